"""The policy-gradient loss of one node sample."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Aggregation = Literal["sequence_sum", "token_mean", "constant"]


def drop_final_token(counts: Bool[Tensor, "K L"]) -> Bool[Tensor, "K L"]:
    """The same mask without the last counted token of each row, wherever the row's tokens lie."""
    from_here = counts.flip(-1).cumsum(-1).flip(-1)
    return counts & (from_here > 1)


def importance_ratio(
    logprobs: Float[Tensor, "K L"],
    behaviour_logprobs: Float[Tensor, "K L"],
    counts: Bool[Tensor, "K L"],
    level: Literal["token", "sequence"],
    cap: float,
) -> Float[Tensor, "K L"]:
    """Truncated ratio of new to behaviour probability, per token or per completion, without gradient; 1 where
    nothing counts. ``min(pi / mu, cap)`` (Ionides 2008)."""
    log_ratio = torch.where(counts, logprobs.detach() - behaviour_logprobs, 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
    return log_ratio.exp().clamp(max=cap)


def node_loss(
    logprobs: Float[Tensor, "K L"],
    counts: Bool[Tensor, "K L"],
    advantages: Float[Tensor, " K"],
    *,
    aggregation: Aggregation = "sequence_sum",
    max_new_tokens: int = 1,
    exclude_final_token: bool = False,
    kept: Bool[Tensor, " K"] | None = None,
    ratio: Float[Tensor, "K L"] | None = None,
    num_completions: int | None = None,
    num_tokens: int | None = None,
) -> Float[Tensor, ""]:
    """REINFORCE on the K completions of one agent at one node (Williams 1992).

    ``sequence_sum``: mean over K of ``-advantage_k * sum of the completion's token log-probs``. ``token_mean``: the
    sum over all tokens divided by their number. ``constant``: divided by ``K * max_new_tokens`` (Dr. GRPO, Liu et al.
    2025).

    Args:
        logprobs: [K, L] of the sampled tokens, with gradient.
        counts: [K, L], True where a token was sampled.
        advantages: [K].
        kept: [K], False leaves a completion out of the numerator and, in ``token_mean``, its tokens out of the
            denominator; K itself does not change.
        ratio: [K, L] importance weights, without gradient.
        num_completions: K of the node, where these are only some of its completions: the losses of all parts of a node
            add up to that of the node.
        num_tokens: in ``token_mean``, the tokens of the node that count, likewise.

    Returns:
        A scalar; exactly 0 (with a graph) where nothing counts.
    """
    if logprobs.ndim != 2 or logprobs.shape != counts.shape or advantages.shape != logprobs.shape[:1]:
        raise ValueError(
            f"log-probs {tuple(logprobs.shape)}, counts {tuple(counts.shape)}, advantages {tuple(advantages.shape)}"
        )
    if exclude_final_token:
        counts = drop_final_token(counts)
    if kept is not None:
        counts = counts & kept[:, None]
    weight = counts * advantages[:, None].to(logprobs)
    if ratio is not None:
        weight = weight * ratio
    total = -(weight * torch.where(counts, logprobs, 0.0)).sum()
    size = logprobs.shape[0] if num_completions is None else num_completions
    if aggregation == "token_mean":
        return total / (counts.sum() if num_tokens is None else torch.tensor(num_tokens)).clamp(min=1).to(total)
    return total / (size if aggregation == "sequence_sum" else size * max_new_tokens)
