"""The progress of a run on the console: two live lines in a terminal, one line a row of metrics elsewhere."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from mareinforce.csv_log import MetricsCSV
from mareinforce.metrics import mean
from mareinforce.rollout.tree import nodes_by_level, valid

PHASES = {
    "generation": "generating",
    "reward": "rewarding",
    "transition": "preparing the next turn",
    "scoring": "scoring",
    "update": "updating",
    "evaluation": "evaluating",
}
"""What a phase of the module is called on the console."""
_REWARD = re.compile(r"(?:eval/)?turn_\d+/reward_mean")
_RETURN = re.compile(r"(?:eval/)?turn_1/expected_return")
_ENTROPY = re.compile(r"agent_\d+/entropy")
_STEPPED = re.compile(r"agent_\d+/stepped_fraction")
_SECONDS_BETWEEN = 1.0
"""Between two lots of lines."""


class RunProgress(ProgressBar):
    """Shows how far a run is, what it is doing, and what its answers are worth.

    In a terminal: a bar, and below it reward (turn by turn), return, entropy and tokens a second of the last batch, and
    the phase. Elsewhere, as in a file or a notebook: one line whenever a row of metrics is logged, without colours; it
    waits for the next if it comes less than a second after the one before. Both on stderr.

    Args:
        console: where to; default: stderr.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._console = console or Console(stderr=True)
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._enabled = True
        self._display: TwoLines | None = None
        self._seen: dict[str, Any] = {}  # of the last batch
        self._rows = 0  # of metrics.csv, in a line already
        self._waiting: list[str] = []  # lines; who prints above us comes after them
        self._told = -math.inf  # time.monotonic
        self._tokens, self._batch_began, self._row_began = 0, 0.0, 0.0

    @property
    def is_enabled(self) -> bool:
        """Is anything shown?"""
        return self._enabled

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar; where there is none, lines are as wide as they are."""
        self._tell()
        self._console.print(*args, **{"soft_wrap": not self._live, **kwargs})

    # training

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._row_began, self._tokens = time.perf_counter(), 0
        table = _table(trainer)
        self._rows = 0 if table is None else table.rows()
        if self._enabled and self._live:
            self._display = TwoLines(self._console, lambda: status(self._seen, pl_module))
            self._display.start()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._display is not None and not self._display.tasks:
            self._display.begin(*self._length(trainer, pl_module))
        self._batch_began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if isinstance(outputs, Mapping) and "trees" in outputs:
            tokens = sum(len(one.ids) for sample in outputs["samples"] for one in sample.completions)
            self._tokens += tokens
            rate = tokens / max(1e-9, time.perf_counter() - self._batch_began)
            self._seen |= {**batch_values(outputs), "tokens/s": rate}
        if self._display is not None:
            self._display.move(*self._length(trainer, pl_module))
        self._tell_rows(trainer)
        if time.monotonic() - self._told >= _SECONDS_BETWEEN:
            self._tell()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._tell_rows(trainer)  # the module has written the last one after all callbacks' on_train_end
        self._tell()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._stop()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._stop()

    # evaluation alone

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._enabled and self._live and self._display is None and not trainer.training:
            self._display = TwoLines(self._console, Text)
            self._display.start()
            self.has_dataloader_changed(dataloader_idx)
            self._display.begin("evaluation", self.total_val_batches_current_dataloader, 0)

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._display is not None and not trainer.training:
            self._display.move("evaluation", self.total_val_batches_current_dataloader, batch_idx + 1)

    # small print

    def _length(self, trainer: L.Trainer, module: Any) -> tuple[str, float | None, int]:
        """What the whole run is counted in, how long it is, and how far it has come; a resumed one too."""
        most = module.config.max_updates
        if most is not None:
            return "update", most, max(module.updates)
        epochs = trainer.max_epochs
        if epochs is None or epochs < 0:  # without end
            return f"epoch {trainer.current_epoch + 1}", None, module.batches
        return f"epoch {trainer.current_epoch + 1}/{epochs}", epochs * self.total_train_batches, module.batches

    def _stop(self) -> None:
        self._tell()
        if self._display is not None:
            self._display.stop()
            self._display = None

    def _tell_rows(self, trainer: L.Trainer) -> None:
        """Where there is no terminal: a line is to be told for each row that has been logged since the last time."""
        table = _table(trainer)
        if self._live or not self._enabled or table is None:
            return
        fresh, self._rows = table.rows() - self._rows, table.rows()
        for row in list(table.recent)[max(0, len(table.recent) - fresh) :]:
            self._waiting.append(self._line(row, trainer.max_epochs))

    def _tell(self) -> None:
        """Print the lines that wait, all at once: W&B captures the console, and takes as long for one as for many."""
        lines, self._waiting = self._waiting, []
        if lines:
            self._console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)
            self._told = time.monotonic()

    def _line(self, row: Mapping[str, float], epochs: int | None) -> str:
        evaluation, values = any(name.startswith("eval/") for name in row), row_values(row)
        if not evaluation:
            now = time.perf_counter()
            values["tokens/s"] = self._tokens / max(1e-9, now - self._row_began)
            self._tokens, self._row_began = 0, now
        of = "" if epochs is None else f"/{epochs}"
        kind = "evaluation, " if evaluation else ""
        where = f"epoch {row['epoch'] + 1}{of}, batch {row['batch']}, step {row['step']}"
        return f"{kind}{where}: {in_words(values)}"


class TwoLines(Progress):
    """A bar, and a line of text below it that is asked for at every refresh.

    Args:
        console: where to.
        below: -> the line.
    """

    def __init__(self, console: Console, below: Any) -> None:
        self._below = below  # before the bar asks for it
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=4,
            expand=True,
        )

    def begin(self, description: str, total: float | None, done: int) -> None:
        """Start the bar; what was done before counts for no speed."""
        self.add_task(description, total=total, completed=done)

    def move(self, description: str, total: float | None, done: int) -> None:
        """Move the bar."""
        for task in self.task_ids:
            self.update(task, description=description, total=total, completed=done)

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield self._below()


def status(seen: Mapping[str, Any], module: Any) -> Text:
    """The line below the bar: what the last batch was worth, and what is being done."""
    phases = getattr(module, "phases", None)
    phase = PHASES.get(getattr(phases, "current", None) or "", "")
    text = Text(in_words(seen), no_wrap=True, overflow="ellipsis")
    return text.append(f"{'  ' if seen else ''}{phase}", style="dim")


def batch_values(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Reward of each turn, return and entropy of what a training step returned; nothing of what has none.

    The entropy is None where an update was made, and nothing was scored because nothing could be learned from.
    """
    rewards: dict[int, list[float]] = {}
    for root in outputs["trees"]:
        for node in nodes_by_level(root):
            if found := valid(node.rewards):
                rewards.setdefault(node.turn, []).append(mean(found))
    values = {
        "reward": [mean(rewards[turn]) for turn in sorted(rewards)],
        "return": [mean(found) for root in outputs["trees"] if (found := valid(root.returns))],
        "entropy": [seen["entropy"] for _, seen in outputs.get("reports", ()) if "entropy" in seen],
    }
    shown: dict[str, Any] = {n: found if n == "reward" else mean(found) for n, found in values.items() if found}
    return {**shown, "entropy": None} if outputs.get("reports") and "entropy" not in shown else shown


