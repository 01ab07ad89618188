"""Agents write stories: each is to be so many times as long as the one before. Lengths in characters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from mareinforce.errors import PromptError
from mareinforce.tasks.row_means import row_means

LOW, HIGH = 2.0, 3.0
"""The second text is to have this many times the characters of the first."""
STEP_LOW, STEP_HIGH = 1.2, 2.0
"""Of more than two texts, each is to have this many times the characters of the one before."""


def length_ratio(first: str, second: str) -> float:
    """Characters of the second text over those of the first; an empty first counts as one character."""
    return len(second) / max(len(first), 1)


def range_score(ratio: float, low: float = LOW, high: float = HIGH) -> float:
    """1.0 inside [low, high], else exp(-distance to the nearer bound)."""
    return math.exp(-max(low - ratio, ratio - high, 0.0))


def length_ratio_reward(first: Sequence[str], second: Sequence[str]) -> list[float]:
    """How near the length ratio of each joint answer is to [2, 3], 0 to 1; 0.0 where the first text is empty."""
    return [range_score(length_ratio(a, b)) if a else 0.0 for a, b in zip(first, second, strict=True)]


def improved_length_ratio_reward(first: Sequence[str], second: Sequence[str]) -> list[float]:
    """As `length_ratio_reward`, with an empty first text counted as one character."""
    return [range_score(length_ratio(a, b)) for a, b in zip(first, second, strict=True)]


def growing_lengths_reward(*texts: Sequence[str]) -> list[float]:
    """For any number of agents: how near each text's length is to 1.2 to 2 times that of the text before, averaged
    over neighbours; a pair whose first text is empty earns 0."""
    scores = []
    for joint in zip(*texts, strict=True):
        pairs = list(pairwise(joint))
        steps = [range_score(length_ratio(a, b), STEP_LOW, STEP_HIGH) if a else 0.0 for a, b in pairs]
        scores.append(sum(steps) / max(len(steps), 1))
    return scores


def told(row: Mapping[str, Any]) -> str:
    """The row's prompt, beginning with "Tell": one of two roles for agents that share a policy."""
    return f"Tell {row['prompt'].split(' ', 1)[1]}"


def written(row: Mapping[str, Any]) -> str:
    """The row's prompt, beginning with "Write": the other role."""
    return f"Write {row['prompt'].split(' ', 1)[1]}"


def length_feedback(prompt: str, agent_completions: Sequence[str], num_agents: int, **history: Any) -> list[str]:
    """Tell each of two agents how long its last answer was, what the ratio was and is to be, and ask again.

    Returns two prompts. Raises PromptError if there are not two agents.
    """
    if num_agents != 2:
        raise PromptError(
            f"length_feedback compares two texts, but num_agents is {num_agents}; use it with num_agents: 2."
        )
    first, second = agent_completions
    ratio = length_ratio(first, second)
    roles = ("shorter", "longer")
    return [
        f"{prompt}\n\nYour last answer had {len(agent_completions[agent])} characters. The second writer's text was "
        f"{ratio:.2f} times as long as the first writer's; it should be {LOW:g} to {HIGH:g} times as long. You are the "
        f"{'first' if agent == 0 else 'second'} writer, whose text is the {roles[agent]} one. Please write an improved "
        f"answer."
        for agent in range(num_agents)
    ]


def retell(prompt: str, agent_completions: Sequence[str], num_agents: int, **history: Any) -> list[str]:
    """Ask every agent the same again: for models that cannot read feedback, such as the tiny one."""
    return [prompt] * num_agents


def story_eval_logger(
    agent_completions_turns: Sequence[Sequence[Sequence[str]]],
    batch_items: Sequence[Mapping[str, Any]],
    prompts: Sequence[str],
) -> list[dict[str, float]]:
    """Lengths and their ratio at each turn, one dict a row. ``agent_completions_turns``: [2][rows][turn]."""
    rows = []
    for firsts, seconds in zip(*agent_completions_turns, strict=True):
        row = {}
        for turn, (first, second) in enumerate(zip(firsts, seconds, strict=True), start=1):
            ratio = length_ratio(first, second)
            row[f"turn_{turn}/first_length"] = float(len(first))
            row[f"turn_{turn}/second_length"] = float(len(second))
            row[f"turn_{turn}/length_ratio"] = ratio
            row[f"turn_{turn}/in_range"] = float(LOW <= ratio <= HIGH)
        rows.append(row)
    return rows


def story_eval_aggregator(metrics: Sequence[Mapping[str, float]], num_turns: int) -> dict[str, float]:
    """Means over the rows that have the metric."""
    return row_means(metrics)
