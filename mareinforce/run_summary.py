"""What a finished run says about itself: its folder, and what was measured, from first to last."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mareinforce.csv_log import FILE_NAME, read_metrics
from mareinforce.metrics import mean

_REWARD = re.compile(r"turn_(\d+)/reward_mean")
_SIGNAL = re.compile(r"turn_\d+/zero_signal_fraction")
_STEPPED = re.compile(r"agent_\d+/stepped_fraction")
_CUT = re.compile(r"agent_\d+/truncated_fraction")
NOTHING_LEARNED = (
    "nothing was learned: all answers of every node earned the same (zero_signal_fraction is 1 throughout)"
)
FEWEST_ROWS = 3
"""Rows at each end of a short run: one prompt's reward says more about the prompt than about what was learned."""
MUCH_CUT = 0.9
"""Share of answers cut at `max_new_tokens` from which that is said."""
Row = Mapping[str, str]


def print_summary(folder: Path, console: Console | None = None) -> None:
    """Print the summary on stdout: as a table in a terminal, as lines elsewhere."""
    console = console or Console()
    if console.is_terminal and (folder / FILE_NAME).exists():
        console.print(summary_table(folder / FILE_NAME))
        print(f"run folder: {folder}")
    else:
        print(summary(folder))


def summary(folder: Path) -> str:
    """The run folder, after one line a turn: mean reward over the first and the last tenth of its rows.

    Of a short run these are `FEWEST_ROWS` rows, or half of all.
    """
    return "\n".join([*turn_lines(folder / FILE_NAME), f"run folder: {folder}"])


def turn_lines(metrics: Path) -> list[str]:
    """One line a turn. A tenth is at least one row, and only rows with that turn's reward are counted. If nothing was
    learned at all, a line says so."""
    rows = read_metrics(metrics) if metrics.exists() else []
    lines = []
    for turn in turns(rows):
        if (found := first_and_last(rows, [f"turn_{turn}/reward_mean"])) is not None:
            first, last, tenth, count = found
            values = f"{first:.4g}" if count == 1 else f"{first:.4g} -> {last:.4g}"
            lines.append(f"turn {turn} reward: {values} ({which_rows(tenth, count)})")
    return [*lines, *remarks(rows)]


def summary_table(metrics: Path) -> Table:
    """Reward and return of every turn, and over all agents entropy, tokens and the share of answers cut."""
    rows = read_metrics(metrics)
    agents = {name.split("/")[0] for name in (rows[0] if rows else {}) if name.startswith("agent_")}
    lines = {f"turn {turn} reward": [f"turn_{turn}/reward_mean"] for turn in turns(rows)}
    lines |= {f"turn {turn} return": [f"turn_{turn}/expected_return"] for turn in turns(rows) if len(turns(rows)) > 1}
    for what, column in (
        ("entropy, nats a token", "entropy"),
        ("tokens an answer", "completion_length"),
        ("share of answers cut", "truncated_fraction"),
    ):
        lines[what] = [f"{agent}/{column}" for agent in sorted(agents)]
    found = {name: values for name, columns in lines.items() if (values := first_and_last(rows, columns))}
    tenth, count = next(((tenth, count) for *_, tenth, count in found.values()), (0, 0))
    caption = which_rows(tenth, count) if count == 1 else f"means over the {which_rows(tenth, count)}"
    table = Table(caption="\n".join([caption, *remarks(rows)]))
    for column in ("", "value") if count == 1 else ("", "first", "last", "change"):
        table.add_column(column, justify="right" if column else "left")
    for name, (first, last, *_) in found.items():
        change = () if count == 1 else (f"{last:.4g}", f"{last - first:+.3g}")
        table.add_row(name, f"{first:.4g}", *change)
    return table


def remarks(rows: Sequence[Row]) -> list[str]:
    """What there is to say of a run whose reward cannot have moved much, or not by what was learned."""
    said = [NOTHING_LEARNED] if nothing_was_learned(rows) else []
    cut = [float(value) for row in rows for name, value in row.items() if value and _CUT.fullmatch(name)]
    if cut and mean(cut) >= MUCH_CUT:
        said.append(
            f"{mean(cut):.0%} of the answers were cut at max_new_tokens: with more room they may end by themselves"
        )
    return said


def which_rows(tenth: int, count: int) -> str:
    """Which rows of metrics were looked at."""
    return "1 row of metrics" if count == 1 else f"first and last {tenth} of {count} rows of metrics"


def nothing_was_learned(rows: Sequence[Row]) -> bool:
    """Did all answers of every node earn the same in every row, and was no weight changed?"""
    signal = [float(value) for row in rows for name, value in row.items() if value and _SIGNAL.fullmatch(name)]
    steps = [float(value) for row in rows for name, value in row.items() if value and _STEPPED.fullmatch(name)]
    return bool(signal) and min(signal) == 1 and bool(steps) and max(steps) == 0


def turns(rows: Sequence[Row]) -> list[int]:
    """The turns that rows have a reward of."""
    return [int(match[1]) for name in (rows[0] if rows else {}) if (match := _REWARD.fullmatch(name))]


def first_and_last(rows: Sequence[Row], columns: Sequence[str]) -> tuple[float, float, int, int] | None:
    """Mean of the columns over the first and over the last tenth of the rows that have them, and how many rows those
    are, of how many; None: no row has them."""
    values = [mean([float(row[name]) for name in columns if row[name]]) for row in rows if any(map(row.get, columns))]
    if not values:
        return None
    tenth = max(1, len(values) // 10, min(FEWEST_ROWS, len(values) // 2))
    return mean(values[:tenth]), mean(values[-tenth:]), tenth, len(values)
