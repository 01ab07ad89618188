"""The command line in one process: what is read, what sets what, what is refused and in which words."""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, TQDMProgressBar
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException

from mareinforce import fit
from mareinforce.checkpoint import TeamCheckpoint
from mareinforce.cli import MareinforceCLI
from mareinforce.csv_log import MetricsCSV
from mareinforce.ddp import TeamDDP
from mareinforce.errors import ConfigError, MareinforceError, MareinforceWarning
from mareinforce.own_arguments import run_given
from mareinforce.parse_errors import nearest_key
from mareinforce.progress import RunProgress
from mareinforce.reporting import quiet
from mareinforce.trainer_rules import check_trainer

REAL_FIT = MareinforceCLI.fit
REAL_TRAINER_FIT = Trainer.fit
MY_TASK = """
from lightning.pytorch.loggers import CSVLogger
def reward(first, second):
    return [0.0] * len(first)

def any_number(*texts):
    return [0.0] * len(texts[0])

class Scale:
    def __init__(self, factor: float):
        self.factor = factor
    def __call__(self, reward):
        return self.factor * reward

class Unmade(CSVLogger):
    def __init__(self):
        raise ModuleNotFoundError("no package")

class Judge:
    def __init__(self, api_key: str, name: str):
        self.api_key = api_key
    def __call__(self, reward):
        return reward
"""
RECIPE = {
    "model": {
        "agent_model": "tiny-story",
        "reward_func": "my_task.reward",
        "config": {"num_turns": 1, "num_train_epochs": 3, "agent_learning_rate": 1e-3},
    },
    "data": {"train": [{"prompt": "a b"}]},
    "trainer": {"accelerator": "cpu"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """The user's folder, in which nothing is trained: what matters is what would be."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(MareinforceCLI, "fit", lambda self, **_: None)
    monkeypatch.setattr(MareinforceCLI, "after_fit", lambda self: None)
    (tmp_path / "my_task.py").write_text(MY_TASK)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return tmp_path


def parse(*arguments: str, text: str | None = None) -> MareinforceCLI:
    if text is not None:
        Path("overlay.yaml").write_text(text)
        arguments = ("--config", "overlay.yaml", *arguments)
    return build("--config", "recipe.yaml", *arguments)


def build(*arguments: str) -> MareinforceCLI:
    with quiet():
        return MareinforceCLI("fit", list(arguments))


def refusal(*arguments: str, text: str | None = None, kept: int = 0) -> str:
    with pytest.raises(MareinforceError) as error:
        parse(*arguments, text=text)
    assert len(list(Path().glob("runs/*"))) == kept, "refused before anything was written"
    assert "\n" not in str(error.value)
    return str(error.value)


# what is read


def test_a_recipe_is_read_and_the_users_function_is_found_in_the_current_folder(folder: Path) -> None:
    cli = parse()
    assert (cli.model.config.num_turns, cli.model.config.num_agents, cli.model.team) == (1, 2, None)
    assert cli.config["fit"].model.reward_func.__module__ == "my_task"


@pytest.mark.parametrize(
    ("written", "rate"),
    [("5e-5", 5e-5), ("1e-4", 1e-4), ("5.0e-5", 5e-5), ('"5e-5"', 5e-5), (".5", 0.5), ("[5e-5, 1e-4]", [5e-5, 1e-4]),
     ('[5.0e-5, "1e-4"]', [5e-5, 1e-4])],
)  # fmt: skip
def test_every_way_to_write_a_number_is_that_number(folder: Path, written: str, rate: Any) -> None:
    in_yaml = parse(text=f"model: {{config: {{agent_learning_rate: {written}}}}}")
    overridden = parse(f"--model.config.agent_learning_rate={written}")
    assert in_yaml.model.config.agent_learning_rate == overridden.model.config.agent_learning_rate == rate
    assert build("--config", _saved_config(overridden)).model.config == overridden.model.config


def _saved_config(cli: MareinforceCLI) -> str:
    path = cli.run_folder / "config.yaml"
    for callback in cli.trainer.callbacks:
        if isinstance(callback, SaveConfigCallback):
            with quiet():
                callback.setup(cli.trainer, cli.model, "fit")
    return str(path)


def test_a_whole_number_with_an_exponent_is_refused_by_name(folder: Path) -> None:
    for message in (
        refusal(text="model: {config: {max_new_tokens: 1e2}}"), refusal("--model.config.max_new_tokens", "1e2")
    ):  # fmt: skip
        assert message == (
            "model.config.max_new_tokens=100.0: must be a whole number, written without point or exponent."
        )
    assert parse("--model.config.max_new_tokens", "100").model.config.max_new_tokens == 100


def test_a_number_for_a_text_is_refused_and_asks_for_quotes(folder: Path) -> None:
    for key, text in [
        ("data.prompt_column", "data: {prompt_column: 1e3}"), ("model.agent_model", "model: {agent_model: 1e3}")
    ]:  # fmt: skip
        assert refusal(text=text) == (
            f"{key}=1000.0: this is read as a number where text is wanted; put quotes around it."
        )
    assert parse(text='data: {prompt_column: "1e3"}').datamodule.prompt_column == "1e3"
    assert parse("--data.prompt_column", "1e3").datamodule.prompt_column == "1e3"
    assert parse("--data.prompt_column", '"1e3"').datamodule.prompt_column == "1e3"


def test_the_name_of_a_run_stays_text(folder: Path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for cli in (
        parse("--wandb", "--wandb-name", "1e3"),
        parse("--wandb=true", "--wandb_name=1e3"),
        parse("--wandb-name=1e3", text="wandb: true"),
        parse(text='{wandb: true, wandb_name: "1e3"}'),
    ):
        assert cli.tracker is not None
        assert cli.tracker.settings.name == "1e3"
        saved = yaml.safe_load(Path(_saved_config(cli)).read_text())
        assert (saved["wandb"], saved["wandb_name"]) == (True, "1e3")
        wandb.finish()  # it was told the configuration, and nobody trains
    assert refusal(text="wandb_name: 1e3", kept=4) == (
        "wandb_name=1000.0: this is read as a number where text is wanted; put quotes around it."
    )


@pytest.mark.parametrize("seed", ["7", '"7"'])
def test_the_seed_may_be_quoted(folder: Path, seed: str) -> None:
    assert parse(text=f"seed_everything: {seed}").model.seed == 7
    assert parse("--seed_everything", seed).model.seed == 7


def test_without_a_seed_runs_are_equal(folder: Path) -> None:
    assert parse().model.seed == parse().model.seed == 0


def test_a_callable_class_takes_init_args(folder: Path) -> None:
    cli = parse(text="model: {reward_processor: {class_path: my_task.Scale, init_args: {factor: 1e2}}}")
    assert cli.model._reward._processor.func(2.0) == 200.0


# what sets what


@pytest.mark.parametrize(
    ("algorithm", "mode"), [("magrpo", "mean"), ("marloo", "rloo"), ("maremax", "max"), ("mareinforce", "raw")]
)
def test_the_algorithm_sets_the_advantage_mode(folder: Path, algorithm: str, mode: str) -> None:
    assert parse("--model.algorithm", algorithm).model.config.advantage_mode == mode


def test_the_number_of_agents_sets_its_twin_and_follows_the_list_of_agents(folder: Path) -> None:
    listed = ("--model.agent_model", "null", "--model.agents", "[a, b, c]", "--model.reward_func", "my_task.any_number")
    assert "model.num_agents=2, but model.agents lists 3" in refusal(*listed, "--model.num_agents", "2")
    cli = parse(*listed)
    assert cli.model.config.num_agents == len(cli.model.updates) == 3
    assert parse("--model.num_agents", "3", *listed[4:]).model.config.num_agents == 3


def test_a_twin_that_contradicts_is_refused_and_one_that_agrees_is_not(folder: Path) -> None:
    assert refusal(text="model: {config: {advantage_mode: rloo}}") == (
        "model.config.advantage_mode='rloo' contradicts model.algorithm='magrpo', which sets it: give "
        "model.algorithm: marloo instead."
    )
    assert "give model.algorithm instead" in refusal("--model.config.advantage_mode", "mean")
    assert "model.config.num_agents=3, but model.num_agents=2" in refusal(text="model: {config: {num_agents: 3}}")
    assert "give model.num_agents instead" in refusal("--model.config.num_agents", "2")
    assert parse(text="model: {algorithm: marloo, config: {advantage_mode: rloo, num_agents: 2}}").model is not None


def test_epochs_come_from_the_config_unless_the_trainer_is_told(folder: Path) -> None:
    assert parse().trainer.max_epochs == 3
    assert parse("--trainer.max_epochs", "2").trainer.max_epochs == 2


# where a run's files go


def test_every_run_has_a_new_folder_with_a_config_that_gives_the_same_run(folder: Path) -> None:
    first = parse("--model.config.agent_learning_rate", "[5e-5, 1e-4]", "--model.algorithm", "maremax")
    assert first.run_folder == Path("runs/run_0001")
    path = _saved_config(first)
    again = build("--config", path)
    assert again.run_folder == Path("runs/run_0002")
    assert again.model.config == first.model.config
    assert Path(_saved_config(again)).read_text() == Path(path).read_text()
    assert build("--config", path, "--model.algorithm", "marloo").model.config.advantage_mode == "rloo"


def test_another_parent(folder: Path) -> None:
    cli = parse("--trainer.default_root_dir", "other")
    assert cli.trainer.default_root_dir == str(Path("other/run_0001"))
    assert cli.trainer.log_dir == str(Path("other/run_0001"))


def test_metrics_csv_is_always_there_and_comes_first(folder: Path) -> None:
    assert [type(logger) for logger in parse().trainer.loggers] == [MetricsCSV]
    assert [type(logger) for logger in parse("--trainer.logger", "false").trainer.loggers] == [MetricsCSV]
    own = "{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: own}}"
    for written in (own, f"[{own}]"):
        cli = parse(text=f"trainer: {{logger: {written}}}")
        assert [type(logger) for logger in cli.trainer.loggers] == [MetricsCSV, CSVLogger]
        assert cli.trainer.log_dir == str(cli.run_folder)


def test_checkpoints_are_the_teams_unless_others_are_listed_or_none_are_wanted(folder: Path) -> None:
    def kinds(cli: MareinforceCLI) -> list[type]:
        return [type(callback) for callback in cli.trainer.checkpoint_callbacks]

    assert kinds(parse()) == [TeamCheckpoint]
    other = "lightning.pytorch.callbacks.ModelCheckpoint"
    assert kinds(parse(text=f"trainer: {{callbacks: [{{class_path: {other}}}]}}")) == [ModelCheckpoint]
    assert kinds(parse("--trainer.callbacks+=lightning.pytorch.callbacks.LambdaCallback")) == [TeamCheckpoint]
    assert kinds(parse("--trainer.enable_checkpointing", "false")) == []


def test_wandb_is_off_unless_asked_for_and_an_argument_overrides_a_file(folder: Path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert parse().tracker is None
    assert parse("--no-wandb", text="wandb: true").tracker is None
    cli = parse("--wandb-project", "mine", "--wandb-save-models", text="{wandb: true, wandb_entity: us}")
    assert cli.trainer.loggers[1:] == [cli.tracker]
    assert cli.tracker is not None
    settings = cli.tracker.settings
    assert (settings.project, settings.entity, settings.name, settings.save_models) == ("mine", "us", None, True)
    assert "Did you mean 'wandb_project'?" in refusal("--wandb-projct", "mine", kept=3)


def test_loggers_are_told_the_configuration_without_secrets(folder: Path, monkeypatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(MetricsCSV, "log_hyperparams", lambda self, params: told.append(params))
    judge = "{class_path: my_task.Judge, init_args: {api_key: abc, name: me}}"
    path = _saved_config(parse(text=f"model: {{reward_processor: {judge}}}"))
    assert told[0]["model"]["reward_processor"]["init_args"] == {"api_key": "(hidden)", "name": "me"}
    assert told[0]["model"]["config"]["num_train_epochs"] == 3
    assert "api_key: abc" in Path(path).read_text()  # which runs again as it is


def test_progress_is_shown_unless_another_bar_is_listed_or_none_is_wanted(folder: Path) -> None:
    def bars(cli: MareinforceCLI) -> list[type]:
        return [type(callback) for callback in cli.trainer.callbacks if isinstance(callback, ProgressBar)]

    other = "{class_path: lightning.pytorch.callbacks.TQDMProgressBar}"
    assert bars(parse()) == [RunProgress]
    assert bars(parse(text=f"trainer: {{callbacks: [{other}]}}")) == [TQDMProgressBar]
    assert bars(parse("--trainer.enable_progress_bar", "false")) == []


def test_what_people_look_at_is_there_unless_it_is_listed_otherwise(folder: Path) -> None:
    def listed(cli: MareinforceCLI) -> dict[str, Any]:
        own = [one for one in cli.trainer.callbacks if type(one).__module__.startswith("mareinforce.callbacks")]
        found = {type(one).__name__: one for one in own}
        assert len(found) == len(own)
        return found

    assert sorted(listed(parse())) == ["EarlyTerminationLogger", "EvaluationCallback", "TurnRewardCurves"]
    other = "{class_path: mareinforce.callbacks.TurnRewardCurves, init_args: {file_name: mine.png}}"
    found = listed(parse(text=f"trainer: {{callbacks: [{other}]}}"))
    assert sorted(found) == ["EarlyTerminationLogger", "EvaluationCallback", "TurnRewardCurves"]
    assert found["TurnRewardCurves"].file_name == "mine.png"
    assert listed(parse("--trainer.callbacks+=mareinforce.callbacks.ThroughputMonitor")).keys() > {"TurnRewardCurves"}


def test_a_run_goes_without_callbacks_that_cannot_be_imported(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr("mareinforce.default_callbacks.PACKAGE", "mareinforce.no_callbacks")
    with pytest.warns(MareinforceWarning, match=r"are left out. Install with pip install -e"):
        cli = parse()
    assert not [one for one in cli.trainer.callbacks if type(one).__module__.startswith("mareinforce.callbacks")]


def test_lightning_does_not_evaluate_by_itself(folder: Path) -> None:
    assert parse().trainer.limit_val_batches == 0
    assert parse().trainer.num_sanity_val_steps == 0


def test_the_last_checkpoint_is_looked_for_below_the_parent_and_gone_on_with_in_its_folder(folder: Path) -> None:
    assert "ckpt_path=last: there is no whole checkpoint in any run folder below 'runs'" in refusal(
        "--ckpt_path", "last"
    )
    assert "ckpt_path='no.ckpt': there is no such file" in refusal("--ckpt_path", "no.ckpt")
    first = parse()
    trainer = Trainer(accelerator="cpu", logger=False, max_epochs=0, enable_progress_bar=False)
    path = first.run_folder / "checkpoints" / "batch=1-updates=1.ckpt"
    first.model.configure_model()
    trainer.strategy.connect(first.model)
    trainer.save_checkpoint(path, weights_only=True)
    cli = parse("--ckpt_path", "last")
    assert cli.run_folder == first.run_folder
    assert cli.config_init["fit"].ckpt_path == str(path)
    assert "ckpt_path: null" in Path(_saved_config(cli)).read_text()
    assert len(list(Path("runs").iterdir())) == 1


# what is refused


@pytest.mark.parametrize(
    ("argument", "values", "names"),
    [
        ("max_steps", [5], "model.config.max_updates"),
        ("min_steps", [5], "leave it out"),
        ("max_epochs", [-1], "model.config.max_updates"),
        ("gradient_clip_val", [1.0, 0], "model.config.max_grad_norm"),
        ("gradient_clip_algorithm", ["value"], "model.config.max_grad_norm"),
        ("accumulate_grad_batches", [2], "model.config.train_batch_size"),
        ("precision", ["bf16-true", "16-true"], "hardly ever changes"),
        ("precision", ["16-mixed", 16, "16"], "bf16-mixed"),
        ("strategy", ["fsdp", "fsdp_cpu_offload", "deepspeed_stage_3", FSDPStrategy()], "cannot shard"),
        ("strategy", ["ddp_spawn", "ddp_fork", "ddp_notebook"], "run the command again"),
        ("strategy", ["ddp_find_unused_parameters_true", DDPStrategy()], "set ddp"),
        ("strategy", ["horovod"], "not known here"),
        ("use_distributed_sampler", [True], "data module"),
        ("barebones", [True], "metrics.csv"),
        ("val_check_interval", [2, 0.5], "model.config.eval_interval"),
        ("check_val_every_n_epoch", [2, None], "model.config.eval_interval"),
        ("limit_val_batches", [2, 0.5], "model.config.eval_num_samples"),
        ("num_sanity_val_steps", [2, -1], "model.config.eval_interval"),
    ],
)
def test_trainer_arguments_that_would_mislead_are_refused(argument: str, values: list[Any], names: str) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"^trainer\.{argument}=") as error:
            check_trainer({argument: value}, training=True)
        assert names in str(error.value)


@pytest.mark.parametrize(
    ("argument", "values"),
    [("max_steps", [-1]), ("precision", [None, 32, "32-true", "bf16-mixed"]), ("limit_val_batches", [None, 0]),
     ("strategy", ["auto", "single_device", "ddp"]), ("devices", ["auto", 1, "1", [3], "0,", 2, -1, [0, 1]]),
     ("num_nodes", [2]), ("max_epochs", [None, 0, 3]),
     ("accumulate_grad_batches", [1]), ("limit_train_batches", [2, 0.5]), ("use_distributed_sampler", [False])],
)  # fmt: skip
def test_trainer_arguments_that_do_what_they_say_are_taken(argument: str, values: list[Any]) -> None:
    for value in values:
        check_trainer({argument: value}, training=True)


def test_processes_that_would_each_train_a_team_of_their_own_are_refused(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_trainer({"strategy": "ddp", "devices": 2, "num_nodes": 2}, training=True)
    check_trainer({}, training=False)
    with pytest.raises(ConfigError, match=r"^trainer\.strategy='auto': 4 processes were started"):
        check_trainer({"devices": 1}, training=True)


def test_several_processes_need_a_command_to_run_again(monkeypatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    check_trainer({"devices": 1}, training=True)
    with pytest.raises(ConfigError, match="interactive session; write a script"):
        check_trainer({"devices": 2}, training=True)
    with pytest.raises(ConfigError, match="is one process on one device"):
        check_trainer({"devices": 2, "strategy": "single_device"}, training=True)


@pytest.mark.parametrize("arguments", [("--trainer.strategy", "ddp"), ("--trainer.devices", "2")])
def test_several_processes_add_up_gradients_by_themselves(folder: Path, arguments: tuple[str, ...]) -> None:
    cli = parse(*arguments)
    assert isinstance(cli.trainer.strategy, TeamDDP)
    assert not isinstance(parse().trainer.strategy, TeamDDP)
    cli.trainer.strategy.connect(cli.model)
    cli.trainer.strategy.configure_ddp()
    assert cli.trainer.strategy.model is cli.model  # Lightning wraps it


def test_evaluation_is_one_process_whatever_the_training_is(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(MareinforceCLI, "validate", lambda self, *args, **_: None)
    arguments = ["--config", "recipe.yaml", "--trainer.strategy", "ddp", "--trainer.devices", "2"]
    with quiet():
        cli = MareinforceCLI("validate", arguments)
    assert cli.trainer.world_size == 1
    assert cli.trainer.num_devices == 1


def test_evaluation_alone_may_be_limited() -> None:
    check_trainer({"limit_val_batches": 2}, training=False)


@pytest.mark.parametrize("argument", ["max_steps", "accumulate_grad_batches"])
def test_trainer_refusals_come_before_anything_is_built(folder: Path, argument: str) -> None:
    assert refusal(f"--trainer.{argument}", "2").startswith(f"trainer.{argument}=2: ")
    assert refusal(text=f"trainer: {{{argument}: 2}}").startswith(f"trainer.{argument}=2: ")


def test_devices_auto_means_one(folder: Path) -> None:
    assert parse("--trainer.devices", "auto").trainer.num_devices == 1


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("model.config.num_turn", "model.config.num_turns"),
        ("model.num_turns", "model.config.num_turns"),
        ("model.algoritm", "model.algorithm"),
        ("trainer.device", "trainer.devices"),
        ("data.trein", "data.train"),
        ("dataset.train", "data.train"),
        ("modle.algorithm", "model.algorithm"),
    ],
)
def test_unknown_keys_are_refused_with_the_near_match(folder: Path, key: str, near: str) -> None:
    expected = f"{key}: there is no such key. Did you mean {near!r}?"
    assert refusal(f"--{key}", "3") == expected
    nested: Any = 3
    for part in reversed(key.split(".")):
        nested = {part: nested}
    assert refusal(text=yaml.safe_dump(nested)) == expected


def test_a_key_like_no_other_gets_no_suggestion() -> None:
    known = ["model.config.top_p", "model.config.top_k", "trainer.devices"]
    assert nearest_key("model.config.zzzzzz", known) == ""
    assert nearest_key("model.config.topp", known) == " Did you mean 'model.config.top_p'?"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model.algorithm", "marlo"],
         "model.algorithm=marlo: must be magrpo | marloo | maremax | mareinforce. Did you mean 'marloo'?"),
        (["--model.config.num_turns", "two"], "model.config.num_turns=two: must be a whole number"),
        (["--model.config.mask_truncated", "3"], "model.config.mask_truncated=3: must be true or false."),
        (["--model.config.advantage_normalization", "skale"], "must be true or false or scale. Did you mean 'scale'?"),
        (["--model.config.num_generations", "1"], "num_generations=1: must be at least 2"),
        (["--model.config.value_clip_range", "0.2"], "there is no critic"),
        (["--model.config.num_turns", "2"], "num_turns=2 needs external_transition"),
        (["--model.reward_func", "my_task.rewad"],
         "this function cannot be found: module 'my_task' has no attribute 'rewad'. Did you mean 'reward'?"),
        (["--model.reward_func", "no_task.reward"],
         "cannot be found: No module named 'no_task'. Modules are also looked for in the current folder, /"),
        (["--wandb", "offline"],
         "wandb=offline: must be true or false. For a run that is uploaded later, set WANDB_MODE=offline beside it."),
        (["more.yaml"], "'more.yaml' on the command line belongs to no key. Did you mean --config more.yaml?"),
        (["--model.reward_func", "reward"], "model.reward_func=reward: must be a dotted path such as my_task.reward"),
        (["--model.config.num_turns"], "--model.config.num_turns: expected one argument"),
        (["train"], "'train' on the command line belongs to no key: write --KEY VALUE."),
        (["--config", "none.yaml"], "File does not exist"),
        (["--trainer.callbacks+={class_path: lightning.pytorch.callbacks.Timer, init_args: {foo: 1}}"],
         "callbacks: lightning.pytorch.callbacks.Timer has no argument 'foo'; it has duration, interval, verbose."),
        (["--trainer.callbacks+={class_path: mareinforce.callbacks.TreeView, init_args: {keep_lost: 1}}"],
         "it has every_n_env_steps, keep_last, console. Did you mean 'keep_last'?"),
        (["--trainer.callbacks+={class_path: mareinforce.callbacks.TreeView, init_args: {keep_last: x}}"],
         "trainer.callbacks: mareinforce.callbacks.TreeView keep_last=x: must be a whole number"),
        (["--trainer.callbacks+={class_path: mareinforce.callbacks.TreVew}"],
         "trainer.callbacks: mareinforce.callbacks has no 'TreVew'. Did you mean 'TreeView'?"),
        (["--trainer.callbacks+=mareinforce.callbacks.TreeVeiw"],
         "trainer.callbacks: mareinforce.callbacks has no 'TreeVeiw'. Did you mean 'TreeView'?"),
        (["--trainer.callbacks+={class_path: mareinforce.callbacks.TreeView, init_args: {keep_last: 0}}"],
         "TreeView keep_last=0: must be at least 1"),
        (["--trainer.logger={class_path: my_task.Unmade}"],
         "my_task.Unmade could not be made: ModuleNotFoundError: no package."),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_in_words(folder: Path, arguments: list[str], says: str) -> None:
    assert says in refusal(*arguments)


@pytest.mark.parametrize("text", ["", "[1, 2]", "model: ["])
def test_a_file_that_is_no_configuration_is_refused(folder: Path, text: str) -> None:
    assert "config" in refusal(text=text)


def test_a_missing_reward_is_refused(folder: Path) -> None:
    assert "reward_func is missing" in refusal(text="model: {reward_func: null}")


def test_arguments_override_files_wherever_they_stand(folder: Path) -> None:
    (folder / "over.yaml").write_text("model: {config: {num_generations: 6}}\nckpt_path: null\n")
    for given in (["--config", "over.yaml"], ["--config=over.yaml"]):
        late = parse("--model.config.num_generations", "5", *given)
        assert late.config["fit"].model.config.num_generations == 5
        assert parse(*given).config["fit"].model.config.num_generations == 6


# how it ends


def main(capsys, *arguments: str) -> tuple[int, str]:
    status = fit.main(["--config", "recipe.yaml", *arguments])
    return status, capsys.readouterr().err


def test_a_refusal_is_one_sentence_and_status_one(folder: Path, capsys) -> None:
    status, said = main(capsys, "--model.config.num_turn", "3")
    assert status == 1
    assert said == "error: model.config.num_turn: there is no such key. Did you mean 'model.config.num_turns'?\n"


def test_a_users_module_that_fails_to_import_shows_its_own_traceback(folder: Path, capsys) -> None:
    (folder / "broken_task.py").write_text("def reward(a, b): ...\nraise ValueError('boom')\n")
    status, said = main(capsys, "--model.reward_func", "broken_task.reward")
    assert status == 1
    assert 'broken_task.py", line 2' in said
    assert said.endswith(
        "error: model.reward_func=broken_task.reward: importing broken_task raised ValueError: boom.\n"
    )
    assert "mareinforce/" not in said


def test_interruption_and_bugs_have_their_own_endings(folder: Path, capsys, monkeypatch) -> None:
    def raising(error: BaseException) -> int:
        def run(self: Any, **_: Any) -> None:
            raise error

        monkeypatch.setattr(MareinforceCLI, "fit", run)
        return main(capsys)

    assert raising(KeyboardInterrupt())[0] == 130
    assert raising(SystemExit(143))[0] == 143
    status, said = raising(RuntimeError("ours"))
    assert status == 1
    assert "Traceback" in said
    assert said.endswith("RuntimeError: ours\n")


def test_signals_have_their_exit_status_whatever_lightning_makes_of_them(folder: Path, capsys, monkeypatch) -> None:
    def interrupted(self: Trainer, *_: Any, **__: Any) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)

    def terminated(self: Trainer, *_: Any, **__: Any) -> None:
        raise SIGTERMException

    def left(self: Trainer, *_: Any, **__: Any) -> None:
        sys.exit(3)

    monkeypatch.setattr(MareinforceCLI, "fit", REAL_FIT)
    for behaviour, status in [(interrupted, 130), (terminated, 143), (left, 3)]:
        monkeypatch.setattr(Trainer, "fit", functools.wraps(REAL_TRAINER_FIT)(behaviour))  # its arguments are keys
        assert main(capsys)[0] == status


def test_help_explains_the_fields_and_begins_with_examples(folder: Path, capsys) -> None:
    assert fit.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python -m mareinforce.fit --config FILE [--config OVERLAY ...] [--KEY VALUE ...]\n")
    assert "Weight of the next turn's return" in shown
    places = [shown.index(word) for word in ("options:", "--model.algorithm", "--no-wandb", "--trainer.accelerator")]
    assert places == sorted(places)
    assert max(map(len, shown.splitlines()[:15])) < 120


def test_the_whole_configuration_is_printed_and_runs_as_it_is(folder: Path, capsys) -> None:
    (folder / "overlay.yaml").write_text("model: {config: {num_turns: 1, temperature: 0.5}}")
    assert fit.main(["--config", "recipe.yaml", "--config", "overlay.yaml", "--wandb-name=x", "--print_config"]) == 0
    printed = capsys.readouterr().out
    written = yaml.safe_load(printed)
    assert written["model"]["config"]["temperature"] == 0.5  # of the overlay
    assert written["model"]["config"]["num_train_epochs"] == 3  # of the recipe
    assert written["wandb_name"] == "x"  # of the arguments
    assert written["model"]["config"]["discount"] == 1.0  # a default
    (folder / "printed.yaml").write_text(printed)
    assert build("--config", "printed.yaml").model.config == parse("--config", "overlay.yaml").model.config
    assert fit.main(["--config", "recipe.yaml", "--model.config.num_turn", "3", "--print_config"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.lora.rank", "3"], "model.lora.rank: there is no such key; model.lora has r, lora_alpha"),
        (["--model.lora", "{rank: 3}"], "model.lora.rank: there is no such key; model.lora has r, lora_alpha"),
        (["--model.lora", "[{r: 3}, {rr: 3}]"], "model.lora.rr: there is no such key; model.lora has r, lora_alpha"),
        (["--model.lora.r", "x"], "model.lora.r=x: must be a whole number"),
        (["--model.lora.r", "0"], "lora.r=0: must be a whole number of at least 1"),
        (
            ["--model.lora", "8"],
            "model.lora=8: must be key: value pairs (r, lora_alpha, target_modules ...)",
        ),
    ],
)
def test_adapters_that_cannot_be_meant_are_refused_in_a_sentence(
    folder: Path, arguments: list[str], message: str
) -> None:
    assert message in refusal(*arguments)


def test_adapters_can_be_set_in_part_or_one_an_agent(folder: Path) -> None:
    lora = parse("--model.lora.r", "4").config["fit"].model.lora
    assert (lora.r, lora.lora_alpha, lora.target_modules) == (4, 32, "all-linear")
    first, second = parse("--model.lora", "[{r: 4}, null]").config["fit"].model.lora
    assert first.r == 4
    assert second is None


def test_a_misspelt_callback_is_found(folder: Path, capsys) -> None:
    status, said = main(capsys, "--trainer.callbacks+=TreeVeiw")
    assert status == 1
    assert said == "error: trainer.callbacks=TreeVeiw: there is no such callback. Did you mean 'TreeView'?\n"


def test_interrupted_before_training_there_is_no_run_to_go_on_with(folder: Path, capsys, monkeypatch) -> None:
    def interrupted(self: Any, *_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(MareinforceCLI, "instantiate_classes", interrupted)
    assert main(capsys) == (130, "interrupted before training began: there is no run to go on with\n")


def test_help_lists_no_files_of_single_groups_and_names_the_trainers_arguments(folder: Path, capsys) -> None:
    assert fit.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "\nAgents, rewards and functions:\n" in shown
    assert "--trainer.max_time" in shown
    assert not re.findall(r"^  --\S+(?:\.help| CONFIG  )", shown, flags=re.MULTILINE)
    assert len(shown.splitlines()) < 450


def test_callbacks_have_their_bare_names(folder: Path) -> None:
    made = parse("--trainer.callbacks+=TreeView").trainer.callbacks
    assert "TreeView" in [type(one).__name__ for one in made]


def test_without_any_argument_a_file_is_asked_for(folder: Path, capsys) -> None:
    assert fit.main([]) == 1
    assert capsys.readouterr().err.startswith("error: give --config FILE")


@pytest.mark.parametrize(
    ("arguments", "run"),
    [
        (["--config", "runs/run_0008/config.yaml", "--ckpt_path", "last"], "runs/run_0008"),
        (["--config=runs/run_0008/config.yaml"], "runs/run_0008"),
        (["--config", "runs/run_0008/config.yaml", "--config", "runs/run_0002/config.yaml"], "runs/run_0002"),
        (["--config", "runs/run_0008/config.yaml", "--config", "overlay.yaml"], "runs/run_0008"),
        (["--config", "configs/config.yaml"], None),
        (["--config", "runs/run_0008/other.yaml"], None),
    ],
)
def test_the_run_whose_own_configuration_is_given(arguments: list[str], run: str | None) -> None:
    assert run_given(arguments) == (run and Path(run))


def test_last_beside_a_runs_own_configuration_is_of_that_run(folder: Path, capsys) -> None:
    for number, name in enumerate(("run_0001", "run_0002")):
        place = folder / "runs" / name / "checkpoints" / "batch=1-updates=1.ckpt"
        place.parent.mkdir(parents=True)
        torch.save({"mareinforce": {}}, place)
        os.utime(place, (number + 1, number + 1))
        shutil.copy(folder / "recipe.yaml", folder / "runs" / name / "config.yaml")
    (folder / "runs" / "run_0003").mkdir()
    shutil.copy(folder / "recipe.yaml", folder / "runs" / "run_0003" / "config.yaml")
    for config, run in [("runs/run_0001/config.yaml", "run_0001"), ("recipe.yaml", "run_0002")]:
        made = build("--config", config, "--ckpt_path", "last")
        assert made.run_folder == Path("runs") / run
    assert fit.main(["--config", "runs/run_0003/config.yaml", "--ckpt_path", "last"]) == 1
    assert "no whole checkpoint in 'runs/run_0003', whose file was given" in capsys.readouterr().err


def test_a_switch_of_a_file_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^wandb \(or wandb_save_models\)=maybe: must be true or false\.$"):
        parse(text="wandb: maybe")
