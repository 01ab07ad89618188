"""Two agents summarise a post: one briefly, the other at more length and with more words of its own.

Lengths are numbers of words. A word is a run of letters, digits and inner apostrophes, in lower case. The reward has
four parts, whose points add up to at most 3.0:

=============  ====  ================================================================
first_length    0.5  band(words of the first; 20, 50)
length_ratio    1.0  band(words of the second / words of the first; 2, 3)
unique_words    1.0  band(|content words of the second| / |those of the first|; 1.5, 3)
style           0.5  min(categories of transition words in the second, 3) / 3
=============  ====  ================================================================

``band(x; low, high)`` is 1 from low to high, x / low below and high / x above. Content words are a text's distinct
words without stop words. If either text has no words, all parts are 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mareinforce.errors import ConfigError, PromptError
from mareinforce.tasks.row_means import row_means

POINTS = {"first_length": 0.5, "length_ratio": 1.0, "unique_words": 1.0, "style": 0.5}
"""The most that each part can earn."""

_STOP_WORDS = """
a about after again all also am an and any are as at be because been before being but by can could did do does
doing down during each few for from further had has have having he her here hers him his how i if in into is it
its itself just me more most my no nor not now of off on once only or other our out over own same she should so
some such than that the their them then there these they this those through to too under until up very was we were
what when where which while who whom why will with would you your
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
"""Words that carry no content of their own; they do not count as unique words."""

TRANSITIONS: Mapping[str, tuple[str, ...]] = {
    "addition": ("also", "furthermore", "moreover", "in addition", "besides", "as well as"),
    "contrast": ("however", "although", "nevertheless", "instead", "on the other hand", "despite", "whereas"),
    "cause": ("because", "therefore", "consequently", "as a result", "thus", "hence", "due to"),
    "sequence": ("first", "then", "next", "afterwards", "meanwhile", "later", "subsequently"),
    "example": ("for example", "for instance", "such as", "in particular", "namely"),
    "conclusion": ("finally", "overall", "in conclusion", "in short", "in the end", "to sum up", "ultimately"),
}
"""Category -> its words and phrases."""

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_SPACE = r"\s+"
_PHRASES = {
    name: re.compile("|".join(rf"\b{_SPACE.join(phrase.split())}\b" for phrase in phrases))
    for name, phrases in TRANSITIONS.items()
}


def words(text: str) -> list[str]:
    """The words of a text, in lower case, in order."""
    return _WORD.findall(text.lower().replace("\u2019", "'"))


def content_words(text: str) -> set[str]:
    """The distinct words of a text that are no stop words; "it's" and "didn't" count as "it" and "did"."""
    return {word for word in words(text) if word.removesuffix("n't").split("'")[0] not in STOP_WORDS}


def transition_categories(text: str) -> set[str]:
    """The categories of which a text uses at least one transition word or phrase."""
    lowered = text.lower()
    return {name for name, pattern in _PHRASES.items() if pattern.search(lowered)}


def band(value: float, low: float, high: float) -> float:
    """1.0 from low to high, value / low below, high / value above; 0 is worth 0."""
    return 0.0 if value <= 0.0 else min(value / low, 1.0, high / value)


