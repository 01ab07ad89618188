"""Weights & Biases and other loggers: off unless asked for, offline without a key or a question, and steps never go
back, also where a run is resumed. The real client writes offline, and what it wrote is read back."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import wandb
from lightning.pytorch.loggers import CSVLogger, Logger

from mareinforce.checkpoint import TeamCheckpoint
from mareinforce.csv_log import read_metrics
from mareinforce.errors import ConfigError, UserCodeError
from mareinforce.tracking import WandbSettings, WandbTracker
from tests.system.runs import metrics, rank, train, trainer
from tests.wandb_files import OfflineRun, offline_runs

TWO_TURNS = {
    "num_turns": 2,
    "external_transition": lambda num_agents: ["on"] * num_agents,
    "rows": ["go", "on", "up", "by"],
    "eval_dataset": ["go"],
    "eval_interval": 2,
    "shuffle": False,
    "enable_progress_bar": False,
}
"""Four batches of 2 + 4 joint actions, with an evaluation before the first and the third."""


@pytest.fixture(autouse=True)
def nobody_to_ask(monkeypatch, tmp_path):
    """No key anywhere, and an end of file for whoever asks."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr("sys.stdin", io.StringIO())


def complaints(history: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, float]]) -> list[str]:
    """What is wrong with the rows at a tracker, beside those of metrics.csv."""
    found = [
        f"{name} goes back"
        for name in ("env_step", "_step")
        if any(later[name] < earlier[name] for earlier, later in itertools.pairwise(history))
    ]
    if len(history) != len(rows):
        return [*found, f"{len(history)} rows for {len(rows)}"]
    for sent, row in zip(history, rows, strict=True):
        for name, value in row.items():
            there = sent.get("env_step" if name == "step" else name)
            if there is None or not math.isclose(there, value, rel_tol=1e-6):
                found.append(f"{name} is {there!r} for {value}")
    return found


def only_run(made: Any) -> OfflineRun:
    (found,) = offline_runs(made.run_folder)
    return found


def test_an_offline_run_holds_every_row_over_environment_steps_and_the_configuration(tmp_path):
    made = train(tmp_path, wandb_config={"project": "stories", "offline": True, "tags": ["two"]}, **TWO_TURNS)
    run, rows = only_run(made), metrics(made)
    assert (run.project, run.name, run.exit_code) == ("stories", "run_0001", 0)
    assert run.step_metric == {"env_step": "", "*": "env_step"}
    assert [row["env_step"] for row in run.history] == [0, 6, 12, 12, 18, 24]
    assert complaints(run.history, rows) == []
    together = next(row for row in run.history if row["env_step"] == 6)
    assert {"agent_0/loss", "agent_1/loss", "turn_1/reward_mean", "turn_2/reward_mean"} <= together.keys()
    evaluated = [{name for name in row if name[0] != "_"} for row in run.history if "eval/turn_1/reward_mean" in row]
    assert len(evaluated) == 2
    counters = {"env_step", "epoch", "batch", "updates", "agent_0/updates", "agent_1/updates"}
    assert all(name.startswith("eval/") for row in evaluated for name in row - counters)
    assert run.config["model"]["config"]["num_turns"] == 2
    assert run.config["model"]["algorithm"] == "magrpo"
    assert run.config["model"]["reward_func"] == "tests.system.runs.rank"


def test_rows_that_go_back_are_lost_or_are_changed_would_be_noticed(tmp_path):
    made = train(tmp_path, wandb_config={"offline": True}, **TWO_TURNS)
    history, rows = only_run(made).history, metrics(made)
    assert complaints(history[::-1], rows[::-1]) == ["env_step goes back", "_step goes back"]
    assert complaints(history[1:], rows) == ["5 rows for 6"]
    history[1]["agent_1/loss"] += 1
    assert len(complaints(history, rows)) == 1


def test_without_a_key_a_run_is_offline_and_nobody_is_asked(tmp_path, caplog):
    with caplog.at_level("INFO"):
        made = train(tmp_path, wandb_config={}, **TWO_TURNS)
    assert len(only_run(made).history) == 6
    (said,) = [one.getMessage() for one in caplog.records if "W&B" in one.getMessage()]
    assert f"wandb sync {made.run_folder}/wandb/offline-run-*" in said
    assert "wandb login" in said


