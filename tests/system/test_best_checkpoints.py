"""The best checkpoints by a logged metric stay beside the last ones, also over a resume, and nothing else does."""

from __future__ import annotations

import json

import pytest
import torch

from mareinforce.checkpoint import TeamCheckpoint
from mareinforce.errors import ConfigError, MareinforceWarning
from tests.system.runs import column, train, trainer

VALUES = {"go": 3.0, "on": 9.0, "up": 1.0, "by": 7.0, "in": 2.0}
ROWS = tuple(VALUES)


def reward(first, second, prompts):
    """What a prompt is worth is known, and there is a signal."""
    return {"reward": [VALUES[prompts[0]] + index for index in range(len(first))], "odd": [-VALUES[prompts[0]]] * 2}


def checkpoint(**arguments):
    return TeamCheckpoint(**{"every_n_batches": 1, "monitor": "turn_1/raw_reward_mean", **arguments})


def run(folder, callback, rows=ROWS, **options):
    return train(folder, reward, rows=rows, callbacks=[callback], shuffle=False, **options)


def kept(made):
    return sorted(int(path.name[6]) for path in (made.run_folder / "checkpoints").glob("*.ckpt"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"keep_best": 2}, [2, 4, 5]),
        ({"keep_best": 1, "keep_last": 2}, [2, 4, 5]),
        ({"keep_best": 2, "mode": "min"}, [3, 5]),
        ({"monitor": "turn_1/odd_mean", "mode": "min", "keep_best": 2}, [2, 4, 5]),
        ({"monitor": None, "keep_last": 2}, [4, 5]),
    ],
)
def test_the_best_are_kept_beside_the_last(tmp_path, arguments, expected):
    assert kept(run(tmp_path, checkpoint(**arguments))) == expected


def test_their_values_are_those_logged_and_are_written_down(tmp_path):
    callback = checkpoint(keep_best=2)
    made = run(tmp_path, callback)
    scores = json.loads((made.run_folder / "checkpoints" / "scores.json").read_text())
    logged = column(made, "turn_1/raw_reward_mean")
    assert scores["scores"] == {f"batch={b}-updates={b}.ckpt": logged[b - 1] for b in (2, 4, 5)}
    assert scores["best"] == callback.best == ["batch=2-updates=2.ckpt", "batch=4-updates=4.ckpt"]


def test_of_equal_ones_the_newer_is_the_better(tmp_path):
    assert kept(run(tmp_path, checkpoint(), rows=("go", "on", "up", "on", "up"))) == [4, 5]


def test_a_resumed_run_knows_the_best_of_the_run_before(tmp_path):
    run(tmp_path, checkpoint())
    made = train(tmp_path / "unused", reward, rows=ROWS)  # a folder of another run
    assert kept(made) == [5]
    longer = trainer(
        tmp_path, reward, rows=ROWS, callbacks=[checkpoint(keep_best=2)], shuffle=False, num_train_epochs=2
    )
    longer.train(resume_from_checkpoint="last")
    found = [path.name for path in (longer.run_folder / "checkpoints").glob("*.ckpt")]
    assert sorted(found) == ["batch=10-updates=10.ckpt", "batch=2-updates=2.ckpt", "batch=7-updates=7.ckpt"]


def test_every_one_that_is_kept_loads(tmp_path):
    made = run(tmp_path, checkpoint(keep_best=2))
    for path in (made.run_folder / "checkpoints").glob("*.ckpt"):
        assert torch.load(path, weights_only=True)["mareinforce"]["batches"] == int(path.name[6])


def test_a_mistyped_metric_is_refused_before_anything_is_sampled(tmp_path):
    calls = []
    with pytest.raises(ConfigError, match="Did you mean 'turn_1/reward_mean'"):
        train(tmp_path, lambda *texts: calls.append(1), callbacks=[checkpoint(monitor="turn_1/rewrad_maen")])
    assert calls == []


def test_a_mistyped_component_is_refused_after_the_first_save(tmp_path):
    with pytest.raises(ConfigError, match=r"turn_1/od_mean.*Did you mean 'turn_1/odd_mean'"):
        run(tmp_path, checkpoint(monitor="turn_1/od_mean"))
    assert [path.name for path in tmp_path.glob("run_*/checkpoints/*.ckpt")] == ["batch=1-updates=1.ckpt"]


def test_a_metric_that_never_had_a_value_is_said_at_the_end(tmp_path):
    with pytest.warns(MareinforceWarning, match="'turn_2/odd_mean': no value of it was logged"):
        run(
            tmp_path, checkpoint(monitor="turn_2/odd_mean"), num_turns=2, early_termination_threshold=0.0,
            external_transition=lambda prompt: [prompt, prompt],
        )  # fmt: skip
