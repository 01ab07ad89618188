"""The reward and the return of every turn over environment steps, drawn into the run folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
from mareinforce.callbacks.trackers import log_picture

from mareinforce.csv_log import FILE_NAME, read_metrics
from mareinforce.curves import draw, read_curves
from mareinforce.errors import ConfigError

SHARE = 0.01
"""Of a run's time that drawing may take while it goes on."""


class TurnRewardCurves(L.Callback):
    """Draws `reward_curves.png` from the run's `metrics.csv` while it trains and when it ends, also when it ends early.

    The picture has each turn's `reward_mean` and, with several turns, `expected_return`, with their deviation within
    nodes. It is also sent to Weights & Biases or TensorBoard, where they are among the loggers. The pictures of several
    runs in one: `python -m mareinforce.plot RUN RUN ...`.

    Args:
        file_name: the picture's name in the run folder.
        every_n_seconds: how often it is drawn while the run goes on; less often where drawing would take more than
            a hundredth of the time. None: only when it ends.

    Raises:
        ConfigError: a time that is not above 0, or a name that does not end with .png.
    """

    def __init__(self, file_name: str = "reward_curves.png", every_n_seconds: float | None = 60.0) -> None:
        if every_n_seconds is not None and not every_n_seconds > 0:
            raise ConfigError(f"TurnRewardCurves every_n_seconds={every_n_seconds}: must be above 0, or null.")
        if not file_name.endswith(".png"):
            raise ConfigError(f"TurnRewardCurves file_name={file_name!r}: must end with .png.")
        self.file_name = file_name
        self.every_n_seconds = every_n_seconds
        self._folder: Path | None = None
        self._drawn_at = 0.0
        self._wait = float("inf")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the folder: asked on every rank, since it is rank 0's."""
        folder = trainer.log_dir
        self._folder = Path(folder) if folder is not None and trainer.is_global_zero else None
        self._drawn_at, self._wait = time.monotonic(), self.every_n_seconds or float("inf")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Draw, if it was long enough ago."""
        start = time.monotonic()
        if start - self._drawn_at >= self._wait:
            self._draw(trainer, pl_module)
            self._drawn_at = time.monotonic()
            self._wait = max(self.every_n_seconds or 0.0, (self._drawn_at - start) / SHARE)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._draw(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._draw(trainer, pl_module)

    def _draw(self, trainer: L.Trainer, module: Any) -> None:
        if self._folder is None or not (self._folder / FILE_NAME).exists():
            return
        curves = read_curves(read_metrics(self._folder / FILE_NAME))
        if curves.get("reward_mean"):
            draw([curves], self._folder / self.file_name)
            log_picture(trainer.loggers, "reward_curves", self._folder / self.file_name, module.env_step)
