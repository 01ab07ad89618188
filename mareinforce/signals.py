"""Stopping by a signal: at a step's boundary, with a checkpoint, and with every agent stepped or none."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import lightning as L

from mareinforce.checkpoint import TeamCheckpoint
from mareinforce.errors import StopRequested

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)
)  # SLURM announces pre-emption by the last, or by SIGTERM
NOTHING_KEPT = "before a whole step, so there is no checkpoint of this run"
"""What a stopped run says in place of how to go on."""


class StopBySignal(L.Callback):
    """Ends a run that gets SIGINT or SIGTERM (or, under SLURM, SIGUSR1).

    While answers are sampled and scored, which may take long, the rollout is given up: nothing of it has been learned,
    and the checkpoint is that of the step before. While agents learn, all of them finish the step first. A second
    signal ends the process at once; files are written whole or not at all, so the last checkpoint is whole.

    Of several processes one signal to one of them ends all, at the same step: what one gives up all give up.

    Attributes:
        received: the signal, once there was one.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._interruptible = False
        self._before: dict[signal.Signals, Any] = {}

    @property
    def exit_status(self) -> int:
        """130 after SIGINT, 143 after another; as shells say it."""
        return 128 + (signal.SIGINT if self.received == signal.SIGINT else signal.SIGTERM)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take over from Lightning, whose own handlers end a run in the middle of a step, or with status 0."""
        if threading.current_thread() is not threading.main_thread():
            return
        pl_module.interruptible = self.interruptible  # type: ignore[assignment]
        for number in SIGNALS:
            if number != getattr(signal, "SIGUSR1", None) or "SLURM_JOB_ID" in os.environ:
                self._before[number] = signal.signal(number, self._handle)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.received is not None and pl_module.ranks.size == 1:  # else they agree on it inside the step
            raise StopRequested(self.received)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        received, stops = zip(*pl_module.ranks.gather((self.received, trainer.should_stop)), strict=True)
        trainer.should_stop = any(stops)
        agreed = next((one for one in received if one is not None), None)
        if agreed is not None:
            self.received = agreed
            save_boundary(trainer)
            raise StopRequested(agreed)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Keep the last step's boundary, if it was a signal that ended the run."""
        if isinstance(exception, StopRequested):
            self.received = self.received or signal.Signals(exception.signal)  # it may be another process's
            save_boundary(trainer)
        self._restore()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._restore()

    def interruptible(self, work: Callable[[], Any]) -> Any:
        """Do what may be given up: a signal in the meantime ends it at once."""
        self._interruptible = True
        try:
            if self.received is not None:
                raise StopRequested(self.received)
            return work()
        finally:
            self._interruptible = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = signal.Signals(number)
        sys.stderr.write(f"\n{self.received.name}: stopping at the step's boundary; once more to end at once\n")
        if self._interruptible:
            raise StopRequested(self.received)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def save_boundary(trainer: Any) -> None:
    """Let the run's checkpoints keep the last whole step, if they have not."""
    for callback in trainer.callbacks:
        if isinstance(callback, TeamCheckpoint):
            callback.save_now(trainer)
