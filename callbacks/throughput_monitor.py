"""How fast a run is, where its time goes, and how much memory it takes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from mareinforce.callbacks.sums import Sums

from mareinforce.metrics import node_tokens
from mareinforce.phases import PHASES, Phases
from mareinforce.rollout.tree import Node, nodes_by_level
from mareinforce.types import NodeSample

GIB = 2**30


class ThroughputMonitor(L.Callback):
    """Adds tokens, seconds and memory to the training rows.

    The columns are `tokens` and `seconds` so far; `tokens_per_second`; `generation_tokens_per_second`;
    `seconds/generation`, `/reward`, `/transition`, `/scoring`, `/update`, `/evaluation` and `/other` since the last
    row; `reward_wait_fraction`, the share of that time in which the device waited for rewards; and the peaks
    `memory/process_gib` and `memory/device_gib`. docs/metrics.md has their meaning. With several processes tokens are
    those of all of them, and times and memory those of the first.

    Args:
        clock: seconds that pass; for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._phases: Phases | None = None
        self._module: Any = None
        self._sums = Sums(("tokens",))
        self._tokens = 0.0  # of rows that are written
        self._seconds = 0.0  # before `_since`
        self._since = 0.0  # when the row began
        self._taken: dict[str, float] = {}  # seconds by phase, when the row began

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Start the watch."""
        self._sums.place(trainer, pl_module)
        if pl_module.env_step == 0:
            self._sums.reset()
            self._tokens = self._seconds = 0.0
        self._phases, self._module = pl_module.phases, pl_module
        self._since, self._taken = self._clock(), pl_module.phases.seconds
        if _has_memory_counter(pl_module.device):
            torch.accelerator.reset_peak_memory_stats(pl_module.device)

    def observe(self, trees: Sequence[Node], samples: Sequence[NodeSample]) -> None:
        """Count the tokens that were sampled for a batch."""
        self._sums.update({"tokens": float(sum(node_tokens(node) for root in trees for node in nodes_by_level(root)))})

    def take_row(self) -> dict[str, float]:
        """The columns since the last row."""
        assert self._phases is not None, "asked before training started"
        now, taken = self._clock(), self._phases.seconds
        tokens = self._sums.compute()["tokens"]
        self._sums.reset()
        self._sums.update({})
        elapsed = now - self._since
        parts = {name: taken.get(name, 0.0) - self._taken.get(name, 0.0) for name in PHASES}
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + elapsed
        self._since, self._taken = now, taken
        return {
            "tokens": self._tokens,
            "seconds": self._seconds,
            **rates(tokens, elapsed, parts),
            **{f"seconds/{name}": seconds for name, seconds in parts.items()},
            "seconds/other": max(0.0, elapsed - sum(parts.values())),
            **memory_peaks(self._module.device),
        }

    def state_dict(self) -> dict[str, Any]:
        """Tokens and seconds so far; the time between a row and a kill is lost."""
        return {"tokens": self._tokens, "seconds": self._seconds, "sums": self._sums.kept()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        from lightning.pytorch.utilities import rank_zero_only

        self._tokens, self._seconds = state_dict["tokens"], state_dict["seconds"]
        self._sums.go_on_from(state_dict["sums"], first=getattr(rank_zero_only, "rank", 0) == 0)


def rates(tokens: float, elapsed: float, parts: Mapping[str, float]) -> dict[str, float]:
    """What is left out would be divided by no time at all."""
    found = {}
    if elapsed > 0:
        found["tokens_per_second"] = tokens / elapsed
        found["reward_wait_fraction"] = parts["reward"] / elapsed
    if parts["generation"] > 0:
        found["generation_tokens_per_second"] = tokens / parts["generation"]
    return found


def memory_peaks(device: torch.device) -> dict[str, float]:
    """The most memory the process has taken, and of the device what tensors have."""
    found = {}
    if sys.platform != "win32":
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found["memory/process_gib"] = peak * (1 if sys.platform == "darwin" else 1024) / GIB  # Linux counts in KiB
    if _has_memory_counter(device):
        found["memory/device_gib"] = torch.accelerator.max_memory_allocated(device) / GIB
    return found


def _has_memory_counter(device: torch.device) -> bool:
    return device.type not in ("cpu", "mps")
