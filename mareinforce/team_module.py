"""The LightningModule around a team: its arguments, its loading, its evaluation, and what a checkpoint holds of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import lightning as L
import torch

from mareinforce import run_state
from mareinforce.agents.arguments import check_agents, check_team_config
from mareinforce.agents.rendering import renderings
from mareinforce.agents.team import Team
from mareinforce.agents.workers import Workers
from mareinforce.concurrent_calls import CallRunner
from mareinforce.config import ALGORITHMS, MAGRPOConfig
from mareinforce.config_rules import check_for_ranks
from mareinforce.devices import agent_places
from mareinforce.errors import ConfigError, NonFiniteError
from mareinforce.evaluation import Evaluation, Evaluators
from mareinforce.learner import Learner
from mareinforce.metrics import RunningMeans
from mareinforce.notices import RunNotices
from mareinforce.optim import all_finite, build_optimizer, keep_state_beside_weights, probe
from mareinforce.phases import Phases
from mareinforce.random_states import set_random_states
from mareinforce.ranks import ALONE, Ranks
from mareinforce.rewards.contract import Reward
from mareinforce.rollout.engines.transformers import TransformersEngine
from mareinforce.rollout.expand import Episode, Expansion
from mareinforce.rollout.prompts import Formatters
from mareinforce.rollout.transition import Transition
from mareinforce.types import IndexedRow

UserCallable = Callable[..., Any]


class TeamModule(L.LightningModule):
    """A team of N agents, what they are asked and how their answers are scored. How they learn is for its heirs.

    Everything but the weights is checked here, and nothing is loaded before `configure_model`.

    Args:
        algorithm: magrpo, marloo, maremax or mareinforce: the baseline; default: that of `config`, else magrpo.
        agent_model: a hub id, a folder or an embedded model, for `num_agents` equal agents.
        agents: one id, folder or loaded model an agent, instead of `agent_model`.
        num_agents: N; with `agents`, their number.
        tokenizer: one, or one an agent; needed for loaded models.
        model_config: how models are loaded: dtype, attn_implementation, gguf_file, revision, gradient_checkpointing,
            special_tokens, trust_remote_code.
        lora: the agents' adapters on a shared base, see `mareinforce.agents.lora.LoRA`: one setting for all agents, or
            one an agent (None: the agent is trained whole).
        share_policy: one set of weights for all agents, whose losses are added up in one optimizer step.
        trainable: which agents learn, one flag an agent; default: all.
        reward_func: scores joint answers, see `mareinforce.rewards.contract.Reward`.
        reward_processor: applied to every single reward before anything else uses it.
        formatters: row -> prompt, one or one an agent; default: the row's prompt.
        external_transition: what is asked next, see `mareinforce.rollout.transition.Transition`.
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
        formatters: list[UserCallable] | UserCallable | None = None,  # a list first: it is written as a list
        external_transition: UserCallable | None = None,
        eval_logger: UserCallable | None = None,
        eval_aggregator: UserCallable | None = None,
        config: MAGRPOConfig | None = None,
        prompt_column: str | None = None,
        lora: Any = None,
        share_policy: bool = False,
        trainable: list[bool] | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False  # frozen weights are in no checkpoint; what must be in one is checked by ourselves
        team = {
            "agent_model": agent_model, "agents": agents, "num_agents": num_agents, "tokenizer": tokenizer,
            "model_config": model_config, "lora": lora, "share_policy": share_policy, "trainable": trainable,
        }  # fmt: skip
        num_agents = check_agents(**team)
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
        check_team_config(config, **team)
        self._team_arguments = {
            **team,
            "max_new_tokens": config.max_new_tokens,
            "places": agent_places(config.agent_devices, num_agents, "agent_devices"),
            "reference_kl": config.references,
            "reference": config.reference,
            "renderings": renderings(config),
            "reference_places": agent_places(config.reference_devices, num_agents, "reference_devices"),
        }
        self.workers = Workers(concurrent=config.parallel_training == "mp")
        self.calls = CallRunner(config.reward_workers, config.reward_worker_kind, config.reward_timeout)
        self._reward = Reward(
            reward_func, num_agents, reward_processor, on_error=config.on_reward_error, runner=self.calls
        )
        self._formatters = Formatters(
            formatters, num_agents, prompt_column or "prompt", config.external_prompt_passthrough, config.history
        )
        self._transition = (
            None if external_transition is None else Transition(external_transition, num_agents, runner=self.calls)
        )
        self.evaluators = Evaluators(eval_logger, eval_aggregator)
        self._notices = RunNotices(config)
        self._validation: Evaluation | None = None
        self.team: Team | None = None
        self.expansion: Expansion | None = None
        self.seed = config.seed if config.seed is not None else int(os.environ.get("PL_GLOBAL_SEED", 0))
        self.env_step = 0
        """Joint actions scored so far in training."""
        self.batches = 0
        """Batches trained so far."""
        self.batches_in_epoch = 0
        """Those of the epoch."""
        self.learners: list[Learner] = []
        """One a policy, once the agents are loaded."""
        self.phases = Phases()
        """What the run is doing now, and the seconds it has spent on what."""
        self.means = RunningMeans()
        self.logged_env_step = 0
        self._batch_index = 0  # within the epoch
        self._epoch = 0  # of the batch trained last
        self._resumed_random_states: dict[str, Any] | None = None
        self.boundary: dict[str, Any] | None = None
        """In the middle of a step: what the run was like before, of what a step that is given up may have changed."""
        self.ranks = ALONE
        """The processes that train this team."""
        self.overlong_prompts = 0
        """Prompts of training, on all ranks, that were too long for their model."""
        self.interruptible: Callable[[Callable[[], Any]], Any] = lambda work: work()
        """Does what a signal may end in the middle."""
        self._prompt_column = prompt_column

    @property
    def updates(self) -> list[int]:
        """Updates (mini-batches worked through) so far, one number an agent."""
        return self._by_agent({learner: learner.updates for learner in self.learners})

    @property
    def policy_versions(self) -> list[int]:
        """Updates that changed an agent's weights, one number an agent: what a sample's age is counted in."""
        return self._by_agent({learner: learner.policy_version for learner in self.learners})

    # evaluation

    def evaluate(self, rows: Sequence[IndexedRow]) -> dict[str, float]:
        """Play every row once, on one path, and return the `eval/...` metrics. Changes neither weights nor counters."""
        with self.phases.measure("evaluation", whole=True):
            evaluation = self._evaluation()
            evaluation.play(rows, self.config.eval_batch_size)
            self.loaded_team().rest()
            return evaluation.metrics()

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
            self.team = Team.build(**self._team_arguments, seed=self.seed)
            self.learners = [
                Learner(self.team, policy, self.config, self.seed, self.phases) for policy in self.team.policies
            ]
            self.expansion = Expansion(
                TransformersEngine(
                    self.team,
                    self.config.rollout_token_budget,
                    self.workers,
                    rollout_dtype=getattr(torch, self.config.rollout_dtype) if self.config.rollout_dtype else None,
                ),
                self.team,
                self._reward,
                self._formatters,
                self._transition,
                self.config.num_agents,
                self.config.prompt_overflow,
                phases=self.phases,
            )

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """One AdamW a policy; the learning rates are set at every update."""
        team, rates = self.loaded_team(), self.config.learning_rates
        return [
            build_optimizer(team.weights(policy).values(), rates[policy.agents[0]], self.config)
            for policy in team.policies
        ]

    def setup(self, stage: str) -> None:
        """Before anything loads: meet the other processes, if there are any. Raises ConfigError for what needs one."""
        if self.ranks.size == 1:
            self.ranks = Ranks.here()
        check_for_ranks(self.config, self.ranks.size)
        for table in run_state.tables(self):
            table.move_to(self.ranks.of_first(table.save_dir))  # where nobody but rank 0 has chosen a run folder
        if stage == "fit":
            self.trainer.limit_val_batches = 0  # evaluation has its own schedule: before a batch trains
        data = getattr(self.trainer, "datamodule", None)
        if data is not None and self._prompt_column is None:
            self._formatters.prompt_column = data.prompt_column

    def on_fit_start(self) -> None:
        """Before any rollout: say what should be said, and try the first prompt of every row."""
        self._notices.at_start(self.loaded_team().notes)
        data = getattr(self.trainer, "datamodule", None)
        if data is not None:
            for index, row in data.train_rows():
                self.loaded_expansion().first_prompts(index, row)

    def on_train_start(self) -> None:
        """A resumed optimizer's moments belong beside its weights, which may be on another device than Lightning's.

        Raises NonFiniteError if a weight that is to be trained is not finite, and RankError if the processes do not
        begin with the same, from which alone the same steps lead on.
        """
        for index, policy in enumerate(self.loaded_team().policies):
            keep_state_beside_weights(self._optimizer(index))
            for name, weight in self.loaded_team().weights(policy).items():
                if not all_finite([weight]):
                    raise NonFiniteError(
                        f"agent {policy.agents[0]}: its weight {name.split('.', 2)[-1]} is not finite before it has "
                        "learned anything; load another model."
                    )
        if self.ranks.size > 1:
            weights = probe(list(self.loaded_team().parameters())).float().numpy().tobytes()
            digest = hashlib.blake2b(weights, digest_size=8).hexdigest()
            progress = (self.batches, self.env_step, self.updates)
            same = {"config": self.config, "seed": self.seed, "batches per epoch": self.trainer.num_training_batches}
            self.ranks.check_same({**same, "progress": progress, "weights": digest})

    def teardown(self, stage: str) -> None:
        """Leave no worker behind, and the user's models as what they were given as."""
        self.workers.close()
        self.calls.close()
        if self.team is not None:
            self.team.rest()

    def agent_names(self) -> list[str]:
        """Who the agents are: names and folders as given, or the kind of a model that was given loaded."""
        given = self._team_arguments["agents"] or [self._team_arguments["agent_model"]] * self.config.num_agents
        return [one if isinstance(one, str) else type(one).__name__ for one in given]

    def save_model(self, directory: str | os.PathLike[str]) -> None:
        """Save every agent with its tokenizer, one folder an agent (`agent_0` ...), loadable by `from_pretrained`."""
        self.configure_model()
        self.loaded_team().save(directory)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        run_state.save(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._resumed_random_states = run_state.load(self, checkpoint)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Where a resumed run takes up the random streams that users' functions draw from: as late as can be."""
        if self._resumed_random_states is not None:
            run_state.count_epoch(self.trainer)
            set_random_states(self._resumed_random_states)
            self._resumed_random_states = None

    # small print

    def _by_agent(self, counts: dict[Learner, int]) -> list[int]:
        found = {agent: count for learner, count in counts.items() for agent in learner.policy.agents}
        return [found.get(agent, 0) for agent in range(self.config.num_agents)]

    def loaded_team(self) -> Team:
        """The agents, once they are loaded."""
        assert self.team is not None, "the agents are loaded in configure_model"
        return self.team

    def _optimizer(self, policy: int) -> torch.optim.Optimizer:
        optimizers = self.optimizers()
        return optimizers[policy] if isinstance(optimizers, list) else optimizers  # type: ignore[return-value]

    def loaded_expansion(self) -> Expansion:
        """What grows rollout trees, once the agents are loaded."""
        assert self.expansion is not None, "the agents are loaded in configure_model"
        return self.expansion

    def _evaluation(self) -> Evaluation:
        episode = Episode.evaluation(self.config, self.seed)
        return Evaluation(self.loaded_expansion(), episode, self.config.discount, self.evaluators)
