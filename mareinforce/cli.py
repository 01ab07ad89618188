"""The command line: the keys of the YAML, what sets what, what is refused, and where a run's files go."""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import SIGTERMException

from mareinforce.agents.lora import LoRA
from mareinforce.checkpoint import TeamCheckpoint
from mareinforce.checkpoint_files import checkpoint_to_resume, folder_of_run, tracked_run
from mareinforce.config import MAGRPOConfig
from mareinforce.config_links import check_twins, link_arguments, team_size
from mareinforce.csv_log import MetricsCSV
from mareinforce.data.datamodule import RowsDataModule
from mareinforce.ddp import TeamDDP
from mareinforce.default_callbacks import default_callbacks
from mareinforce.errors import ConfigError
from mareinforce.eval_protocol import ProtocolEvaluation
from mareinforce.hyperparameters import log_hyperparameters
from mareinforce.module import MultiAgentReinforce
from mareinforce.own_arguments import (
    DESCRIPTION,
    USAGE,
    add_own_arguments,
    arrange_help,
    files_first,
    gives,
    run_given,
    spelt,
    wandb_settings,
)
from mareinforce.parse_errors import explained, not_made
from mareinforce.progress import RunProgress
from mareinforce.reporting import BEFORE_TRAINING, FAILED, TERMINATED
from mareinforce.run_folder import (
    CONFIG_FILE,
    discard_if_nothing_came,
    new_run_folder,
    rank_by_environment,
    run_folder_of_rank,
)
from mareinforce.run_header import RunHeader
from mareinforce.saved_config import SavedConfig
from mareinforce.signals import NOTHING_KEPT, StopBySignal
from mareinforce.tracking import WandbTracker
from mareinforce.trainer_rules import check_trainer, several_processes

_DEFAULTS = {
    "default_root_dir": "runs",
    "devices": 1,
    "log_every_n_steps": 1,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}
_PARSER = {"allow_abbrev": False, "exit_on_error": False}
_METHOD_SKIPS = {
    "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule", "weights_only"},
    "validate": {"model", "dataloaders", "datamodule", "weights_only"},
}


class AgentsOfYAML(MultiAgentReinforce):
    """The module as YAML gives it: agents and tokenizers are names, and `config` is there, so its fields are keys."""

    def __init__(
        self,
        *,
        algorithm: Literal["magrpo", "marloo", "maremax", "mareinforce"] = "magrpo",
        num_agents: int = 2,
        agents: list[str] | None = None,
        tokenizer: str | list[str] | None = None,
        lora: LoRA | list[LoRA | None] | None = None,
        config: MAGRPOConfig = MAGRPOConfig(),  # noqa: B008 (the parser reads the default's fields and makes its own)
        **kwargs: Any,
    ) -> None:
        super().__init__(
            algorithm=algorithm, num_agents=num_agents, agents=agents, tokenizer=tokenizer, lora=lora, config=config,
            **kwargs,
        )  # fmt: skip


