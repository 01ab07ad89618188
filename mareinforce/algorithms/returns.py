"""Returns of joint actions over a rollout tree, and of one agent's completions. All float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float64
from torch import Tensor


def joint_return(reward: float, child_returns: Sequence[float] | None, discount: float) -> float:
    """Return of one joint action: its reward plus the discounted mean return of its child node.

    ``R_j = r_j + discount * mean_j' R_{j, j'}``; without a child ``R_j = r_j``. The expectation over the next turn's
    joint action is estimated by the mean over the child's joint actions (Williams 1992, with a tree of samples).
    """
    if child_returns is None:
        return reward
    return reward + discount * sum(child_returns) / len(child_returns)


def held_return(reward: float, skipped_turns: int, discount: float) -> float:
    """Return of a joint action whose branch was stopped early and that keeps earning its reward.

    ``r * (1 + discount + ... + discount ** skipped_turns)``: the reward once for each turn it skipped.
    """
    return reward * sum(discount**turn for turn in range(skipped_turns + 1))


def completion_returns(
    joint_returns: Float64[Tensor, " J"],
    joint_indices: Sequence[int],
    num_completions: int,
    reduction: str,
    counts: Bool[Tensor, " J"] | None = None,
) -> Float64[Tensor, " K"]:
    """Return of each of one agent's K completions, from the returns of the joint actions it takes part in.

    Args:
        joint_returns: [J].
        joint_indices: which completion of this agent each joint action uses, [J].
        num_completions: K.
        reduction: ``sum`` (of the joint actions' returns) or ``mean``. For aligned joint actions both are the same.
        counts: [J], False: this joint action has no return, whatever stands there. The sum is then the mean of the
            others times how many a completion takes part in, so that all completions' sums stay comparable; a
            completion without any other is not to be used (its return is NaN). None: all have one.
    """
    if joint_returns.ndim != 1 or len(joint_indices) != len(joint_returns):
        raise ValueError(f"{tuple(joint_returns.shape)} joint returns for {len(joint_indices)} joint actions")
    index = torch.as_tensor(joint_indices)
    used = torch.ones(len(index), dtype=torch.bool) if counts is None else counts
    total = torch.zeros(num_completions, dtype=torch.float64).index_add_(0, index[used], joint_returns[used])
    takes_part = torch.bincount(index, minlength=num_completions)
    found = torch.bincount(index[used], minlength=num_completions)
    if reduction == "sum":
        return torch.where(found == takes_part, total, total / found * takes_part)
    return total / found
