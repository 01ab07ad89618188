"""What an evaluation's rows measured, averaged name by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def row_means(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of every metric over the rows that have it; names in alphabetical order."""
    names = sorted({name for row in metrics for name in row})
    return {
        name: sum(row[name] for row in metrics if name in row) / sum(name in row for row in metrics) for name in names
    }
