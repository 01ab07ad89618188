"""Learning curves of runs: read from `metrics.csv`, drawn as a picture of one run or of several together."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Floats = np.ndarray[Any, np.dtype[np.float64]]

SMOOTHING = 10
"""Rows in the running mean of a long run; of a short one, a tenth of its rows."""
GRID = 400
"""Points at which several runs are compared."""
STYLES = ("-", "--", ":", "-.")
"""Of the lines of several runs."""
Kind = Literal["reward_mean", "expected_return"]
LABELS: dict[Kind, str] = {"reward_mean": "mean reward", "expected_return": "expected return"}
_SPREADS: dict[Kind, str] = {"reward_mean": "reward_std", "expected_return": "expected_return_std"}
_COLUMN = re.compile(r"turn_(\d+)/(reward_mean|expected_return)")


@dataclass(frozen=True, slots=True)
class Curve:
    """One column over environment steps, all three of the same length; rows without a value are left out."""

    steps: list[int]
    values: list[float]
    spread: list[float]
    """Deviation within nodes, 0 where it was not logged."""

    def smooth(self, rows: int = SMOOTHING) -> Curve:
        """Each value and spread as the mean over the last `rows` rows."""
        return Curve(self.steps, running_mean(self.values, rows), running_mean(self.spread, rows))


Curves = dict[Kind, dict[int, Curve]]
"""Reward and return of each turn (from 1)."""


def running_mean(values: Sequence[float], rows: int) -> list[float]:
    """The mean of each value and of up to `rows` - 1 before it."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - rows)
    means: list[float] = ((sums[ends] - sums[starts]) / (ends - starts)).tolist()
    return means


def smoothing(runs: Sequence[Curves]) -> int:
    """Rows in the running mean if nobody says how many: a tenth of the longest curve's, and `SMOOTHING` at most."""
    longest = max((len(curve.steps) for run in runs for turns in run.values() for curve in turns.values()), default=0)
    return min(SMOOTHING, max(1, longest // 10))


def read_curves(rows: Sequence[Mapping[str, Any]]) -> Curves:
    """The curves in rows of a `metrics.csv`; evaluation is not among them."""
    found: Curves = {"reward_mean": {}, "expected_return": {}}
    for column in dict.fromkeys(name for row in rows for name in row):
        match = _COLUMN.fullmatch(column)
        if match is None:
            continue
        kind: Kind = "reward_mean" if match[2] == "reward_mean" else "expected_return"
        spread = f"turn_{match[1]}/{_SPREADS[kind]}"
        given = [row for row in rows if row.get(column) not in ("", None)]
        if given:
            found[kind][int(match[1])] = Curve(
                [int(float(row["step"])) for row in given],
                [float(row[column]) for row in given],
                [float(row.get(spread) or 0.0) for row in given],
            )
    return {kind: dict(sorted(turns.items())) for kind, turns in found.items() if turns}


def together(curves: Sequence[Curve], rows: int = SMOOTHING) -> tuple[Floats, Floats, Floats]:
    """Several runs' smoothed curves where all of them have been: steps, their mean, their deviation (population).

    Between its rows a run is taken to go straight. Runs that share no step give nothing.
    """
    first, last = max(curve.steps[0] for curve in curves), min(curve.steps[-1] for curve in curves)
    if last < first:
        nothing = np.zeros(0)
        return nothing, nothing, nothing
    grid = np.linspace(first, last, GRID) if last > first else np.array([float(first)])
    values = np.stack([np.interp(grid, curve.steps, curve.smooth(rows).values) for curve in curves])
    return grid, values.mean(axis=0), values.std(axis=0)


def draw(runs: Sequence[Curves], path: Path, rows: int | None = None, names: Sequence[str] = ()) -> None:
    """Draw one run, or several as mean and band (see `figure`), into a PNG that appears whole."""
    aside = path.with_name(f".{path.name}")
    figure(runs, rows, names).savefig(aside, dpi=130, format="png")
    os.replace(aside, path)


def figure(runs: Sequence[Curves], rows: int | None = None, names: Sequence[str] = ()) -> Figure:
    """Draw one run, or several as mean and band; a notebook shows what is returned.

    One run: each turn's values, faint, their running mean, and a band of the deviation within nodes. Several: the mean
    of their running means, a band of the deviation between runs, and each of them, faint. A run of one turn has one
    panel, because its return is its reward. ``rows`` are those of the running mean, see `smoothing`;
    ``names`` those of several runs in the legend.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = rows or smoothing(runs)
    turns = sorted({turn for run in runs for turn in run.get("reward_mean", {})})
    kinds: list[Kind] = ["reward_mean"] if turns == [1] else ["reward_mean", "expected_return"]
    drawing = Figure(figsize=(7 if len(kinds) == 1 else 11, 4), layout="constrained")
    FigureCanvasAgg(drawing)
    for axes, kind in zip(drawing.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        for index, turn in enumerate(turns):
            having = [place for place, run in enumerate(runs) if turn in run.get(kind, {})]
            curves = [runs[place][kind][turn] for place in having]
            if len(runs) == 1:
                _draw_one(axes, curves[0], f"turn {turn}", f"C{index}", rows)
            elif curves:
                called = [names[place] if names and index == 0 else None for place in having]
                _draw_several(axes, curves, called, f"turn {turn}", f"C{index}", rows)
        axes.set_ylabel(LABELS[kind])
        _finish(axes)
    _title(drawing, runs, rows)
    return drawing


def _draw_one(axes: Axes, curve: Curve, label: str, colour: str, rows: int) -> None:
    smooth = curve.smooth(rows)
    low, high = (np.array(smooth.values) + sign * np.array(smooth.spread) for sign in (-1, 1))
    alone = {"marker": "o"} if len(curve.steps) == 1 else {}
    axes.fill_between(smooth.steps, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.plot(curve.steps, curve.values, color=colour, alpha=0.3, linewidth=0.7)
    axes.plot(smooth.steps, smooth.values, color=colour, label=label, linewidth=1.8, **alone)  # type: ignore[arg-type]


def _draw_several(
    axes: Axes, curves: Sequence[Curve], names: Sequence[str | None], label: str, colour: str, rows: int
) -> None:
    for index, (curve, name) in enumerate(zip(curves, names, strict=True)):
        style = STYLES[index % len(STYLES)]
        values = curve.smooth(rows).values
        axes.plot(curve.steps, values, style, color=colour, alpha=0.5, linewidth=0.7, label=name)
    steps, mean, deviation = together(curves, rows)
    axes.fill_between(steps, mean - deviation, mean + deviation, color=colour, alpha=0.2, linewidth=0)
    alone = {"marker": "o"} if len(steps) == 1 else {}
    axes.plot(steps, mean, color=colour, label=label, linewidth=1.8, **alone)  # type: ignore[arg-type]


def _finish(axes: Axes) -> None:
    axes.set_xlabel("environment steps (joint answers scored)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _title(drawing: Figure, runs: Sequence[Curves], rows: int) -> None:
    band = "deviation among the answers to a prompt" if len(runs) == 1 else f"deviation of {len(runs)} runs"
    mean = f"running mean over {rows} rows; " if rows > 1 else ""
    drawing.suptitle(f"{mean}band: {band}", fontsize=9, color="0.35")
