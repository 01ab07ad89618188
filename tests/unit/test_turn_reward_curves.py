"""The picture in the run folder."""

from __future__ import annotations

import lightning as L
import pytest
from mareinforce.callbacks import TurnRewardCurves
from mareinforce.callbacks.turn_reward_curves import draw_curves, read_curves

ROWS = [
    {"step": "0", "turn_1/reward_mean": "", "turn_2/reward_mean": "", "eval/turn_1/reward_mean": "9"},
    {"step": "4", "turn_1/reward_mean": "0.5", "turn_2/reward_mean": "", "turn_1/raw_reward_mean": "7"},
    {"step": "24", "turn_1/reward_mean": "0.75", "turn_2/reward_mean": "0.25", "turn_1/raw_reward_mean": "7"},
]


def draw(curves, trainer):
    curves.on_train_start(trainer, L.LightningModule())
    curves.on_fit_end(trainer, L.LightningModule())


def test_reads_the_training_rewards_of_every_turn_and_nothing_else():
    assert read_curves(ROWS) == {1: [(4, 0.5), (24, 0.75)], 2: [(24, 0.25)]}


def test_draws_a_png_that_appears_whole(tmp_path):
    draw_curves(read_curves(ROWS), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["curve.png"]


def test_a_trainer_without_metrics_draws_nothing(tmp_path):
    trainer = L.Trainer(logger=False, default_root_dir=tmp_path, accelerator="cpu", enable_progress_bar=False)
    draw(TurnRewardCurves(), trainer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("picture", ["reward_curves.png", "other.png"])
def test_draws_what_a_run_logged(tmp_path, picture):
    from mareinforce.csv_log import MetricsCSV

    logger = MetricsCSV(tmp_path)
    logger.log_metrics({"turn_1/reward_mean": 0.5}, step=4)
    trainer = L.Trainer(logger=logger, default_root_dir=tmp_path, accelerator="cpu", enable_progress_bar=False)
    draw(TurnRewardCurves(picture), trainer)
    assert (tmp_path / picture).exists()
