"""Which positions count. Masks come from positions, never from comparing ids with a filler; True means counts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from jaxtyping import Bool
from torch import Tensor


def counts_mask(lengths: Sequence[int], width: int) -> Bool[Tensor, "K L"]:
    """bool [K, L] with L = ``width``: row k is True at its first ``lengths[k]`` positions.

    Raises:
        ValueError: for a length outside 0 .. ``width``.
    """
    for length in lengths:
        if not 0 <= length <= width:
            raise ValueError(f"length {length} must lie in 0 .. {width}")
    return torch.arange(width) < torch.tensor(list(lengths), dtype=torch.int64).reshape(-1, 1)


def cut_at_end(ids: Sequence[int], end_ids: Collection[int]) -> tuple[int, bool]:
    """How many of the sampled ``ids`` count, and whether an end token was sampled.

    The first end token counts and nothing after it does, even where the filler that follows is an end token too.
    Without one all of ``ids`` count: the completion was cut, and no end token is invented.
    """
    for position, token in enumerate(ids):
        if int(token) in end_ids:
            return position + 1, True
    return len(ids), False
