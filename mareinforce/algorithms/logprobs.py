"""Log-probabilities and entropy of tokens under the tempered policy pi(v) = softmax(logits / temperature)[v].

Dims: L tokens, V vocabulary; ``..`` stands for any leading dims. Everything is in nats.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_SCORES = 2**21
"""Logits worked on at a time, rows x vocabulary: few enough to stay in a processor's cache."""


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


def chosen_logprobs(
    logits: Float[Tensor, "R V"],
    rows: Int64[Tensor, " L"],
    ids: Int64[Tensor, " L"],
    temperature: float,
    *,
    reuse: bool = False,
) -> tuple[Float[Tensor, " L"], Float[Tensor, " R"]]:
    """Log-probability of each token, and the entropy of each position's policy, without other copies of the logits.

    As `tempered_logprobs` of ``logits[rows]`` and `tempered_entropy` of ``logits``, in chunks of positions.

    Args:
        logits: [R, V].
        rows: int64 [L], the position that says how probable each token was; several tokens may share one.
        ids: int64 [L], the tokens.
        temperature: T > 0.
        reuse: the backward pass, which can then be made once, writes its gradient where the logits are: for logits that
            nobody needs afterwards, whatever made them included.

    Returns:
        Log-probs [L], with gradient, and entropies [R], without; float32 (float64 for float64 logits).
    """
    _check(logits, temperature)
    if rows.shape != ids.shape:
        raise ValueError(f"rows {tuple(rows.shape)} and ids {tuple(ids.shape)} must have one shape")
    logprobs, entropy = _ChosenLogprobs.apply(logits, rows, ids, temperature, reuse)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Tensor, ids: Tensor, temperature: float, reuse: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        total = torch.empty(len(logits), dtype=dtype, device=logits.device)  # log of the sum of exponentials, [R]
        entropy = torch.empty_like(total)
        room, more_room = _room(logits, dtype), _room(logits, dtype)
        for part in _chunks(logits):
            below = _into(room, logits[part]).div_(temperature)
            largest = below.amax(dim=-1, keepdim=True)
            # exp is 0 there already, and 0 times a finite number is 0
            below.sub_(largest).clamp_(min=-1e4)
            weights = torch.exp(below, out=more_room[: len(below)])
            sums = weights.sum(dim=-1)
            total[part] = sums.log() + largest.squeeze(-1)
            entropy[part] = sums.log() - weights.mul_(below).sum(dim=-1) / sums
        ctx.save_for_backward(logits, rows, ids, total)
        ctx.temperature, ctx.reuse = temperature, reuse
        ctx.mark_non_differentiable(entropy)
        return logits[rows, ids].to(dtype) / temperature - total[rows], entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        logits, rows, ids, total = ctx.saved_tensors
        gradient = gradient / ctx.temperature
        found = logits.detach() if ctx.reuse else torch.empty_like(logits)
        by_row = torch.zeros_like(total).index_add_(0, rows, gradient)
        room = None if ctx.reuse and logits.dtype == total.dtype else _room(logits, total.dtype)
        for part in _chunks(logits):
            below = found[part] if room is None else _into(room, logits[part])
            policy = below.div_(ctx.temperature).sub_(total[part].unsqueeze(-1)).exp_()
            policy.mul_(-by_row[part].unsqueeze(-1))
            if room is not None:
                found[part] = policy
        return found.index_put_((rows, ids), gradient.to(logits.dtype), accumulate=True), None, None, None, None


def _room(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for a chunk: taken anew for each, most of the time would go into getting it."""
    return torch.empty(min(len(logits), _chunk_rows(logits)), logits.shape[-1], dtype=dtype, device=logits.device)


def _into(room: Tensor, logits: Tensor) -> Tensor:
    return room[: len(logits)].copy_(logits)


def _chunk_rows(logits: Tensor) -> int:
    return max(1, CHUNK_SCORES // logits.shape[-1])


def _chunks(logits: Tensor) -> list[slice]:
    size = _chunk_rows(logits)
    return [slice(start, start + size) for start in range(0, len(logits), size)]


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