class SaveRunConfig(SavedConfig):
    """Writes `config.yaml`, and tells every logger what is in it, without secrets."""

    def save_config(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Write it and tell the loggers."""
        super().save_config(trainer, pl_module, stage)
        log_hyperparameters(trainer.loggers, yaml.safe_load(self.parser.dump(self.config, skip_none=False)))


class MareinforceCLI(LightningCLI):
    """Parse, refuse, build and run `fit` or `validate`.

    Everything that can be refused is refused before a model loads. `fit` gets a new run folder with `config.yaml`
    and `metrics.csv`, or goes on in the folder of the run it resumes.

    Args:
        command: fit or validate.
        arguments: command-line arguments.

    Raises:
        MareinforceError: a sentence for the user.
    """

    def __init__(self, command: str, arguments: list[str]) -> None:
        asks_for_help = any(argument.startswith(("--help", "-h")) for argument in arguments)
        set_parsing_settings(docstring_parse_attribute_docstrings=asks_for_help)  # slow, and only help shows them
        self.command, self._arguments = command, arguments
        self.run_folder: Path | None = None
        self.tracker: WandbTracker | None = None
        self._header = RunHeader()
        self._trained = False
        try:
            super().__init__(
                AgentsOfYAML,
                RowsDataModule,
                save_config_callback=SaveRunConfig if command == "fit" else None,
                trainer_defaults=dict(_DEFAULTS),
                seed_everything_default=0,
                parser_kwargs={**_PARSER, command: dict(_PARSER)},
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
                args=[command, *arguments],
            )
        except BaseException as error:
            self._end_badly(error)
            if isinstance(error, KeyboardInterrupt) and command == "fit" and not self._trained:
                raise KeyboardInterrupt(BEFORE_TRAINING) from None
            raise

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The one command there is."""
        return {self.command: _METHOD_SKIPS[self.command]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Let keys set their twins in `model.config`, and take what is neither model nor data nor trainer."""
        add_own_arguments(parser)
        link_arguments(parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse twice: what was given and nothing else, to check it, and then with the defaults and links."""
        if not self._arguments:
            raise ConfigError("give --config FILE, such as configs/quickstart.yaml; --help shows what there is.")
        importlib.import_module("mareinforce.callbacks")  # so that the parser knows them by their bare names
        command, *others = spelt(args)
        arguments = [command, *files_first(others)]
        plain = self._plain_parser()
        known = [key for key, _ in plain.get_defaults(skip_validation=True).items() if key != "config"]
        complaint = None
        try:
            asked = [one for one in arguments[1:] if not one.startswith("--print_config")]  # with defaults, below
            given = plain.parse_args(asked, defaults=False)
            check_twins(given.as_dict().get("model") or {})
            self.config = parser.parse_args(arguments)
        except argparse.ArgumentError as error:
            complaint = error.message
        if complaint is not None:  # outside of `except`: the parser's own error is nothing to show
            raise explained(complaint, known)
        settings = self.config[self.command]
        settings.model.num_agents = team_size(settings.model.num_agents, settings.model.agents)
        settings.ckpt_path = self._checkpoint(settings)

    def before_instantiate_classes(self) -> None:
        """Refuse what Lightning's Trainer would do otherwise than hoped."""
        check_trainer(self.config[self.command].trainer.as_dict(), training=self.command == "fit")

    def instantiate_classes(self) -> None:
        """Build what the configuration describes. What we refuse is said as we say it, not as the parser wraps it."""
        refusal = None
        try:
            super().instantiate_classes()
        except ValueError as error:
            if error.__cause__ is None:
                raise
            refusal = not_made(error)
        if refusal is not None:  # outside of `except`: the parser's own error is nothing to show
            raise refusal

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the Trainer, with a run folder, its loggers and its checkpoints if it is going to train."""
        arguments = self.config_init[self.command].trainer
        if arguments.devices == "auto":
            kwargs["devices"] = 1
        if self.command == "fit":
            kwargs |= self._training_arguments(arguments)
            if several_processes(arguments.as_dict()):
                kwargs["strategy"] = TeamDDP()
        else:
            bars = [] if arguments.enable_progress_bar is False else [RunProgress()]
            kwargs |= {"logger": False, "enable_checkpointing": False, "callbacks": bars}  # others are for training
            if several_processes(arguments.as_dict()):  # of a configuration to train with
                kwargs |= {"strategy": "auto", "devices": 1, "num_nodes": 1}
            if (protocol := self.config_init[self.command].eval) is not None:
                self.run_folder = new_run_folder(arguments.default_root_dir, "eval")
                kwargs["callbacks"] = [*bars, ProtocolEvaluation(protocol, self.run_folder)]
        return super().instantiate_trainer(**kwargs)

    def fit(self, model: MultiAgentReinforce, **kwargs: Any) -> None:
        """Train. Raises SystemExit with 130 after SIGINT and 143 after SIGTERM, where Lightning has 1 and 0."""
        trainer: Any = self.trainer
        stopped: StopBySignal = next(one for one in trainer.callbacks if isinstance(one, StopBySignal))
        try:
            self.trainer.fit(model, **kwargs, weights_only=True)
        except SIGTERMException:  # before training began
            raise SystemExit(TERMINATED) from None
        except SystemExit as stop:
            if stopped.received is None and isinstance(stop.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            if stopped.received is None:
                raise
        if stopped.received is not None:
            kept = trainer.lightning_module is not None and trainer.lightning_module.batches > 0
            resume = f"python -m mareinforce.fit --config {self.run_folder}/{CONFIG_FILE} --ckpt_path last"
            after = f"go on with: {resume}" if kept else NOTHING_KEPT
            if trainer.is_global_zero:
                sys.stderr.write(f"stopped by {stopped.received.name}; {after}\n")
            raise SystemExit(stopped.exit_status)

    def validate(self, model: MultiAgentReinforce, **kwargs: Any) -> None:
        """Evaluate all rows, or as many as the command line asks for; then there are `metrics` of `eval_rows` rows.

        `eval_num_samples` of a file is for the evaluations of a training.
        """
        self.datamodule.validates_all = not gives(self._arguments, "model.config.eval_num_samples")
        self.metrics: dict[str, float] = {}
        with warnings.catch_warnings():
            # checkpoints were written by callbacks that evaluation has no use for
            warnings.filterwarnings("ignore", message=".*callbacks used to create the checkpoint.*")
            for values in self.trainer.validate(model, **{**kwargs, "verbose": False, "weights_only": True}):
                self.metrics |= {name: float(value) for name, value in values.items()}
        wanted = self.datamodule.eval_rows(None if self.datamodule.validates_all else model.config.eval_num_samples)
        self.eval_rows = min(len(wanted), int(sum(self.trainer.num_val_batches)) * model.config.eval_batch_size)

    def after_fit(self) -> None:
        """Save the agents in the run folder, loadable by `from_pretrained`."""
        assert self.run_folder is not None
        self._trained = True
        if self.trainer.is_global_zero:
            self.model.save_model(self.run_folder / "agents")
        if self.tracker is not None:
            if self.tracker.settings.save_models:
                self.tracker.log_agents(self.run_folder / "agents")
            self.tracker.close()

    def _end_badly(self, error: BaseException) -> None:
        """Leave no run going at a tracker, and no folder of a run from which nothing came."""
        if self.tracker is not None:
            self.tracker.close(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else FAILED)
        if self.run_folder is not None and rank_by_environment() == 0:
            discarded = discard_if_nothing_came(self.run_folder)
            if discarded and self._header.printed:
                sys.stderr.write(f"nothing came of this run: its folder {self.run_folder} is not kept\n")

    def _plain_parser(self) -> LightningArgumentParser:
        parser = self.init_parser(**_PARSER, usage=USAGE[self.command], description=DESCRIPTION)
        self.add_default_arguments_to_parser(parser)
        self.add_core_arguments_to_parser(parser)
        add_own_arguments(parser)
        parser.add_method_arguments(Trainer, self.command, skip=set(_METHOD_SKIPS[self.command]))
        arrange_help(parser)
        return parser

    def _checkpoint(self, settings: Namespace) -> str | None:
        run = run_given(self._arguments)
        return checkpoint_to_resume(settings.ckpt_path, settings.trainer.default_root_dir, "ckpt_path", run)

    def _training_arguments(self, arguments: Namespace) -> dict[str, Any]:
        settings = self.config[self.command]
        folder = folder_of_run(settings.ckpt_path) or run_folder_of_rank(arguments.default_root_dir)
        self.run_folder = folder
        given = arguments.logger if not isinstance(arguments.logger, bool | None) else []
        loggers = [MetricsCSV(folder), *(given if isinstance(given, list | tuple) else [given])]
        if settings.wandb:
            self.tracker = WandbTracker(wandb_settings(settings), folder, tracked_run(settings.ckpt_path))
            loggers.append(self.tracker)
        settings.ckpt_path = None  # what config.yaml will say: it starts the run anew
        callbacks = arguments.callbacks or []
        callbacks = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
        callbacks += [*default_callbacks(callbacks), StopBySignal(), self._header]
        if arguments.enable_progress_bar is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
            callbacks.append(RunProgress())
        if (protocol := self.config_init[self.command].eval) is not None:
            callbacks.append(ProtocolEvaluation(protocol))
        if arguments.enable_checkpointing is not False and not any(isinstance(c, Checkpoint) for c in callbacks):
            callbacks.append(TeamCheckpoint())
        if arguments.max_epochs is None:
            arguments.max_epochs = settings.model.config.num_train_epochs
        return {
            "default_root_dir": str(folder),
            "logger": loggers,
            "callbacks": callbacks,
            "max_epochs": arguments.max_epochs,
            "limit_val_batches": 0,  # evaluation happens inside training, by eval_interval
            "num_sanity_val_steps": 0,
        }
