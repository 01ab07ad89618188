"""The call of the user's reward: what it is given, what it may give back, and what is done with it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mareinforce.calling import UserFunction, brief, place
from mareinforce.concurrent_calls import Call, CallRunner
from mareinforce.errors import MareinforceError, MareinforceWarning, RewardError, UserCodeError
from mareinforce.rewards.columns import ReadColumns, listed, read_columns
from mareinforce.rewards.values import as_float
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
    """The rewards of a node's joint actions, as plain finite floats in joint-action order; None: skipped."""

    raw: list[float | None]  # [J] as the reward function gave them
    processed: list[float | None]  # [J] after the reward processor: what everything else uses
    components: dict[str, list[float | None]]  # name -> [J], logged only


@dataclass(frozen=True, slots=True)
class JointAnswers:
    """What the reward is told of one node."""

    texts: Sequence[Sequence[str]]  # [N][J]
    row: Row
    prompt: Any
    turn: int  # from 0
    num_turns: int
    prompt_history_per_agent: Sequence[Sequence[Any]]  # [N][turn + 1]
    response_history_per_agent: Sequence[Sequence[Any]]  # [N][turn]
    ended: Sequence[Sequence[bool]]  # [N][J]
    path: Sequence[int] = ()  # joint actions that led to the node, for messages

    @property
    def count(self) -> int:
        """J."""
        return len(self.texts[0])


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

    Args:
        on_error: what a failure does: stop raises it; skip leaves out the joint actions that it concerns, which is all
            of the call where the call as a whole fails, and says so once.
        runner: makes the calls; default: here, one after the other.

    Raises:
        ConfigError: a callable cannot be called like that, or not by the runner.
    """

    def __init__(
        self,
        reward_func: Any,
        num_agents: int,
        reward_processor: Any = None,
        *,
        on_error: Literal["stop", "skip"] = "stop",
        runner: CallRunner | None = None,
    ) -> None:
        lists = [f"completions of agent {agent}" for agent in range(num_agents)]
        self._num_agents = num_agents
        self._func = UserFunction(reward_func, "reward_func", positional=lists, known=KNOWN_KEYWORDS, leading="prompts")
        self._processor = (
            None
            if reward_processor is None
            else UserFunction(reward_processor, "reward_processor", positional=["one reward"])
        )
        self.skips = on_error == "skip"
        """Are failures left out, rather than raised?"""
        self._said = False
        self._runner = runner or CallRunner()
        self._runner.check(self._func)

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
            UserCodeError: the function or the processor raised, or took too long.
            RewardError: what one of them returned is not one finite number a joint action.
        """
        histories = prompt_history_per_agent, response_history_per_agent
        (scores,) = self.score_all([JointAnswers(texts, row, prompt, turn, num_turns, *histories, ended)])
        return scores

    def score_all(self, nodes: Sequence[JointAnswers]) -> list[Scores]:
        """Score nodes, one call a node, in their order whatever is done first. Raises as `score` does."""
        calls = [self._call(node) for node in nodes]

        def read(result: Any, index: int) -> ReadColumns:
            columns = read_columns(self._func.label, result, nodes[index].count, calls[index].where)
            if columns.complaint is not None and not self.skips:
                raise columns.complaint
            return columns

        outcomes = self._runner.run(self._func, calls, read, keep_going=self.skips)
        scores = []
        for node, call, outcome in zip(nodes, calls, outcomes, strict=True):
            columns, complaint = outcome.value, outcome.error
            if columns is None:
                columns = ReadColumns({"reward": [None] * node.count})
            values = dict(columns.values)
            raw = values.pop("reward")
            processed, unprocessed = self._process(raw, call.where)
            if missing := {j for j, value in enumerate(processed) if value is None}:
                raw = [None if j in missing else value for j, value in enumerate(raw)]
                self._say_skipped(complaint or columns.complaint or unprocessed)
            scores.append(Scores(raw, processed, {name: _without(column, missing) for name, column in values.items()}))
        return scores

    def _call(self, node: JointAnswers) -> Call:
        lengths = {len(column) for column in node.texts}
        if len(node.texts) != self._num_agents or len(lengths) != 1:
            raise ValueError(
                f"expected {self._num_agents} lists of equal length, got lengths {[*map(len, node.texts)]}"
            )
        count = node.count
        where = f"{place(node.prompt, node.turn, node.num_turns, node.path)}, joint actions 0 to {count - 1}"
        prompts = [node.prompt] * count
        values = {
            "prompts": prompts,
            "batch_items": [dict(node.row) for _ in range(count)],
            "turn": node.turn,
            "num_turns": node.num_turns,
            "prompt_history_per_agent": [list(history) for history in node.prompt_history_per_agent],
            "response_history_per_agent": [list(history) for history in node.response_history_per_agent],
            "ended": [list(column) for column in node.ended],
        }
        lists = [list(column) for column in node.texts]
        return Call([prompts, *lists] if self._func.leads else lists, values, where)

    def _process(self, raw: list[float | None], where: str) -> tuple[list[float | None], MareinforceError | None]:
        """Every reward that is there, processed; with what there is to complain about, if failures are skipped."""
        if self._processor is None:
            return list(raw), None
        values: dict[int, Any] = {}
        complaint: MareinforceError | None = None
        for index, reward in enumerate(raw):
            if reward is None:
                continue
            try:
                values[index] = self._processor.call([reward], {}, f"reward {reward} of joint action {index}, {where}")
            except UserCodeError as error:
                if not self.skips:
                    raise
                complaint = complaint or error
        numbers = {index: as_float(value) for index, value in values.items()}
        if bad := {index: values[index] for index, number in numbers.items() if number is None}:
            wrong = RewardError(
                f"{self._processor.label} made what is not a finite number for {listed(bad)}; the rewards were "
                f"{brief(raw)} ({where}). Joint actions count from 0. It takes one reward and returns one number."
            )
            if not self.skips:
                raise wrong
            complaint = complaint or wrong
        return [numbers.get(index) for index in range(len(raw))], complaint

    def _say_skipped(self, complaint: MareinforceError | None) -> None:
        if not self._said:
            self._said = True
            warnings.warn(
                f"{complaint} What has no reward is left out (on_reward_error: skip). Later ones are counted in the "
                f"metrics turn_k/skipped_rewards.",
                MareinforceWarning,
                stacklevel=2,
            )


def _without(column: list[float | None], missing: set[int]) -> list[float | None]:
    return [None if j in missing else value for j, value in enumerate(column)]
