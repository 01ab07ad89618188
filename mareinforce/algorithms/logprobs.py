"""Log-probabilities and entropy of tokens under the tempered policy pi(v) = softmax(logits / temperature)[v].

Dims: L tokens, V vocabulary; ``..`` stands for any leading dims. Everything is in nats.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def tempered_logprobs(
    logits: Float[Tensor, "*lead L V"], ids: Int64[Tensor, "*lead L"], temperature: float
) -> Float[Tensor, "*lead L"]:
    """Log-probability of each id: logits[id] / T - logsumexp(logits / T).

    Args:
        logits: [.., L, V], one row of scores for each token.
        ids: int64 [.., L], the tokens to score.
        temperature: T > 0, the temperature the tokens were sampled at.

    Returns:
        [.., L], float32 (float64 for float64 logits), differentiable with respect to ``logits``.

    Raises:
        ValueError: for shapes that do not belong together, or a temperature that is not positive.

    Written as gather minus logsumexp because ``log_softmax`` would keep a second tensor of the size of ``logits``.
    """
    _check(logits, temperature)
    if ids.shape != logits.shape[:-1]:
        raise ValueError(f"ids {tuple(ids.shape)} must have the leading shape of logits {tuple(logits.shape)}")
    scores = _tempered(logits, temperature)
    chosen = scores.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.logsumexp(scores, dim=-1)


@torch.no_grad()
def tempered_entropy(logits: Float[Tensor, "*lead L V"], temperature: float) -> Float[Tensor, "*lead L"]:
    """Entropy -sum_v pi(v) log pi(v) of each position's tempered policy, [.., L, V] -> [.., L], without gradient."""
    _check(logits, temperature)
    rows = logits.reshape(-1, logits.shape[-2], logits.shape[-1])
    entropies = [_entropy(_tempered(row, temperature)) for row in rows]  # row by row: one row's copy of V at a time
    if not entropies:
        return logits.new_zeros(logits.shape[:-1])
    return torch.stack(entropies).reshape(logits.shape[:-1])


def _entropy(scores: Tensor) -> Tensor:
    log_policy = torch.log_softmax(scores, dim=-1)
    # entr(p) is -p log p with 0 at p = 0, where p * log p would be 0 * -inf.
    terms: Tensor = torch.special.entr(log_policy.exp())
    return terms.sum(dim=-1)


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    scores: Tensor = logits if logits.dtype == torch.float64 else logits.float()
    return scores if temperature == 1.0 else scores / temperature


def _check(logits: Tensor, temperature: float) -> None:
    if logits.ndim < 2:
        raise ValueError(f"logits must be [.., L, V], got the shape {tuple(logits.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} must be positive")
