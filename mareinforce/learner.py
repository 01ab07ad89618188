"""One policy as it learns: its rollout buffer, its counters, and its updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mareinforce.agents.team import Policy, Team
from mareinforce.config import MAGRPOConfig
from mareinforce.optim import learning_rate_factor, update_policy
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

    def learn(
        self,
        samples: Sequence[NodeSample],
        optimizer: torch.optim.Optimizer,
        *,
        flush: bool,
        progress: Callable[[int], float],
        ranks: Ranks = ALONE,
    ) -> list[Report]:
        """Fill the buffer, and update whenever it is full, and from what is left if it is to be flushed.

        ``progress``: updates made so far -> the share of the run that is done. ``ranks``: who makes every update with
        us; where one has filled its buffer more often than another, the other adds nothing to those updates.
        """
        full = [nodes for node in by_node(samples) if (nodes := self._buffer.add(node))]
        if flush and (left := self._buffer.flush()):
            full.append(left)
        reports = []
        for index in range(max(ranks.gather(len(full)))):
            reports += self._update(full[index] if index < len(full) else [], optimizer, progress, ranks)
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

    def _update(
        self,
        nodes: Sequence[NodeSamples],
        optimizer: torch.optim.Optimizer,
        progress: Callable[[int], float],
        ranks: Ranks,
    ) -> list[Report]:
        """One optimizer step per mini-batch of a full buffer."""
        config, first = self._config, self.policy.agents[0]
        batches = mini_batches(
            nodes,
            batch_size=config.train_batch_size,
            turn_weighting=config.turn_weighting,
            seed=self._seed,
            agent=first,
            update=self.updates,
        )
        turns = [0 if config.turn_weighting == "tree" else batch[0].turn for batch in batches]
        reports = []
        for batch in side_by_side(batches, ranks.gather(turns), ranks.rank):
            if self.is_done():
                break
            factor = learning_rate_factor(
                config.lr_schedule, progress(self.updates), self.updates, config.warmup_updates
            )
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rates[first] * factor
            with self._phases.measure("update"):
                update = update_policy(self._team, optimizer, batch, config, self.policy_version, ranks, self._phases)
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
