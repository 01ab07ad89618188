"""The callback of a run that takes turns with another."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback

from tests.benchmarks.turns import OF_THIS_PROCESS


class Baton(Callback):
    """Before each batch, let the other run go on with its own."""

    def on_train_batch_start(self, *_: Any) -> None:
        """Give, and take when the other has given."""
        (turns,) = OF_THIS_PROCESS
        turns.give()
        turns.take()