def row_values(row: Mapping[str, float]) -> dict[str, Any]:
    """The same of a row of metrics."""
    entropies = [value for name, value in row.items() if _ENTROPY.fullmatch(name)]
    found = {
        "reward": [value for name, value in row.items() if _REWARD.fullmatch(name)],
        "return": [value for name, value in row.items() if _RETURN.fullmatch(name)],
        "entropy": [mean(entropies)] if entropies else [],
    }
    updated = any(_STEPPED.fullmatch(name) for name in row)
    return {name: values or None for name, values in found.items() if values or (name == "entropy" and updated)}


def in_words(values: Mapping[str, Any]) -> str:
    """`reward 0.381, 0.5  return 0.381  ...`: several numbers are those of the turns. None: no signal."""
    parts = []
    for name, value in values.items():
        numbers = value if isinstance(value, list) else [value]
        if name == "tokens/s":
            parts.append(f"{value:,.0f} tokens/s")
        elif value is None:
            parts.append("no signal")
        else:
            parts.append(f"{name} {', '.join(f'{number:.3g}' for number in numbers)}")
    return "  ".join(parts)


def _table(trainer: L.Trainer) -> MetricsCSV | None:
    return next((logger for logger in trainer.loggers if isinstance(logger, MetricsCSV)), None)
