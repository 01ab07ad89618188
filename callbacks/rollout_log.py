"""`rollouts.jsonl`: every completion of training, with what it earned, as lines that stay bounded in size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from mareinforce.callbacks.bounded_lines import BoundedLines

from mareinforce.errors import ConfigError
from mareinforce.rollout_table import FILE_NAME, as_line, completion_records


class RolloutLog(L.Callback):
    """Writes a JSON line for every agent's completion of training into `rollouts.jsonl` in the run folder.

    The fields are those of `docs/rollouts.md`; `mareinforce.read_rollouts` reads the file. Lines are written when a
    batch has been trained. A run that is resumed goes on in the file of its folder, from which lines that are newer
    than its checkpoint are taken out first: those batches are trained again.

    Args:
        every_n_batches: write the batches whose number (the first is 1) is a multiple of this.
        max_bytes: a file that would grow beyond this becomes `rollouts.1.jsonl`, in place of an older one, and a new
            one begins: at most twice this on disk.
        ids: write the token ids of the completions too.

    Raises:
        ConfigError: a number below 1.
    """

    def __init__(self, every_n_batches: int = 1, max_bytes: int = 256 * 2**20, ids: bool = False) -> None:
        for name, number in {"every_n_batches": every_n_batches, "max_bytes": max_bytes}.items():
            if number < 1:
                raise ConfigError(f"RolloutLog {name}={number}: must be at least 1.")
        self.every_n_batches = every_n_batches
        self.max_bytes = max_bytes
        self.ids = ids
        self._lines: BoundedLines | None = None  # on rank 0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Find the file, and take out of it what a killed run wrote after its checkpoint."""
        folder = trainer.log_dir or trainer.default_root_dir  # asked on every rank: it is rank 0's
        self._lines = (
            BoundedLines(Path(folder) / FILE_NAME, self.max_bytes, "RolloutLog") if trainer.is_global_zero else None
        )
        if self._lines is not None:
            self._lines.go_on_from(pl_module.env_step)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write the batch's completions, of all ranks, if it is one of those that are written."""
        if pl_module.batches % self.every_n_batches:
            return
        if not outputs or "trees" not in outputs:
            raise ConfigError(
                f"RolloutLog: training_step of {type(pl_module).__name__} returned {outputs!r}; it must return what "
                f"MultiAgentReinforce.training_step does (trees and samples)."
            )
        records = completion_records(
            outputs["trees"],
            outputs["samples"],
            joint_mode=pl_module.config.joint_mode,
            epoch=trainer.current_epoch,
            batch=pl_module.batches,
            ids=self.ids,
        )
        own = [(record["env_step"], as_line(record)) for record in records]
        numbered = [line for of_rank in pl_module.ranks.gather_on_first(own) for line in of_rank]
        if self._lines is not None:
            self._lines.append([line for _, line in sorted(numbered, key=lambda line: line[0])])
