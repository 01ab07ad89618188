"""What rows of metrics say of nodes and samples, in numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from mareinforce.metrics import RunningMeans, completion_metrics, deviation, node_metrics, signal_metrics
from mareinforce.rollout.credit import assign_returns
from mareinforce.types import Completion, NodeSample
from tests.numerics.test_returns import node


def sample(lengths: list[int], ended: list[bool], advantages: list[float], zero_signal: bool = False) -> NodeSample:
    completions = tuple(
        Completion(torch.zeros(length, dtype=torch.long), torch.zeros(length), end, "")
        for length, end in zip(lengths, ended, strict=True)
    )
    credit = torch.tensor(advantages, dtype=torch.float64)
    return NodeSample(0, 1, 0, (0,), torch.tensor([1]), completions, credit, credit, zero_signal, 1.0, 2, 0)


def test_deviation_is_that_of_the_population():
    assert deviation([1.0, 3.0]) == 1.0  # a sample's would be the square root of 2
    assert deviation([5.0]) == 0.0


def test_a_node_tells_deviations_of_its_joint_actions():
    root = node([1.0, 3.0], [node([2.0, 2.0]), None])
    root.raw_rewards = [10.0, 50.0]
    root.components = {"style": [0.0, 4.0], "raw_reward": [9.0, 9.0]}
    assign_returns(root, num_turns=2, discount=1.0, hold=False)
    found = node_metrics(root)
    stds = {name: value for name, value in found.items() if name.endswith("_std")}
    assert stds == {
        "turn_1/reward_std": 1.0, "turn_1/expected_return_std": 0.0,  # returns are 1 + 2 and 3
        "turn_1/raw_reward_std": 20.0, "turn_1/style_std": 2.0,
    }  # fmt: skip
    assert found["turn_1/raw_reward_mean"] == 30.0


def test_lengths_of_completions_that_ended_are_told_apart():
    found = completion_metrics(sample([2, 4, 9, 9], [True, True, False, False], [1.0, -1.0, 3.0, -3.0]))
    assert found == {
        "completion_length": 6.0, "completion_length_min": 2.0, "completion_length_max": 9.0,
        "ended_length": 3.0, "ended_length_min": 2.0, "ended_length_max": 4.0,
        "truncated_fraction": 0.5, "zero_signal_fraction": 0.0, "advantage_std": pytest.approx(5**0.5),
    }  # fmt: skip
    assert not [name for name in completion_metrics(sample([2], [False], [0.0])) if name.startswith("ended")]


def test_the_shortest_and_the_longest_are_those_of_the_whole_row():
    means = RunningMeans()
    for lengths in ([3, 5], [1, 2], [4, 4]):
        means.add_agent(0, completion_metrics(sample(lengths, [True, True], [0.0, 0.0])))
    found = means.take()
    assert (found["agent_0/completion_length_min"], found["agent_0/completion_length_max"]) == (1.0, 5.0)
    assert found["agent_0/completion_length"] == pytest.approx(19 / 6)
    means.add_agent(0, completion_metrics(sample([7, 8], [True, True], [0.0, 0.0])))
    assert means.take()["agent_0/completion_length_min"] == 7.0  # nothing is left of the last row


def test_signal_is_told_by_turn():
    assert signal_metrics(sample([1], [True], [0.0], zero_signal=True)) == {"turn_2/zero_signal_fraction": 1.0}
    assert signal_metrics(sample([1], [True], [0.0])) == {"turn_2/zero_signal_fraction": 0.0}
