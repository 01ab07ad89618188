"""Multi-agent REINFORCE, a step of it: rollout, credit, loss, one optimizer step per policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from lightning.pytorch.utilities import rank_zero_info

from mareinforce import run_state
from mareinforce.agents.workers import Job
from mareinforce.errors import MareinforceError
from mareinforce.evaluation import EvaluationSchedule, EveryBatches
from mareinforce.learner import Learner, Report
from mareinforce.metrics import RowSource, RunningMeans, completion_metrics, kl_metrics, mean, signal_metrics
from mareinforce.optim import Update
from mareinforce.rollout.credit import (
    assign_returns,
    measure_reference_kl,
    node_samples,
    number_env_steps,
    tree_env_steps,
)
from mareinforce.rollout.expand import Episode
from mareinforce.rollout.tree import Node, nodes_by_level, valid
from mareinforce.team_module import TeamModule
from mareinforce.types import IndexedRow, NodeSample


class MultiAgentReinforce(TeamModule):
    """N agents that answer together, earn one shared reward, and learn from it with an optimizer each.

    Its arguments are those of `mareinforce.team_module.TeamModule`.
    """

    def training_step(self, rows: Sequence[IndexedRow], batch_index: int) -> dict[str, Any]:
        """Roll out the rows' trees, give every agent its credit, and let each one learn from its own samples.

        With several processes these are this rank's rows, of which it may have none, and every policy learns from the
        samples of all ranks. Returns `trees` [B], `samples` and `reports` (what was seen of each agent in each update),
        which Lightning hands to every callback's `on_train_batch_end` as `outputs` and then drops: nothing here keeps a
        tree.
        """
        self._batch_index, self._epoch = batch_index, self.current_epoch
        self.boundary = run_state.boundary(self)
        with self.ranks.together():
            trees = self.interruptible(partial(self._play, rows, batch_index))
        samples = self.credit(trees)
        reports = self.learn(samples)
        self.batches += 1
        self.batches_in_epoch = batch_index + 1
        self._log(trees, samples)
        self.boundary = None
        if self._all_updates_made():
            self.trainer.should_stop = True
        return {"trees": trees, "samples": samples, "reports": reports}

    def _play(self, rows: Sequence[IndexedRow], batch_index: int) -> list[Node]:
        """What a signal may end in the middle: nothing of it changes what has been learned."""
        if self.ranks.rank == 0:  # what an evaluation says is the same wherever it is played
            self._evaluate_if_due(batch_index)
        trees = self.rollout(rows)
        self.measure_kl(trees)
        return trees

    def rollout(self, rows: Sequence[IndexedRow]) -> list[Node]:
        """Sample, score and expand: one whole tree a row."""
        trees = self.loaded_expansion().grow(rows, Episode.training(self.config, self.seed, self.current_epoch))
        self._notices.after_rollout(trees)
        return trees

    def measure_kl(self, trees: Sequence[Node]) -> None:
        """How far every learning agent's answers are from its frozen reference, if it has one."""
        team = self.loaded_team()
        jobs = [
            Job(team.seats[agent].network, (agent,), partial(measure_reference_kl, team, agent, trees, self.config))
            for agent in sorted(team.references)
        ]
        with self.phases.measure("scoring"):
            self.workers.run(jobs)

    def credit(self, trees: Sequence[Node]) -> list[NodeSample]:
        """Returns up every tree, then each agent's returns and advantages, in the order of environment steps."""
        config = self.config
        told = self.ranks.gather(([tree_env_steps(root) for root in trees], self.loaded_expansion().overlong["train"]))
        sizes = [own for own, _ in told]
        self.overlong_prompts = sum(overlong for _, overlong in told)
        self.env_step = number_env_steps(trees, self.env_step, sizes, self.ranks.rank)
        num_rows = sum(map(len, sizes))
        samples = []
        for root in trees:
            hold = config.early_termination_value == "hold"
            assign_returns(root, num_turns=config.num_turns, discount=config.discount, hold=hold)
            for node in nodes_by_level(root):
                samples += node_samples(node, config, self.policy_versions, num_rows)
        return samples

    def learn(self, samples: Sequence[NodeSample]) -> list[Report]:
        """Every policy learns from its own agents' samples; the order of what is logged is that of the policies."""
        for sample in samples:
            self.means.add_agent(sample.agent, {**completion_metrics(sample), **kl_metrics(sample)})
            self.means.add({**kl_metrics(sample), **signal_metrics(sample)})
        flush = self.config.rollout_buffer_size == "rollout" or bool(self.trainer.is_last_batch)
        queues = [
            learner.mini_batches(
                [one for one in samples if one.agent in learner.policy.agents], flush=flush, ranks=self.ranks
            )
            for learner in self.learners
        ]
        reports: list[Report] = []
        while batches := {i: batch for i, queue in enumerate(queues) if (batch := next(queue, None)) is not None}:
            reports += self._update(batches)
        for agent, seen in reports:
            self.means.add_agent(agent, seen)
        return reports

    def _update(self, batches: Mapping[int, Sequence[NodeSample]]) -> list[Report]:
        """One update of every policy that has a mini-batch, by its index: all gradients first, then all steps.

        So that nobody has stepped if somebody's gradient turns out not to be finite.
        """
        optimizers = {index: self._optimizer(index) for index in batches}

        def each(work: Callable[[Learner, int], object]) -> list[object]:
            jobs = []
            for index in batches:
                learner = self.learners[index]
                jobs.append(Job(learner.policy.seat.network, learner.policy.agents, partial(work, learner, index)))
            return self.workers.run(jobs)

        try:
            computed = each(lambda learner, index: learner.compute(batches[index], optimizers[index], self.ranks))
        except MareinforceError:
            for optimizer in optimizers.values():
                optimizer.zero_grad(set_to_none=True)
            raise
        updates = dict(zip(batches, cast("list[Update]", computed), strict=True))
        stepped = each(lambda learner, index: learner.step(updates[index], optimizers[index], self._progress))
        return [report for reports in cast("list[list[Report]]", stepped) for report in reports]

    # small print

    def _evaluate_if_due(self, batch_index: int) -> None:
        data = getattr(self.trainer, "datamodule", None)
        if data is None:
            return
        listed = [one for one in self._callbacks() if isinstance(one, EvaluationSchedule)]
        for schedule in listed or [EveryBatches(self.config)]:
            if schedule.is_due(self, batch_index):
                metrics = self.evaluate(data.eval_rows(schedule.num_samples(self)))
                if metrics:
                    self._write({**metrics, **schedule.judged(self, metrics)})

    def on_train_start(self) -> None:
        """A run that goes on from where all its updates were made has nothing left to do."""
        super().on_train_start()
        if self._all_updates_made():
            rank_zero_info(f"max_updates={self.config.max_updates}: all were made before; nothing is left to train.")
            self.trainer.should_stop = True

    def on_train_end(self) -> None:
        if self.env_step > self.logged_env_step:
            self._write(self._row())

    def _all_updates_made(self) -> bool:
        """Has every policy that has anything to learn from made `max_updates` updates?"""
        if self.config.max_updates is None:
            return False
        spoken = self.ranks.gather([learner.has_learned_from_anything() for learner in self.learners])
        done = [
            learner.is_done()
            for learner, each in zip(self.learners, zip(*spoken, strict=True), strict=True)
            if any(each)
        ]
        return bool(done) and all(done)

    def _progress(self, updates: int) -> float:
        """Share of this training that is done: of its batches or of its updates, whichever is nearer the end."""
        epochs, batches = self.trainer.max_epochs or 1, float(self.trainer.num_training_batches)
        shares = [(self.current_epoch + self._batch_index / batches) / epochs if epochs > 0 else 0.0]
        if self.config.max_updates is not None:
            shares.append(updates / self.config.max_updates)
        return max(shares)

    def _log(self, trees: Sequence[Node], samples: Sequence[NodeSample]) -> None:
        """Add what the trees were worth to the means, and write a row when it is time."""
        self.means.add_trees(trees, self.config.num_turns, skips=self.config.on_reward_error == "skip")
        for source in self._row_sources():
            source.observe(trees, samples)
        if rewards := [mean(found) for root in trees if (found := valid(root.rewards))]:
            self.log("reward", mean(rewards), prog_bar=True, logger=False, batch_size=len(trees))
        if self.env_step - self.logged_env_step >= self.config.logging_steps:
            self._write(self._row())
            self.logged_env_step = self.env_step

    def _callbacks(self) -> list[Any]:
        return self.trainer.callbacks  # type: ignore[attr-defined, no-any-return]

    def _row_sources(self) -> list[RowSource]:
        return [one for one in self._callbacks() if isinstance(one, RowSource)]

    def _row(self) -> dict[str, float]:
        """What all ranks have seen since the last training row; on every rank it starts afresh."""
        means = RunningMeans()
        for state in self.ranks.gather(self.means.state_dict()):
            means.merge(state)
        self.means.take()
        row = means.take()
        for source in self._row_sources():
            row.update(source.take_row())
        return row

    def _write(self, metrics: dict[str, float]) -> None:
        updates = self.updates
        counters = {"epoch": self._epoch, "batch": self.batches, "updates": max(updates)}
        for agent in (agent for learner in self.learners for agent in learner.policy.agents):
            counters[f"agent_{agent}/updates"] = updates[agent]
        if self.config.prompt_overflow != "error":
            counters["overlong_prompts"] = self.overlong_prompts
        for logger in self.loggers:
            logger.log_metrics({**metrics, **counters}, step=self.env_step)
