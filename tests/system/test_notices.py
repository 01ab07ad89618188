"""Legal settings that surprise people are told once a run, and settings that do not are not."""

from __future__ import annotations

import logging
import warnings

import pytest

from mareinforce import MareinforceWarning
from tests.system.runs import STATES, rank, train

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
    for words in ("early_termination_threshold=-0.2", "turn 1", "turns 2 to 2 never happen", "null"):
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


@pytest.mark.parametrize(("normalization", "count"), [(True, 1), (False, 0), ("scale", 0)])
def test_that_normalization_makes_all_algorithms_equal_is_told_at_the_start(tmp_path, caplog, normalization, count):
    with caplog.at_level(logging.INFO):
        train(tmp_path, advantage_normalization=normalization)
    assert sum("the same advantages" in record.getMessage() for record in caplog.records) == count
