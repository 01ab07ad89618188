"""What evaluated samples say together: means with intervals over rows, pass@k, gains between turns, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mareinforce.eval_statistics import bootstrap_interval, pass_at_k
from mareinforce.metrics import mean
from mareinforce.rollout.tree import Node, valid

PASSED = "passed"
"""The reward component that says whether a joint answer passed (above 0.5) or not."""

Path = Sequence[Node]
"""A row played once: its nodes from turn 1 on."""


def summarise(paths: Sequence[Path], rows: Sequence[int], ks: Sequence[int], seed: int) -> dict[str, Any]:
    """Summary of samples, each a path of ``rows[i]``; every row must have as many samples as the others.

    For each turn, over the samples that reached it, and for the last turn of each sample (``final``): ``reward_mean``
    with ``reward_ci95``, a bootstrap interval over rows; ``raw_reward_mean``; the means of the components; where one is
    named passed, ``pass@k`` and ``avg@n``. ``gain_turn_2_over_turn_1`` and so on are paired: the mean over rows of the
    difference, with its interval. Rewards are processed ones. Rewards that were skipped are in none of this, and
    counted for each turn; what nothing is left of is left out.
    """
    turns = max(len(path) for path in paths)
    summary: dict[str, Any] = {"rows": len(set(rows))}
    for turn in range(turns):
        reached = [(row, path[turn]) for row, path in zip(rows, paths, strict=True) if len(path) > turn]
        summary[f"turn_{turn + 1}"] = _of_nodes(reached, ks, seed)
    summary["final"] = _of_nodes([(row, path[-1]) for row, path in zip(rows, paths, strict=True)], ks, seed)
    for turn in range(1, turns):
        pairs = [
            (row, valid([path[turn - 1].rewards[0], path[turn].rewards[0]]))
            for row, path in zip(rows, paths, strict=True)
            if len(path) > turn
        ]
        if gains := _by_row([(row, pair[1] - pair[0]) for row, pair in pairs if len(pair) == 2]):
            summary[f"gain_turn_{turn + 1}_over_turn_{turn}"] = _with_interval("mean", gains, seed)
    tokens = [len(answers.completions[0].ids) for path in paths for node in path for answers in node.answers if answers]
    summary["tokens_per_row"] = sum(tokens) / len(set(rows))
    return summary


def _of_nodes(reached: Sequence[tuple[int, Node]], ks: Sequence[int], seed: int) -> dict[str, Any]:
    nodes = [(row, node) for row, node in reached if node.rewards[0] is not None]
    found: dict[str, Any] = {"samples": len(nodes), "skipped_rewards": len(reached) - len(nodes)}
    if not nodes:
        return found
    found |= _with_interval("reward_mean", _by_row([(row, node.rewards[0]) for row, node in nodes]), seed)
    found["reward_ci95"] = found.pop("ci95")
    found["raw_reward_mean"] = mean(_by_row([(row, node.raw_rewards[0]) for row, node in nodes]))
    names = dict.fromkeys(name for _, node in nodes for name in node.components)
    for name in names:
        having = [(row, node.components[name][0]) for row, node in nodes if name in node.components]
        found[f"{name}_mean"] = mean(_by_row(having))
    if PASSED in names:
        found |= _passes([(row, node) for row, node in nodes if PASSED in node.components], ks, seed)
    return found


def _passes(nodes: Sequence[tuple[int, Node]], ks: Sequence[int], seed: int) -> dict[str, Any]:
    verdicts: dict[int, list[bool]] = {}
    for row, node in nodes:
        verdicts.setdefault(row, []).extend(value > 0.5 for value in valid(node.components[PASSED]))
    counts = [(len(one), sum(one)) for one in verdicts.values()]
    found: dict[str, Any] = {}
    for k in ks:
        enough = [pass_at_k(samples, passed, k) for samples, passed in counts if samples >= k]
        if enough:
            found[f"pass@{k}"] = mean(enough)
            found[f"pass@{k}_ci95"] = list(bootstrap_interval(enough, seed))
    found[f"avg@{max(samples for samples, _ in counts)}"] = mean([passed / samples for samples, passed in counts])
    return found


def _by_row(given: Sequence[tuple[int, float | None]]) -> list[float]:
    """The mean value of each row's samples that have one: rows, not samples, are independent of each other."""
    by_row: dict[int, list[float]] = {}
    for row, value in given:
        if value is not None:
            by_row.setdefault(row, []).append(value)
    return [mean(values) for values in by_row.values()]


def _with_interval(name: str, values: Sequence[float], seed: int) -> dict[str, Any]:
    return {name: mean(values), "ci95": list(bootstrap_interval(values, seed))}
