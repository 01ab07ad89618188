"""What `rollouts.jsonl` should say of full trees of up to two turns, from nothing but the calls of the reward."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mareinforce.algorithms.advantages import advantages
from mareinforce.algorithms.returns import completion_returns, joint_return
from tests.system.runs import Recorder


def scored(*texts: list[str]) -> dict[str, list[float]]:
    """A number that hardly any other joint action has, and two components."""
    joint = list(zip(*texts, strict=True))
    values = [sum(len(text) * 7**agent for agent, text in enumerate(said)) + j / 8 for j, said in enumerate(joint)]
    lengths = [float(sum(map(len, said))) for said in joint]
    return {"reward": values, "length": lengths, "place": [float(j) for j in range(len(joint))]}


def halved(value: float) -> float:
    """The reward processor."""
    return value / 2


@dataclass
class Call:
    """One call of the reward: a node."""

    known: dict[str, Any]
    joint: list[tuple[str, ...]]  # [J][N]
    scores: dict[str, list[float]]

    @property
    def rewards(self) -> list[float]:
        return [halved(value) for value in self.scores["reward"]]

    @property
    def shown(self) -> list[Any]:
        return [history[self.known["turn"]] for history in self.known["prompt_history_per_agent"]]


def expected_rollouts(
    recorder: Recorder, completions: int, discount: float, reduction: str | None = None
) -> list[dict[str, Any]]:
    """The lines of a run of two turns with `scored` and `halved`. ``reduction``: of cross; None: aligned."""
    calls = [
        Call(known, list(zip(*texts, strict=True)), scored(*texts))
        for known, texts in zip(recorder.known, recorder.texts, strict=True)
    ]
    found: list[dict[str, Any]] = []
    env_step = 0
    while calls:
        root, children = calls[0], calls[1 : 1 + len(calls[0].joint)]
        calls = calls[1 + len(children) :]
        both = zip(root.rewards, children, strict=True)
        returns = [joint_return(own, child.rewards, discount) for own, child in both]
        env_step += len(root.joint)
        found += _lines(root, env_step, "", returns, completions, reduction)
        for j, child in enumerate(children):
            env_step += len(child.joint)
            found += _lines(child, env_step, str(j), child.rewards, completions, reduction)
    return found


def _lines(
    call: Call, env_step: int, path: str, returns: Sequence[float], completions: int, reduction: str | None
) -> list[dict[str, Any]]:
    speaking = [agent for agent, prompt in enumerate(call.shown) if prompt is not None]
    choices = list(itertools.product(range(completions), repeat=len(speaking)))  # the first one moves slowest
    found = []
    for place, agent in enumerate(speaking):
        takes_part = [choice[place] for choice in choices] if reduction else list(range(completions))
        own = completion_returns(
            torch.tensor(returns, dtype=torch.float64), takes_part, completions, reduction or "sum"
        )
        for k in range(completions):
            joint = [j for j, taken in enumerate(takes_part) if taken == k]
            found.append({
                "env_step": env_step, "path": path, "turn": call.known["turn"] + 1, "agent": agent, "k": k,
                "prompt": call.shown[agent], "completion": call.joint[joint[0]][agent],
                "ended": call.known["ended"][agent][joint[0]],
                **(_in_all(call, joint) if reduction else _in_one(call, k)),
                "return": float(own[k]), "advantage": float(advantages(own, "mean", False)[k]),
            })  # fmt: skip
    return found


def _in_one(call: Call, k: int) -> dict[str, Any]:
    components = {name: call.scores[name][k] for name in ("length", "place")}
    return {"raw_reward": call.scores["reward"][k], "reward": call.rewards[k], "components": components}


def _in_all(call: Call, joint: list[int]) -> dict[str, Any]:
    return {
        "joint_actions": joint,
        "raw_rewards": [call.scores["reward"][j] for j in joint],
        "rewards": [call.rewards[j] for j in joint],
        "components": {name: [call.scores[name][j] for j in joint] for name in ("length", "place")},
    }
