"""When `rollouts.jsonl` is written, how large it grows, what a resumed run makes of it, and what stays in memory."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from mareinforce.callbacks import RolloutLog

from mareinforce import fit, read_rollouts
from mareinforce.checkpoint_files import newest_checkpoint
from tests.models import llama_model, word_tokenizer
from tests.system.runs import rollouts, train


def test_which_batches_are_written(tmp_path: Path) -> None:
    for every, batches in {1: [1, 2, 3, 4, 5], 2: [2, 4], 9: None}.items():
        made = train(tmp_path, rows=("go",) * 5, callbacks=[RolloutLog(every_n_batches=every)])
        if batches is None:
            assert not list(made.run_folder.glob("rollouts*"))
        else:
            assert list(dict.fromkeys(line["batch"] for line in rollouts(made))) == batches
            assert {line["env_step"] for line in rollouts(made)} == {2 * batch for batch in batches}


def test_nothing_is_written_unless_it_is_asked_for(tmp_path: Path) -> None:
    assert not list(train(tmp_path).run_folder.glob("rollouts*"))
    made = train(tmp_path, callbacks=[RolloutLog()])
    assert [file.name for file in made.run_folder.glob("*rollouts*")] == ["rollouts.jsonl"]
    assert not any("completion_ids" in line for line in rollouts(made))


def test_logging_changes_nothing_that_is_learned(tmp_path: Path) -> None:
    without, with_log = (train(tmp_path, rows=("go", "on"), callbacks=c) for c in ([], [RolloutLog(ids=True)]))
    first, second = ((made.run_folder / "metrics.csv").read_bytes() for made in (without, with_log))
    assert first == second


def test_two_files_never_hold_more_than_twice_the_bound(tmp_path: Path) -> None:
    bound, rows = 4000, ("go",) * 20
    whole = train(tmp_path, rows=rows, callbacks=[RolloutLog()])
    made = train(tmp_path, rows=rows, callbacks=[RolloutLog(max_bytes=bound)])
    files = sorted(made.run_folder.glob("*rollouts*"))
    assert [file.name for file in files] == ["rollouts.1.jsonl", "rollouts.jsonl"]
    assert all(0 < file.stat().st_size <= bound for file in files)
    assert (whole.run_folder / "rollouts.jsonl").stat().st_size > 2 * bound
    kept = rollouts(made, "rollouts.1.jsonl") + rollouts(made)
    assert kept == rollouts(whole)[-len(kept) :]
    assert read_rollouts(made.run_folder, older=True)["env_step"][:] == [line["env_step"] for line in kept]
    assert len(read_rollouts(made.run_folder)) < len(kept)


class Watch(L.Callback):
    """Weak references to the trees' tensors, and whether any lives when the next batch begins."""

    def __init__(self, keep: bool) -> None:
        self.keep, self.kept, self.seen = keep, [], []
        self.alive: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert [root.path for root in outputs["trees"]] == [()]
        assert {sample.agent for sample in outputs["samples"]} == {0, 1}
        self.seen += [weakref.ref(answers.prompt_ids) for root in outputs["trees"] for answers in root.answers]
        if self.keep:
            self.kept.append(outputs)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        gc.collect()  # a tree is a ring of parents and children
        self.alive.append(sum(reference() is not None for reference in self.seen))


def test_no_tree_outlives_its_batch(tmp_path: Path) -> None:
    watches = [Watch(keep=False), Watch(keep=True)]
    for watch in watches:
        made = train(tmp_path, rows=("go", "go", "go"), callbacks=[watch, RolloutLog()])
        assert len(rollouts(made)) == 12
    assert watches[0].alive == [0, 0, 0]
    assert watches[1].alive == [0, 2, 4]  # what a callback keeps is seen


TASK = """
import pathlib

def reward(first, second):
    count = pathlib.Path("calls")
    calls = int(count.read_text()) if count.exists() else 0
    count.write_text(str(calls + 1))
    if pathlib.Path("breaks").exists() and calls == 5:
        raise RuntimeError("killed")
    return [float(len(a) <= len(b)) for a, b in zip(first, second)]
"""


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path: Path, monkeypatch, capsys) -> None:
    """It dies in its second epoch, after two batches that no checkpoint has."""
    tokenizer = word_tokenizer()
    llama_model(len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "killed_task.py").write_text(TASK)
    recipe = {
        "model": {"agent_model": "model", "reward_func": "killed_task.reward",
                  "config": {"num_turns": 1, "num_train_epochs": 3, "num_generations": 4, "max_new_tokens": 3,
                             "agent_learning_rate": 1e-2, "rollout_buffer_size": 1, "eval_interval": 0}},
        "data": {"train": ["a b", "c d e", "f"]},
        "trainer": {"accelerator": "cpu", "enable_progress_bar": False, "callbacks": [
            {"class_path": "mareinforce.callbacks.RolloutLog", "init_args": {"ids": True}}]},
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(*arguments: str) -> int:
        (tmp_path / "calls").unlink(missing_ok=True)
        return fit.main(["--config", "recipe.yaml", *arguments])

    assert run("--trainer.default_root_dir", "whole") == 0
    (tmp_path / "breaks").touch()
    assert run() == 1
    log = tmp_path / "runs" / "run_0001" / "rollouts.jsonl"
    whole = (tmp_path / "whole" / "run_0001" / "rollouts.jsonl").read_bytes()
    killed = log.read_bytes()
    checkpoint = torch.load(newest_checkpoint("runs"), weights_only=True)["mareinforce"]
    assert checkpoint["env_step"] == 12
    assert json.loads(killed.splitlines()[-1])["env_step"] == 20
    assert whole.startswith(killed)
    log.write_bytes(killed + b'{"version": 1, "env_st')  # the last write was not finished
    (tmp_path / "breaks").unlink()
    assert run("--ckpt_path", "last") == 0
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["run_0001"]
    assert log.read_bytes() == whole != killed
    assert len(read_rollouts(log)) == 9 * 8
    # without the cut the killed run's batches would be there twice
    assert len(set(read_rollouts(log)["env_step"])) * 8 == 9 * 8
