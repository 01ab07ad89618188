"""A resumed run is the run that was never stopped, bit for bit."""

from __future__ import annotations

import random
import shutil

import numpy as np
import pytest
import torch

from mareinforce.checkpoint import TeamCheckpoint
from mareinforce.csv_log import read_metrics
from mareinforce.errors import ConfigError
from tests.models import llama_model, word_tokenizer
from tests.system.runs import Recorder, train, trainer

ROWS = ["go", "on", "up", "by", "in", "at"]
FIELDS = {
    "num_train_epochs": 2,
    "num_generations": 3,
    "max_new_tokens": 3,
    "rollout_buffer_size": 2,
    "warmup_updates": 2,
    "lr_schedule": "linear",
    "advantage_normalization": True,
    "eval_interval": 2,
    "eval_num_samples": 2,
    "logging_steps": 4,  # rows that hold more than one batch: means are carried over
    "agent_learning_rate": 0.01,
}
LORA = {"lora": {"r": 2, "target_modules": "all-linear"}}


def noisy(*texts):
    """A reward that draws from every global stream there is."""
    noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
    return [len(text) + 0.1 * index + noise * (index + 1) for index, text in enumerate(texts[0])]


def team(count: int = 2):
    words = word_tokenizer()
    return [llama_model(len(words), seed=seed) for seed in range(count)], words


def run(folder, batches, *, resume=None, lora=False, turns=1, **options):
    """A run whose checkpoints are kept after each batch, stopped after some of them."""
    torch.manual_seed(5), random.seed(5), np.random.seed(5)  # as a process starts
    if resume is not None:
        torch.manual_seed(77), random.seed(77), np.random.seed(77)  # another process starts elsewhere
    reward = Recorder(noisy)
    made = trainer(
        folder,
        reward,
        agents=team(),
        rows=ROWS,
        eval_dataset=ROWS[:3],
        model_config=LORA if lora else None,
        callbacks=[TeamCheckpoint(every_n_batches=1, keep_last=99), *options.pop("callbacks", [])],
        num_turns=turns,
        external_transition=(lambda prompt: [prompt, "go"]) if turns > 1 else None,
        **{**FIELDS, **options},
    )
    if batches is None:
        made.train(resume_from_checkpoint=resume)
    else:
        stop_after(made, batches)
        with pytest.raises(StoppedHereError):
            made.train(resume_from_checkpoint=resume)
    return made, reward


class StoppedHereError(RuntimeError):
    """As good as a killed process: nothing is saved after it."""


def stop_after(made, batches):
    whole = made.module.rollout

    def rollout(rows):
        if made.module.batches == batches:
            raise StoppedHereError
        return whole(rows)

    made.module.rollout = rollout


def state(made):
    """Everything that is learned: weights and moments."""
    weights = {name: w.detach().clone() for name, w in made.module.team.state_dict().items()}
    optimizers = made.module.optimizers()
    moments = [optimizer.state_dict()["state"] for optimizer in optimizers]
    return weights, moments


def assert_equal(one, other):
    (weights, moments), (other_weights, other_moments) = state(one), state(other)
    for name, weight in weights.items():
        assert torch.equal(weight, other_weights[name]), name
    for agent, other_agent in zip(moments, other_moments, strict=True):
        for index, values in agent.items():
            for name, value in values.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(other_agent[index][name])), (index, name)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("batches", [1, 3, 5, 6, 7, 11])
