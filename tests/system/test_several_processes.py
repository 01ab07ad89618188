"""Two processes that train one team: the same updates as one process, and the same end, however it comes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mareinforce.csv_log import read_metrics
from mareinforce.errors import ConfigError, MareinforceWarning
from tests.system import two_ranks
from tests.system.runs import rollouts

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> SimpleNamespace:
    """What two processes did and saw, training by training: `both.rank_0["trees"]`."""
    folder, port = tmp_path_factory.mktemp("two"), str(free_port())
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.system.two_ranks", str(folder)],
            cwd=ROOT,
            env={**os.environ, "LOCAL_RANK": str(local), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stderr=subprocess.PIPE,
            text=True,
        )
        for local in range(2)
    ]
    said = [process.communicate(timeout=550)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    loaded = [torch.load(folder / f"rank_{local}.pt") for local in range(2)]
    return SimpleNamespace(folder=folder, rank_0=loaded[0], rank_1=loaded[1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, Any]:
    """The same trainings in one process, with all the rows of a step."""
    folder = tmp_path_factory.mktemp("one")
    wide = {"prompts_per_step": 2, "rollout_buffer_size": 2}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=MareinforceWarning)
        return {name: two_ranks.run(folder, name, **{**wide, **fields}) for name, fields in two_ranks.SAME.items()}


def read(found: dict[str, Any]) -> list[dict[str, str]]:
    return read_metrics(Path(found["folder"]) / "metrics.csv")


@pytest.mark.parametrize("name", two_ranks.SAME)
def test_two_processes_make_the_updates_of_one(both, alone, name):
    two, one = both.rank_0[name], alone[name]
    assert two["error"] is None
    assert (two["env_step"], two["updates"]) == (one["env_step"], one["updates"])
    torch.testing.assert_close(torch.stack(two["steps"]), torch.stack(one["steps"]), rtol=0, atol=1e-6)
    assert (two["steps"][-1] - two["steps"][0]).abs().max() > 1e-3  # there was something to be equal about


@pytest.mark.parametrize("name", two_ranks.SAME)
def test_metrics_and_rollouts_are_those_of_one_process(both, alone, name):
    rows, expected = read(both.rank_0[name]), read(alone[name])
    assert ("turn_1/stopped_fraction" in rows[0]) == (name in ("trees", "tree weights"))
    assert [list(row) for row in rows] == [list(row) for row in expected]
    for row, other in zip(rows, expected, strict=True):
        for column in row:
            assert (row[column] == "") == (other[column] == "")
            if row[column]:
                assert float(row[column]) == pytest.approx(float(other[column]), rel=1e-4, abs=2e-5), column
    lines, others = (
        rollouts(SimpleNamespace(run_folder=Path(found[name]["folder"]))) for found in (both.rank_0, alone)
    )
    key = ("env_step", "row", "path", "agent", "k", "completion", "reward", "policy_version")
    assert [[line[name] for name in key] for line in lines] == [[line[name] for name in key] for line in others]


def test_weights_are_equal_on_both_ranks_after_every_step(both):
    for name, found in both.rank_0.items():
        if name not in ("not added up", "other weights"):
            assert len(found["steps"]) == len(both.rank_1[name]["steps"])
            assert all(map(torch.equal, found["steps"], both.rank_1[name]["steps"])), name


def test_without_adding_up_they_drift_apart(both):
    assert not torch.equal(both.rank_0["not added up"]["steps"][0], both.rank_1["not added up"]["steps"][0])


def test_no_row_is_trained_twice_in_an_epoch_and_none_is_left_out(both):
    steps = list(zip(both.rank_0["buffers"]["rows"], both.rank_1["buffers"]["rows"], strict=True))
    assert steps[:4] == [([0], [1]), ([2], [3]), ([4], [5]), ([6], [])]
    assert steps[4:] == steps[:4]


def test_trees_of_different_size_and_a_rank_without_signal_make_equal_steps(both):
    """The rows of rank 1 earn the same whatever is said there."""
    sizes = both.rank_0["trees"]["samples"], both.rank_1["trees"]["samples"]
    assert any(one != other for one, other in zip(*sizes, strict=True))
    found = read(both.rank_0["no signal"])
    assert {row["agent_0/zero_signal_fraction"] for row in found} == {"0.5", "0.0"}  # 0 where rank 1 has no row
    assert {row["agent_0/stepped_fraction"] for row in found} == {"1.0"}


def test_rank_0_alone_writes_into_one_folder(both):
    for name, found in both.rank_0.items():
        assert found["folder"] == both.rank_1[name]["folder"]
        runs = [path.name for path in (both.folder / name).iterdir()] if (both.folder / name).exists() else []
        assert runs == ([] if name == "resumed" else ["run_0001"]), name


def test_evaluation_is_played_by_one_and_changes_nothing(both):
    assert both.rank_0["evaluated"]["error"] is None
    assert torch.equal(both.rank_0["evaluated"]["steps"][-1], both.rank_0["buffers"]["steps"][-1])
    rows = read(both.rank_0["evaluated"])
    assert sum(row["eval/turn_1/reward_mean"] != "" for row in rows) == 4  # every second of four batches, twice
    folder = Path(both.rank_0["evaluated"]["folder"])
    assert sorted(path.name for path in (folder / "best_agents").iterdir()) == ["agent_0", "agent_1"]
    assert len(list((folder / "trees").iterdir())) == len(both.rank_0["evaluated"]["steps"])
    assert len((folder / "completions.jsonl").read_text().splitlines()) == 2 * len(both.rank_0["evaluated"]["steps"])
    lines = (folder / "eval.jsonl").read_text().splitlines()
    assert len(lines) == 2 * len(two_ranks.ROWS[:3])


def test_a_resumed_run_is_the_unbroken_one_on_both_ranks(both):
    """Rank 1 has a buffer, means and random numbers of its own."""
    for found in (both.rank_0, both.rank_1):
        assert found["resumed"]["error"] is None
        assert len(found["resumed"]["steps"]) == len(found["unbroken"]["steps"]) - 5
        assert all(map(torch.equal, found["resumed"]["steps"], found["unbroken"]["steps"][5:]))
    assert both.rank_0["unbroken"]["folder"] == both.rank_0["resumed"]["folder"]


def test_another_number_of_processes_cannot_go_on(both, tmp_path):
    checkpoint = Path(both.rank_0["unbroken"]["folder"]) / "checkpoints" / "batch=5-updates=2.ckpt"
    saved = torch.load(checkpoint, weights_only=True)["mareinforce"]
    assert len(saved["other_ranks"]) == 1
    assert saved["random"]["python"] != saved["other_ranks"][0]["random"]["python"]  # it has had a row less
    buffers = [each["learners"][0]["buffer"] for each in (saved, *saved["other_ranks"])]
    assert [[node[0]["row"] for node in buffer] for buffer in buffers] == [[0], [1]]
    with pytest.raises(ConfigError, match=r"of a run in 2 processes.* here there is 1: set trainer\.devices"):
        run_alone(tmp_path, checkpoint)


def run_alone(folder, checkpoint):
    made = two_ranks.trainer(
        folder, agents=two_ranks.llama_team(), rows=two_ranks.ROWS, shuffle=False, **two_ranks.FIELDS
    )
    made.train(resume_from_checkpoint=checkpoint)


def test_what_fails_on_one_rank_ends_both_with_its_message(both):
    assert both.rank_1["fails"]["error"].startswith("UserCodeError: ")
    assert "the judge is out" in both.rank_1["fails"]["error"]
    assert both.rank_0["fails"]["error"].startswith("RankError: rank 1 failed, so the others end too: UserCodeError: ")
    assert "the judge is out" in both.rank_0["fails"]["error"]
    assert both.rank_0["fails"]["updates"] == both.rank_1["fails"]["updates"] == [1, 1]


def test_a_signal_to_one_rank_stops_both_with_a_checkpoint_of_the_step_before(both):
    assert both.rank_0["stops"]["error"] == both.rank_1["stops"]["error"] == "SystemExit: 143"
    names = [path.name for path in (Path(both.rank_0["stops"]["folder"]) / "checkpoints").iterdir()]
    assert names == ["batch=1-updates=1.ckpt"]


def test_processes_that_begin_with_other_weights_are_refused(both):
    for found in (both.rank_0, both.rank_1):
        assert "RankError: rank 1 begins with other weights than rank 0" in found["other weights"]["error"]


TASK = """
import os
import time
from datetime import timedelta
from pathlib import Path