def test_it_is_refused_in_a_sentence_where_it_must_be_online_and_cannot(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ConfigError, match=r"WANDB_MODE=online, but there is no W&B key .*WANDB_MODE=offline"):
        train(tmp_path, wandb_config={}, **TWO_TURNS)
    assert list(tmp_path.iterdir()) == []  # no folder is left
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert WandbTracker(WandbSettings(), tmp_path).mode == "online"


def test_a_key_that_there_is_not_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(ConfigError, match=r"wandb_config\.projct: there is no such key\. Did you mean 'project'\?"):
        trainer(tmp_path, wandb_config={"projct": "stories"})
    with pytest.raises(ConfigError, match=r"wandb_config\.x: there is no such key\. There are project, entity"):
        trainer(tmp_path, wandb_config={"x": 1})


def test_it_is_off_unless_asked_for_and_changes_nothing(tmp_path):
    without = train(tmp_path / "without", **TWO_TURNS)
    assert not (without.run_folder / "wandb").exists()
    assert metrics(train(tmp_path / "with", wandb_config={"offline": True}, **TWO_TURNS)) == metrics(without)


class Dies:
    """The reward, until a call that it does not survive."""

    def __init__(self, call: int) -> None:
        self.left = call

    def __call__(self, *texts: list[str]) -> list[float]:
        self.left -= 1
        if self.left == 0:
            raise OSError("the machine is gone")
        return rank(*texts)


def test_a_resumed_run_goes_on_with_its_run_and_sends_nothing_twice(tmp_path):
    whole = train(tmp_path / "whole", **TWO_TURNS)
    options = {**TWO_TURNS, "wandb_config": {"offline": True}}
    often = TeamCheckpoint(every_n_batches=1, keep_last=3)
    broken = trainer(tmp_path / "broken", Dies(14), callbacks=[often], **options)  # in the fourth batch
    with pytest.raises(UserCodeError, match="the machine is gone"):
        broken.train()
    (first_step,) = tmp_path.glob("broken/run_0001/checkpoints/batch=1-*.ckpt")
    resumed = trainer(tmp_path / "broken", **options)
    resumed.train(first_step)
    first, second = offline_runs(resumed.run_folder)
    assert first.id == second.id
    assert (first.exit_code, second.exit_code) == (1, 0)
    assert [row["env_step"] for row in first.history] == [0, 6, 12, 12, 18]
    assert [row["env_step"] for row in second.history] == [24]  # those of 12 and 18 are there already
    assert complaints([*first.history, *second.history], metrics(whole)) == []


def test_a_run_of_the_users_own_is_used_and_left_open(tmp_path):
    own = wandb.init(project="mine", mode="offline", dir=tmp_path)
    try:
        made = train(tmp_path / "runs", wandb_config={}, **TWO_TURNS)
        assert wandb.run is own
        assert not (made.run_folder / "wandb").exists()
        own.log({"after": 1.0})
    finally:
        own.finish()
    (run,) = offline_runs(tmp_path)
    assert complaints(run.history[:-1], metrics(made)) == []
    assert run.history[-1]["after"] == 1.0


def test_rows_of_others_stand_at_the_step_of_the_row_before(tmp_path):
    tracker = WandbTracker(WandbSettings(offline=True), tmp_path)
    for row, step in [({"ours": 1.0}, 6), ({"theirs": 1.0}, 1), ({"without": 1.0}, None), ({"ours": 2.0}, 12)]:
        tracker.log_metrics(row, step)
    tracker.close()
    (run,) = offline_runs(tmp_path)
    assert [row["env_step"] for row in run.history] == [6, 6, 6, 12]


