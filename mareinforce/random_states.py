"""The random streams that users' own functions may draw from, as plain values that a checkpoint may hold.

Nothing of ours draws from them: samples and orders are decided by keyed streams.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's global generators, on every device."""
    version, words, gauss = random.getstate()
    name, key, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(name), [int(word) for word in key], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Put them back. Devices that are not there any more are left out."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, key, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(key, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"].cpu())
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([state.cpu() for state in states["cuda"]])
