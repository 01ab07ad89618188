"""Keyed sampling: the uniform numbers that decide a completion, and the token each of them picks.

A token is a pure function of (the policy's logits, one uniform number), and the uniform number is a pure function of
(stream key, position). So whatever a prompt is batched with, its samples stay the same, up to rounding in the logits.

Dims: R rows of a batch, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mareinforce.algorithms.logprobs import tempered_logprobs
from mareinforce.types import Sampling, StreamKey

BLOCK = 256
"""Tokens summed at a time while the cumulative distribution is walked."""

FIRST_CANDIDATES = 1024
"""Most probable tokens looked at first where top_p is used without top_k."""


def uniforms(key: StreamKey, n: int) -> npt.NDArray[np.float64]:
    """The first ``n`` numbers of the key's stream, float64 [n], each a multiple of 2^-53 in [0, 1).

    The generator is Philox4x64 (Salmon et al. 2011), keyed with a hash of ``key``: the first m of n numbers are those
    of n = m, and they are the same in every process and on every platform.
    """
    path = ".".join(str(int(joint)) for joint in key.path)
    name = f"{key.purpose}|{int(key.seed)}|{int(key.epoch)}|{int(key.row)}|{path}|{int(key.agent)}|{int(key.k)}"
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    # Raw words: numpy promises the stream of a bit generator, not that of Generator.random.
    words = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(n)
    return np.asarray((words >> np.uint64(11)) * 2.0**-53, dtype=np.float64)


def draw(
    logits: Tensor, u: Tensor, sampling: Sampling, forbidden: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Pick one token a row by inverting the cumulative distribution, in the order of token ids, at ``u``.

    Args:
        logits: [R, V] of the policy.
        u: float64 [R] in [0, 1).
        sampling: temperature, top_k and top_p. Temperature 0 takes the most probable token and does not look at ``u``.
        forbidden: ids that cannot be drawn at this position, for instance end tokens before ``min_new_tokens``.

    Returns:
        Token ids int64 [R], and their log-probabilities [R] under the policy at the sampling temperature (1 where that
        is 0), before top_k, top_p and ``forbidden``. A row of non-finite logits gives a log-probability of nan.

    A token of probability zero is never returned. Id order, rather than order of probability, is walked because
    rounding noise in the logits then moves a boundary a little instead of swapping two tokens.
    """
    if logits.ndim != 2 or u.shape != logits.shape[:1]:
        raise ValueError(f"draw needs logits [R, V] and u [R], got {tuple(logits.shape)} and {tuple(u.shape)}")
    allowed = logits
    if forbidden:
        allowed = logits.clone()
        allowed[:, list(forbidden)] = -torch.inf
    if sampling.temperature == 0.0:
        ids = allowed.argmax(dim=-1)
        return ids, tempered_logprobs(logits, ids, 1.0)
    candidates, probabilities = _candidates(allowed, sampling)
    ids = _invert(probabilities, u)
    if candidates is not None:
        ids = candidates.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return ids, tempered_logprobs(logits, ids, sampling.temperature)