import mareinforce.ddp
import mareinforce.ranks

mareinforce.ranks.LAST_WORDS = timedelta(seconds=1)
mareinforce.ddp.GRACE = 1.0
RANK = int(os.environ.get("LOCAL_RANK", 0))
CALLS = 0


def reward(first, second):
    global CALLS
    CALLS += 1
    if CALLS == 2 and RANK == 0:
        time.sleep(300)
    if CALLS == 2 and RANK == 1:
        raise ValueError("the judge is out")
    return [float(len(b) - len(a)) for a, b in zip(first, second)]
"""
CONFIG = """
model:
  agent_model: tiny-story
  reward_func: task.reward
  config: {num_turns: 1, num_generations: 2, max_new_tokens: 4, rollout_buffer_size: 1, logging_steps: 1,
           eval_interval: 0}
data: {train: {path: story-prompts, split: "train[:5]"}}
trainer:
  accelerator: cpu
  enable_progress_bar: false
  strategy: ddp
  devices: 2
  callbacks: {class_path: mareinforce.checkpoint.TeamCheckpoint, init_args: {every_n_batches: 1}}
"""


def test_the_command_runs_itself_again_and_ends_when_one_fails_while_another_is_busy(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text(CONFIG)
    environment = {name: value for name, value in os.environ.items() if name != "MAREINFORCE_RUN_FOLDER"}
    run = subprocess.run(
        [sys.executable, "-m", "mareinforce.fit", "--config", "run.yaml"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=290,  # the other sleeps longer
    )
    assert run.returncode == 1, run.stderr
    assert "error: reward_func task.reward raised ValueError: the judge is out" in run.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(read_metrics(folder / "metrics.csv")) == 1
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["batch=1-updates=1.ckpt"]
