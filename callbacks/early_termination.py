"""What early termination does: how many branches stop, how good they are, and what is saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from mareinforce.callbacks.sums import Sums

from mareinforce.config import MAGRPOConfig
from mareinforce.errors import ConfigError
from mareinforce.metrics import mean, node_tokens
from mareinforce.rollout.tree import Node, nodes_by_level, valid
from mareinforce.types import NodeSample

_SUMS = ("nodes", "stopped", "reward", "joint_actions", "tokens")


class EarlyTerminationLogger(L.Callback):
    """Adds to the training rows, for every turn but the last, what `early_termination_threshold` stops there.

    The columns are `turn_k/stopped_fraction`, `turn_k/stopped_reward_mean`, `turn_k/saved_joint_actions` and
    `turn_k/saved_tokens`; docs/metrics.md has their meaning. Without a threshold, or with one turn, there are none.
    It says once, in words, when the threshold has stopped every branch after turn 1 for a while.

    Args:
        batches_before_saying: how many batches in a row that is.

    Raises:
        ConfigError: a number below 1.
    """

    def __init__(self, batches_before_saying: int = 10) -> None:
        if batches_before_saying < 1:
            raise ConfigError(
                f"EarlyTerminationLogger batches_before_saying={batches_before_saying}: must be at least 1."
            )
        self.batches_before_saying = batches_before_saying
        self._config: MAGRPOConfig | None = None
        self._sums = Sums(())
        self._said = False
        self._in_a_row = 0  # batches in which every branch was stopped after turn 1
        self._rewards = 0.0  # sum over those batches of their mean reward
        self._lowest = float("inf")

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """See which turns can be stopped after."""
        self._config = config = pl_module.config
        stops = config.early_termination_threshold is not None
        turns = range(1, config.num_turns) if stops else ()
        self._sums = Sums([f"turn_{turn}/{name}" for turn in turns for name in _SUMS])

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._sums.place(trainer, pl_module)
        if pl_module.env_step == 0:
            self._said, self._in_a_row, self._rewards, self._lowest = False, 0, 0.0, float("inf")

    def observe(self, trees: Sequence[Node], samples: Sequence[NodeSample]) -> None:
        """Count what was stopped in a batch's trees."""
        if not self._sums.names:
            return
        assert self._config is not None
        self._sums.update({})
        for root in trees:
            for node in nodes_by_level(root):
                if node.turn + 1 < self._config.num_turns:
                    found = stopped_at(node, self._config.num_turns)
                    self._sums.update({f"turn_{node.turn + 1}/{name}": value for name, value in found.items()})
        self._say_if_all_stop(trees, self._config)

    def take_row(self) -> dict[str, float]:
        """The columns since the last row; the reward is left out where nothing stopped."""
        if not self._sums.names:
            return {}
        sums, row = self._sums.compute(), {}
        self._sums.reset()
        self._sums.update({})
        for turn in dict.fromkeys(name.split("/")[0] for name in sums):
            nodes, stopped, reward, joint_actions, tokens = (sums[f"{turn}/{name}"] for name in _SUMS)
            if nodes:
                row[f"{turn}/stopped_fraction"] = stopped / nodes
                row[f"{turn}/saved_joint_actions"] = joint_actions
                row[f"{turn}/saved_tokens"] = tokens
            if stopped:
                row[f"{turn}/stopped_reward_mean"] = reward / stopped
        return row

    def state_dict(self) -> dict[str, Any]:
        """The sums since the last row, and whether it has said what it has to say."""
        words = {"said": self._said, "in_a_row": self._in_a_row, "rewards": self._rewards, "lowest": self._lowest}
        return {"sums": self._sums.kept(), **words}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._said, self._in_a_row = state_dict["said"], state_dict["in_a_row"]
        self._rewards, self._lowest = state_dict["rewards"], state_dict["lowest"]
        self._sums.go_on_from(state_dict["sums"], first=_is_first_process())

    def _say_if_all_stop(self, trees: Sequence[Node], config: MAGRPOConfig) -> None:
        rewards = valid([reward for root in trees for reward in root.rewards])
        if not rewards:  # this rank has no row, or its rewards failed
            return
        self._lowest = min(self._lowest, *rewards)
        if not all(all(root.stopped) for root in trees):
            self._in_a_row, self._rewards = 0, 0.0
            return
        self._in_a_row, self._rewards = self._in_a_row + 1, self._rewards + mean(rewards)
        threshold = config.early_termination_threshold
        assert threshold is not None
        told_by_the_run = threshold < 0 <= self._lowest  # at its first step
        if self._in_a_row >= self.batches_before_saying and not self._said and not told_by_the_run:
            self._said = True
            rank_zero_info(
                f"early_termination_threshold={threshold} has stopped every branch after turn 1 in the last "
                f"{self._in_a_row} batches (mean reward {self._rewards / self._in_a_row:.4g}): turns 2 to "
                f"{config.num_turns} do not happen any more. If those answers are not good enough yet, raise it, or "
                f"set it to null to play all turns."
            )


def stopped_at(node: Node, num_turns: int) -> dict[str, float]:
    """What is stopped at a node before the last turn, and what that saves at most.

    Returns 1 node; the share of its joint actions that are `stopped` (with node_mean all or none); their mean `reward`
    times that share; the `joint_actions` and `tokens` of the nodes that would have followed had every turn been played
    by all, each taken to be of this node's size.
    """
    size = len(node.joint_actions)
    lost = sum(node.stopped) * sum(size**turns for turns in range(num_turns - 1 - node.turn))  # nodes
    share = sum(node.stopped) / size
    rewards = valid([reward for reward, stopped in zip(node.rewards, node.stopped, strict=True) if stopped])
    return {
        "nodes": 1.0,
        "stopped": share,
        "reward": share * mean(rewards) if rewards else 0.0,
        "joint_actions": float(lost * size),
        "tokens": float(lost * node_tokens(node)),
    }


def _is_first_process() -> bool:
    from lightning.pytorch.utilities import rank_zero_only

    return getattr(rank_zero_only, "rank", 0) == 0
