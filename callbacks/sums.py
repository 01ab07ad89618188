"""Sums by name over batches and over processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
from torchmetrics import Metric


class Sums(Metric):
    """Adds up numbers by name; with several processes `compute` adds up theirs, so that all must call it.

    Args:
        names: what is added up; the same everywhere.
    """

    full_state_update = False
    totals: torch.Tensor  # float64 [names]

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(compute_with_cache=False)
        self.names = tuple(names)
        self.add_state("totals", torch.zeros(len(self.names), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Mapping[str, float]) -> None:
        """Add numbers; a name that is left out gets nothing."""
        given = [float(values.get(name, 0.0)) for name in self.names]
        self.totals += torch.tensor(given, dtype=self.totals.dtype, device=self.totals.device)

    def compute(self) -> dict[str, float]:
        """The sums since the last `reset`."""
        return dict(zip(self.names, self.totals.tolist(), strict=True))

    def place(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Go where processes can exchange it; alone, it stays on the CPU."""
        if trainer.world_size > 1:
            self.to(module.device)

    def kept(self) -> dict[str, float]:
        """The sums of all processes as a checkpoint may hold them."""
        return dict(self.compute()) if self.update_called else {}

    def go_on_from(self, kept: Mapping[str, Any], *, first: bool) -> None:
        """Start with saved sums, in the first process; the others with nothing, since those are of all of them."""
        self.reset()
        self.update(kept if first else {})
