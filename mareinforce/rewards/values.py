"""What counts as a number in the result of a reward callable, and how it becomes a plain float."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor


def as_list(result: Any) -> list[Any] | None:
    """The entries of a list, a tuple, an array or a tensor; None for anything that is not a column of values."""
    if isinstance(result, Tensor):
        return result.detach().cpu().tolist() if result.ndim else None
    if isinstance(result, np.ndarray):
        return list(result) if result.ndim else None
    return list(result) if isinstance(result, list | tuple) else None


def as_float(value: Any) -> float | None:
    """A finite real number (also a bool, a numpy scalar, a tensor without dimensions) as a float; else None."""
    if isinstance(value, Tensor):
        value = value.item() if value.ndim == 0 else None
    elif isinstance(value, np.generic | np.ndarray):
        value = value.item() if value.ndim == 0 and value.dtype.kind in "biuf" else None
    if not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # an int beyond the largest float
        return None
    return number if math.isfinite(number) else None


def as_floats(values: list[Any]) -> tuple[list[float], dict[int, Any]]:
    """All of ``values`` as floats, NaN where one is not a finite number, and those values by their index."""
    numbers = [as_float(value) for value in values]
    bad = {index: values[index] for index, number in enumerate(numbers) if number is None}
    return [math.nan if number is None else number for number in numbers], bad
