"""`python -m tests.campaigns.fault`: short runs that are killed at random moments and resumed until they are done.

Every run must end with the weights, moments, metrics and rollouts of the run that was never stopped, bit for bit, and
at no moment may a checkpoint be there that is not whole. Runs are forked from a process that has imported everything,
so that one takes a second or two.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets  # noqa: F401 (what a run imports late is imported once, before the runs are forked)
import mareinforce.callbacks
import matplotlib.figure  # noqa: F401
import torch
import yaml
from safetensors.torch import load_file

import mareinforce.cli  # noqa: F401
from mareinforce import fit
from mareinforce.checkpoint_files import FOLDER, PART

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
MOST_KILLS = 6  # of one run; then it is left alone
LATEST = 900.0  # seconds within which any process must have ended, on a busy machine too
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": {"r": 2, "target_modules": "all-linear"}, "config": {"num_train_epochs": 4}},
    "buffered": {"config": {"rollout_buffer_size": 2, "importance_sampling": "token", "logging_steps": 5}},
    "two turns": {
        "external_transition": "tests.campaigns.noisy.again",
        "config": {"num_turns": 2, "rollout_buffer_size": "rollout", "num_train_epochs": 4},
        "every_n_batches": 3,
    },
}


def recipe(kind: str, updates: int) -> dict[str, Any]:
    """The quickstart, made short, with noise in its reward."""
    special = dict(KINDS[kind])
    cadence = special.pop("every_n_batches", 1)
    config = {
        "num_turns": 1, "num_train_epochs": 2, "num_generations": 2, "max_new_tokens": 8, "agent_learning_rate": 1e-3,
        "lr_schedule": "linear", "warmup_updates": 3, "max_grad_norm": 1.0, "rollout_buffer_size": 1,
        "logging_steps": 1, "eval_interval": 4, "eval_num_samples": 1, "early_termination_threshold": None,
        "max_updates": updates,
        **special.pop("config", {}),
    }  # fmt: skip
    buffer, epochs = config["rollout_buffer_size"], config["num_train_epochs"]
    rows = updates // epochs * (buffer if isinstance(buffer, int) else 1)
    checkpoints = {"every_n_batches": cadence, "keep_last": 2}
    callbacks = [
        {"class_path": "mareinforce.checkpoint.TeamCheckpoint", "init_args": checkpoints},
        {"class_path": "mareinforce.callbacks.RolloutLog"},
    ]
    return {
        "seed_everything": 0,
        "model": {
            "agent_model": "tiny-story", "num_agents": 2, "reward_func": "tests.campaigns.noisy.reward", **special,
            "config": config,
        },
        "data": {
            "train": {"path": "story-prompts", "split": f"train[:{rows}]"},
            "eval": {"path": "story-prompts", "split": "test[:1]"},
        },
        "trainer": {"accelerator": "cpu", "enable_progress_bar": False, "callbacks": callbacks},
    }  # fmt: skip


def forked(folder: Path, arguments: Sequence[str]) -> int:
    """Start `python -m mareinforce.fit` in a folder without importing everything again; return the process id."""
    sys.stdout.flush(), sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.chdir(folder)
        log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1), os.dup2(log, 2)
        faulthandler.register(signal.SIGUSR2, file=2)
        for number in SIGNALS[1:]:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        status = fit.main(list(arguments))
    except KeyboardInterrupt:  # before or after everything that catches it
        status = 130
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


def ended(pid: int, within: float) -> int | None:
    """The exit status as a shell says it, or None if the process is still at work."""
    end = time.monotonic() + within
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if time.monotonic() >= end:
            return None
        time.sleep(0.005)


def attempt(folder: Path, arguments: Sequence[str], number: signal.Signals | None, after: float) -> tuple[int, float]:
    """Run once, with a signal after some seconds. Returns the exit status, and seconds from the signal to the end.

    Raises RuntimeError, with what it was doing, if it does not end.
    """
    pid = forked(folder, arguments)
    began = time.monotonic()
    status = ended(pid, after) if number is not None else None
    if status is None and number is not None:
        os.kill(pid, number)
        began = time.monotonic()
    if status is None:
        status = ended(pid, LATEST)
    if status is None:
        os.kill(pid, signal.SIGUSR2)  # its stack, into its log
        time.sleep(1.0)
        os.kill(pid, signal.SIGKILL)
        raise RuntimeError(f"did not end within {LATEST} s: {(folder / 'log.txt').read_text()[-4000:]}")
    return status, time.monotonic() - began


def run_folder(folder: Path) -> Path | None:
    """The folder of the only run that got as far as a checkpoint."""
    found = [path.parent.parent for path in folder.glob(f"runs/*/{FOLDER}/*.ckpt")]
    return found[0] if found else None


def not_whole(folder: Path) -> list[str]:
    """Checkpoints that would be taken for whole and are not."""
    bad = []
    for path in folder.glob(f"runs/*/{FOLDER}/*.ckpt"):
        try:
            content = torch.load(path, weights_only=True, map_location="cpu")
            complete = content["mareinforce"]["batches"] == int(path.name.split("-")[0].split("=")[1])
        except (RuntimeError, OSError, EOFError, KeyError):
            complete = False
        if not complete:
            bad.append(path.name)
    return bad


def outcome(run: Path) -> dict[str, Any]:
    """Everything that a finished run leaves: by name, values that can be compared."""
    newest = max((run / FOLDER).glob("*.ckpt"), key=lambda path: int(path.name.split("-")[0].split("=")[1]))
    content = torch.load(newest, weights_only=True, map_location="cpu")
    found: dict[str, Any] = {"checkpoint": newest.name}
    found |= {f"weight {name}": value for name, value in content["state_dict"].items()}
    for policy, state in enumerate(content["optimizer_states"]):
        for index, values in state["state"].items():
            found |= {f"moment {policy} {index} {name}": torch.as_tensor(value) for name, value in values.items()}
    for file in sorted((run / "agents").glob("*/*.safetensors")):
        found |= {f"{file.parent.name} {name}": value for name, value in load_file(file).items()}
    for name in ("metrics.csv", "rollouts.jsonl"):
        found[name] = (run / name).read_bytes()
    return found


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of what is not the same, bit for bit."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one or name not in other or not _same(one[name], other[name])
    ]


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def campaign(folder: Path, runs: int, seed: int, updates: int, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Kill and resume `runs` runs; return the figures."""
    draw = random.Random(seed)
    counts: Counter[str] = Counter()
    broken: list[str] = []
    slowest = 0.0
    wholes: dict[str, tuple[dict[str, Any], float]] = {}
    report(f"{'run':>4}  {'kind':<10} {'killed by':<46} result")
    for index in range(runs):
        kind = list(KINDS)[index % len(KINDS)]
        if kind not in wholes:
            wholes[kind] = unbroken(folder / f"unbroken {kind}", kind, updates)
        whole, seconds = wholes[kind]
        place = prepared(folder / f"run_{index}", kind, updates)
        killed: list[str] = []
        faults: list[str] = []
        while True:
            number = draw.choice(SIGNALS) if len(killed) < MOST_KILLS else None
            resumes = run_folder(place) is not None
            counts["resumed"] += resumes
            arguments = ["--config", "run.yaml", *(["--ckpt_path", "last"] if resumes else [])]
            status, waited = attempt(place, arguments, number, draw.uniform(0.0, 1.3 * seconds))
            faults += not_whole(place)
            counts["half written"] += len(list(place.rglob(f".*{PART}")))
            if status == 0:
                break
            if number is None or status != 128 + number:
                faults.append(f"exit status {status} after {number}")
                break
            killed.append(number.name)
            counts[number.name] += 1
            if number != signal.SIGKILL:
                slowest = max(slowest, waited)
        made = run_folder(place)
        if not faults:
            assert made is not None
            faults = differences(whole, outcome(made))
        counts["identical"] += not faults
        report(f"{index:>4}  {kind:<10} {', '.join(killed) or '-':<46} {'; '.join(faults[:3]) or 'identical'}")
        if faults:
            broken.append(f"{index}: {faults[0]}")
    kills = sum(counts[number.name] for number in SIGNALS)
    return {
        "campaign": "fault", "seed": seed, "runs": runs, "updates": updates, "identical": counts["identical"],
        "kills": kills, **{number.name: counts[number.name] for number in SIGNALS}, "resumed": counts["resumed"],
        "half_written_left_by_kills": counts["half written"], "slowest_end_s": round(slowest, 2), "broken": broken,
    }  # fmt: skip


def prepared(place: Path, kind: str, updates: int) -> Path:
    """A folder with its recipe."""
    place.mkdir(parents=True)
    (place / "run.yaml").write_text(yaml.safe_dump(recipe(kind, updates)))
    return place


def unbroken(place: Path, kind: str, updates: int) -> tuple[dict[str, Any], float]:
    """What the run leaves that nothing stops, and the seconds it takes."""
    prepared(place, kind, updates)
    began = time.monotonic()
    status, _ = attempt(place, ["--config", "run.yaml"], None, 0.0)
    seconds = time.monotonic() - began
    made = run_folder(place)
    if status != 0 or made is None:
        raise RuntimeError(f"the unbroken run ended with status {status}: {(place / 'log.txt').read_text()}")
    return outcome(made), seconds


def main() -> int:
    """Run the campaign and say how it went; 1 if any run was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # no thread of the parent's may be missing in its children
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        found = campaign(Path(folder), options.runs, options.seed, options.updates)
        print(json.dumps({**found, "seconds": round(time.monotonic() - began)}))
    return int(found["identical"] != options.runs)


if __name__ == "__main__":
    sys.exit(main())