def truncated_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution tokens are drawn from, [R, V] -> [R, V]: temperature, then top_k, then top_p inside the k.

    It is the distribution of transformers' own warpers in that order: tokens that tie with the k-th are kept, at
    least one token always is. Where tied tokens straddle top_p those of higher id are kept, as a stable sort would.
    """
    if sampling.temperature == 0.0:
        return torch.nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[-1]).to(logits.dtype)
    candidates, probabilities = _candidates(logits, sampling)
    if candidates is None:
        return probabilities
    return torch.zeros_like(logits).scatter_(-1, candidates, probabilities)


def _candidates(logits: Tensor, sampling: Sampling) -> tuple[Tensor | None, Tensor]:
    """The tokens that may be drawn, int64 [R, C] ascending by id (None: all V, in their order), and their
    probabilities [R, C]."""
    candidates = None
    if sampling.top_k and sampling.top_k < logits.shape[-1]:
        candidates, scores = _top_k(logits, sampling.top_k, sampling.temperature)
    else:
        scores = _tempered(logits, sampling.temperature)
    if sampling.top_p < 1.0:
        scores = _keep_top_p(scores, sampling.top_p)
    return candidates, torch.softmax(scores, dim=-1)


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits / temperature


def _top_k(logits: Tensor, top_k: int, temperature: float) -> tuple[Tensor, Tensor]:
    """The k best tokens and those that tie with the k-th, ascending by id: ids [R, C] and scores [R, C].

    Only the best are divided by the temperature: that keeps their order, and whether the next one ties.
    """
    found = torch.topk(logits, top_k + 1, dim=-1)
    values, indices = _tempered(found.values, temperature), found.indices
    kth = values[:, top_k - 1 : top_k]
    if bool((values[:, top_k:] < kth).all()):
        values, indices = values[:, :top_k], indices[:, :top_k]
    else:
        scores = _tempered(logits, temperature)
        count = max(top_k, int((scores >= kth).sum(dim=-1).max()))  # of scores that are no numbers none is as large
        values, indices = torch.topk(scores, count, dim=-1)
    candidates, order = indices.sort(dim=-1)
    kept = values.gather(-1, order)
    return candidates, kept.masked_fill(kept < kth, -torch.inf)


def _keep_top_p(scores: Tensor, top_p: float) -> Tensor:
    """Drop the least probable tokens whose probabilities add up to at most 1 - top_p.

    Only the candidates (the most probable tokens) are sorted. Their number grows until even the least of them is
    dropped, which shows that nothing outside of them is kept. In the worst case, a nearly flat policy, that is a sort
    of the whole vocabulary.
    """
    vocabulary = scores.shape[-1]
    probabilities = torch.softmax(scores, dim=-1)
    total = probabilities.sum(dim=-1, keepdim=True, dtype=torch.float64)
    size = min(vocabulary, FIRST_CANDIDATES)
    while True:
        if size < vocabulary:
            # Ascending ids first and a stable sort after, so that ties are ordered by id whatever topk did with them.
            candidates = torch.topk(scores, size, dim=-1).indices.sort(dim=-1).values
            order = scores.gather(-1, candidates).sort(dim=-1, stable=True)
            candidates = candidates.gather(-1, order.indices)
        else:
            order = scores.sort(dim=-1, stable=True)
            candidates = order.indices
        mass = probabilities.gather(-1, candidates).double()
        others = (total - mass.sum(dim=-1, keepdim=True)).clamp(min=0.0) if size < vocabulary else 0.0
        # Compared in the precision of the scores, as transformers does: it decides what happens at exact ties.
        dropped = (others + mass.cumsum(dim=-1)).to(scores.dtype) <= 1.0 - top_p
        dropped[:, -1] = False
        least = order.values[:, :1]
        kept_least = order.values.masked_fill(dropped, torch.inf).amin(dim=-1, keepdim=True)
        if size == vocabulary or bool(((kept_least > least) | (least == -torch.inf)).all()):
            break
        size = min(vocabulary, 8 * size)
    keep = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, candidates, ~dropped)
    return scores.masked_fill(~keep, -torch.inf)


def _invert(probabilities: Tensor, u: Tensor) -> Tensor:
    """The first token, in id order, at which the cumulative probability exceeds ``u`` times the total.

    Sums are in float64 and blockwise: block totals first, then the tokens of the one block that holds the target.
    """
    rows, vocabulary = probabilities.shape
    if vocabulary <= BLOCK:
        cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
        return _first_above(cumulative, u.double() * cumulative[:, -1]).squeeze(-1)
    blocks = -(-vocabulary // BLOCK)
    filled = torch.nn.functional.pad(probabilities, (0, blocks * BLOCK - vocabulary)).view(rows, blocks, BLOCK)
    sums = filled.sum(dim=-1, dtype=torch.float64)
    cumulative = sums.cumsum(dim=-1)
    target = u.double() * cumulative[:, -1]
    block = _first_above(cumulative, target)
    before = (cumulative.gather(-1, block) - sums.gather(-1, block)).squeeze(-1)
    inside = filled.gather(1, block.unsqueeze(-1).expand(rows, 1, BLOCK)).squeeze(1)
    token = _first_above(inside.cumsum(dim=-1, dtype=torch.float64), (target - before).clamp(min=0.0))
    return (block * BLOCK + token).squeeze(-1).clamp(max=vocabulary - 1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """First index [R, 1] at which the cumulative weights [R, n] exceed the target [R]."""
    total = cumulative[:, -1]
    # Strictly below the total, so that rounding cannot step behind the last token of positive probability.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True)
    return index.clamp_(max=cumulative.shape[-1] - 1)
