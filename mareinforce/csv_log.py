"""`metrics.csv`: one row per logged step, on disk as soon as it is logged."""

from __future__ import annotations

import csv
import io
import os
import re
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from mareinforce.whole_files import write_whole

FILE_NAME = "metrics.csv"
_CURVES = ("reward_mean", "expected_return")
_CURVE = re.compile(rf"turn_(\d+)/({'|'.join(_CURVES)})")


class MetricsCSV(Logger):
    """Writes `metrics.csv` into a folder, and goes on in the file that is there.

    Columns: `step` (the step a row is logged with: environment steps), `turn_1/reward_mean`,
    `turn_1/expected_return`, `turn_2/...`, then everything else in the order it was first seen. A value that was not
    logged with a row is an empty field. A column that first appears later rewrites the file beside itself and takes
    its place in one move, so a killed run loses no row.

    Args:
        folder: the run folder; made when the first row is written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        self._folder = Path(folder)
        self.recent: deque[dict[str, float | int]] = deque(maxlen=8)
        """The rows logged last, each with its `step`."""
        self._columns: list[str] | None = None
        self._count: int | None = None
        self._latest: dict[str, float] | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return self._folder / FILE_NAME

    def move_to(self, folder: str | os.PathLike[str]) -> None:
        """Write into another folder, before the first row."""
        self._folder = Path(folder)

    @property
    def save_dir(self) -> str:
        """The run folder: where Lightning puts `config.yaml`."""
        return str(self._folder)

    @property
    def log_dir(self) -> str:
        """The run folder."""
        return str(self._folder)

    @property
    def name(self) -> str:
        """Empty: no folder of this name is made inside the run folder."""
        return ""

    @property
    def version(self) -> str:
        """Empty: runs are told apart by their folder."""
        return ""

    @property
    @rank_zero_experiment
    def experiment(self) -> MetricsCSV:
        """Itself: there is no other object to write with."""
        return self

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append one row. Rows that say nothing but the epoch, which Lightning adds by itself, are left out."""
        values = {name: _plain(value) for name, value in metrics.items() if name != "step"}
        if not values.keys() - {"epoch"}:
            return
        row = {"step": 0 if step is None else int(step), **values}
        if self._columns is None:
            self._columns = self._header_of_file()
        if not row.keys() <= set(self._columns):
            self._columns = ordered_columns([*self._columns, *row])
            self._rewrite()
        count = self.rows()
        _append(self.path, [row.get(column, "") for column in self._columns])
        self._count = count + 1
        self.latest().update(row)
        self.recent.append(row)

    def rows(self) -> int:
        """Rows in the file."""
        if self._count is None:
            self._count = len(read_metrics(self.path)) if self.path.exists() else 0
        return self._count

    def latest(self) -> dict[str, float]:
        """The last value of every column."""
        if self._latest is None:
            rows = read_metrics(self.path) if self.path.exists() else []
            self._latest = {name: float(value) for row in rows for name, value in row.items() if value}
        return self._latest

    @rank_zero_only
    def keep_rows(self, count: int) -> None:
        """Leave out what a run that was killed has logged after the checkpoint that a resumed run goes on from."""
        if self.rows() > count:
            self._columns = self._header_of_file()
            self._rewrite(count)
            self._count, self._latest = count, None

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: `config.yaml` holds them."""

    def _header_of_file(self) -> list[str]:
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # killed in the middle of a row: the next one must not be glued to it
            write_whole(self.path, whole)
        return next(csv.reader(io.StringIO(whole)), [])

    def _rewrite(self, count: int | None = None) -> None:
        rows = read_metrics(self.path)[:count] if self.path.exists() else []
        assert self._columns is not None
        lines = [self._columns, *([row.get(column, "") for column in self._columns] for row in rows)]
        write_whole(self.path, "".join(_line(values) for values in lines))


def read_metrics(path: Path) -> list[dict[str, str]]:
    """The rows of a `metrics.csv`, oldest first, as text by column; a value not logged is an empty text."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def ordered_columns(names: Iterable[str]) -> list[str]:
    """`step`, then reward and return turn by turn, then the rest as they come; each once."""
    names = list(dict.fromkeys(names))
    curves = {name: (int(found[1]), _CURVES.index(found[2])) for name in names if (found := _CURVE.fullmatch(name))}
    rest = [name for name in names if name != "step" and name not in curves]
    return ["step", *sorted(curves, key=lambda name: curves[name]), *rest]


def _plain(value: Any) -> float | int:
    """A number without its tensor or array. Raises TypeError or ValueError for anything else."""
    value = value.item() if hasattr(value, "item") else value
    return value if type(value) in (int, float) else float(value)


def _line(values: Iterable[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def _append(path: Path, values: Iterable[Any]) -> None:
    with path.open("a", newline="", encoding="utf-8") as file:  # closed, so flushed, row by row
        file.write(_line(values))
