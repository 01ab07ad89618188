"""Signals in the middle of everything: the exit status, the checkpoint, and that the run goes on as if nothing was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mareinforce.csv_log import read_metrics
from tests.system.runs import metrics, rank, trainer

ROOT = Path(__file__).parents[2]
TASK = '''
import random
import time
from pathlib import Path

CALLS = 0


def reward(first, second):
    """Draws a number, says when it is called for the fifth time, and then takes its time."""
    global CALLS
    CALLS += 1
    noise = random.random()
    if CALLS == 5 and Path("slow").exists():
        Path("slow").unlink()
        Path("here").touch()
        time.sleep(120)
    return [len(b) - len(a) + noise * len(a) for a, b in zip(first, second)]
'''
CONFIG = """
model:
  agent_model: tiny-story
  reward_func: task.reward
  config: {num_turns: 1, num_train_epochs: 1, num_generations: 2, max_new_tokens: 8, agent_learning_rate: 1e-3,
           rollout_buffer_size: 1, logging_steps: 1, eval_interval: 2, eval_num_samples: 1}
data:
  train: {path: story-prompts, split: "train[:8]"}
  eval: {path: story-prompts, split: "test[:1]"}
trainer: {accelerator: cpu, enable_progress_bar: false}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def start(folder, *arguments, config="run.yaml"):
    return subprocess.Popen(
        [sys.executable, "-m", "mareinforce.fit", "--config", config, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process, timeout=120):
    """Exit status and what was said on stderr."""
    errors = process.communicate(timeout=timeout)[1]
    return process.returncode, errors


def wait_for(path, process):
    for _ in range(600):
        if path.exists():
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.1)
    raise AssertionError(f"{path.name} did not appear")


def weights(folder, run="run_0001"):
    (path,) = (folder / "runs" / run / "checkpoints").glob("*.ckpt")
    return torch.load(path, weights_only=True)["state_dict"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_a_slow_reward_ends_the_run_and_it_goes_on_as_if_nothing_was(folder, number, status):
    (folder / "slow").touch()
    process = start(folder)
    wait_for(folder / "here", process)
    began = time.monotonic()
    process.send_signal(number)
    code, errors = finish(process, timeout=60)
    assert time.monotonic() - began < 20
    assert code == status, errors
    said = rf"stopped by {number.name}; go on with: python -m mareinforce.fit --config (\S+) (--ckpt_path last)\n"
    config, *resume = re.search(said, errors).groups()
    run = folder / "runs" / "run_0001"
    assert not (run / "agents").exists()  # nothing is exported as if it had finished
    (checkpoint,) = (run / "checkpoints").glob("*.ckpt")
    # evaluation, two batches, evaluation: the fifth call is in the third batch, whose evaluation is logged already
    assert checkpoint.name == "batch=2-updates=2.ckpt"
    assert finish(start(folder, *resume[0].split(), config=config))[0] == 0
    assert finish(start(folder))[0] == 0  # without a signal
    for name, weight in weights(folder, "run_0002").items():
        assert torch.equal(weight, weights(folder)[name])
    one, other = (read_metrics(folder / "runs" / run / "metrics.csv") for run in ("run_0001", "run_0002"))
    assert one == other
    assert len(one) == 8 + 4


def test_a_second_signal_ends_at_once(folder):
    (folder / "task.py").write_text(TASK.replace("time.sleep(120)", "stubborn()") + STUBBORN)
    (folder / "slow").touch()
    process = start(folder)
    wait_for(folder / "here", process)
    process.send_signal(signal.SIGINT)
    time.sleep(2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert finish(process, timeout=10)[0] == 130


STUBBORN = '''

def stubborn():
    """Does not let itself be interrupted."""
    end = time.time() + 60
    while time.time() < end:
        try:
            time.sleep(1)
        except BaseException:
            pass
'''


def test_from_python_a_signal_leaves_a_checkpoint_too(tmp_path, capsys):
    calls, before = [], signal.getsignal(signal.SIGINT)  # ignored, where the tests run in the background

    def reward(first, second):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return rank(first, second)

    made = trainer(tmp_path, reward, rows=("go", "on", "up", "by"))
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert 'stopped by SIGINT; go on with: train(resume_from_checkpoint="last")\n' in capsys.readouterr().err
    assert [path.name for path in (made.run_folder / "checkpoints").iterdir()] == ["batch=2-updates=2.ckpt"]
    assert signal.getsignal(signal.SIGINT) is before
    made.train(resume_from_checkpoint="last")
    assert len(metrics(made)) == 4


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what a process has loaded is told in /proc")
@pytest.mark.parametrize("seconds", [0, 0.2, 0.5, 0.8])
def test_while_libraries_are_imported_a_signal_ends_the_process_at_once(folder, seconds):
    process = start(folder)
    maps = Path(f"/proc/{process.pid}/maps")
    while "libtorch" not in maps.read_text():  # the import of torch has begun, whatever the load of the machine
        time.sleep(0.02)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    code, errors = finish(process, timeout=60)
    assert (code, errors) == (130, "interrupted before training began: there is no run to go on with\n")
    assert not (folder / "runs").exists()
