"""Checkpoints of the whole team at step boundaries, by the module's own counters."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from mareinforce.errors import ConfigError

FOLDER = "checkpoints"


class TeamCheckpoint(Checkpoint):
    """Saves `checkpoints/batch=3-updates=3.ckpt` in the run folder, where `batches` and `updates` are the module's.

    (`trainer.global_step` adds up the steps of every agent's optimizer.) It saves after whole batches only, when
    every agent has made its updates, and once more where training ends. A checkpoint is written beside its place and
    moved there when it is complete; older ones are removed only then.

    Args:
        every_n_batches: save whenever this many batches have been trained since the last time.
        every_n_updates: save whenever agents have made this many updates since the last time. With neither, save at
            every epoch's last batch.
        keep_last: how many checkpoints are kept, at least 1.
        dirpath: where to save; default `checkpoints` in the run folder.

    Raises:
        ConfigError: a number below 1.
    """

    def __init__(
        self,
        every_n_batches: int | None = None,
        every_n_updates: int | None = None,
        keep_last: int = 1,
        dirpath: str | None = None,
    ) -> None:
        super().__init__()
        numbers = {"every_n_batches": every_n_batches, "every_n_updates": every_n_updates, "keep_last": keep_last}
        for name, number in numbers.items():
            if number is not None and number < 1:
                raise ConfigError(f"TeamCheckpoint {name}={number}: must be at least 1.")
        self.every_n_batches = every_n_batches
        self.every_n_updates = every_n_updates
        self.keep_last = keep_last
        self.dirpath = dirpath
        self._saved_batches = 0
        self._saved_updates = 0
        self._kept: list[str] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is time, or if this was the last batch of the run."""
        if trainer.should_stop or self._due(trainer, pl_module):
            self._save(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what no batch's end has saved."""
        self._save(trainer, pl_module)

    def save_now(self, trainer: Trainer) -> None:
        """Save the last whole step, if it has not been saved yet."""
        if trainer.lightning_module.batches:
            self._save(trainer, trainer.lightning_module)

    def state_dict(self) -> dict[str, Any]:
        """What was saved last, and which files are this run's."""
        return {"batches": self._saved_batches, "updates": self._saved_updates, "kept": list(self._kept)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting and removing from there."""
        self._saved_batches, self._saved_updates = state_dict["batches"], state_dict["updates"]
        self._kept = list(state_dict["kept"])

    def _due(self, trainer: Trainer, module: Any) -> bool:
        if self.every_n_batches is None and self.every_n_updates is None:
            return trainer.is_last_batch
        return _passed_multiple(self.every_n_batches, self._saved_batches, module.batches) or _passed_multiple(
            self.every_n_updates, self._saved_updates, max(module.updates)
        )

    def _save(self, trainer: Trainer, module: Any) -> None:
        if module.batches == self._saved_batches:
            return
        folder = Path(self.dirpath or Path(trainer.log_dir or trainer.default_root_dir) / FOLDER)
        self._saved_batches, self._saved_updates = module.batches, max(module.updates)
        name = f"batch={self._saved_batches}-updates={self._saved_updates}.ckpt"
        # Noted before saving: the checkpoint's own copy of this state must list the checkpoint itself.
        self._kept = [other for other in self._kept if other != name] + [name]
        surplus, self._kept = self._kept[: -self.keep_last], self._kept[-self.keep_last :]
        aside = folder / f".{name}.part"
        trainer.save_checkpoint(aside, weights_only=False)
        if trainer.is_global_zero:
            os.replace(aside, folder / name)
            for other in surplus:
                (folder / other).unlink(missing_ok=True)


def _passed_multiple(every: int | None, before: int, now: int) -> bool:
    return every is not None and now // every > before // every


def newest_checkpoint(parent: str | os.PathLike[str]) -> Path | None:
    """The checkpoint last written in any run folder below `parent` that is whole, or None."""
    found = sorted(Path(parent).glob(f"*/{FOLDER}/*.ckpt"), key=lambda path: (path.stat().st_mtime_ns, str(path)))
    return next((path for path in reversed(found) if zipfile.is_zipfile(path)), None)


def folder_of_run(checkpoint: str | None) -> Path | None:
    """The run folder that a checkpoint lies in, in which training goes on; None for one that lies elsewhere."""
    found = Path(checkpoint or "").absolute()
    return Path(checkpoint or "").parent.parent if checkpoint and found.parent.name == FOLDER else None


def tracked_run(checkpoint: str | None) -> dict[str, Any] | None:
    """Which run at a tracker a checkpoint belongs to; None: none."""
    if checkpoint is None:
        return None
    content = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)
    record: dict[str, Any] | None = content["mareinforce"].get("wandb")
    return record


def checkpoint_to_resume(path: str | os.PathLike[str] | None, parent: str | os.PathLike[str], key: str) -> str | None:
    """The checkpoint file that is meant: ``path``, or for "last" the newest whole one below ``parent``.

    Raises ConfigError, in the words of ``key`` and before a model loads, if it is not there, or is not one of ours.
    """
    if path is None:
        return None
    if os.fspath(path) == "last":
        newest = newest_checkpoint(parent)
        if newest is None:
            raise ConfigError(f"{key}=last: there is no whole checkpoint in any run folder below {str(parent)!r}.")
        return str(newest)
    name = os.fspath(path)
    if not Path(name).is_file():
        raise ConfigError(f"{key}={name!r}: there is no such file; give a .ckpt file, or last.")
    try:
        content = torch.load(name, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{key}={name!r}: cannot be read as a checkpoint ({type(error).__name__}).") from error
    if not isinstance(content, dict) or "mareinforce" not in content:
        raise ConfigError(f"{key}={name!r}: is not a checkpoint that a run of this framework wrote.")
    return name
