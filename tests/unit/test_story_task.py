"""The length-ratio task by hand."""

from __future__ import annotations

import math

import pytest

from mareinforce.errors import PromptError
from mareinforce.tasks.story import (
    growing_lengths_reward,
    improved_length_ratio_reward,
    length_feedback,
    length_ratio_reward,
    retell,
    story_eval_aggregator,
    story_eval_logger,
    told,
    written,
)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("a" * 10, "b" * 20, 1.0),
        ("a" * 10, "b" * 30, 1.0),
        ("a" * 10, "b" * 25, 1.0),
        ("a" * 10, "b" * 10, math.exp(-1.0)),
        ("a" * 10, "b" * 45, math.exp(-1.5)),
        ("a" * 10, "", math.exp(-2.0)),
    ],
)
def test_the_score_falls_with_the_distance_from_two_to_three_times(first, second, expected):
    assert length_ratio_reward([first], [second]) == pytest.approx([expected])
    assert improved_length_ratio_reward([first], [second]) == pytest.approx([expected])
    swapped = length_ratio_reward([second], [first])
    assert swapped != pytest.approx([expected], abs=1e-3) or len(first) == len(second)


def test_an_empty_first_text_is_worth_nothing_or_counts_as_one_character():
    assert length_ratio_reward([""], ["bb"]) == [0.0]
    assert improved_length_ratio_reward([""], ["bb"]) == [1.0]


def test_feedback_tells_each_agent_its_own_length_the_ratio_and_the_goal():
    first, second = length_feedback("Describe a city:", ["a" * 10, "b" * 15], 2)
    assert first.startswith("Describe a city:")
    assert "10 characters" in first
    assert "15 characters" not in first
    assert "15 characters" in second
    assert all("1.50 times" in text and "2 to 3 times" in text and "improved" in text for text in (first, second))
    assert retell("Describe a city:", ["x", "y"], 2) == ["Describe a city:"] * 2


def test_evaluation_measures_lengths_turn_by_turn():
    turns = [[["aa", "a"], ["a"]], [["bbbb", "b"], ["b"]]]
    rows = story_eval_logger(agent_completions_turns=turns, batch_items=[{}, {}], prompts=["x", "y"])
    assert rows[0]["turn_1/length_ratio"] == 2.0
    assert rows[0]["turn_2/in_range"] == 0.0
    assert "turn_2/length_ratio" not in rows[1]
    means = story_eval_aggregator(rows, num_turns=2)
    assert means["turn_1/in_range"] == 0.5
    assert means["turn_2/length_ratio"] == 1.0


def test_feedback_takes_histories_and_refuses_a_third_agent():
    histories = {"prompt_history_per_agent": [["p"], ["p"]], "response_history_per_agent": [["a"], ["b"]]}
    given = {"prompt": "p", "agent_completions": ["a", "b"]}
    assert length_feedback(**given, num_agents=2, **histories) == length_feedback(**given, num_agents=2)
    with pytest.raises(PromptError, match="num_agents is 3"):
        length_feedback("p", ["a", "b", "c"], 3)


def test_growing_lengths_are_scored_by_neighbours_for_any_number_of_agents():
    texts = [
        ["a" * length for length in lengths] for lengths in zip((10, 15, 30), (10, 10, 10), (0, 5, 8), strict=True)
    ]
    first, flat, empty = growing_lengths_reward(*texts)
    assert first == 1.0
    assert flat == pytest.approx(math.exp(-0.2))
    assert empty == pytest.approx((0.0 + 1.0) / 2)  # nothing is any number of times as long as nothing
    assert growing_lengths_reward(["abc"]) == [0.0]


def test_two_roles_differ_in_the_first_word_alone():
    row = {"prompt": "Tell a story about a red fox."}
    assert told(row) == row["prompt"]
    assert written(row) == "Write a story about a red fox."
