"""Legal settings that surprise people are told once a run, and settings that do not are not."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings

import pytest

from mareinforce import MAGRPOConfig, MareinforceWarning
from mareinforce.config import ALGORITHMS
from mareinforce.notices import startup_information
from tests.system.runs import STATES, rank, train

NAMES = {mode: name for name, mode in ALGORITHMS.items()}
TURNS = {"external_transition": lambda num_agents: ["on"] * num_agents, "rows": STATES[:3]}


def told(folder, *args, **options) -> list[str]:
    """Everything a run warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MareinforceWarning)
        train(folder, *args, **options)
    return [str(warning.message) for warning in caught if issubclass(warning.category, MareinforceWarning)]


def test_a_default_threshold_that_stops_everything_is_told_once_with_the_fix(tmp_path):
    found = told(tmp_path, num_turns=2, early_termination_threshold=-0.2, **TURNS)
    assert len(found) == 1
    for words in ("early_termination_threshold=-0.2", "turn 1", "turn 2 never happens", "null"):
        assert words in found[0]


@pytest.mark.parametrize(
    ("reward", "fields"),
    [
        (rank, {"num_turns": 2, "early_termination_threshold": None}),
        (rank, {"num_turns": 2, "early_termination_threshold": 0.2}),  # a threshold that was thought about
        (rank, {"num_turns": 1, "early_termination_threshold": -0.2}),
        (lambda *texts: [-1.0, -0.5], {"num_turns": 2, "early_termination_threshold": -0.2}),  # nothing stops
        (lambda *texts: [-0.1, 1.0], {"num_turns": 2, "early_termination_threshold": -0.2}),  # some can be negative
    ],
)
def test_other_thresholds_are_not_told(tmp_path, reward, fields):
    assert told(tmp_path, reward, **fields, **TURNS) == []


def rising(first, second, turn):
    """Above 0.8 from turn 2 on, so that branches stop there with a turn to go."""
    return [0.5, 0.6] if turn == 0 else [0.9, 1.0]


@pytest.mark.parametrize(("value", "count"), [("zero", 1), ("hold", 0)])
def test_stopping_with_nothing_to_come_is_told_once_where_it_teaches_to_miss(tmp_path, value, count):
    fields = {"num_turns": 3, "early_termination_threshold": 0.8, "early_termination_value": value}
    found = told(tmp_path, rising, **fields, **TURNS)
    assert len(found) == count
    assert all("early_termination_value: hold" in sentence for sentence in found)
    fields["num_turns"] = 2  # a whole node that stops at the first turn competes with nothing
    assert told(tmp_path, rising, **{**fields, "early_termination_threshold": 0.5}, **TURNS) == []
    fields |= {"early_termination_on": "joint_action", "early_termination_threshold": 0.55}  # one of two siblings does
    assert len(told(tmp_path, rising, **fields, **TURNS)) == count


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"top_k": 1}, "top_k=1"),
        ({"prompts_per_step": 2}, "prompts_per_step=2 with rollout_buffer_size=1"),
        ({"min_new_tokens": 1}, "min_new_tokens=1"),
        ({"turn_weighting": "tree"}, "turn_weighting=tree with rollout_buffer_size=1"),
        ({}, None),
        ({"turn_weighting": "tree", "rollout_buffer_size": "rollout"}, None),
        ({"prompts_per_step": 2, "rollout_buffer_size": "rollout"}, None),
        ({"prompts_per_step": 2, "importance_sampling": "token"}, None),
    ],
)
def test_settings_that_bias_the_gradient_are_told_once_at_the_start(tmp_path, fields, says):
    found = told(tmp_path, rows=STATES, num_train_epochs=2, **fields)
    assert len(found) == (says is not None)
    assert all(says in sentence for sentence in found)


def test_several_turns_that_never_happen_are_told_as_several(tmp_path):
    (found,) = told(tmp_path, num_turns=3, early_termination_threshold=-0.2, **TURNS)
    assert "turns 2 to 3 never happen" in found


@pytest.mark.parametrize(
    ("mode", "normalization", "count"),
    [("mean", True, 0), ("rloo", True, 1), ("max", True, 1), ("raw", True, 1), ("rloo", False, 0), ("max", "scale", 0)],
)
def test_that_normalization_undoes_the_choice_of_an_algorithm_is_told(mode, normalization, count):
    config = MAGRPOConfig(advantage_mode=mode, advantage_normalization=normalization, num_turns=1)
    said = list(startup_information(config))
    assert len(said) == count
    assert all(f"{NAMES[mode]} gives the same advantages as magrpo" in sentence for sentence in said)


def test_what_normalization_undoes_is_told_at_the_start_of_a_run(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        train(tmp_path, advantage_normalization=True, advantage_mode="max")
        train(tmp_path, advantage_normalization=True)
    assert sum("the same advantages" in record.getMessage() for record in caplog.records) == 1


def test_a_warning_of_a_run_from_python_is_one_plain_line_and_others_stay_as_they_are(tmp_path):
    shown, before = io.StringIO(), warnings.formatwarning

    def reward(first, second):
        warnings.warn("from a user", UserWarning, stacklevel=1)
        return [1.0] * len(first)

    with warnings.catch_warnings(), contextlib.redirect_stderr(shown):
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, category, filename, lineno, file=None, line=None: shown.write(
            warnings.formatwarning(message, category, filename, lineno, line)
        )
        train(tmp_path, reward, num_turns=2, early_termination_threshold=-0.2, **TURNS)
    lines = shown.getvalue().splitlines()
    (ours,) = [line for line in lines if "early_termination_threshold" in line]
    assert ours.startswith("warning: early_termination_threshold=-0.2 stops every branch")
    assert any(line.endswith("UserWarning: from a user") and "test_notices.py" in line for line in lines)
    assert warnings.formatwarning is before
