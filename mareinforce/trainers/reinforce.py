"""`MAGRPOTrainer` and its siblings: the module, the data and Lightning's Trainer behind one constructor."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint, ProgressBar

from mareinforce.agents.arguments import check_agents
from mareinforce.checkpoint import TeamCheckpoint
from mareinforce.checkpoint_files import checkpoint_to_resume, folder_of_run, tracked_run
from mareinforce.config import ALGORITHMS, MAGRPOConfig, MAREINFORCEConfig, MAReMaxConfig, MARLOOConfig
from mareinforce.csv_log import MetricsCSV
from mareinforce.data.datamodule import RowsDataModule
from mareinforce.ddp import TeamDDP
from mareinforce.errors import ConfigError
from mareinforce.module import MultiAgentReinforce
from mareinforce.progress import RunProgress
from mareinforce.quiet import plain_warnings, quiet
from mareinforce.reporting import FAILED
from mareinforce.run_folder import discard_if_nothing_came, rank_by_environment, run_folder_of_rank
from mareinforce.run_header import RunHeader
from mareinforce.run_summary import print_summary
from mareinforce.signals import NOTHING_KEPT, StopBySignal
from mareinforce.tracking import WandbSettings, WandbTracker
from mareinforce.trainer_rules import check_trainer, refuse_secrets, several_processes
from mareinforce.trainers.run_config import WriteRunConfig, rows_named

__all__ = [
    "MAGRPOConfig",
    "MAGRPOTrainer",
    "MAREINFORCEConfig",
    "MAREINFORCETrainer",
    "MARLOOConfig",
    "MARLOOTrainer",
    "MAReMaxConfig",
    "MAReMaxTrainer",
]


class MAGRPOTrainer:
    """Trains N cooperating agents with multi-agent group-relative policy optimisation.

    Args:
        agent_model: one hub id, folder or embedded model (such as ``tiny-story``) for `num_agents` equal agents.
        agents: instead, a list of ids, folders or loaded models, one an agent.
        num_agents: N; default: the number of `agents`, else 2.
        tokenizer: one, or one an agent; may be left out for ids and folders, must be given for loaded models.
        model_config: how models are loaded: ``dtype``, ``attn_implementation``, ``gguf_file``, ``revision``,
            ``gradient_checkpointing``, ``special_tokens``, ``trust_remote_code``; and ``lora``, the agents' adapters on
            a shared base: ``{"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}``, or a list of one an agent.
        train_dataset: rows with a prompt column (a data set, a list, or a source as in YAML); needed by `train`.
        eval_dataset: rows to evaluate on.
        reward_func: scores joint answers: lists of texts, one list an agent, to as many numbers.
        reward_processor: applied to every reward, e.g. ``RewardProcessors.scale(factor=100)``.
        formatters: row -> prompt; one, or one an agent.
        external_transition: what agents are asked after a turn; needed when `num_turns` is above 1.
        wandb_config: switches Weights & Biases on; fields of `mareinforce.tracking.WandbSettings`: project, entity,
            name, group, job_type, notes, tags, dir, offline, save_models.
        eval_logger: measures evaluated rows; needs `eval_aggregator`, and the other way round.
        eval_aggregator: turns those measurements into metrics.
        args: the training configuration; default: that of the algorithm.
        share_policy: one set of weights for all agents.
        trainable: which agents learn, one flag an agent; default: all.
        prompt_column: the column that holds the row's prompt.
        shuffle: train on the rows in a new order every epoch, decided by the seed.
        default_root_dir: the folder under which every run gets a numbered folder of its own.
        callbacks: further Lightning callbacks.
        accelerator: Lightning's choice of hardware.
        devices: processes of this machine, each with a device and the whole team: more than 1 run the script again.
        num_nodes: machines.
        strategy: ddp for several processes, which is also what auto means then.
        enable_progress_bar: show how far the run is, and before and after it what is trained and what came of it.

    Raises:
        ConfigError: an argument or a combination of them is refused; nothing has been loaded then.
    """

    config_class: ClassVar[type[MAGRPOConfig]] = MAGRPOConfig
    algorithm: ClassVar[Literal["magrpo", "marloo", "maremax", "mareinforce"]] = "magrpo"

    def __init__(
        self,
        agent_model: str | None = None,
        agents: Sequence[Any] | None = None,
        num_agents: int | None = None,
        tokenizer: Any = None,
        model_config: Mapping[str, Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        reward_func: Callable[..., Any] | None = None,
        reward_processor: Callable[..., Any] | None = None,
        formatters: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        external_transition: Callable[..., Any] | None = None,
        wandb_config: Mapping[str, Any] | None = None,
        eval_logger: Callable[..., Any] | None = None,
        eval_aggregator: Callable[..., Any] | None = None,
        args: MAGRPOConfig | None = None,
        *,
        share_policy: bool = False,
        trainable: Sequence[bool] | None = None,
        prompt_column: str = "prompt",
        shuffle: bool = True,
        default_root_dir: str | os.PathLike[str] = "runs",
        callbacks: Sequence[L.Callback] = (),
        accelerator: str = "auto",
        devices: int | str | list[int] = 1,
        num_nodes: int = 1,
        strategy: str = "auto",
        enable_progress_bar: bool = True,
    ) -> None:
        self._processes: dict[str, Any] = {"devices": devices, "num_nodes": num_nodes, "strategy": strategy}
        check_trainer(self._processes, training=True)
        trains = None if trainable is None else list(trainable)
        num_agents = check_agents(
            agent_model, agents, num_agents, tokenizer, model_config, share_policy=share_policy, trainable=trains
        )
        self.args = args if args is not None else self.config_class(num_agents=num_agents)
        mode = self.args.advantage_mode
        if self.algorithm != "magrpo" and mode != ALGORITHMS[self.algorithm]:
            raise ConfigError(
                f"args.advantage_mode={mode!r} is not what {type(self).__name__} trains with; give it a "
                f"{self.config_class.__name__}."
            )
        self.data = RowsDataModule(train_dataset, eval_dataset, prompt_column, shuffle)
        model: dict[str, Any] = {
            "agent_model": agent_model,
            "agents": None if agents is None else list(agents),
            "num_agents": num_agents,
            "tokenizer": tokenizer,
            "model_config": None if model_config is None else dict(model_config),
            "reward_func": reward_func,
            "reward_processor": reward_processor,
            "formatters": list(formatters) if isinstance(formatters, Sequence) else formatters,
            "external_transition": external_transition,
            "eval_logger": eval_logger,
            "eval_aggregator": eval_aggregator,
            "config": self.args,
            "share_policy": share_policy,
            "trainable": trains,
        }
        self.module = MultiAgentReinforce(**model, prompt_column=prompt_column)
        algorithm = next(name for name, its_mode in ALGORITHMS.items() if its_mode == mode)
        self._configuration = {
            "seed_everything": self.module.seed,
            "model": {"algorithm": algorithm, **model},
            "data": {
                "train": rows_named(train_dataset),
                "eval": rows_named(eval_dataset),
                "prompt_column": prompt_column,
                "shuffle": shuffle,
            },
            "trainer": {
                "accelerator": accelerator,
                "default_root_dir": os.fspath(default_root_dir),
                **self._processes,
            },
        }
        self.run_folder: Path | None = None
        """Where the last `train` wrote config.yaml, metrics.csv and its checkpoints."""
        refuse_secrets(None if wandb_config is None else dict(wandb_config), "wandb_config")
        self._wandb = None if wandb_config is None else WandbSettings.of(wandb_config)
        self._root, self._callbacks, self._accelerator = default_root_dir, list(callbacks), accelerator
        self._talks = enable_progress_bar

    def train(self, resume_from_checkpoint: str | os.PathLike[str] | None = None) -> None:
        """Train on `train_dataset`, logging into a new numbered folder (`run_folder`).

        Args:
            resume_from_checkpoint: a checkpoint file to go on from, in the folder of its run; or "last": the newest
                below `default_root_dir`.
        """
        if self.data.train is None:
            raise ConfigError("train_dataset is missing: train() needs rows to train on.")
        self.data.setup("fit")  # refuse bad rows before a folder is made or a model loads
        checkpoint = checkpoint_to_resume(resume_from_checkpoint, self._root, "resume_from_checkpoint")
        self.run_folder = folder_of_run(checkpoint) or run_folder_of_rank(self._root)
        stopping, tracker = StopBySignal(), None
        try:
            tracker = (
                None if self._wandb is None else WandbTracker(self._wandb, self.run_folder, tracked_run(checkpoint))
            )
            self._fit(stopping, tracker, checkpoint)
            if stopping.received is not None and self.module.ranks.rank == 0:
                after = 'go on with: train(resume_from_checkpoint="last")' if self.module.batches else NOTHING_KEPT
                sys.stderr.write(f"stopped by {stopping.received.name}; {after}\n")
            if stopping.received == signal.SIGINT:
                raise KeyboardInterrupt
            if stopping.received is not None:
                raise SystemExit(stopping.exit_status)
            if tracker is not None and tracker.settings.save_models:
                self.save_model(self.run_folder / "agents")
                tracker.log_agents(self.run_folder / "agents")
        except BaseException:
            if tracker is not None:
                tracker.close(FAILED)
            if rank_by_environment() == 0:
                discard_if_nothing_came(self.run_folder)
            raise
        if tracker is not None:
            tracker.close()
        if self._talks and self.module.ranks.rank == 0:
            print_summary(self.run_folder)

    def _fit(self, stopping: StopBySignal, tracker: WandbTracker | None, checkpoint: str | None) -> None:
        """Let Lightning train. A signal only leaves `stopping.received` behind."""
        assert self.run_folder is not None
        table = MetricsCSV(self.run_folder)
        several = several_processes(self._processes)
        processes = {**self._processes, "strategy": TeamDDP() if several else "auto"}
        with quiet(), plain_warnings():
            trainer = L.Trainer(
                accelerator=self._accelerator,
                **processes,
                use_distributed_sampler=False,
                max_epochs=self.args.num_train_epochs,
                logger=[table, *([] if tracker is None else [tracker])],
                callbacks=[*self._standard_callbacks(), *self._callbacks, stopping],
                default_root_dir=self.run_folder,
                log_every_n_steps=1,
                enable_model_summary=False,
                enable_progress_bar=self._talks,
            )
            try:
                trainer.fit(self.module, datamodule=self.data, ckpt_path=checkpoint, weights_only=True)
            except SystemExit:
                if stopping.received is None:
                    raise
            finally:
                self.module.teardown("fit")  # which Lightning leaves out after an error
                self.run_folder = Path(table.save_dir)  # on every rank that of rank 0

    def evaluate(self, num_eval_samples: int | None = None) -> dict[str, float]:
        """Play the first `num_eval_samples` rows (default: `args.eval_num_samples`) of `eval_dataset`, each once.

        Returns the `eval/...` metrics. Changes neither weights nor what training will sample.
        """
        if self.data.eval is None:
            raise ConfigError("eval_dataset is missing: evaluate() needs rows to evaluate on.")
        self.data.setup("validate")
        self.module.configure_model()
        if self._accelerator == "auto" and torch.accelerator.is_available():
            self.module.to(torch.accelerator.current_accelerator())
        count = self.args.eval_num_samples if num_eval_samples is None else num_eval_samples
        try:
            with plain_warnings():
                return self.module.evaluate(self.data.eval_rows(count))
        finally:
            self.module.calls.close()

    def save_model(self, output_dir: str | os.PathLike[str]) -> None:
        """Save each agent with its tokenizer as `output_dir/agent_0`, `agent_1` ..., loadable by `from_pretrained`.

        Of several processes rank 0 saves, and the others wait.
        """
        with self.module.ranks.together():
            if self.module.ranks.rank == 0:
                self.module.save_model(output_dir)

    def _standard_callbacks(self) -> list[L.Callback]:
        """What every run has, unless the user gave one of the kind."""
        found: list[L.Callback] = [WriteRunConfig(self._configuration, type(self).__name__)]
        if not any(isinstance(one, Checkpoint) for one in self._callbacks):
            found.append(TeamCheckpoint())
        if self._talks:
            found.append(RunHeader())
            if not any(isinstance(one, ProgressBar) for one in self._callbacks):
                found.append(RunProgress())
        return found


class MARLOOTrainer(MAGRPOTrainer):
    """Trains N cooperating agents with the leave-one-out baseline."""

    config_class = MARLOOConfig
    algorithm = "marloo"


class MAReMaxTrainer(MAGRPOTrainer):
    """Trains N cooperating agents against the group's largest return."""

    config_class = MAReMaxConfig
    algorithm = "maremax"


class MAREINFORCETrainer(MAGRPOTrainer):
    """Trains N cooperating agents without a baseline."""

    config_class = MAREINFORCEConfig
    algorithm = "mareinforce"
