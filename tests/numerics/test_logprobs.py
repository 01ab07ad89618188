"""Tempered log-probs and entropies against closed forms and against a slow obvious version."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mareinforce.algorithms import logprobs as logprobs_module
from mareinforce.algorithms.logprobs import chosen_logprobs, tempered_entropy, tempered_logprobs


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


class TestChosen:
    """Log-probs of tokens that share positions, with a backward pass of our own."""

    LOGITS = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    ROWS, IDS = torch.tensor([0, 0, 2, 4, 4, 4]), torch.tensor([1, 6, 0, 3, 3, 5])

    @pytest.mark.parametrize("chunk", [1, 14, 10**6])
    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    def test_values_and_gradients_are_those_of_the_plain_formula(self, monkeypatch, chunk, temperature):
        monkeypatch.setattr(logprobs_module, "CHUNK_SCORES", chunk)
        weights = torch.tensor([1.0, -2.0, 0.5, 0.3, 0.7, -1.1], dtype=torch.float64)
        logits = self.LOGITS.clone().requires_grad_()
        found, entropy = chosen_logprobs(logits, self.ROWS, self.IDS, temperature)
        (gradient,) = torch.autograd.grad((found * weights).sum(), logits)
        plain = self.LOGITS.clone().requires_grad_()
        expected = tempered_logprobs(plain[self.ROWS], self.IDS, temperature)
        (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), plain)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-12, rtol=0)
        torch.testing.assert_close(entropy, tempered_entropy(self.LOGITS, temperature), atol=1e-12, rtol=0)
        assert not entropy.requires_grad
        assert expected_gradient[[1, 3]].abs().max() == 0 < expected_gradient[4].abs().max()

    @pytest.mark.parametrize("chunk", [1, 14, 1000])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_the_gradient_takes_the_place_of_logits_that_nobody_needs(self, monkeypatch, dtype, chunk):
        monkeypatch.setattr(logprobs_module, "CHUNK_SCORES", chunk)
        gradients = []
        for reuse in (False, True):
            given = self.LOGITS.to(dtype, copy=True).requires_grad_()
            logits = given * 1.0
            found, _ = chosen_logprobs(logits, self.ROWS, self.IDS, 0.7, reuse=reuse)
            loss = (found * torch.arange(1.0, 1.0 + len(found))).sum()
            loss.backward(retain_graph=True)
            gradients.append(given.grad)
            assert torch.equal(logits.detach(), given.grad if reuse else given.detach())
        assert torch.equal(*gradients)
        assert gradients[0].abs().max() > 0.1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_tokens_that_cannot_be_said_leave_no_trace(self):
        logits = self.LOGITS.clone()
        logits[:, 2] = -torch.inf
        logits.requires_grad_()
        found, entropy = chosen_logprobs(logits, self.ROWS, self.IDS, 1.0)
        (gradient,) = torch.autograd.grad(found.sum(), logits)
        others = [0, 1, 3, 4, 5, 6]
        without, entropy_without = chosen_logprobs(
            self.LOGITS[:, others], self.ROWS, torch.tensor([1, 5, 0, 2, 2, 4]), 1.0
        )
        torch.testing.assert_close(found, without)
        torch.testing.assert_close(entropy, entropy_without)
        assert bool(torch.isfinite(gradient).all())
        assert gradient[:, 2].abs().max() == 0

    def test_logits_that_are_no_numbers_are_not_hidden(self):
        logits = self.LOGITS.clone()
        logits[0, 1] = torch.nan
        found, entropy = chosen_logprobs(logits, self.ROWS, self.IDS, 1.0)
        assert torch.isnan(found[:2]).all()
        assert torch.isnan(entropy[0])
        assert torch.isfinite(found[2:]).all()

    def test_bfloat16_logits_are_worked_on_in_float32(self):
        logits = self.LOGITS.bfloat16().requires_grad_()
        found, _ = chosen_logprobs(logits, self.ROWS, self.IDS, 1.0)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, tempered_logprobs(logits.float()[self.ROWS], self.IDS, 1.0))
        found.sum().backward()
        assert logits.grad.dtype == torch.bfloat16
