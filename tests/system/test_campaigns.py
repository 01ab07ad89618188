"""Small versions of the campaigns, and that each of them would notice what it looks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from tests.campaigns import fault, fuzz, soak

ROOT = Path(__file__).parents[2]
CASE = {
    "model": "table", "agents": 2, "share_policy": False, "learning": "all", "template": True,
    "config": {"advantage_mode": "raw", "advantage_normalization": False, "num_generations": 3},
    "reward": "huge", "later": "huge", "at": 0, "asynchronous": False, "processor": "none", "transition": "the same",
    "formatters": "none", "prompts": ["words"],
}  # fmt: skip


def quietly(work, *arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return work(*arguments, **options)


def test_random_combinations_train_or_end_in_an_error_of_ours(tmp_path):
    found = quietly(fuzz.campaign, tmp_path, 20, seed=1, report=lambda text: None)
    assert found["combinations"] >= 20
    assert found[fuzz.TRAINED] > 5
    assert found["combinations"] - found[fuzz.TRAINED] > 2


def test_weights_and_moments_that_are_not_finite_are_noticed(tmp_path, monkeypatch):
    assert quietly(fuzz.run_case, CASE, tmp_path) == "NonFiniteError"
    monkeypatch.setattr("mareinforce.optim._can_be_squared", lambda *norms: True)
    with pytest.raises(AssertionError, match="that are not finite"):
        quietly(fuzz.run_case, CASE, tmp_path)


def test_an_error_that_is_none_of_ours_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr("mareinforce.module.MultiAgentReinforce.credit", lambda self, trees: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quietly(fuzz.run_case, CASE, tmp_path)


def test_a_short_soak_keeps_its_tensors_and_its_files(tmp_path):
    found = quietly(soak.soak, tmp_path, 10, 5, seed=0, report=lambda text: None)
    assert found["steps"] >= 10
    assert set(found["wrong"]) <= {"resident memory"}  # which means something after many steps
    assert min(found["log_bytes"].values()) > 1000


def test_a_soak_notices_what_is_kept(tmp_path):
    found = quietly(soak.soak, tmp_path, 10, 5, seed=0, report=lambda text: None, leak=True)
    assert "live tensors" in found["wrong"]


def test_a_soak_notices_files_that_grow():
    first = {"step": 1, "resident_mib": 10.0, "tensors": 3, "files": 2, "metrics.csv": 5, "rollouts.jsonl": 5, "x": 5}
    assert soak.wrong([first, {**first, "metrics.csv": 10**9}]) == []
    assert soak.wrong([first, {**first, "x": 10**4}]) == ["x"]
    assert soak.wrong([first, {**first, "resident_mib": 26.0}, first]) == ["resident memory"]
    assert soak.wrong([first, {**first, "files": 99}]) == ["number of files"]


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_a_run_that_is_killed_ends_as_if_it_had_not_been():
    command = [sys.executable, "-m", "tests.campaigns.fault", "--runs", "1", "--updates", "4", "--seed", "3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["identical"], found["runs"]) == (1, 1)


def test_a_run_that_is_not_the_same_is_noticed():
    one = {"weight": torch.zeros(2), "metrics.csv": b"1"}
    assert fault.differences(one, {**one, "weight": torch.zeros(2)}) == []
    assert fault.differences(one, {**one, "weight": torch.tensor([0.0, 1e-9])}) == ["weight"]
    assert fault.differences(one, {"weight": torch.zeros(2), "moment": torch.zeros(1)}) == ["metrics.csv", "moment"]


def test_a_checkpoint_that_is_not_whole_is_noticed(tmp_path):
    folder = tmp_path / "runs" / "run_0001" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save({"mareinforce": {"batches": 2}}, folder / "batch=2-updates=2.ckpt")
    assert fault.not_whole(tmp_path) == []
    (folder / "batch=3-updates=3.ckpt").write_bytes((folder / "batch=2-updates=2.ckpt").read_bytes()[:200])
    assert fault.not_whole(tmp_path) == ["batch=3-updates=3.ckpt"]