def test_resuming_is_not_stopping_from_any_batch(tmp_path, batches, lora):
    unbroken, seen = run(tmp_path / "unbroken", None, lora=lora)
    stopped, before = run(tmp_path / "stopped", batches, lora=lora)
    checkpoint = next((stopped.run_folder / "checkpoints").glob(f"batch={batches}-*.ckpt"))
    resumed, after = run(tmp_path / "stopped", None, resume=checkpoint, lora=lora)
    assert resumed.run_folder == stopped.run_folder
    assert_equal(resumed, unbroken)
    calls = len(before.texts)
    redone = calls + len(after.texts) - len(seen.texts)  # an evaluation before the batch that was stopped
    assert redone in (0, 2)
    assert seen.texts == before.texts[: calls - redone] + after.texts
    rows = [read_metrics(one.run_folder / "metrics.csv") for one in (resumed, unbroken)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("stops", [[6, 7], [6, 8, 12, 15], [1, 5, 6, 11, 12, 13, 17]])
def test_resuming_again_and_again_is_not_stopping(tmp_path, stops):
    """A run that was resumed where an epoch ended leaves checkpoints that are as good as any."""
    unbroken, _ = run(tmp_path / "unbroken", None, num_train_epochs=3)
    resume = None
    for stop in stops:
        run(tmp_path / "stopped", stop, resume=resume, num_train_epochs=3)
        resume = "last"
    resumed, _ = run(tmp_path / "stopped", None, resume="last", num_train_epochs=3)
    assert_equal(resumed, unbroken)
    rows = [read_metrics(one.run_folder / "metrics.csv") for one in (resumed, unbroken)]
    assert rows[0] == rows[1]
    assert resumed.module.batches == unbroken.module.batches == 18


def test_buffers_and_two_turns_are_resumed_too(tmp_path):
    options = {"turns": 2, "rollout_buffer_size": 5, "importance_sampling": "token", "num_generations": 2}
    unbroken, _ = run(tmp_path / "unbroken", None, **options)
    stopped, _ = run(tmp_path / "stopped", 4, **options)
    resumed, _ = run(tmp_path / "stopped", None, resume="last", **options)
    assert stopped.run_folder == resumed.run_folder
    assert_equal(resumed, unbroken)
    plain = [read_metrics(one.run_folder / "metrics.csv") for one in (resumed, unbroken)]
    assert plain[0] == plain[1]


def test_what_a_killed_run_did_after_its_checkpoint_is_left_out(tmp_path):
    unbroken, _ = run(tmp_path / "unbroken", None)
    stopped, _ = run(tmp_path / "stopped", 8)
    checkpoint = next((stopped.run_folder / "checkpoints").glob("batch=3-*.ckpt"))
    longer = len(read_metrics(stopped.run_folder / "metrics.csv"))
    resumed, _ = run(tmp_path / "stopped", None, resume=checkpoint)
    rows = read_metrics(resumed.run_folder / "metrics.csv")
    assert longer > 3
    assert rows == read_metrics(unbroken.run_folder / "metrics.csv")
    assert_equal(resumed, unbroken)


def test_without_the_random_states_it_would_be_another_run(tmp_path, monkeypatch):
    unbroken, _ = run(tmp_path / "unbroken", None)
    run(tmp_path / "stopped", 3)
    monkeypatch.setattr("mareinforce.team_module.set_random_states", lambda states: None)
    resumed, _ = run(tmp_path / "stopped", None, resume="last")
    with pytest.raises(AssertionError):
        assert_equal(resumed, unbroken)


def test_more_epochs_train_on_and_a_run_that_is_done_ends_at_once(tmp_path):
    made, _ = run(tmp_path, None)
    again, reward = run(tmp_path, None, resume="last")
    assert (again.module.batches, reward.texts) == (12, [])
    assert_equal_weights_to_checkpoint(again, made)
    longer, reward = run(tmp_path, None, resume="last", num_train_epochs=3)
    assert longer.module.batches == 18
    assert len(reward.texts) > 0


def test_a_run_whose_updates_are_all_made_ends_at_once_and_more_of_them_train_on(tmp_path):
    made, _ = run(tmp_path, None, max_updates=2)
    batches = made.module.batches
    assert (batches, made.module.updates) == (4, [2, 2])  # in the middle of an epoch
    rows = read_metrics(made.run_folder / "metrics.csv")
    again, reward = run(tmp_path, None, resume="last", max_updates=2)
    assert (again.module.batches, reward.texts) == (batches, [])
    assert read_metrics(again.run_folder / "metrics.csv") == rows
    assert_equal_weights_to_checkpoint(again, made)
    longer, reward = run(tmp_path, None, resume="last", max_updates=3)
    assert longer.module.updates == [3, 3]
    assert len(reward.texts) > 0


def assert_equal_weights_to_checkpoint(again, made):
    for name, weight in made.module.team.state_dict().items():
        assert torch.equal(again.module.team.state_dict()[name], weight)


def test_what_is_set_otherwise_is_told_and_fewer_epochs_are_refused(tmp_path, caplog):
    fields = {"max_new_tokens": 2, "logging_steps": 1, "num_train_epochs": 3}
    run(tmp_path, 8, num_train_epochs=3)
    run(tmp_path, 9, resume="last", **fields)
    assert "changed since the checkpoint: logging_steps 4 -> 1, max_new_tokens 3 -> 2" in caplog.text
    caplog.clear()
    run(tmp_path, 14, resume="last", **fields)
    assert "changed since" not in caplog.text
    with pytest.raises(ConfigError, match="num_train_epochs=1: the checkpoint is of epoch 3"):
        run(tmp_path, None, resume="last", **fields | {"num_train_epochs": 1})


def test_last_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="resume_from_checkpoint=last: there is no whole checkpoint"):
        run(tmp_path, None, resume="last")
    made = train(tmp_path / "other", rows=("go",))
    shutil.copytree(made.run_folder, tmp_path / "elsewhere" / "run_0001")
    with pytest.raises(ConfigError, match="is of another team"):
        run(tmp_path / "elsewhere", None, resume="last")


@pytest.mark.parametrize(
    ("change", "name"),
    [({"prompts_per_step": 2}, "prompts_per_step"), ({"seed": 9}, "seed"), ({"shuffle": False}, "shuffle")],
)
@pytest.mark.filterwarnings("ignore:prompts_per_step=2")
def test_another_order_in_the_middle_of_an_epoch_is_refused(tmp_path, change, name):
    run(tmp_path, 2)
    with pytest.raises(ConfigError, match=f"from the middle of an epoch with {name}="):
        run(tmp_path, None, resume="last", **change)
