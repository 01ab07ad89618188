"""Returns over trees: closed forms, and a slow obvious implementation against the one in use."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mareinforce.algorithms.advantages import advantages
from mareinforce.algorithms.returns import completion_returns
from mareinforce.metrics import carried_reward
from mareinforce.rollout.credit import assign_returns, number_env_steps, tree_env_steps
from mareinforce.rollout.joint import joint_actions
from mareinforce.rollout.tree import Node, nodes_by_level


def node(rewards, children=None, stopped=None, parent=None, action=None) -> Node:
    made = Node(0, {}, [], parent=parent, parent_action=action)
    made.rewards, made.raw_rewards = list(rewards), list(rewards)
    made.joint_actions = [(k, k) for k in range(len(made.rewards))]
    made.children = list(children) if children else [None] * len(made.rewards)
    made.stopped = list(stopped) if stopped else [False] * len(made.rewards)
    for j, child in enumerate(made.children):
        if child is not None:
            child.parent, child.parent_action = made, j
    return made


def two_turn_tree() -> Node:
    return node([1.0, 0.0], [node([2.0, 0.0]), node([3.0, 1.0])])


@pytest.mark.parametrize(
    ("discount", "expected", "first_advantage"), [(0.9, [1.9, 1.8], 0.05), (0.0, [1, 0], 0.5), (1.0, [2, 2], 0.0)]
)
def test_two_turns_by_hand(discount, expected, first_advantage):
    root = two_turn_tree()
    assert assign_returns(root, num_turns=2, discount=discount, hold=False) == pytest.approx(expected, abs=1e-12)
    group = torch.tensor(root.returns, dtype=torch.float64)
    assert advantages(group, "mean", False).tolist() == pytest.approx([first_advantage, -first_advantage], abs=1e-12)
    assert advantages(group, "rloo", False).tolist() == pytest.approx(
        [2 * first_advantage, -2 * first_advantage], abs=1e-12
    )
    for child in root.children:
        siblings = torch.tensor(child.returns, dtype=torch.float64)
        assert advantages(siblings, "mean", False).tolist() == [1.0, -1.0]
    pooled = torch.tensor([2.0, 0.0, 3.0, 1.0], dtype=torch.float64)
    assert advantages(pooled, "mean", False).tolist() != [1.0, -1.0, 1.0, -1.0]  # leaves of two branches, pooled


def test_a_held_reward_counts_once_for_every_turn_skipped():
    root = node([2.0, 1.0], stopped=[True, False])
    assert assign_returns(root, num_turns=3, discount=0.5, hold=True) == pytest.approx([2 * (1 + 0.5 + 0.25), 1.0])
    assert assign_returns(root, num_turns=3, discount=0.5, hold=False) == [2.0, 1.0]


def test_a_branch_that_the_transition_ends_is_not_held():
    root = node([2.0, 1.0])
    assert assign_returns(root, num_turns=3, discount=1.0, hold=True) == [2.0, 1.0]


def test_environment_steps_are_numbered_row_by_row_level_by_level():
    first, second = two_turn_tree(), two_turn_tree()
    assert number_env_steps([first, second], 100) == 112
    assert [one.env_step for one in nodes_by_level(first)] == [102, 104, 106]
    assert [one.env_step for one in nodes_by_level(second)] == [108, 110, 112]


def test_environment_steps_of_several_ranks_are_those_of_one_process_with_all_rows():
    rows = [two_turn_tree(), node([1.0, 2.0]), node([0.0, 1.0]), two_turn_tree(), two_turn_tree()]
    count = number_env_steps(rows, 100)
    alone = [[one.env_step for one in nodes_by_level(root)] for root in rows]
    dealt = [rows[rank::2] for rank in range(2)]  # as rows are
    sizes = [[tree_env_steps(root) for root in own] for own in dealt]
    for root in rows:
        for one in nodes_by_level(root):
            one.env_step = -1
    assert [number_env_steps(own, 100, sizes, rank) for rank, own in enumerate(dealt)] == [count, count]
    assert [[one.env_step for one in nodes_by_level(root)] for root in rows] == alone
    number_env_steps(dealt[1], 100, sizes[::-1], 0)  # as if they were those of the other rank
    assert [one.env_step for one in nodes_by_level(rows[1])] != alone[1]


def test_a_carried_reward_stays_where_its_branch_ended():
    root = node([1.0, 0.0], [None, node([3.0, 1.0])])
    assert carried_reward(root, 0) == 0.5
    assert carried_reward(root, 1) == pytest.approx((1.0 + 2.0) / 2)
    assert carried_reward(root, 1) != 2.0  # the mean over those who went on


class TestJointActions:
    def test_aligned_and_cross(self):
        assert joint_actions([True, True], 2, "aligned") == [(0, 0), (1, 1)]
        assert joint_actions([True, True], 2, "cross") == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert len(joint_actions([True] * 3, 3, "cross")) == 27

    def test_an_idle_agent_has_no_index(self):
        assert joint_actions([True, False], 2, "cross") == [(0, None), (1, None)]
        assert joint_actions([False, True], 2, "aligned") == [(None, 0), (None, 1)]

    def test_one_agent_is_the_same_either_way(self):
        assert joint_actions([True], 4, "cross") == joint_actions([True], 4, "aligned")

    def test_cross_sums_the_returns_a_completion_takes_part_in(self):
        joint = joint_actions([True, True], 2, "cross")
        returns = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
        first = completion_returns(returns, [one[0] for one in joint], 2, "sum")
        second = completion_returns(returns, [one[1] for one in joint], 2, "sum")
        assert first.tolist() == [3.0, 12.0]
        assert second.tolist() == [5.0, 10.0]
        assert completion_returns(returns, [one[1] for one in joint], 2, "mean").tolist() == [2.5, 5.0]


def slow_return(tree: Node, j: int, num_turns: int, discount: float, hold: bool) -> float:
    """The same by listing every path down from joint action j and averaging over equally likely leaves."""
    child = tree.children[j]
    if child is None:
        turns = num_turns - tree.turn if hold and tree.stopped[j] else 1
        total = 0.0
        for step in range(turns):
            total += tree.rewards[j] * discount**step
        return total
    below = 0.0
    for k in range(len(child.rewards)):
        below += slow_return(child, k, num_turns, discount, hold)
    return tree.rewards[j] + discount * below / len(child.rewards)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.floats(0, 1), st.booleans())
def test_two_implementations_agree_on_random_trees(seed, num_turns, discount, hold):
    draw = random.Random(seed)

    def grow(turn: int) -> Node:
        width = draw.randint(1, 3)
        last = turn == num_turns - 1
        stopped = [not last and draw.random() < 0.3 for _ in range(width)]
        children = [None if last or stop or draw.random() < 0.1 else grow(turn + 1) for stop in stopped]
        return node([draw.uniform(-5, 5) for _ in range(width)], children, stopped)

    root = grow(0)
    found = assign_returns(root, num_turns=num_turns, discount=discount, hold=hold)
    expected = [slow_return(root, j, num_turns, discount, hold) for j in range(len(root.rewards))]
    assert found == pytest.approx(expected, abs=1e-9)
