"""Multi-agent REINFORCE as a LightningModule: rollout, credit, loss, step, one optimizer per agent."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import lightning as L
import torch

from mareinforce.agents.team import Team, check_agents
from mareinforce.config import ALGORITHMS, MAGRPOConfig
from mareinforce.errors import ConfigError
from mareinforce.evaluation import Evaluation, Evaluators
from mareinforce.metrics import RunningMeans, completion_metrics, mean
from mareinforce.notices import RunNotices
from mareinforce.optim import build_optimizer, learning_rate_factor, update_agent
from mareinforce.rewards.contract import Reward
from mareinforce.rollout.buffer import RolloutBuffer, mini_batches
from mareinforce.rollout.credit import assign_returns, node_samples, number_env_steps
from mareinforce.rollout.engines.transformers import TransformersEngine
from mareinforce.rollout.expand import Episode, Expansion
from mareinforce.rollout.prompts import Formatters, Transition
from mareinforce.rollout.tree import Node, nodes_by_level
from mareinforce.types import IndexedRow, NodeSample

UserCallable = Callable[..., Any]


class MultiAgentReinforce(L.LightningModule):
    """N agents that answer together, earn one shared reward, and learn from it with an optimizer each.

    Everything but the weights is checked here, and nothing is loaded before `configure_model`.

    Args:
        algorithm: magrpo, marloo, maremax or mareinforce: the baseline; default: that of `config`, else magrpo.
        agent_model: a hub id, a folder or an embedded model, for `num_agents` equal agents.
        agents: one id, folder or loaded model an agent, instead of `agent_model`.
        num_agents: N; with `agents`, their number.
        tokenizer: one, or one an agent; needed for loaded models.
        model_config: how models are loaded (dtype, attn_implementation).
        reward_func: scores joint answers, see `mareinforce.rewards.contract.Reward`.
        reward_processor: applied to every single reward before anything else uses it.
        formatters: row -> prompt, one or one an agent; default: the row's prompt.
        external_transition: what is asked next, see `mareinforce.rollout.prompts.Transition`.
        eval_logger: measures evaluated rows; needs `eval_aggregator`.
        eval_aggregator: turns those measurements into metrics.
        config: the fields of the learning loop.
        prompt_column: the column with the row's prompt; default: the data module's.

    Raises:
        ConfigError: a field, an argument, or a callable that cannot be called as it will be.
    """

    def __init__(
        self,
        algorithm: Literal["magrpo", "marloo", "maremax", "mareinforce"] | None = None,
        agent_model: str | None = None,
        agents: list[Any] | None = None,
        num_agents: int | None = None,
        tokenizer: Any = None,
        model_config: dict[str, Any] | None = None,
        reward_func: UserCallable | None = None,
        reward_processor: UserCallable | None = None,
        formatters: UserCallable | list[UserCallable] | None = None,
        external_transition: UserCallable | None = None,
        eval_logger: UserCallable | None = None,
        eval_aggregator: UserCallable | None = None,
        config: MAGRPOConfig | None = None,
        prompt_column: str | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        num_agents = check_agents(agent_model, agents, num_agents, tokenizer, model_config)
        mode = ALGORITHMS[algorithm or "magrpo"]
        self.config = config = config or MAGRPOConfig(num_agents=num_agents, advantage_mode=mode)
        if algorithm is not None and config.advantage_mode != mode:
            raise ConfigError(
                f"config.advantage_mode={config.advantage_mode!r} contradicts algorithm={algorithm!r}, whose "
                f"baseline is {mode!r}: leave one of them out."
            )
        if config.num_agents != num_agents:
            raise ConfigError(f"config.num_agents={config.num_agents}, but num_agents={num_agents}: make them equal.")
        if reward_func is None:
            raise ConfigError("reward_func is missing: name the function that scores joint answers.")
        if config.num_turns > 1 and external_transition is None:
            raise ConfigError(
                f"num_turns={config.num_turns} needs external_transition, which says what agents are asked after a "
                f"turn. Give one, or set num_turns: 1."
            )
        self._agents_from = {
            "agent_model": agent_model, "agents": agents, "num_agents": num_agents, "tokenizer": tokenizer,
            "model_config": model_config, "max_new_tokens": config.max_new_tokens,
        }  # fmt: skip
        self._reward = Reward(reward_func, num_agents, reward_processor)
        self._formatters = Formatters(
            formatters, num_agents, prompt_column or "prompt", config.external_prompt_passthrough
        )
        self._transition = None if external_transition is None else Transition(external_transition, num_agents)
        self._evaluators = Evaluators(eval_logger, eval_aggregator)
        self._notices = RunNotices(config)
        self._validation: Evaluation | None = None
        self.team: Team | None = None
        self.expansion: Expansion | None = None
        self.seed = config.seed if config.seed is not None else int(os.environ.get("PL_GLOBAL_SEED", 0))
        self.env_step = 0
        """Joint actions scored so far in training."""
        self.batches = 0
        """Batches trained so far."""
        self.updates = [0] * num_agents
        """Updates (mini-batches worked through) so far, one number an agent."""
        self.policy_versions = [0] * num_agents
        """Updates that changed an agent's weights, one number an agent: what a sample's age is counted in."""
        capacity = None if config.rollout_buffer_size == "rollout" else config.rollout_buffer_size
        self._rollout_buffers = [RolloutBuffer(capacity) for _ in range(num_agents)]
        self._means = RunningMeans()
        self._logged_env_step = 0
        self._batch_index = 0  # within the epoch
        self._epoch = 0  # of the batch trained last
        self._epoch_is_whole = True  # no batch of an epoch is left to train
        self._prompt_column = prompt_column

    # the algorithm

    def training_step(self, rows: Sequence[IndexedRow], batch_index: int) -> None:
        """Roll out the rows' trees, give every agent its credit, and let each one learn from its own samples."""
        self._batch_index, self._epoch = batch_index, self.current_epoch
        self._evaluate_if_due(batch_index)
        trees = self.rollout(rows)
        samples = self.credit(trees)
        for agent in range(self.config.num_agents):
            self.learn(agent, [sample for sample in samples if sample.agent == agent])
        self.batches += 1
        self._epoch_is_whole = bool(self.trainer.is_last_batch)
        self._log(trees)
        if self._all_updates_made():
            self.trainer.should_stop = True

    def rollout(self, rows: Sequence[IndexedRow]) -> list[Node]:
        """Sample, score and expand: one whole tree a row."""
        trees = self._expansion().grow(rows, Episode.training(self.config, self.seed, self.current_epoch))
        self._notices.after_rollout(trees)
        return trees

    def credit(self, trees: Sequence[Node]) -> list[NodeSample]:
        """Returns up every tree, then each agent's returns and advantages, in the order of environment steps."""
        config = self.config
        self.env_step = number_env_steps(trees, self.env_step)
        samples = []
        for root in trees:
            hold = config.early_termination_value == "hold"
            assign_returns(root, num_turns=config.num_turns, discount=config.discount, hold=hold)
            for node in nodes_by_level(root):
                samples += node_samples(node, config, self.policy_versions, len(trees))
        return samples

    def learn(self, agent: int, samples: Sequence[NodeSample]) -> None:
        """Fill an agent's buffer, and update whenever it is full and at the end of an epoch or of a whole rollout."""
        for sample in samples:
            self._means.add_agent(agent, completion_metrics(sample))
            self._update(agent, self._rollout_buffers[agent].add(sample))
        if self.config.rollout_buffer_size == "rollout" or self.trainer.is_last_batch:
            self._update(agent, self._rollout_buffers[agent].flush())

    def _update(self, agent: int, samples: Sequence[NodeSample]) -> None:
        """One optimizer step per mini-batch of a full buffer."""
        config, optimizer = self.config, self._optimizer(agent)
        assert self.team is not None
        for batch in mini_batches(
            samples,
            batch_size=config.train_batch_size,
            turn_weighting=config.turn_weighting,
            seed=self.seed,
            agent=agent,
            update=self.updates[agent],
        ):
            if config.max_updates is not None and self.updates[agent] >= config.max_updates:
                return
            factor = learning_rate_factor(
                config.lr_schedule, self._progress(agent), self.updates[agent], config.warmup_updates
            )
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rates[agent] * factor
            update = update_agent(self.team, agent, optimizer, batch, config, self.policy_versions[agent])
            ages = [self.policy_versions[agent] - sample.policy_version for sample in batch]
            self.updates[agent] += 1
            self.policy_versions[agent] += update.stepped
            seen = {
                "loss": update.loss,
                "learning_rate": optimizer.param_groups[0]["lr"],
                "sample_age": sum(ages) / len(ages),
                "stepped_fraction": float(update.stepped),
            }
            self._means.add_agent(agent, {**seen, **update.metrics})

    # evaluation

    def evaluate(self, rows: Sequence[IndexedRow]) -> dict[str, float]:
        """Play every row once, on one path, and return the `eval/...` metrics. Changes neither weights nor counters."""
        evaluation = self._evaluation()
        evaluation.play(rows, self.config.eval_batch_size)
        return evaluation.metrics()

    def _evaluate_if_due(self, batch_index: int) -> None:
        config, data = self.config, getattr(self.trainer, "datamodule", None)
        if config.eval_interval and batch_index % config.eval_interval == 0 and data is not None:
            metrics = self.evaluate(data.eval_rows(config.eval_num_samples))
            if metrics:
                self._write(metrics)

    def on_validation_epoch_start(self) -> None:
        self._validation = self._evaluation()

    def validation_step(self, rows: Sequence[IndexedRow], batch_index: int) -> None:
        """Play a batch of evaluation rows."""
        assert self._validation is not None
        self._validation.play(rows, len(rows))

    def on_validation_epoch_end(self) -> None:
        assert self._validation is not None
        self.log_dict(self._validation.metrics(), batch_size=1)

    # Lightning's side

    def configure_model(self) -> None:
        """Load the agents, once."""
        if self.team is None:
            self.team = Team.build(**self._agents_from)
            self.expansion = Expansion(
                TransformersEngine(self.team),
                self.team,
                self._reward,
                self._formatters,
                self._transition,
                self.config.num_agents,
            )

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """One AdamW an agent; the learning rates are set at every update."""
        assert self.team is not None
        rates = self.config.learning_rates
        return [build_optimizer(agent, rates[i], self.config) for i, agent in enumerate(self.team.agents)]

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.trainer.limit_val_batches = 0  # evaluation has its own schedule: before a batch trains
        data = getattr(self.trainer, "datamodule", None)
        if data is not None and self._prompt_column is None:
            self._formatters.prompt_column = data.prompt_column

    def on_fit_start(self) -> None:
        """Before any rollout: say what should be said, and try the first prompt of every row."""
        self._notices.at_start()
        data = getattr(self.trainer, "datamodule", None)
        if data is not None:
            for index, row in data.train_rows():
                self._expansion().first_prompts(index, row)

    def on_train_end(self) -> None:
        if self.env_step > self._logged_env_step:
            self._write(self._means.take())

    def save_model(self, directory: str | os.PathLike[str]) -> None:
        """Save every agent with its tokenizer, one folder an agent (`agent_0` ...), loadable by `from_pretrained`."""
        self.configure_model()
        assert self.team is not None
        self.team.save(directory)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mareinforce"] = {
            "env_step": self.env_step,
            "batches": self.batches,
            "updates": list(self.updates),
            "epoch_is_whole": self._epoch_is_whole,
            "policy_versions": list(self.policy_versions),
            "logged_env_step": self._logged_env_step,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["mareinforce"]
        if self.trainer.training and not state["epoch_is_whole"]:
            raise ConfigError(
                f"the checkpoint was saved in the middle of an epoch, after batch {state['batches']}; as yet training "
                f"can only go on from the end of one. It can be evaluated, or give another."
            )
        self.env_step, self.batches, self.updates = state["env_step"], state["batches"], list(state["updates"])
        self.policy_versions = list(state["policy_versions"])
        self._logged_env_step = state["logged_env_step"]

    # small print

    def _optimizer(self, agent: int) -> torch.optim.Optimizer:
        optimizers = self.optimizers()
        return optimizers[agent] if isinstance(optimizers, list) else optimizers  # type: ignore[return-value]

    def _expansion(self) -> Expansion:
        assert self.expansion is not None, "the agents are loaded in configure_model"
        return self.expansion

    def _evaluation(self) -> Evaluation:
        episode = Episode.evaluation(self.config, self.seed)
        return Evaluation(self._expansion(), episode, self.config.discount, self._evaluators)

    def _all_updates_made(self) -> bool:
        """Has every agent that has anything to learn from made `max_updates` updates?"""
        if self.config.max_updates is None:
            return False
        learning = [
            made for made, buffer in zip(self.updates, self._rollout_buffers, strict=True) if made or buffer.samples
        ]
        return bool(learning) and min(learning) >= self.config.max_updates

    def _progress(self, agent: int) -> float:
        """Share of this training that is done: of its batches or of its updates, whichever is nearer the end."""
        epochs, batches = self.trainer.max_epochs or 1, float(self.trainer.num_training_batches)
        shares = [(self.current_epoch + self._batch_index / batches) / epochs if epochs > 0 else 0.0]
        if self.config.max_updates is not None:
            shares.append(self.updates[agent] / self.config.max_updates)
        return max(shares)

    def _log(self, trees: Sequence[Node]) -> None:
        """Add what the trees were worth to the means, and write a row when it is time."""
        self._means.add_trees(trees, self.config.num_turns)
        reward = mean([mean(root.rewards) for root in trees])
        self.log("reward", reward, prog_bar=True, logger=False, batch_size=len(trees))
        if self.env_step - self._logged_env_step >= self.config.logging_steps:
            self._write(self._means.take())
            self._logged_env_step = self.env_step

    def _write(self, metrics: dict[str, float]) -> None:
        counters = {"epoch": self._epoch, "batch": self.batches, "updates": max(self.updates)}
        for logger in self.loggers:
            logger.log_metrics({**metrics, **counters}, step=self.env_step)
