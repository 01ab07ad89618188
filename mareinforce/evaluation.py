"""Evaluation: every row is played on one path, one completion per agent and turn, without training on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from mareinforce.calling import UserFunction, brief
from mareinforce.config import MAGRPOConfig
from mareinforce.errors import ConfigError
from mareinforce.metrics import mean
from mareinforce.rewards.values import as_float
from mareinforce.rollout.credit import assign_returns
from mareinforce.rollout.expand import Episode, Expansion
from mareinforce.rollout.tree import Node, nodes_by_level, valid
from mareinforce.types import IndexedRow, Row

LOGGER_KEYWORDS = ("agent_completions_turns", "batch_items", "prompts")


@runtime_checkable
class EvaluationSchedule(Protocol):
    """When a run is evaluated while it trains: before which batches. A callback that is one replaces `EveryBatches`."""

    def is_due(self, module: Any, batch_index: int) -> bool:
        """Is it time, before a batch of the epoch (counted from 0) trains?"""
        ...

    def num_samples(self, module: Any) -> int | None:
        """How many rows are played; None: all."""
        ...

    def judged(self, module: Any, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """What is to be written beside the metrics of an evaluation."""
        ...


class EveryBatches:
    """The schedule of the configuration: `eval_interval` and `eval_num_samples`."""

    def __init__(self, config: MAGRPOConfig) -> None:
        self._config = config

    def is_due(self, module: Any, batch_index: int) -> bool:
        """At every epoch's first batch, and every `eval_interval` batches from there; 0: never."""
        return bool(self._config.eval_interval) and batch_index % self._config.eval_interval == 0

    def num_samples(self, module: Any) -> int:
        """As configured."""
        return self._config.eval_num_samples

    def judged(self, module: Any, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Nothing more."""
        return {}


class Evaluators:
    """The user's `eval_logger` and `eval_aggregator`, both or neither, checked when made. Raises ConfigError."""

    def __init__(self, eval_logger: Callable[..., Any] | None, eval_aggregator: Callable[..., Any] | None) -> None:
        if (eval_logger is None) != (eval_aggregator is None):
            given, missing = ("eval_aggregator", "eval_logger") if eval_logger is None else (
                "eval_logger", "eval_aggregator"
            )  # fmt: skip
            raise ConfigError(f"{given} is given without {missing}: give both, or neither.")
        self._logger = self._aggregator = None
        if eval_logger is not None and eval_aggregator is not None:
            self._logger = UserFunction(eval_logger, "eval_logger", positional=[], known=LOGGER_KEYWORDS)
            self._aggregator = UserFunction(
                eval_aggregator, "eval_aggregator", positional=["metrics"], known=["num_turns"]
            )

    @property
    def aggregates(self) -> bool:
        """Are there metrics of the user's own?"""
        return self._aggregator is not None

    def metrics(self, completions: list[list[list[str]]], rows: list[Row], prompts: list[Any], num_turns: int,
    ) -> dict[str, float]:  # fmt: skip
        """What the user measures of evaluated rows, by name. ``completions``: [N][rows][turn]."""
        if self._logger is None or self._aggregator is None:
            return {}
        values = {"agent_completions_turns": completions, "batch_items": [dict(row) for row in rows]}
        per_row = self._logger.call([], {**values, "prompts": prompts}, "evaluation")
        if not isinstance(per_row, Sequence) or len(per_row) != len(rows):
            got = len(per_row) if isinstance(per_row, Sequence) else brief(per_row)
            raise ConfigError(
                f"{self._logger.label} must return a list with one dict of metrics a row: expected {len(rows)}, got "
                f"{got}."
            )
        found = self._aggregator.call([per_row], {"num_turns": num_turns}, "evaluation")
        numbers = {name: as_float(value) for name, value in found.items()} if isinstance(found, Mapping) else None
        if numbers is None or None in numbers.values():
            raise ConfigError(f"{self._aggregator.label} must return a dict of finite numbers, got {brief(found)}.")
        return {f"eval/{name}": value for name, value in numbers.items() if value is not None}


@dataclass(slots=True)
class Evaluation:
    """Gathers evaluated rows and turns them into `eval/...` metrics."""

    expansion: Expansion
    episode: Episode
    discount: float
    evaluators: Evaluators
    trees: list[Node] = field(default_factory=list)

    def play(self, rows: Sequence[IndexedRow], batch_size: int) -> None:
        """Roll out rows, `batch_size` of them together."""
        for start in range(0, len(rows), batch_size):
            trees = self.expansion.grow(rows[start : start + batch_size], self.episode)
            for root in trees:
                assign_returns(root, num_turns=self.episode.num_turns, discount=self.discount, hold=False)
            self.trees += trees

    def metrics(self) -> dict[str, float]:
        """`eval/turn_k/reward_mean`, `eval/turn_k/expected_return` and what the user's aggregator gives.

        Skipped rewards are in no mean, and counted in `eval/turn_k/skipped_rewards`.
        """
        if not self.trees:
            return {}
        paths = [list(nodes_by_level(root)) for root in self.trees]
        values = {}
        for turn in range(self.episode.num_turns):
            reached = [path[turn] for path in paths if len(path) > turn]
            name = f"eval/turn_{turn + 1}"
            if rewards := valid([node.rewards[0] for node in reached]):
                values[f"{name}/reward_mean"] = mean(rewards)
            if returns := valid([node.returns[0] for node in reached]):
                values[f"{name}/expected_return"] = mean(returns)
            if reached and self.expansion.reward.skips:
                values[f"{name}/skipped_rewards"] = float(len(reached) - len(rewards))
        return values | self.users_metrics()

    def users_metrics(self) -> dict[str, float]:
        """What the user's own evaluators measure of the rows played."""
        paths = [list(nodes_by_level(root)) for root in self.trees]
        completions = [
            [[node.text(agent, 0) for node in path] for path in paths] for agent in range(self.expansion.num_agents)
        ]
        rows = [root.row for root in self.trees]
        prompts = [self.expansion.formatters.row_prompt(row) for row in rows]
        return self.evaluators.metrics(completions, rows, prompts, self.episode.num_turns)
