"""The call of the user's reward: what it is given, what it may give back, and what is done with it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mareinforce.calling import UserFunction, brief, place
from mareinforce.errors import RewardError
from mareinforce.rewards.values import as_floats, as_list
from mareinforce.types import Row

KNOWN_KEYWORDS = (
    "prompts",
    "batch_items",
    "turn",
    "num_turns",
    "prompt_history_per_agent",
    "response_history_per_agent",
    "ended",
)
"""What a reward function may declare by name."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The rewards of a node's joint actions, as plain finite floats in joint-action order."""

    raw: list[float]  # [J] as the reward function gave them
    processed: list[float]  # [J] after the reward processor: what everything else uses
    components: dict[str, list[float]]  # name -> [J], logged only


class Reward:
    """The user's reward function and reward processor, checked when made, called once a node.

    The function is called with one list of texts per agent, by position, each with one entry per joint action (J) of
    ONE row's node, and returns J numbers, or a dict of columns ``{"reward": [...], "any_component": [...]}``. An agent
    that is idle at the node has ``""`` everywhere. These it may declare by name; ``**kwargs`` receives all of them:

    - ``prompts`` [J]: the row's own prompt, repeated. Also as the first positional parameter of that name.
    - ``batch_items`` [J]: the row, repeated.
    - ``turn``: the node's turn, counted from 0; ``num_turns``: turns of a full episode.
    - ``prompt_history_per_agent`` [N][turn + 1]: the prompts shown up to and including this turn.
    - ``response_history_per_agent`` [N][turn]: the answers before this turn.
    - ``ended`` [N][J]: True where the answer ended by itself, False where it was cut at ``max_new_tokens``.

    All are copies. Other parameters that have a default are left alone. The processor, if there is one, is called with
    each reward and returns the number used in its place.

    Raises:
        ConfigError: a callable cannot be called like that.
    """

    def __init__(
        self,
        reward_func: Any,
        num_agents: int,
        reward_processor: Any = None,
    ) -> None:
        lists = [f"completions of agent {agent}" for agent in range(num_agents)]
        self._num_agents = num_agents
        self._func = UserFunction(reward_func, "reward_func", positional=lists, known=KNOWN_KEYWORDS, leading="prompts")
        self._processor = (
            None
            if reward_processor is None
            else UserFunction(reward_processor, "reward_processor", positional=["one reward"])
        )

    def score(
        self,
        texts: Sequence[Sequence[str]],  # [N][J]
        *,
        row: Row,
        prompt: Any,
        turn: int,
        num_turns: int,
        prompt_history_per_agent: Sequence[Sequence[Any]],
        response_history_per_agent: Sequence[Sequence[Any]],
        ended: Sequence[Sequence[bool]],  # [N][J]
    ) -> Scores:
        """Score the joint actions of one node. ``turn`` counts from 0; the rest is described at the class.

        Raises:
            UserCodeError: the function or the processor raised.
            RewardError: what one of them returned is not one finite number a joint action.
        """
        joint = {len(column) for column in texts}
        if len(texts) != self._num_agents or len(joint) != 1:
            raise ValueError(f"expected {self._num_agents} lists of equal length, got lengths {[*map(len, texts)]}")
        count = joint.pop()
        where = place(prompt, turn, num_turns)
        lists = [list(column) for column in texts]
        prompts = [prompt] * count
        values = {
            "prompts": prompts,
            "batch_items": [dict(row) for _ in range(count)],
            "turn": turn,
            "num_turns": num_turns,
            "prompt_history_per_agent": [list(history) for history in prompt_history_per_agent],
            "response_history_per_agent": [list(history) for history in response_history_per_agent],
            "ended": [list(column) for column in ended],
        }
        result = self._func.call([prompts, *lists] if self._func.leads else lists, values, where)
        columns = self._columns(result, where)
        read = {name: self._read(name, column, count, where) for name, column in columns.items()}
        raw = read.pop("reward")
        return Scores(raw=raw, processed=self._process(raw, where), components=read)

    def _columns(self, result: Any, where: str) -> dict[str, Any]:
        if not isinstance(result, Mapping):
            return {"reward": result}
        if bad := [key for key in result if not isinstance(key, str)]:
            raise RewardError(
                f"{self._func.label} returned a dict with the key {brief(bad[0])} ({where}). Its keys are 'reward' and "
                "the names of components to log: make each a text."
            )
        if "reward" not in result:
            raise RewardError(
                f"{self._func.label} returned a dict without 'reward', with {brief(list(result))} ({where})."
                " The rewards themselves go under the key 'reward'; other keys are components to log."
            )
        return dict(result)

    def _read(self, name: str, column: Any, count: int, where: str) -> list[float]:
        """One returned column as ``count`` floats."""
        label = self._func.label if name == "reward" else f"{self._func.label}, component {name!r},"
        expected = f"expected {count} numbers, one for each joint action"
        values = as_list(column)
        if values is None:
            raise RewardError(f"{label} returned {_kind(column)}; {expected} ({where}). Return a list of {count}.")
        if len(values) != count:
            raise RewardError(
                f"{label} returned the wrong number of values: {expected}, got {len(values)} ({where}). "
                "One call scores all joint actions of a node; nothing is repeated or cut to fit."
            )
        numbers, bad = as_floats(values)
        if bad:
            raise RewardError(
                f"{label} gave what is not a finite number for {_listed(bad)}; {expected} ({where}). Joint actions "
                "count from 0. Return a plain number for every one, whatever an answer without a score is worth."
            )
        return numbers

    def _process(self, raw: list[float], where: str) -> list[float]:
        if self._processor is None:
            return list(raw)
        values = [
            self._processor.call([reward], {}, f"reward {reward} of joint action {index}, {where}")
            for index, reward in enumerate(raw)
        ]
        numbers, bad = as_floats(values)
        if bad:
            raise RewardError(
                f"{self._processor.label} made what is not a finite number for {_listed(bad)}; the rewards were "
                f"{brief(raw)} ({where}). Joint actions count from 0. It takes one reward and returns one number."
            )
        return numbers


def _listed(bad: Mapping[int, Any]) -> str:
    named = ", ".join(f"{index} ({brief(value)})" for index, value in bad.items())
    return f"joint action{'s' * (len(bad) > 1)} {named}"


def _kind(column: Any) -> str:
    if column is None:
        return "None (is a `return` missing?)"
    if inspect.isgenerator(column) or inspect.isasyncgen(column):
        return "a generator, not its values"
    return f"{brief(column)}, a single {type(column).__name__}"
