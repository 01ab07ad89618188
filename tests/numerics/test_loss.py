"""The loss in closed form on uniform policies over four tokens, and what the usual mistakes would give."""

from __future__ import annotations

import math

import pytest
import torch

from mareinforce.algorithms.loss import drop_final_token, importance_ratio, node_loss

LN4 = math.log(4)


def counts(*lengths: int) -> torch.Tensor:
    return torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]


def uniform(mask: torch.Tensor) -> torch.Tensor:
    return torch.full(mask.shape, -LN4, requires_grad=True)


def weights(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_every_sampled_token_counts_and_nothing_after_it():
    mask = counts(3, 2)
    loss = node_loss(uniform(mask), mask, weights(1, 1))
    assert loss.item() == pytest.approx(5 * LN4 / 2, abs=1e-6)
    assert loss.item() != pytest.approx(3 * LN4 / 2, abs=1e-3)  # end tokens dropped
    assert loss.item() != pytest.approx(6 * LN4 / 2, abs=1e-3)  # the filler counted
    assert node_loss(uniform(mask), mask, weights(1, 1), aggregation="token_mean").item() == pytest.approx(
        LN4, abs=1e-6
    )
    constant = node_loss(uniform(mask), mask, weights(1, 1), aggregation="constant", max_new_tokens=10)
    assert constant.item() == pytest.approx(5 * LN4 / 20, abs=1e-6)


def test_a_cut_completion_can_be_left_out_of_numerator_and_token_count():
    mask, kept = counts(3, 5), torch.tensor([True, False])
    total = node_loss(uniform(mask), mask, weights(0.5, -0.5), kept=kept)
    assert total.item() == pytest.approx(1.039721, abs=1e-6)
    token_mean = node_loss(uniform(mask), mask, weights(0.5, -0.5), kept=kept, aggregation="token_mean")
    assert token_mean.item() == pytest.approx(0.693147, abs=1e-6)
    assert token_mean.item() != pytest.approx(0.259930, abs=1e-3)  # the cut tokens left in the denominator
    unmasked = node_loss(uniform(mask), mask, weights(0.5, -0.5))
    assert unmasked.item() == pytest.approx((0.5 * 3 - 0.5 * 5) * LN4 / 2, abs=1e-6)


@pytest.mark.parametrize("aggregation", ["sequence_sum", "token_mean", "constant"])
def test_a_node_of_nothing_but_cut_completions_is_exactly_zero_with_zero_gradient(aggregation):
    mask = counts(5, 5)
    logprobs = uniform(mask)
    loss = node_loss(
        logprobs, mask, weights(0.5, -0.5), kept=torch.tensor([False, False]), aggregation=aggregation, max_new_tokens=5
    )
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad.abs().max() == 0.0


def test_the_gradient_is_minus_the_advantage_on_counted_tokens_only():
    mask = counts(3, 1)
    logprobs = uniform(mask)
    node_loss(logprobs, mask, weights(2.0, -1.0)).backward()
    expected = torch.tensor([[-1.0, -1.0, -1.0], [0.5, 0.0, 0.0]])
    torch.testing.assert_close(logprobs.grad, expected)
    assert not torch.allclose(logprobs.grad, -expected)


def test_a_minus_infinite_log_prob_outside_the_mask_does_no_harm():
    mask = counts(2, 1)
    values = torch.tensor([[-1.0, -1.0], [-1.0, -torch.inf]], requires_grad=True)
    loss = node_loss(values, mask, weights(1.0, 1.0))
    loss.backward()
    assert loss.item() == pytest.approx(1.5)
    assert torch.isfinite(values.grad).all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_leaving_out_the_final_token_finds_it_wherever_the_row_lies(side):
    mask = counts(3, 1, 2)
    mask = mask if side == "left" else mask.flip(-1)
    dropped = drop_final_token(mask)
    assert dropped.sum(-1).tolist() == [2, 0, 1]
    assert not (dropped & ~mask).any()
    last = mask.shape[1] - 1 - mask.flip(-1).int().argmax(-1)
    assert not dropped[torch.arange(3), last].any()


class TestImportanceRatio:
    behaviour = torch.tensor([[-1.0, -2.0], [-3.0, -1.0]])
    mask = torch.tensor([[True, True], [True, False]])

    def test_is_one_for_the_same_policy(self):
        ratio = importance_ratio(self.behaviour, self.behaviour, self.mask, "token", 2.0)
        assert ratio.tolist() == [[1.0, 1.0], [1.0, 1.0]]

    def test_by_token_and_by_sequence_with_a_cap(self):
        now = self.behaviour + torch.tensor([[math.log(1.5), math.log(0.5)], [math.log(3.0), 9.0]])
        token = importance_ratio(now, self.behaviour, self.mask, "token", 2.0)
        torch.testing.assert_close(token, torch.tensor([[1.5, 0.5], [2.0, 1.0]]))
        sequence = importance_ratio(now, self.behaviour, self.mask, "sequence", 2.0)
        torch.testing.assert_close(sequence, torch.tensor([[0.75, 0.75], [2.0, 2.0]]))
        inverse = importance_ratio(self.behaviour, now, self.mask, "token", 2.0)
        assert not torch.allclose(token, inverse)

    def test_carries_no_gradient_of_its_own(self):
        now = (self.behaviour + 0.1).requires_grad_()
        ratio = importance_ratio(now, self.behaviour, self.mask, "token", 2.0)
        assert not ratio.requires_grad
        node_loss(now, self.mask, weights(1.0, 1.0), ratio=ratio).backward()
        expected = -torch.where(self.mask, torch.tensor(math.exp(0.1)), torch.tensor(0.0)) / 2
        torch.testing.assert_close(now.grad, expected)
