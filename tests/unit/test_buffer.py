"""When buffers are full, and how they are cut into optimizer steps."""

from __future__ import annotations

import torch

from mareinforce.rollout.buffer import RolloutBuffer, by_node, mini_batches, side_by_side
from mareinforce.types import NodeSample


def sample(turn: int, step: int, agent: int = 0) -> NodeSample:
    nothing = torch.zeros(2, dtype=torch.float64)
    return NodeSample(agent, turn, 0, (), torch.tensor([1]), (), nothing, nothing, False, 1.0, step, 0)


def cut(samples, batch_size=None, weighting="sample", update=0, seed=0):
    return mini_batches(
        by_node(samples), batch_size=batch_size, turn_weighting=weighting, seed=seed, agent=0, update=update
    )


def test_a_buffer_gives_its_samples_when_it_is_full_and_the_rest_when_flushed():
    buffer = RolloutBuffer(2)
    given = [buffer.add((sample(0, step),)) for step in range(5)]
    assert [[one.env_step for (one,) in part] for part in given] == [[], [0, 1], [], [2, 3], []]
    assert [one.env_step for (one,) in buffer.flush()] == [4]
    assert buffer.flush() == []


def test_a_buffer_that_is_resumed_with_fewer_places_is_full_at_the_next_sample():
    before, after = RolloutBuffer(6), RolloutBuffer(3)
    for step in range(5):
        before.add((sample(0, step),))
    after.load_state_dict(before.state_dict())
    assert len(after.add((sample(0, 5),))) == 6
    assert [len(after.add((sample(0, step),))) for step in range(6, 9)] == [0, 0, 3]


def test_a_buffer_without_capacity_waits_for_the_flush():
    buffer = RolloutBuffer(None)
    assert all(buffer.add((sample(0, step),)) == [] for step in range(9))
    assert len(buffer.flush()) == 9


def test_turns_are_never_mixed_and_the_lowest_comes_first():
    samples = [sample(turn, step) for step, turn in enumerate([1, 0, 1, 2, 0, 1])]
    batches = cut(samples, batch_size=2)
    assert [[one.turn for one in batch] for batch in batches] == [[0, 0], [1, 1], [1], [2]]
    assert sorted(one.env_step for batch in batches for one in batch) == list(range(6))


def test_the_shuffle_depends_on_seed_and_update_alone():
    samples = [sample(0, step) for step in range(8)]
    order = [one.env_step for one in cut(samples)[0]]
    assert [one.env_step for one in cut(samples)[0]] == order
    assert order != list(range(8))
    assert [one.env_step for one in cut(samples, update=1)[0]] != order
    assert [one.env_step for one in cut(samples, seed=1)[0]] != order


def test_weighting_by_tree_makes_one_step_of_everything():
    samples = [sample(turn, turn) for turn in range(3)]
    (batch,) = cut(samples, weighting="tree")
    assert [one.turn for one in batch] == [0, 1, 2]
    assert cut([], weighting="tree") == []


def test_the_samples_of_agents_that_share_a_policy_stay_together_by_node():
    samples = [sample(0, step, agent) for step in range(4) for agent in range(2)]
    batches = cut([*samples, sample(0, 4, 1)], batch_size=2)  # at the last node only one agent spoke
    assert [len({one.env_step for one in batch}) for batch in batches] == [2, 2, 1]
    for batch in batches:
        for step in {one.env_step for one in batch}:
            assert [one.agent for one in batch if one.env_step == step] == ([1] if step == 4 else [0, 1])


def test_ranks_step_turn_by_turn_with_empty_places_where_others_have_more():
    turns = [[0, 0, 1], [0, 2], []]
    steps = []
    for rank, own in enumerate(turns):
        batches = [[sample(turn, step)] for step, turn in enumerate(own)]
        steps.append([[one.turn for one in batch] for batch in side_by_side(batches, turns, rank)])
    assert steps == [[[0], [0], [1], []], [[0], [], [], [2]], [[], [], [], []]]
