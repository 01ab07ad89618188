"""Evaluation while a run trains, on a schedule of one's own, with the best so far."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import lightning as L

from mareinforce.errors import ConfigError, did_you_mean


class EvaluationCallback(L.Callback):
    """Says when a run is evaluated, in place of `eval_interval`, and keeps the best of what was found.

    The module evaluates, always before a batch trains, with `eval_logger` and `eval_aggregator`, and writes the
    `eval/...` metrics in a row of their own. This adds `eval/best`, the best value of `monitor` so far, and
    `eval/best_step`, the environment step it was found at.

    Args:
        every_n_batches: before the first batch of an epoch and every n batches from there; 0: never. With neither
            this nor `every_n_env_steps` it is `eval_interval` of the configuration.
        every_n_env_steps: before the first batch, and once as many environment steps have been made since.
        num_samples: rows that are played, or all; default: `eval_num_samples` of the configuration.
        monitor: the metric of which the best is kept; default: the mean reward of the last turn.
        mode: max or min: which value is better.
        save_best: save the agents in `best_agents` in the run folder whenever they are the best so far.

    Raises:
        ConfigError: both cadences, or a number that cannot be meant.
    """

    def __init__(
        self,
        every_n_batches: int | None = None,
        every_n_env_steps: int | None = None,
        num_samples: int | Literal["all"] | None = None,
        monitor: str | None = None,
        mode: Literal["max", "min"] = "max",
        save_best: bool = False,
    ) -> None:
        if every_n_batches is not None and every_n_env_steps is not None:
            raise ConfigError("EvaluationCallback: give every_n_batches or every_n_env_steps, not both.")
        least = {"every_n_batches": (every_n_batches, 0), "every_n_env_steps": (every_n_env_steps, 1),
                 "num_samples": (None if num_samples == "all" else num_samples, 1)}  # fmt: skip
        for name, (number, smallest) in least.items():
            if number is not None and (not isinstance(number, int) or number < smallest):
                raise ConfigError(
                    f"EvaluationCallback {name}={number!r}: must be a whole number of at least {smallest}."
                )
        if mode not in ("max", "min"):
            raise ConfigError(f"EvaluationCallback mode={mode!r}: must be max or min.")
        self.every_n_batches, self.every_n_env_steps = every_n_batches, every_n_env_steps
        self.rows, self.monitor, self.mode, self.save_best = num_samples, monitor, mode, save_best
        self.best: float | None = None
        """The best value of `monitor` so far."""
        self.best_step: int | None = None
        """The environment step it was found at."""
        self._evaluated_at: int | None = None  # environment step
        self._folder: Path | None = None
        self._before: dict[str, Any] | None = None  # the state before the batch that is trained now

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse a schedule without rows to evaluate on. Raises ConfigError, before a model loads."""
        asked = self.every_n_batches or self.every_n_env_steps
        data = getattr(trainer, "datamodule", None)
        if stage == "fit" and asked and (data is None or not data.eval_rows(1)):
            raise ConfigError("EvaluationCallback: there is nothing to evaluate on; name rows in data.eval.")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """A new run knows nothing of one before it."""
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)  # asked on every rank: it is rank 0's
        if pl_module.env_step == 0:
            self.load_state_dict({"best": None, "best_step": None, "evaluated_at": None})

    def is_due(self, module: Any, batch_index: int) -> bool:
        """Is it time, before a batch of the epoch (counted from 0) trains?"""
        if self.every_n_env_steps is not None:
            due = self._evaluated_at is None or module.env_step - self._evaluated_at >= self.every_n_env_steps
        else:
            every = module.config.eval_interval if self.every_n_batches is None else self.every_n_batches
            due = bool(every) and batch_index % every == 0
        return due

    def num_samples(self, module: Any) -> int | None:
        """How many rows are played; None: all."""
        if self.rows is None:
            return int(module.config.eval_num_samples)
        return None if self.rows == "all" else self.rows

    def judged(self, module: Any, metrics: Mapping[str, float]) -> dict[str, float]:
        """Note what was found, and return the best so far with its step."""
        self._before = self._state()
        self._evaluated_at = module.env_step
        value = metrics.get(self._monitored(module, metrics))
        if value is not None and self._is_best(value):
            self.best, self.best_step = value, module.env_step
            if self.save_best and self._folder is not None:
                module.save_model(self._folder / "best_agents")
        if self.best is None or self.best_step is None:
            return {}
        return {"eval/best": self.best, "eval/best_step": float(self.best_step)}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The batch is whole, and so is what was evaluated before it."""
        self._before = None

    def state_dict(self) -> dict[str, Any]:
        """The best so far and when it was looked; of a step that is given up, what was known before it."""
        return self._state() if self._before is None else dict(self._before)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.best, self.best_step = state_dict["best"], state_dict["best_step"]
        self._evaluated_at, self._before = state_dict["evaluated_at"], None

    def _is_best(self, value: float) -> bool:
        if self.best is None:
            return True
        return value > self.best if self.mode == "max" else value < self.best

    def _state(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "evaluated_at": self._evaluated_at}

    def _monitored(self, module: Any, metrics: Mapping[str, float]) -> str:
        if self.monitor is None:  # may be missing: the last turn is not always reached
            return f"eval/turn_{module.config.num_turns}/reward_mean"
        if self.monitor not in metrics:
            raise ConfigError(
                f"EvaluationCallback monitor={self.monitor!r}: an evaluation has no such metric; it has "
                f"{', '.join(metrics)}.{did_you_mean(self.monitor, metrics)}"
            )
        return self.monitor
