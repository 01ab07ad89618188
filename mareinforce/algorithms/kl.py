"""Sampled Kullback-Leibler divergence of a policy from its reference, from the log-probs of the tokens sampled."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Estimator = Literal["k1", "k3"]


def token_kl(
    logprobs: Float[Tensor, "*lead L"], reference_logprobs: Float[Tensor, "*lead L"], estimator: Estimator
) -> Float[Tensor, "*lead L"]:
    """Estimate of KL(policy || reference) at each sampled token (Schulman 2020), in nats.

    With ``r = log p_ref - log p_policy``: k1 is ``-r``, unbiased and of either sign; k3 is ``exp(r) - r - 1``, unbiased
    and never negative. As a penalty inside a return only k1 has the gradient of KL(policy || reference).
    """
    log_ratio = reference_logprobs - logprobs
    return -log_ratio if estimator == "k1" else torch.expm1(log_ratio) - log_ratio


def sequence_kl(
    logprobs: Float[Tensor, "K L"],
    reference_logprobs: Float[Tensor, "K L"],
    counts: Bool[Tensor, "K L"],
    estimator: Estimator,
) -> Float[Tensor, " K"]:
    """The sum over a completion's own tokens, float64 [K]. Prompt, filler and what follows an end do not count."""
    if logprobs.shape != reference_logprobs.shape or logprobs.shape != counts.shape:
        raise ValueError(
            f"log-probs {tuple(logprobs.shape)}, reference {tuple(reference_logprobs.shape)}, counts "
            f"{tuple(counts.shape)} must have one shape"
        )
    values = token_kl(logprobs.double(), reference_logprobs.double(), estimator)
    return torch.where(counts, values, 0.0).sum(-1)


def joint_action_count(num_completions: int, speaking_agents: int, joint_mode: str, reduction: str) -> int:
    """How many returns are added up in one completion's: K^(N-1) in cross with the sum, else 1.

    A completion's KL is charged once for each of them, so that reward and KL keep their proportion.
    """
    return int(num_completions ** (speaking_agents - 1)) if (joint_mode, reduction) == ("cross", "sum") else 1
