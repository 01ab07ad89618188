"""The reward of every turn over environment steps, drawn into the run folder."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L

COLUMN = re.compile(r"turn_(\d+)/reward_mean")
SMOOTHING = 10
"""Rows in the running mean."""


class TurnRewardCurves(L.Callback):
    """Draws `reward_curves.png` from the run's `metrics.csv` when training ends, also when it ends early.

    Args:
        file_name: the picture's name in the run folder.
    """

    def __init__(self, file_name: str = "reward_curves.png") -> None:
        self.file_name = file_name
        self._folder: Path | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the run folder."""
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)  # asked on every rank: it is rank 0's

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._draw(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._draw(trainer)

    def _draw(self, trainer: L.Trainer) -> None:
        if not trainer.is_global_zero or self._folder is None:
            return
        if (self._folder / "metrics.csv").exists():
            with (self._folder / "metrics.csv").open(newline="") as file:
                curves = read_curves(list(csv.DictReader(file)))
            if curves:
                draw_curves(curves, self._folder / self.file_name)


def read_curves(rows: Sequence[Mapping[str, Any]]) -> dict[int, list[tuple[int, float]]]:
    """Turn -> (environment step, mean reward) of every row that has one."""
    curves: dict[int, list[tuple[int, float]]] = {}
    for row in rows:
        for name, value in row.items():
            match = COLUMN.fullmatch(name)
            if match and value not in ("", None):
                curves.setdefault(int(match[1]), []).append((int(float(row["step"])), float(value)))
    return dict(sorted(curves.items()))


def draw_curves(curves: Mapping[int, Sequence[tuple[int, float]]], path: Path) -> None:
    """Draw each turn's rewards, faint, and their running mean; the file appears whole."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for turn, points in curves.items():
        steps, rewards = zip(*points, strict=True)
        smooth = [sum(rewards[max(0, i + 1 - SMOOTHING) : i + 1]) / min(i + 1, SMOOTHING) for i in range(len(rewards))]
        (line,) = axes.plot(steps, smooth, label=f"turn {turn}")
        axes.plot(steps, rewards, color=line.get_color(), alpha=0.25, linewidth=0.8)
    axes.set_xlabel("environment steps (joint answers scored)")
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.3)
    axes.legend()
    aside = path.with_name(f".{path.name}")
    figure.savefig(aside, dpi=130, format="png")
    os.replace(aside, path)
