"""metrics.csv: its columns, that every row is on disk at once, and that it is gone on with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mareinforce import csv_log
from mareinforce.csv_log import MetricsCSV, ordered_columns, read_metrics
from mareinforce.run_summary import summary, turn_lines


def lines(folder: Path) -> list[str]:
    return (folder / "metrics.csv").read_text().splitlines()


def test_step_then_curves_by_turn_then_the_rest_as_first_seen() -> None:
    seen = ["loss", "turn_10/reward_mean", "turn_2/expected_return", "turn_2/reward_mean", "step", "b", "turn_1/x", "b"]
    assert ordered_columns(seen) == [
        "step", "turn_2/reward_mean", "turn_2/expected_return", "turn_10/reward_mean", "loss", "b", "turn_1/x",
    ]  # fmt: skip
    assert ordered_columns(seen) != ["step", *sorted(set(seen) - {"step"})]


def test_every_row_is_on_disk_when_logged_and_step_is_the_one_given(tmp_path: Path) -> None:
    log = MetricsCSV(tmp_path / "run")
    log.log_metrics({"turn_1/reward_mean": 0.5, "step": 99.0}, step=16)
    assert lines(tmp_path / "run") == ["step,turn_1/reward_mean", "16,0.5"]
    log.log_metrics({"turn_1/reward_mean": 0.25}, step=32)
    assert lines(tmp_path / "run")[-1] == "32,0.25"


def test_values_are_plain_numbers(tmp_path: Path) -> None:
    values = {"a": torch.tensor(0.5, requires_grad=True), "b": np.float64(0.1), "c": np.int64(3), "d": True, "e": 2}
    MetricsCSV(tmp_path).log_metrics({**values, "f": float("nan")}, step=1)
    assert lines(tmp_path)[1] == "1,0.5,0.1,3,1.0,2,nan"


def test_what_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="could not convert"):
        MetricsCSV(tmp_path).log_metrics({"a": "good"}, step=1)


def test_new_columns_take_their_place_and_old_rows_stay(tmp_path: Path) -> None:
    log = MetricsCSV(tmp_path)
    log.log_metrics({"turn_1/reward_mean": 1.0, "loss": 2.0}, step=4)
    log.log_metrics({"turn_2/reward_mean": 3.0, "turn_1/expected_return": 4.0}, step=8)
    log.log_metrics({"loss": 5.0}, step=12)
    assert lines(tmp_path) == [
        "step,turn_1/reward_mean,turn_1/expected_return,turn_2/reward_mean,loss",
        "4,1.0,,,2.0",
        "8,,4.0,3.0,",
        "12,,,,5.0",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_kill_while_columns_are_added_loses_no_row(tmp_path: Path, monkeypatch) -> None:
    log = MetricsCSV(tmp_path)
    log.log_metrics({"a": 1.0}, step=1)
    monkeypatch.setattr(csv_log.os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        log.log_metrics({"a": 2.0, "b": 3.0}, step=2)
    assert lines(tmp_path) == ["step,a", "1,1.0"]


def test_an_existing_file_is_gone_on_with(tmp_path: Path) -> None:
    MetricsCSV(tmp_path).log_metrics({"a": 1.0}, step=1)
    again = MetricsCSV(tmp_path)
    again.log_metrics({"a": 2.0}, step=2)
    again.log_metrics({"b": 3.0}, step=3)
    assert lines(tmp_path) == ["step,a,b", "1,1.0,", "2,2.0,", "3,,3.0"]


def test_a_row_cut_by_a_kill_is_dropped_and_not_glued_to_the_next(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,a,b\n1,1.0,2.0\n2,1")
    MetricsCSV(tmp_path).log_metrics({"a": 5.0, "b": 6.0}, step=3)
    assert lines(tmp_path) == ["step,a,b", "1,1.0,2.0", "3,5.0,6.0"]


def test_rows_with_nothing_but_lightnings_epoch_are_left_out(tmp_path: Path) -> None:
    log = MetricsCSV(tmp_path)
    log.log_metrics({"epoch": 0}, step=1)
    assert not log.path.exists()
    log.log_metrics({"epoch": 0, "a": 1.0}, step=2)
    assert lines(tmp_path) == ["step,epoch,a", "2,0,1.0"]


def test_hyperparameters_write_nothing_and_folders_are_the_run_folder(tmp_path: Path) -> None:
    log = MetricsCSV(tmp_path)
    log.log_hyperparams({"a": 1})
    assert list(tmp_path.iterdir()) == []
    assert log.log_dir == log.save_dir == str(tmp_path)


def test_summary_compares_the_first_and_the_last_rows(tmp_path: Path) -> None:
    log = MetricsCSV(tmp_path)
    for number in range(20):
        log.log_metrics({"turn_1/reward_mean": float(number)}, step=number)
        log.log_metrics({"eval/turn_1/reward_mean": 100.0}, step=number)
    log.log_metrics({"turn_2/reward_mean": 7.0}, step=20)
    assert turn_lines(log.path) == [
        "turn 1 reward: 1 -> 18 (first and last 3 of 20 rows of metrics)",
        "turn 2 reward: 7 (1 row of metrics)",
    ]
    assert summary(tmp_path).splitlines()[-1] == f"run folder: {tmp_path}"


def test_summary_without_metrics_still_says_the_folder(tmp_path: Path) -> None:
    assert summary(tmp_path) == f"run folder: {tmp_path}"


def test_read_metrics_gives_text_by_column(tmp_path: Path) -> None:
    MetricsCSV(tmp_path).log_metrics({"a": 1.5}, step=3)
    assert read_metrics(tmp_path / "metrics.csv") == [{"step": "3", "a": "1.5"}]
