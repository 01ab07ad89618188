"""What a reward function returned, as columns of numbers, or what is wrong with it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mareinforce.calling import brief
from mareinforce.errors import RewardError
from mareinforce.rewards.values import as_floats, as_list


@dataclass(frozen=True, slots=True)
class ReadColumns:
    """Columns by name, ``reward`` among them. None: a joint action for which some column has no finite number."""

    values: dict[str, list[float | None]]  # name -> [J]
    complaint: RewardError | None = None  # about those, if there are any


def read_columns(label: str, result: Any, count: int, where: str) -> ReadColumns:
    """Read ``count`` (J) numbers a column. ``label`` and ``where``: what returned them and at which node.

    Raises:
        RewardError: it is no column of J values, or no dict of such columns with ``reward``.
    """
    read: dict[str, list[float]] = {}
    bad: set[int] = set()
    complaint = None
    for name, column in _columns(label, result, where).items():
        whose = label if name == "reward" else f"{label}, component {name!r},"
        expected = f"expected {count} numbers, one for each joint action"
        values = as_list(column)
        if values is None:
            raise RewardError(f"{whose} returned {_kind(column)}; {expected} ({where}). Return a list of {count}.")
        if len(values) != count:
            raise RewardError(
                f"{whose} returned the wrong number of values: {expected}, got {len(values)} ({where}). "
                "One call scores all joint actions of a node; nothing is repeated or cut to fit."
            )
        read[name], wrong = as_floats(values)
        if wrong and complaint is None:
            complaint = RewardError(
                f"{whose} gave what is not a finite number for {listed(wrong)}; {expected} ({where}). Joint actions "
                "count from 0. Return a plain number for every one, whatever an answer without a score is worth."
            )
        bad |= set(wrong)
    columns: dict[str, list[float | None]] = {
        name: [None if j in bad else number for j, number in enumerate(numbers)] for name, numbers in read.items()
    }
    return ReadColumns(columns, complaint)


def listed(bad: Mapping[int, Any]) -> str:
    """Joint actions with their values, in words."""
    named = ", ".join(f"{index} ({brief(value)})" for index, value in bad.items())
    return f"joint action{'s' * (len(bad) > 1)} {named}"


def _columns(label: str, result: Any, where: str) -> dict[str, Any]:
    if not isinstance(result, Mapping):
        return {"reward": result}
    if bad := [key for key in result if not isinstance(key, str)]:
        raise RewardError(
            f"{label} returned a dict with the key {brief(bad[0])} ({where}). Its keys are 'reward' and "
            "the names of components to log: make each a text."
        )
    if "reward" not in result:
        raise RewardError(
            f"{label} returned a dict without 'reward', with {brief(list(result))} ({where})."
            " The rewards themselves go under the key 'reward'; other keys are components to log."
        )
    return dict(result)


def _kind(column: Any) -> str:
    if column is None:
        return "None (is a `return` missing?)"
    if inspect.isgenerator(column) or inspect.isasyncgen(column):
        return "a generator, not its values"
    return f"{brief(column)}, a single {type(column).__name__}"
