"""The quickstart really learns, whatever the seed. About a minute and a half each: `pytest -m learning`."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from mareinforce.fit import main

CONFIGS = Path(__file__).parents[2] / "configs"
NODES = 20


@pytest.mark.learning
@pytest.mark.parametrize("recipe", ["quickstart", "quickstart_lora"])
@pytest.mark.parametrize("seed", range(5))
def test_the_quickstart_learns_within_150_updates(recipe, seed, tmp_path):
    config = CONFIGS / f"{recipe}.yaml"
    status = main(
        ["--config", str(config), "--seed_everything", str(seed), "--trainer.default_root_dir", str(tmp_path)]
    )
    assert status == 0
    with (tmp_path / "run_0001" / "metrics.csv").open(newline="") as file:
        rewards = [float(row["turn_1/reward_mean"]) for row in csv.DictReader(file) if row["turn_1/reward_mean"]]
    assert len(rewards) == 150
    assert sum(rewards[:NODES]) / NODES < 0.6
    assert sum(rewards[-NODES:]) / NODES >= 0.95
