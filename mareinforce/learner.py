"""One policy as it learns: its rollout buffer, its counters, and its updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mareinforce.agents.team import Policy, Team
from mareinforce.config import MAGRPOConfig
from mareinforce.heap import give_back_beside
from mareinforce.optim import Update, apply_gradient, compute_gradient, learning_rate_factor, trained_by
from mareinforce.phases import Phases
from mareinforce.ranks import ALONE, Ranks
from mareinforce.rollout.buffer import NodeSamples, RolloutBuffer, by_node, mini_batches, side_by_side
from mareinforce.types import NodeSample

Report = tuple[int, dict[str, float]]
"""An agent, and what was seen of it in one update."""


class Learner:
    """What the node samples of a policy's agents do to its weights.

    Attributes:
        updates: mini-batches worked through so far.
        policy_version: updates that changed the weights: what a sample's age is counted in.
    """

    def __init__(
        self, team: Team, policy: Policy, config: MAGRPOConfig, seed: int, phases: Phases | None = None
    ) -> None:
        self.policy = policy
        self.updates = 0
        self.policy_version = 0
        self._team, self._config, self._seed = team, config, seed
        self._phases = phases or Phases()
        self._buffer = RolloutBuffer(None if config.rollout_buffer_size == "rollout" else config.rollout_buffer_size)

    def mini_batches(
        self, samples: Sequence[NodeSample], *, flush: bool, ranks: Ranks = ALONE
    ) -> Iterator[Sequence[NodeSample]]:
        """Fill the buffer; give its mini-batches whenever it is full, and what is left if it is to be flushed.

        The next one may be asked for when the one before has been learned from. ``ranks``: who makes every update with
        us; where one has filled its buffer more often than another, the other is given empty ones.
        """
        full = [nodes for node in by_node(samples) if (nodes := self._buffer.add(node))]
        if flush and (left := self._buffer.flush()):
            full.append(left)
        for index in range(max(ranks.gather(len(full)))):
            yield from self._cut(full[index] if index < len(full) else [], ranks)

    def compute(self, batch: Sequence[NodeSample], optimizer: torch.optim.Optimizer, ranks: Ranks = ALONE) -> Update:
        """The gradient of a mini-batch, left beside the weights. Raises NonFiniteError."""
        with self._phases.measure("update"):
            update = compute_gradient(
                self._team, optimizer, batch, self._config, self.policy_version, ranks, self._phases
            )
            give_back_beside(trained_by(optimizer))
        return update

    def step(self, update: Update, optimizer: torch.optim.Optimizer, progress: Callable[[int], float]) -> list[Report]:
        """Step with the gradient that was computed.

        ``progress``: updates made so far -> the share of the run that is done.
        """
        config, first = self._config, self.policy.agents[0]
        factor = learning_rate_factor(config.lr_schedule, progress(self.updates), self.updates, config.warmup_updates)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rates[first] * factor
        with self._phases.measure("update"):
            apply_gradient(self._team, optimizer, update)
        reports = []
        for agent, seen in update.metrics.items():
            common = {
                "loss": update.losses[agent],
                "learning_rate": optimizer.param_groups[0]["lr"],
                "sample_age": update.sample_ages[agent],
                "stepped_fraction": float(update.stepped),
            }
            reports.append((agent, {**common, **seen}))
        self.updates += 1
        self.policy_version += update.stepped
        return reports

    def state_dict(self) -> dict[str, Any]:
        """The counters and what waits in the buffer; weights and moments are kept elsewhere."""
        counters = {"updates": self.updates, "policy_version": self.policy_version}
        return {**counters, "buffer": self._buffer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.updates, self.policy_version = state["updates"], state["policy_version"]
        self._buffer.load_state_dict(state["buffer"])

    def is_done(self) -> bool:
        """Has it made all the updates there are to make?"""
        return self._config.max_updates is not None and self.updates >= self._config.max_updates

    def has_learned_from_anything(self) -> bool:
        """False while its agents have not spoken."""
        return bool(self.updates or self._buffer.nodes)

    def _cut(self, nodes: Sequence[NodeSamples], ranks: Ranks) -> Iterator[Sequence[NodeSample]]:
        """The mini-batches of a full buffer, one optimizer step each."""
        config = self._config
        batches = mini_batches(
            nodes,
            batch_size=config.train_batch_size,
            turn_weighting=config.turn_weighting,
            seed=self._seed,
            agent=self.policy.agents[0],
            update=self.updates,
        )
        turns = [0 if config.turn_weighting == "tree" else batch[0].turn for batch in batches]
        for batch in side_by_side(batches, ranks.gather(turns), ranks.rank):
            if self.is_done():
                break
            yield batch
