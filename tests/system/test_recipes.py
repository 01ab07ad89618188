"""Every recipe in configs/ runs: as a user runs it, on fewer rows, with the embedded model in place of larger ones."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml

import mareinforce.cli  # noqa: F401 (Lightning keeps the stderr it is imported with)
from mareinforce import fit

RECIPES = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
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


def run(recipe: Path, folder: Path, **changes: str) -> int:
    """Exit status of a small run of a recipe."""
    options = {**SMALL, **changes, "trainer.default_root_dir": str(folder)}
    agents = yaml.safe_load(recipe.read_text())["model"].get("agents")
    if agents:  # a team of several models
        del options["model.agent_model"]
        options["model.agents"] = json.dumps(["tiny-story"] * len(agents))
    return fit.main(["--config", str(recipe), *(f"--{key}={value}" for key, value in options.items())])


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
