"""Curves read from metrics.csv, several runs in one, and the pictures of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
from mareinforce.callbacks import TurnRewardCurves, turn_reward_curves

from mareinforce import plot
from mareinforce.csv_log import MetricsCSV
from mareinforce.curves import Curve, draw, figure, read_curves, running_mean, together
from mareinforce.errors import ConfigError

ROWS = [
    {"step": "0", "turn_1/reward_mean": "", "turn_2/reward_mean": "", "eval/turn_1/reward_mean": "9"},
    {"step": "4", "turn_1/reward_mean": "0.5", "turn_2/reward_mean": "", "turn_1/raw_reward_mean": "7",
     "turn_1/reward_std": "0.25", "turn_1/expected_return": "0.5"},
    {"step": "24", "turn_1/reward_mean": "0.75", "turn_2/reward_mean": "0.25", "turn_1/raw_reward_mean": "7",
     "turn_1/reward_std": "0.125", "turn_1/expected_return": "1.0", "turn_1/expected_return_std": "0.5"},
]  # fmt: skip


def run_folder(folder, *rewards: float, first: int = 4, turns: int = 1):
    logger = MetricsCSV(folder)
    for index, reward in enumerate(rewards):
        values = {f"turn_{turn + 1}/{name}": reward + turn for turn in range(turns)
                  for name in ("reward_mean", "expected_return")}  # fmt: skip
        logger.log_metrics(values, step=first * (index + 1))
    return folder


class TestCurves:
    def test_reads_rewards_and_returns_of_every_turn_with_their_spread_and_nothing_else(self):
        assert read_curves(ROWS) == {
            "reward_mean": {1: Curve([4, 24], [0.5, 0.75], [0.25, 0.125]), 2: Curve([24], [0.25], [0.0])},
            "expected_return": {1: Curve([4, 24], [0.5, 1.0], [0.0, 0.5])},
        }
        assert read_curves(ROWS[:1]) == {}

    @pytest.mark.parametrize(("rows", "smooth"), [(1, [1, 2, 6, 3]), (2, [1, 1.5, 4, 4.5]), (9, [1, 1.5, 3, 3])])
    def test_the_running_mean_looks_back(self, rows, smooth):
        assert running_mean([1, 2, 6, 3], rows) == pytest.approx(smooth)

    def test_several_runs_are_compared_where_all_of_them_have_been(self):
        one, other = Curve([0, 10], [0.0, 10.0], [0, 0]), Curve([5, 20], [1.0, 16.0], [0, 0])
        steps, mean, deviation = together([one, other], rows=1)
        assert (steps[0], steps[-1]) == (5, 10)
        assert np.allclose(mean, (steps + (steps - 4)) / 2)  # between its rows a run goes straight
        assert np.allclose(deviation, 2.0)
        assert [len(values) for values in together([one, Curve([11], [1.0], [0])])] == [0, 0, 0]

    @pytest.mark.parametrize("runs", [1, 2])
    def test_a_png_appears_whole_and_several_turns_have_two_panels(self, tmp_path, runs):
        sizes = []
        for turns in (1, 2):
            folder = run_folder(tmp_path / f"{turns}", 0.5, 0.75, turns=turns)
            curves = read_curves(_rows(folder))
            draw([curves] * runs, folder / "curve.png")
            assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
            assert sorted(file.name for file in folder.iterdir()) == ["curve.png", "metrics.csv"]
            sizes.append(_size(folder / "curve.png"))
        assert sizes[0] == (910, 520)
        assert sizes[1] == (1430, 520)

    def test_a_figure_has_the_running_means_as_its_thick_lines(self, tmp_path):
        curves = read_curves(_rows(run_folder(tmp_path, 0.5, 0.75)))
        (axes,) = figure([curves], rows=2).axes
        thick = max(axes.lines, key=lambda line: line.get_linewidth())
        assert thick.get_ydata().tolist() == curves["reward_mean"][1].smooth(2).values
        assert thick.get_label() == "turn 1"

    def test_several_runs_are_told_apart_in_the_legend(self, tmp_path):
        runs = [read_curves(_rows(run_folder(tmp_path / name, 0.5, 0.75, turns=2))) for name in ("a", "b")]
        for axes in figure(runs, names=["runs/a", "runs/b"]).axes:
            shown = [text.get_text() for text in axes.get_legend().get_texts()]
            assert shown == ["runs/a", "runs/b", "turn 1", "turn 2"]
            styles = {line.get_label(): line.get_linestyle() for line in axes.lines}
            assert styles["runs/a"] != styles["runs/b"]


def _rows(folder):
    from mareinforce.csv_log import read_metrics

    return read_metrics(folder / "metrics.csv")


def _size(picture) -> tuple[int, int]:
    from matplotlib.image import imread

    height, width, _ = imread(picture).shape
    return width, height


class TestCallback:
    @pytest.mark.parametrize(
        ("options", "words"),
        [({"every_n_seconds": 0}, "every_n_seconds=0: must be above 0"), ({"file_name": "a.jpg"}, "end with .png")],
    )
    def test_what_cannot_be_meant_is_refused(self, options, words):
        with pytest.raises(ConfigError, match=f"TurnRewardCurves .*{words}"):
            TurnRewardCurves(**options)

    def test_a_trainer_without_metrics_draws_nothing(self, tmp_path):
        trainer = L.Trainer(logger=False, default_root_dir=tmp_path, accelerator="cpu", enable_progress_bar=False)
        curves = TurnRewardCurves()
        curves.on_train_start(trainer, L.LightningModule())
        curves.on_fit_end(trainer, L.LightningModule())
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("picture", ["reward_curves.png", "other.png"])
    def test_draws_what_a_run_logged(self, tmp_path, picture):
        run_folder(tmp_path, 0.5)
        curves = TurnRewardCurves(picture)
        curves.on_train_start(stand_in(tmp_path), None)
        curves.on_exception(stand_in(tmp_path), SimpleNamespace(env_step=4), KeyboardInterrupt())
        assert (tmp_path / picture).exists()

    def test_draws_now_and_then_and_less_often_where_that_takes_long(self, tmp_path, monkeypatch):
        now, drawn = [1000.0], []
        monkeypatch.setattr(turn_reward_curves.time, "monotonic", lambda: now[0])

        def draws(curves: Any, path: Any) -> None:
            drawn.append(now[0])
            now[0] += 2.0  # takes two seconds: at most a hundredth of the time is 200

        monkeypatch.setattr(turn_reward_curves, "draw", draws)
        monkeypatch.setattr(turn_reward_curves, "log_picture", lambda *_: None)
        curves, trainer = TurnRewardCurves(every_n_seconds=60), stand_in(run_folder(tmp_path, 0.5))
        curves.on_train_start(trainer, None)
        for _ in range(600):
            curves.on_train_batch_end(trainer, SimpleNamespace(env_step=4), None, None, 0)
            now[0] += 1.0
        assert drawn == [1060.0, 1262.0, 1464.0]
        only_at_the_end = TurnRewardCurves(every_n_seconds=None)
        only_at_the_end.on_train_start(trainer, None)
        now[0] += 1e9
        only_at_the_end.on_train_batch_end(trainer, SimpleNamespace(env_step=4), None, None, 0)
        assert len(drawn) == 3


def stand_in(folder) -> Any:
    return SimpleNamespace(log_dir=str(folder), is_global_zero=True, loggers=[])


class TestCommand:
    def test_one_run_is_drawn_into_its_folder_and_several_where_it_is_said(self, tmp_path, capsys):
        one, other = run_folder(tmp_path / "one", 0.5, 0.7, 0.9), run_folder(tmp_path / "other", 0.4, 0.6, first=5)
        assert plot.main([str(one)]) == 0
        assert capsys.readouterr().out == f"{one / 'reward_curves.png'}\n"
        out = tmp_path / "new" / "both.png"
        assert plot.main([str(one / "metrics.csv"), str(other), "--out", str(out), "--smooth", "1"]) == 0
        assert out.read_bytes().startswith(b"\x89PNG")
        assert not (other / "reward_curves.png").exists()

    def test_several_runs_are_drawn_in_the_current_folder(self, tmp_path, monkeypatch):
        folders = [str(run_folder(tmp_path / name, 0.5)) for name in ("one", "other")]
        monkeypatch.chdir(tmp_path)
        assert plot.main(folders) == 0
        assert (tmp_path / "reward_curves.png").exists()

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["nowhere"], "error: nowhere: there is no metrics.csv; give the folder of a run"),
            (["empty"], "error: empty/metrics.csv: has no row with a turn_1/reward_mean yet"),
            (["run", "--smooth", "0"], "error: --smooth 0: must be at least 1."),
            (["run", "--out", "picture.pdf"], "error: --out picture.pdf: must end with .png."),
            (["run", "--smoth", "2"], "unrecognized arguments: --smoth"),
            ([], "Usage: python -m mareinforce.plot RUN..."),
        ],
    )
    def test_what_cannot_be_drawn_is_said_in_a_sentence(self, tmp_path, monkeypatch, capsys, arguments, words):
        monkeypatch.chdir(tmp_path)
        run_folder(tmp_path / "run", 0.5)
        MetricsCSV(tmp_path / "empty").log_metrics({"eval/turn_1/reward_mean": 1.0}, step=0)
        assert plot.main(arguments) == 1
        assert words in capsys.readouterr().err
        assert not list(tmp_path.rglob("*.p*"))

    def test_help_says_what_there_is(self, capsys):
        assert plot.main(["--help"]) == 0
        assert "--smooth ROWS" in capsys.readouterr().out
