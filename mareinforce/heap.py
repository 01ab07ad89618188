"""Memory on the CPU that is free and that the C library keeps for later."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable
from functools import cache

from torch import Tensor

WORTH_BYTES = 2**28
"""Of gradients: below that, what there is to give back is not worth the search for it."""


def give_back_beside(weights: Iterable[Tensor]) -> None:
    """Give free pages back to the system if many bytes of CPU weights are trained; changes no number.

    The activations of one agent leave holes between the gradients that stay, which the next agent's do not fill: with
    whole models they add up to a tenth of the process. Does nothing where the C library is not glibc.
    """
    size = sum(weight.numel() * weight.element_size() for weight in weights if weight.device.type == "cpu")
    if size >= WORTH_BYTES and (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim
