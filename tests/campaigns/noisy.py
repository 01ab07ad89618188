"""A reward for campaigns: cheap, with a signal, and drawing from every global stream there is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def reward(first: Sequence[str], second: Sequence[str]) -> dict[str, list[float]]:
    """The difference of lengths and noise."""
    noise = [random.random() + float(np.random.rand()) + float(torch.rand(())) for _ in first]
    lengths = [float(len(b) - len(a)) for a, b in zip(first, second, strict=True)]
    return {"reward": [length + extra for length, extra in zip(lengths, noise, strict=True)], "length": lengths}


def again(prompt: Any) -> list[Any]:
    """Ask both agents the same once more."""
    return [prompt, prompt]