def test_rows_are_handed_over_once_a_second_and_before_anything_else_asks_for_the_run(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr("mareinforce.tracking.time.monotonic", lambda: now)
    tracker = WandbTracker(WandbSettings(offline=True), tmp_path)
    handed_over = []
    for step in range(1, 5):
        tracker.log_metrics({"ours": 1.0}, step)
        handed_over.append(tracker.record()["rows"] if step == 4 else tracker._experiment.step)
        now += 0.3
    assert handed_over == [1, 1, 1, 4]
    now += 0.7
    tracker.log_metrics({"ours": 1.0}, 5)
    assert tracker._experiment.step == 5
    tracker.log_metrics({"ours": 1.0}, 6)
    tracker.close()
    (run,) = offline_runs(tmp_path)
    assert [row["env_step"] for row in run.history] == [1, 2, 3, 4, 5, 6]


def test_final_agents_go_up_as_artifacts_on_request(tmp_path):
    made = train(tmp_path / "asked", wandb_config={"offline": True, "save_models": True}, **TWO_TURNS)
    run = only_run(made)
    assert list(run.artifacts) == [f"agent_0-{run.id}", f"agent_1-{run.id}"]
    assert all({"config.json", "model.safetensors", "tokenizer.json"} <= set(files) for files in run.artifacts.values())
    assert only_run(train(tmp_path / "not", wandb_config={"offline": True}, **TWO_TURNS)).artifacts == {}


class RecordingLogger(Logger):
    """Keeps what a logger is told."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.hyperparameters: list[dict[str, Any]] = []

    name, version = "recording", 0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.hyperparameters.append(params)


@pytest.fixture
def beside(monkeypatch):
    """Put a logger beside those of runs from Python, as `trainer.logger` does in YAML."""
    import lightning as L

    def put(logger: Logger) -> None:
        real = L.Trainer
        monkeypatch.setattr(L, "Trainer", lambda **options: real(**options | {"logger": [*options["logger"], logger]}))

    return put


def test_any_logger_gets_each_row_once_and_the_configuration_without_secrets(tmp_path, beside):
    logger = RecordingLogger()
    beside(logger)
    made = train(tmp_path, system_prompt="I am hf_0123456789abcdef", chat_template=False, **TWO_TURNS)
    assert [({"step": step} | row) for step, row in logger.rows] == metrics(made)
    (told,) = logger.hyperparameters
    assert told["model"]["config"]["num_turns"] == 2
    assert told["model"]["config"]["system_prompt"] == "I am (hidden)"
    assert "I am hf_0123456789abcdef" in (made.run_folder / "config.yaml").read_text()


def test_lightnings_own_loggers_follow_environment_steps(tmp_path, beside):
    beside(CSVLogger(tmp_path / "theirs", name="csv", version=""))
    made = train(tmp_path / "ours", **TWO_TURNS)
    theirs = read_metrics(tmp_path / "theirs" / "csv" / "metrics.csv")
    ours = [row for row in metrics(made) if "turn_1/reward_mean" in row]
    rows = [row for row in theirs if row["turn_1/reward_mean"]]
    assert [int(row["step"]) for row in rows] == [row["step"] for row in ours] == [6, 12, 18, 24]
    assert "num_turns: 2" in (tmp_path / "theirs" / "csv" / "hparams.yaml").read_text()


def test_the_folder_of_a_run_is_where_it_writes(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    made = train(tmp_path / "runs", wandb_config={"offline": True, "dir": elsewhere, "name": "1e3"}, **TWO_TURNS)
    assert not (made.run_folder / "wandb").exists()
    (run,) = offline_runs(Path(elsewhere))
    assert run.name == "1e3"


def test_a_run_that_is_resumed_with_other_intervals_sends_nothing_of_earlier_steps(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,a,b\n6,1,\n12,1,\n")
    tracker = WandbTracker(WandbSettings(offline=True), tmp_path, goes_on={"id": "same", "rows": 1})
    for row, step in [({"b": 1.0}, 8), ({"a": 1.0}, 12), ({"b": 2.0}, 12), ({"a": 2.0}, 14), ({"b": 3.0}, 14)]:
        tracker.log_metrics(row, step)
    tracker.close()
    (run,) = offline_runs(tmp_path)
    rows = [{name: row[name] for name in ("a", "b", "env_step") if name in row} for row in run.history]
    assert rows == [{"b": 2.0, "env_step": 12}, {"a": 2.0, "env_step": 14}, {"b": 3.0, "env_step": 14}]
    assert run.id == "same"
    assert [row["_step"] for row in run.history] == [13, 14, 15]  # above those that went before
