"""Tempered log-probs and entropies against closed forms and against a slow obvious version."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mareinforce.algorithms.logprobs import tempered_entropy, tempered_logprobs


def slow_logprob(row: list[float], token: int, temperature: float) -> float:
    weights = [math.exp((value - max(row)) / temperature) for value in row]
    return math.log(weights[token] / math.fsum(weights))


def slow_entropy(row: list[float], temperature: float) -> float:
    return -math.fsum(
        math.exp(logprob) * logprob for logprob in (slow_logprob(row, t, temperature) for t in range(len(row)))
    )


@given(
    st.lists(st.lists(st.floats(-6, 6, width=32), min_size=5, max_size=5), min_size=1, max_size=6),
    st.floats(0.25, 4.0),
    st.data(),
)
def test_agrees_with_the_definition(rows, temperature, data):
    ids = data.draw(st.lists(st.integers(0, 4), min_size=len(rows), max_size=len(rows)))
    logits = torch.tensor(rows)
    expected = torch.tensor([slow_logprob(row, t, temperature) for row, t in zip(rows, ids, strict=True)])
    torch.testing.assert_close(
        tempered_logprobs(logits, torch.tensor(ids), temperature), expected, atol=2e-5, rtol=1e-5
    )
    expected = torch.tensor([slow_entropy(row, temperature) for row in rows])
    torch.testing.assert_close(tempered_entropy(logits, temperature), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("temperature", "logprob", "gradient"),
    [(0.5, -0.142932, -0.266373), (1.0, -0.407606, -0.334759), (2.0, -0.680269, None)],
)
def test_temperature_is_that_of_the_sampler(temperature, logprob, gradient):
    logits = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
    loss = -tempered_logprobs(logits, torch.tensor([0]), temperature).sum()
    assert loss.item() == pytest.approx(-logprob, abs=1e-6)
    (grad,) = torch.autograd.grad(loss, logits)
    if gradient is not None:
        assert grad[0, 0].item() == pytest.approx(gradient, abs=1e-6)


def test_any_leading_dims_and_half_precision_logits():
    logits = torch.randn(2, 3, 4, 7)
    ids = torch.randint(7, (2, 3, 4))
    expected = torch.log_softmax(logits, -1).gather(-1, ids[..., None])[..., 0]
    torch.testing.assert_close(tempered_logprobs(logits, ids, 1.0), expected)
    assert tempered_logprobs(logits.bfloat16(), ids, 0.7).dtype == torch.float32
    assert tempered_entropy(logits, 1.0).shape == (2, 3, 4)


def test_entropy_takes_no_gradient_and_zero_probabilities():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    entropy = tempered_entropy(logits, 1.0)
    assert entropy.item() == pytest.approx(math.log(2), abs=1e-6)
    assert not entropy.requires_grad
    assert tempered_logprobs(logits, torch.tensor([0]), 1.0).requires_grad


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_without_a_policy_is_refused(temperature):
    with pytest.raises(ValueError, match="must be positive"):
        tempered_logprobs(torch.zeros(1, 3), torch.tensor([0]), temperature)
