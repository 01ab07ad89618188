"""What a finished run says about itself: its folder, and every turn's reward from first to last."""

from __future__ import annotations

import re
from pathlib import Path

from mareinforce.csv_log import FILE_NAME, read_metrics

_REWARD = re.compile(r"turn_(\d+)/reward_mean")


def summary(folder: Path) -> str:
    """The run folder, after one line a turn: mean reward over the first and the last tenth of its rows."""
    return "\n".join([*turn_lines(folder / FILE_NAME), f"run folder: {folder}"])


def turn_lines(metrics: Path) -> list[str]:
    """One line a turn. A tenth is at least one row, and only rows with that turn's reward are counted."""
    rows = read_metrics(metrics) if metrics.exists() else []
    columns = [name for name in (rows[0] if rows else {}) if _REWARD.fullmatch(name)]
    return [_line(name, [float(row[name]) for row in rows if row[name] != ""]) for name in columns]


def _line(name: str, rewards: list[float]) -> str:
    tenth = max(1, len(rewards) // 10)
    first, last = sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth
    turn = name.split("/")[0].replace("_", " ")
    return f"{turn} reward: {first:.4g} -> {last:.4g} (first and last {tenth} of {len(rewards)} rows)"
