"""Advantages of the K completions of one agent at one node, from their returns. All float64.

The group is one agent at one node: never pooled over agents, turns, branches or prompts.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float64
from torch import Tensor

BaselineMode = Literal["raw", "mean", "rloo", "max"]
Normalization = bool | Literal["scale"]

STD_FLOOR = 1e-6
"""The deviation is never taken to be smaller."""


def baseline(returns: Float64[Tensor, " K"], mode: BaselineMode) -> Float64[Tensor, " K"]:
    """What each completion's return is compared with.

    raw: nothing (REINFORCE, Williams 1992). mean: the group's mean (GRPO, Shao et al. 2024; it holds the sample itself,
    so it is no independent baseline). rloo: the mean of the other K-1 (Kool et al. 2019; Ahmadian et al. 2024).
    max: the group's largest return (no extra greedy sample is drawn).
    """
    size = len(returns)
    if mode == "raw":
        return torch.zeros_like(returns)
    if mode == "mean":
        return returns.mean().expand(size)
    if mode == "rloo":
        return (returns.sum() - returns) / (size - 1)
    if mode == "max":
        return returns.max().expand(size)
    raise ValueError(f"advantage_mode={mode!r}: must be one of raw, mean, rloo, max")


def is_zero_signal(returns: Float64[Tensor, " K"]) -> bool:
    """True if the group's returns are all equal: ``max - min <= 1e-6 * max(1, |R|)``."""
    largest = max(1.0, float(returns.abs().max()))
    return float(returns.max() - returns.min()) <= 1e-6 * largest


def advantages(
    returns: Float64[Tensor, " K"], mode: BaselineMode, normalization: Normalization = True
) -> Float64[Tensor, " K"]:
    """Advantage of each completion: return minus baseline, then normalised inside the group.

    ``normalization``: True subtracts the mean and divides by the population deviation (floor 1e-6), which makes all
    four modes equal; "scale" divides only, so raw, mean and max stay different (rloo is a multiple of mean, and becomes
    equal to it); False leaves them as they are. A group whose
    returns are all equal has no signal: what is centred is exactly 0, and "scale" divides by 1.
    """
    if returns.ndim != 1 or len(returns) < 2:
        raise ValueError(f"a group is one row of at least 2 returns, not {tuple(returns.shape)}")
    if is_zero_signal(returns):
        centred = mode != "raw" or normalization is True
        return torch.zeros_like(returns) if centred else returns.clone()
    advantage = returns - baseline(returns, mode)
    if normalization is False:
        return advantage
    deviation = advantage.std(correction=0).clamp(min=STD_FLOOR)
    return (advantage - advantage.mean()) / deviation if normalization is True else advantage / deviation
