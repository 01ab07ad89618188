"""Checkpoints of the whole team at step boundaries, by the module's own counters."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any, Literal, TypeGuard

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_warn

from mareinforce.checkpoint_files import FOLDER, WholeCheckpoints, make_ready, remove_parts
from mareinforce.csv_log import MetricsCSV
from mareinforce.errors import ConfigError, MareinforceWarning
from mareinforce.metric_names import check_after, check_before
from mareinforce.whole_files import write_whole

SCORES_FILE = "scores.json"


class TeamCheckpoint(Checkpoint):
    """Saves `checkpoints/batch=3-updates=3.ckpt` in the run folder, where `batches` and `updates` are the module's.

    (`trainer.global_step` adds up the steps of every agent's optimizer.) It saves after whole batches only, when
    every agent has made its updates, and once more where training ends. A checkpoint is written beside its place and
    moved there when it is complete; older ones are removed only then.

    Args:
        every_n_batches: save whenever this many batches have been trained since the last time.
        every_n_updates: save whenever agents have made this many updates since the last time.
        every_n_env_steps: save whenever this many joint actions have been scored since the last time.
        every_n_minutes: save after the first batch that ends this long after the last time. Several of these may be
            given. With none, save at every epoch's last batch.
        keep_last: how many checkpoints are kept, at least 1.
        monitor: a metric of `metrics.csv`. The checkpoints that were written when its last value was best are kept
            too, and `checkpoints/scores.json` says the values of all that are kept.
        mode: is the largest (max) or the smallest (min) value best? Of equal ones the newer is.
        keep_best: how many of the best are kept, at least 1; default 1. They may be among the last.
        dirpath: where to save; default `checkpoints` in the run folder.

    Raises:
        ConfigError: a number below 1, a length of time that is not above 0, or fields that contradict each other;
            before a model loads also a folder that cannot be written to, and a metric that the run cannot log; and
            after the first save a metric that it does not log.
        CheckpointError: the disk does not take a checkpoint.
    """

    def __init__(
        self,
        every_n_batches: int | None = None,
        every_n_updates: int | None = None,
        keep_last: int = 1,
        dirpath: str | None = None,
        *,
        every_n_env_steps: int | None = None,
        every_n_minutes: float | None = None,
        monitor: str | None = None,
        mode: Literal["max", "min"] = "max",
        keep_best: int | None = None,
    ) -> None:
        super().__init__()
        self.every = {"batches": every_n_batches, "updates": every_n_updates, "env_steps": every_n_env_steps}
        numbers = {f"every_n_{name}": number for name, number in self.every.items()}
        for name, number in {**numbers, "keep_last": keep_last, "keep_best": keep_best}.items():
            if number is not None and number < 1:
                raise ConfigError(f"TeamCheckpoint {name}={number}: must be at least 1.")
        if every_n_minutes is not None and not (math.isfinite(every_n_minutes) and every_n_minutes > 0):
            raise ConfigError(f"TeamCheckpoint every_n_minutes={every_n_minutes}: must be a finite number above 0.")
        if mode not in ("max", "min"):
            raise ConfigError(f"TeamCheckpoint mode={mode!r}: must be max or min.")
        if keep_best is not None and monitor is None:
            raise ConfigError(f"TeamCheckpoint keep_best={keep_best}: by which metric? Name it as monitor.")
        self.every_n_minutes = every_n_minutes
        self.keep_last = keep_last
        self.keep_best = keep_best or 1
        self.monitor, self.mode = monitor, mode
        self.dirpath = dirpath
        self._saved = dict.fromkeys(self.every, 0)
        self._saved_at = time.monotonic()
        self._kept: dict[str, float | None] = {}  # name -> what the metric was, oldest first
        self._surplus: list[str] = []  # to be removed, now that others are whole

    @property
    def best(self) -> list[str]:
        """Names of the best checkpoints that are kept, best first."""
        sign = 1 if self.mode == "max" else -1
        scores = [
            (sign * value, place, name) for place, (name, value) in enumerate(self._kept.items()) if _known(value)
        ]
        return [name for _, _, name in sorted(scores, reverse=True)[: self.keep_best]]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Before a model loads: is there a place to save to, and can the metric be logged?"""
        if stage != "fit":
            return
        if self.monitor is not None:
            self._check_monitor(trainer, pl_module)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # a plugin that was asked for stays
            trainer.strategy.checkpoint_io = WholeCheckpoints()
        folder = self._folder(trainer)  # asked on every rank: it is rank 0's
        if trainer.is_global_zero:
            make_ready(folder)
            if self.dirpath is None:  # in another folder they may be of a run that is at work
                remove_parts(folder)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_at = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is time, or if this was the last batch of the run."""
        if trainer.should_stop or self._due(trainer, pl_module):
            self._save(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what no batch's end has saved."""
        self._save(trainer, pl_module)
        if self.monitor is not None and self._kept and not any(map(_known, self._kept.values())):
            rank_zero_warn(
                f"TeamCheckpoint monitor={self.monitor!r}: no value of it was logged before a checkpoint was written, "
                "so none is kept as the best.",
                category=MareinforceWarning,
            )

    def save_now(self, trainer: Trainer) -> None:
        """Save the last whole step, if it has not been saved yet."""
        if trainer.lightning_module.batches:
            self._save(trainer, trainer.lightning_module)

    def state_dict(self) -> dict[str, Any]:
        """What was saved last, and which files are this run's."""
        kept = {"monitor": self.monitor, "kept": dict(self._kept), "surplus": list(self._surplus)}
        return {"saved": dict(self._saved), **kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting and removing from there."""
        self._saved, self._surplus = dict(state_dict["saved"]), list(state_dict["surplus"])
        same = state_dict["monitor"] == self.monitor
        self._kept = {name: value if same else None for name, value in state_dict["kept"].items()}

    def _due(self, trainer: Trainer, module: Any) -> bool:
        given = {name: every for name, every in self.every.items() if every is not None}
        if not given and self.every_n_minutes is None:
            return trainer.is_last_batch
        counts = _counts(module)
        due = any(counts[name] // every > self._saved[name] // every for name, every in given.items())
        if self.every_n_minutes is not None:  # clocks differ: rank 0's decides
            late = time.monotonic() - self._saved_at >= 60 * self.every_n_minutes
            due |= trainer.strategy.broadcast(late)
        return due

    def _save(self, trainer: Trainer, module: Any) -> None:
        counts = _counts(module)
        if counts["batches"] == self._saved["batches"]:
            return
        self._saved, self._saved_at = counts, time.monotonic()
        name = f"batch={counts['batches']}-updates={counts['updates']}.ckpt"
        # Noted before saving: the checkpoint's own copy of this state must list the checkpoint itself.
        self._kept.pop(name, None)
        logged = _logged(trainer) if self.monitor is not None and trainer.is_global_zero else {}
        self._kept[name] = logged.get(self.monitor or "")
        keep = {*self.best, *list(self._kept)[-self.keep_last :]}
        self._surplus = [*self._surplus, *(other for other in self._kept if other not in keep)]
        self._kept = {other: value for other, value in self._kept.items() if other in keep}
        folder = self._folder(trainer)
        trainer.save_checkpoint(folder / name, weights_only=False)
        if trainer.is_global_zero:
            self._tidy(folder)
            if self.monitor is not None:
                check_after(self.monitor, logged, module.config, "TeamCheckpoint monitor")
        self._surplus = []

    def _tidy(self, folder: Path) -> None:
        """Remove what is not kept any more, now that the newest is whole, and say what the metric was of what is."""
        for other in self._surplus:
            if other not in self._kept:
                (folder / other).unlink(missing_ok=True)
        if self.monitor is not None:
            scores = {"monitor": self.monitor, "mode": self.mode, "best": self.best, "scores": self._kept}
            write_whole(folder / SCORES_FILE, json.dumps(scores, indent=2) + "\n")

    def _folder(self, trainer: Trainer) -> Path:
        return Path(self.dirpath or Path(trainer.log_dir or trainer.default_root_dir) / FOLDER)

    def _check_monitor(self, trainer: Any, module: Any) -> None:
        if not any(isinstance(logger, MetricsCSV) for logger in trainer.loggers):
            raise ConfigError(f"TeamCheckpoint monitor={self.monitor!r}: metrics are read from MetricsCSV; add it.")
        data = getattr(trainer, "datamodule", None)
        check_before(
            self.monitor or "",
            module.config,
            what="TeamCheckpoint monitor",
            evaluates=data is not None and bool(data.eval_rows(1)),
            aggregates=module.evaluators.aggregates,
            others=any(map(_is_users, trainer.callbacks)),
        )


def _counts(module: Any) -> dict[str, int]:
    """How far the module has come, in the units that a cadence may have."""
    return {"batches": module.batches, "updates": max(module.updates), "env_steps": module.env_step}


def _logged(trainer: Trainer) -> dict[str, float]:
    found = [logger.latest() for logger in trainer.loggers if isinstance(logger, MetricsCSV)]
    return found[0] if found else {}


def _known(value: float | None) -> TypeGuard[float]:
    return value is not None and not math.isnan(value)


def _is_users(callback: Callback) -> bool:
    return type(callback).__module__.split(".")[0] not in ("mareinforce", "lightning")
