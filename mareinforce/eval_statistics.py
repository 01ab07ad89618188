"""Statistics of evaluations: unbiased pass@k, and bootstrap intervals over rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 4000
CHUNK = 1_000_000
"""Numbers drawn at a time."""


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Probability that at least one of k answers passes, from ``passed`` of ``samples`` that did, without bias.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021). Raises ValueError unless 0 <= passed <= samples and 1 <= k <= samples.
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {passed} in {samples}: needs 0 <= passed <= samples and 1 <= k <= samples")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def bootstrap_interval(values: Sequence[float], seed: int = 0, share: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of at least one value (Efron 1979), the same for the same seed."""
    given = np.asarray(values, dtype=np.float64)
    if given.ndim != 1 or len(given) == 0:
        raise ValueError(f"an interval needs one row of at least 1 value, not the shape {given.shape}")
    generator = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    step = max(1, CHUNK // len(given))
    for start in range(0, RESAMPLES, step):
        size = min(step, RESAMPLES - start)
        means[start : start + size] = given[generator.integers(0, len(given), (size, len(given)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)