@dataclass(frozen=True)
class Targets:
    """What the two summaries are to be. Raises ConfigError unless 0 < low <= high."""

    first_words: tuple[float, float] = (20, 50)
    """Words of the first."""
    length_ratio: tuple[float, float] = (2.0, 3.0)
    """Words of the second over words of the first."""
    unique_ratio: tuple[float, float] = (1.5, 3.0)
    """Content words of the second over those of the first."""
    categories: int = 3
    """Categories of transition words in the second that earn the whole of `style`."""

    def __post_init__(self) -> None:
        for name in ("first_words", "length_ratio", "unique_ratio"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ConfigError(f"{name}=({low}, {high}): a range needs 0 < low <= high, e.g. (2.0, 3.0).")
        if not 1 <= self.categories <= len(TRANSITIONS):
            raise ConfigError(f"categories={self.categories}: there are {len(TRANSITIONS)}; choose 1 to that many.")


def measure(first: str, second: str) -> dict[str, float]:
    """The raw numbers behind the parts. A ratio to nothing is 0."""
    lengths, contents = (len(words(first)), len(words(second))), (len(content_words(first)), len(content_words(second)))
    return {
        "first_words": float(lengths[0]),
        "second_words": float(lengths[1]),
        "length_ratio": lengths[1] / lengths[0] if lengths[0] else 0.0,
        "unique_ratio": contents[1] / contents[0] if contents[0] else 0.0,
        "categories": float(len(transition_categories(second))),
    }


def points(first: str, second: str, targets: Targets) -> dict[str, float]:
    """The points of each part of one joint answer."""
    found = measure(first, second)
    if not found["first_words"] or not found["second_words"]:
        return dict.fromkeys(POINTS, 0.0)
    shares = {
        "first_length": band(found["first_words"], *targets.first_words),
        "length_ratio": band(found["length_ratio"], *targets.length_ratio),
        "unique_words": band(found["unique_ratio"], *targets.unique_ratio),
        "style": min(found["categories"] / targets.categories, 1.0),
    }
    return {name: POINTS[name] * share for name, share in shares.items()}


@dataclass(frozen=True)
class WritingReward:
    """The sum of the parts, 0 to 3, with each part's points as a component; `targets` moves the ranges."""

    targets: Targets = field(default_factory=Targets)

    def __call__(self, first: Sequence[str], second: Sequence[str]) -> dict[str, list[float]]:
        parts = [points(a, b, self.targets) for a, b in zip(first, second, strict=True)]
        return {
            "reward": [sum(each.values()) for each in parts],
            **{name: [each[name] for each in parts] for name in POINTS},
        }


def writing_reward(first: Sequence[str], second: Sequence[str]) -> dict[str, list[float]]:
    """`WritingReward` with the targets of the table above."""
    return WritingReward()(first, second)


def short_summary(row: Mapping[str, Any], external_prompts: Any = None) -> Any:
    """The first agent's prompt; after turn 1 that of the transition as it is."""
    return _task(row["prompt"], 0) if external_prompts is None else external_prompts


def long_summary(row: Mapping[str, Any], external_prompts: Any = None) -> Any:
    """The second agent's prompt; after turn 1 that of the transition as it is."""
    return _task(row["prompt"], 1) if external_prompts is None else external_prompts


def _task(post: Any, agent: int) -> str:
    if not isinstance(post, str):
        raise PromptError(f"the writing task summarises a text, and the row's prompt is a {type(post).__name__}.")
    ask = (
        "Summarise this post in one or two short sentences.",
        "Summarise this post in a detailed paragraph, in words of your own, and connect your sentences with transition "
        "words such as however, therefore or finally.",
    )
    # posts of trl-lib/tldr end in the cue that asks for the summary
    return f"{ask[agent]}\n\nPost:\n{post.strip().removesuffix('TL;DR:').strip()}\n\nSummary:"


@dataclass(frozen=True)
class WritingFeedback:
    """A transition: tells both agents what was measured and what it is to be, and asks for another summary.

    The prompts it makes are whole: the task, the agent's last answer, the feedback. Raises PromptError if there are not
    two agents.
    """

    targets: Targets = field(default_factory=Targets)

    def __call__(self, prompt: str, agent_completions: Sequence[str], num_agents: int) -> list[str]:
        if num_agents != 2:
            raise PromptError(
                f"writing_feedback compares two summaries, but num_agents is {num_agents}; use it with num_agents: 2."
            )
        found, targets = measure(*agent_completions), self.targets
        shared = (
            f"The second summary is {found['length_ratio']:.2f} times as long as the first and should be "
            f"{_range(targets.length_ratio)} times as long. It uses {found['unique_ratio']:.2f} times as many "
            f"different content words and should use {_range(targets.unique_ratio)} times as many."
        )
        own = (
            f"Your summary has {found['first_words']:.0f} words and should have {_range(targets.first_words)}.",
            f"Your summary has {found['second_words']:.0f} words and uses {found['categories']:.0f} kinds of "
            f"transition words; it should use at least {targets.categories}.",
        )
        return [
            f"{_task(prompt, agent)}\n{agent_completions[agent]}\n\n{own[agent]} {shared} You write the "
            f"{('first', 'second')[agent]} summary. Write an improved one.\n\nSummary:"
            for agent in range(2)
        ]


def writing_feedback(prompt: str, agent_completions: Sequence[str], num_agents: int) -> list[str]:
    """`WritingFeedback` with the targets of the table above."""
    return WritingFeedback()(prompt, agent_completions, num_agents)


def writing_eval_logger(agent_completions_turns: Sequence[Sequence[Sequence[str]]]) -> list[dict[str, float]]:
    """Words, ratios and categories at each turn, one dict a row. ``agent_completions_turns``: [2][rows][turn]."""
    return [
        {
            f"turn_{turn}/{name}": value
            for turn, joint in enumerate(zip(firsts, seconds, strict=True), start=1)
            for name, value in measure(*joint).items()
        }
        for firsts, seconds in zip(*agent_completions_turns, strict=True)
    ]


def writing_eval_aggregator(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the rows that have the metric."""
    return row_means(metrics)


def _range(bounds: tuple[float, float]) -> str:
    return f"{bounds[0]:g} to {bounds[1]:g}"
