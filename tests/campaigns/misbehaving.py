"""Rewards, processors, transitions, formatters and rows that behave in every way that users' own do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Values = Callable[[int], Any]
"""J -> what a reward returns for J joint actions."""


def _ramp(count: int, size: float = 1.0) -> list[float]:
    return [size * (index - 1) for index in range(count)]


REWARDS: dict[str, Values] = {
    "floats": lambda count: _ramp(count),
    "ints": lambda count: list(range(count)),
    "bools": lambda count: [index % 2 == 0 for index in range(count)],
    "a tuple": lambda count: tuple(_ramp(count)),
    "equal": lambda count: [0.5] * count,
    "tiny": lambda count: _ramp(count, 1e-320),
    "near each other": lambda count: [1.0 + 1e-15 * index for index in range(count)],
    "huge": lambda count: _ramp(count, 1e30),
    "as huge as can be": lambda count: _ramp(count, 8e307),
    "hugely negative": lambda count: _ramp(count, -1e38),
    "numpy float32": lambda count: np.arange(count, dtype=np.float32),
    "numpy int64 scalars": lambda count: list(np.arange(count)),
    "numpy float16": lambda count: np.linspace(0, 1e4, count, dtype=np.float16),
    "a tensor": lambda count: torch.arange(count),
    "a bfloat16 tensor with a gradient": lambda count: torch.ones(count, dtype=torch.bfloat16, requires_grad=True) * 2,
    "components": lambda count: {"reward": _ramp(count), "length": [3] * count},
    "a component that is NaN": lambda count: {"reward": _ramp(count), "length": [float("nan")] * count},
    "components without reward": lambda count: {"score": _ramp(count)},
    "an odd key": lambda count: {"reward": _ramp(count), 3: _ramp(count)},
    "nothing": lambda count: None,
    "None inside": lambda count: [None, *_ramp(count)[1:]],
    "NaN inside": lambda count: [float("nan"), *_ramp(count)[1:]],
    "infinity inside": lambda count: [*_ramp(count)[:-1], float("inf")],
    "text inside": lambda count: ["1.0"] * count,
    "an int beyond floats": lambda count: [10**400] * count,
    "complex": lambda count: [1j] * count,
    "a matrix": lambda count: np.ones((count, 2)),
    "one too few": lambda count: _ramp(count)[:-1],
    "one too many": lambda count: [*_ramp(count), 1.0],
    "an empty list": lambda count: [],
    "a number": lambda count: 1.0,
    "a set": lambda count: set(_ramp(count)),
    "a generator": lambda count: (one for one in _ramp(count)),
    "a tensor without dimensions": lambda count: torch.tensor(1.0),
}
PROCESSORS: dict[str, Callable[[float], Any] | None] = {
    "none": None,
    "scaled": lambda reward: 0.1 * reward,
    "scaled beyond": lambda reward: reward * 1e300 * 1e300,
    "nothing": lambda reward: None,
    "clipped": lambda reward: max(-1.0, min(1.0, reward)),
}
PROMPTS: dict[str, Any] = {
    "words": "a b c",
    "one word": "z",
    "nothing": "",
    "spaces": "  \n ",
    "unknown words": "naïve 😀 \u0000 \ud7ff 漢字",
    "very long": "a " * 300,
    "messages": [{"role": "user", "content": "a b"}],
    "a conversation": [{"role": "system", "content": "c"}, {"role": "user", "content": "a"}],
    "messages that end with an answer": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    "messages without a role": [{"content": "a"}],
    "messages with None": [{"role": "user", "content": None}],
    "no messages": [],
    "a number": 5,
    "None": None,
}
TRANSITIONS: dict[str, Callable[[int, Any], Any]] = {
    "the same": lambda count, prompt: [prompt] * count,
    "other words": lambda count, prompt: ["c d"] * count,
    "a tuple": lambda count, prompt: ("c",) * count,
    "messages": lambda count, prompt: [[{"role": "user", "content": "c"}]] * count,
    "the first is idle": lambda count, prompt: [None, *["c"] * (count - 1)],
    "all are idle": lambda count, prompt: [None] * count,
    "nothing": lambda count, prompt: None,
    "nothing to read": lambda count, prompt: [""] * count,
    "very long": lambda count, prompt: ["b " * 300] * count,
    "one too few": lambda count, prompt: ["c"] * (count - 1),
    "one too many": lambda count, prompt: ["c"] * (count + 1),
    "a text": lambda count, prompt: "c",
    "numbers": lambda count, prompt: [1] * count,
    "a dict": lambda count, prompt: {"agent_0": "c"},
}
FORMATTERS: dict[str, Any] = {
    "none": None,
    "a text": lambda row: f"a {row['prompt']}",
    "messages": lambda row: [{"role": "user", "content": str(row["prompt"])}],
    "idle": lambda row: None,
    "a number": lambda row: 3,
    "raises": lambda row: row["no such column"],
}


class Reward:
    """A reward that behaves in one way at first and in another from a given call on."""

    def __init__(self, kind: str, later: str, at: int, asynchronous: bool = False) -> None:
        self.kind, self.later, self.at, self.asynchronous, self.calls = kind, later, at, asynchronous, 0

    def __call__(self, *texts: Sequence[str]) -> Any:
        self.calls += 1
        kind = self.later if self.calls > self.at else self.kind
        if kind == "raises":
            raise ValueError("bad json")
        value = REWARDS[kind](len(texts[0]))
        return _later(value) if self.asynchronous else value


async def _later(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


class Transition:
    """A transition that behaves in one way."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, prompt: Any, num_agents: int) -> Any:
        if self.kind == "raises":
            raise KeyError("no feedback")
        return TRANSITIONS[self.kind](num_agents, prompt)
