"""From a joint answer to the next turn's prompts: the call of the user's ``external_transition``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mareinforce.calling import UserFunction, place
from mareinforce.concurrent_calls import Call, CallRunner
from mareinforce.errors import PromptError
from mareinforce.rollout.prompts import RULE, check_prompt, kind_of
from mareinforce.types import Prompt, Row

KNOWN_KEYWORDS = (
    "prompt",
    "agent_completions",
    "num_agents",
    "prompt_history_per_agent",
    "response_history_per_agent",
    "batch_item",
    "turn",
    "reward",
)
"""What an external transition may declare by name."""


@dataclass(frozen=True, slots=True)
class Branch:
    """What the transition is told of one joint action."""

    prompt: Any
    agent_completions: Sequence[str]  # [N]
    prompt_history_per_agent: Sequence[Sequence[Prompt | None]]  # [N][turn + 1]
    response_history_per_agent: Sequence[Sequence[str]]  # [N][turn + 1]
    batch_item: Row
    turn: int  # just played, from 0
    reward: float  # raw
    path: Sequence[int] = ()  # joint actions from the root to this one, for messages


class Transition:
    """The user's ``external_transition``: from a joint answer to the next turn's prompts, called once a branch.

    It is called by keyword only, with those of these that it declares, or all with ``**kwargs``: ``prompt`` (the
    row's own), ``agent_completions`` [N], ``num_agents``, ``prompt_history_per_agent`` and
    ``response_history_per_agent`` [N][turn + 1] (prompts as shown, None where idle; both with the turn just played),
    ``batch_item`` (the row), ``turn`` (the turn just played, counted from 0), ``reward`` (raw, of this joint answer).
    All are copies. It returns N prompts, each a text, a message list, or None for an agent that is idle next; a single
    None ends the branch.

    Args:
        runner: makes the calls; default: here, one after the other.

    Raises:
        ConfigError: it cannot be called like that, or not by the runner.
    """

    def __init__(self, external_transition: Any, num_agents: int, *, runner: CallRunner | None = None) -> None:
        self._num_agents = num_agents
        self._function = UserFunction(external_transition, "external_transition", positional=(), known=KNOWN_KEYWORDS)
        self._runner = runner or CallRunner()
        self._runner.check(self._function)

    def next_prompts(self, branches: Sequence[Branch]) -> list[list[Prompt | None]]:
        """The N prompts of the next turn of every branch, in the order of the branches, whatever is done first.

        Raises:
            UserCodeError: the transition raised, or took too long.
            PromptError: it returned the wrong number or the wrong kind of things.
        """
        calls = [Call((), self._values(branch), _where(branch)) for branch in branches]

        def read(result: Any, index: int) -> list[Prompt | None]:
            return self._read(result, calls[index].where)

        outcomes = self._runner.run(self._function, calls, read)
        return [outcome.value for outcome in outcomes if outcome.value is not None]

    def _values(self, branch: Branch) -> dict[str, Any]:
        return {
            "prompt": branch.prompt,
            "agent_completions": list(branch.agent_completions),
            "num_agents": self._num_agents,
            "prompt_history_per_agent": [list(history) for history in branch.prompt_history_per_agent],
            "response_history_per_agent": [list(history) for history in branch.response_history_per_agent],
            "batch_item": dict(branch.batch_item),
            "turn": branch.turn,
            "reward": branch.reward,
        }

    def _read(self, result: Any, where: str) -> list[Prompt | None]:
        label, expected = self._function.label, f"expected a list of {self._num_agents} prompts, one an agent"
        if result is None:
            return [None] * self._num_agents
        if not isinstance(result, list | tuple):
            raise PromptError(f"{label} returned {kind_of(result)}; {expected} ({where}). {RULE}.")
        if len(result) != self._num_agents:
            raise PromptError(f"{label} returned the wrong number: {expected}, got {len(result)} ({where}). {RULE}.")
        return [check_prompt(each, label, agent, where) for agent, each in enumerate(result)]


def _where(branch: Branch) -> str:
    """The turn and the row, after the joint action that is gone on from."""
    after = f"after {place(branch.prompt, branch.turn, path=branch.path[:-1])}"
    return f"{after}, joint action {branch.path[-1]}" if branch.path else after
