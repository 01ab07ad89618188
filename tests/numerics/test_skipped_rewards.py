"""`on_reward_error: skip` in numbers: who is left in a group, what the group is worth, and what it is divided by."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import torch

from mareinforce import MAGRPOConfig
from mareinforce.eval_summary import summarise
from mareinforce.metrics import RunningMeans, carried_reward, node_metrics, row_metrics, skipped_metrics
from mareinforce.rewards import Reward
from mareinforce.rollout.buffer import sample_of_state, sample_state
from mareinforce.rollout.credit import assign_returns, node_samples, number_env_steps, reach_weight
from mareinforce.rollout.expand import Episode, stopped_early
from mareinforce.rollout.joint import joint_actions
from mareinforce.rollout.tree import Node
from mareinforce.rollout_table import completion_records
from mareinforce.types import Answers, Completion, ReferenceKL, Sampling
from tests.names import shown
from tests.system.runs import column, table_team, train


def node(rewards, children=None, *, joint_mode="aligned", num_agents=2, kl=None, turn_of=None) -> Node:
    """A node with rewards (None: skipped), each agent's completion k saying str(k)."""
    size = len(rewards) if joint_mode == "aligned" else round(len(rewards) ** (1 / num_agents))
    said = [Completion(torch.tensor([k]), torch.zeros(1), True, str(k)) for k in range(size)]
    made = Node(0, {"prompt": ""}, [Answers("", torch.tensor([0]), said, kl=kl) for _ in range(num_agents)])
    made.joint_actions = joint_actions([True] * num_agents, size, joint_mode)
    made.rewards, made.raw_rewards = list(rewards), list(rewards)
    made.stopped = [False] * len(rewards)
    made.children = list(children) if children else [None] * len(rewards)
    for j, child in enumerate(made.children):
        if child is not None:
            child.parent, child.parent_action = made, j
    return made


def samples(root, discount=1.0, **fields):
    """The samples of a node, once the returns of its tree are assigned."""
    assign_returns(root, num_turns=3, discount=discount, hold=False)
    config = MAGRPOConfig(**{"num_generations": 3, "num_turns": 1, "advantage_normalization": False, **fields})
    return node_samples(root, config, [0] * len(root.answers))


# Values that fail


def score(result, on_error="skip"):
    """The processed rewards of four joint answers; a list is returned, an error raised."""

    def my_reward(first, second):
        if isinstance(result, Exception):
            raise result
        return result

    known = {"row": {}, "prompt": "p", "turn": 0, "num_turns": 1, "ended": [[True] * 4] * 2}
    histories = {"prompt_history_per_agent": [["p"], ["p"]], "response_history_per_agent": [[], []]}
    return Reward(my_reward, 2, on_error=on_error).score([["a"] * 4, ["b"] * 4], **known, **histories).processed


@pytest.mark.parametrize(
    ("values", "left", "advantages"),
    [
        ([1, None, 0, math.nan], (0, 2), [0.5, -0.5]),
        ([1, 0, math.inf, 0], (0, 1, 3), [2 / 3, -1 / 3, -1 / 3]),
        ([1, "1", 0, 0], (0, 2, 3), [2 / 3, -1 / 3, -1 / 3]),
        ([1, 0, 0, 1], (0, 1, 2, 3), [0.5, -0.5, -0.5, 0.5]),
    ],
)
def test_what_is_no_number_is_left_out_of_its_group(values, left, advantages):
    if len(left) < 4:
        with pytest.warns(
            match="my_reward gave what is not a finite number .*left out .on_reward_error: skip.*metrics"
        ):
            rewards = score(values)
    else:
        rewards = score(values)
    assert [j for j, reward in enumerate(rewards) if reward is not None] == list(left)
    both = samples(node(rewards), num_generations=4)
    assert len(both) == 2
    for sample in both:
        assert sample.ks == left
        assert [completion.text for completion in sample.completions] == [str(k) for k in left]
        assert sample.advantages.tolist() == pytest.approx(advantages, abs=1e-12)


def test_a_substituted_zero_would_have_been_another_group():
    (first, _) = samples(node([1.0, 0.0, 0.0, 0.0]), num_generations=4)
    assert first.advantages.tolist() != pytest.approx([0.5, -0.5, -0.5, -0.5])
    with pytest.raises(TypeError):  # None is no number to anybody who forgets to ask
        sum(node([1.0, None, 0.0]).rewards)


@pytest.mark.parametrize("result", [ValueError("bad json"), [1, 0, 1], [], None, 0.5, {"rewards": [1, 0, 0, 1]}])
def test_a_call_that_fails_as_a_whole_skips_all_of_its_node(result):
    with pytest.warns(match="my_reward.*on_reward_error: skip"):
        assert score(result) == [None] * 4


@pytest.mark.parametrize(
    "values",
    [
        [1, 0, 0, 1],
        [True, False, False, True],
        [np.float32(1), np.int64(0), np.bool_(False), np.float32(1)],
        np.array([1, 0, 0, 1]),
        torch.tensor([1, 0, 0, 1]),
        torch.tensor([1, 0, 0, 1], dtype=torch.bfloat16),
        torch.tensor([1.0, 0, 0, 1], requires_grad=True) * 1,
    ],
    ids=shown,
)
@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_every_kind_of_number_is_worth_the_same(values, on_error):
    for sample in samples(node(score(values, on_error)), num_generations=4):
        assert sample.advantages.tolist() == [0.5, -0.5, -0.5, 0.5]
        assert not sample.returns.requires_grad


def test_a_component_without_a_number_and_a_failing_processor_skip_too():
    known = {"row": {}, "prompt": "p", "turn": 0, "num_turns": 1, "ended": [[True] * 3]}
    histories = {"prompt_history_per_agent": [["p"]], "response_history_per_agent": [[]]}

    def reward(texts):
        return {"reward": [1.0, 0.0, 4.0], "part": [1.0, 2.0, None]}

    with pytest.warns(match=r"component 'part', gave .*joint action 2 \(None\)"):
        scores = Reward(reward, 1, on_error="skip").score([["a"] * 3], **known, **histories)
    assert scores.raw == [1.0, 0.0, None]
    assert scores.components == {"part": [1.0, 2.0, None]}
    made = Reward(lambda texts: [1.0, 0.0, 4.0], 1, lambda r: 1 / r, on_error="skip")
    with pytest.warns(match="reward_processor .*ZeroDivisionError"):
        scores = made.score([["a"] * 3], **known, **histories)
    assert (scores.raw, scores.processed) == ([1.0, None, 4.0], [1.0, None, 0.25])


# Credit


@pytest.mark.parametrize(
    ("values", "loss"), [([3.0, None, 1.0], (3 + 1) / 2), ([3.0, 1.0], (3 + 1) / 2), ([3.0, 0.0, 1.0], (3 + 1) / 3)]
)
def test_the_loss_divides_by_those_kept(tmp_path, values, loss):
    def reward(first, second):
        return values

    options = {"num_generations": len(values), "advantage_mode": "raw", "on_reward_error": "skip"}
    with pytest.warns(match="skip") if None in values else contextlib.nullcontext():
        made = train(tmp_path, reward, table_team(), **options)
    # two words are equally likely: every log-probability is -log 2
    assert column(made, "agent_0/loss") == pytest.approx([loss * math.log(2)], rel=1e-5)


CROSS = [1.0, 2.0, 3.0, 4.0, None, 6.0, None, None, 9.0]
"""Agent 0's completion moves slowest: rows are its completions, columns agent 1's."""


@pytest.mark.parametrize(
    ("reduction", "first", "second"),
    [
        # rows: 1 2 3 / 4 . 6 / . . 9, columns: 1 4 . / 2 . . / 3 6 9
        ("sum", [6.0, 5.0 * 3, 9.0 * 3], [2.5 * 3, 2.0 * 3, 18.0]),
        ("mean", [2.0, 5.0, 9.0], [2.5, 2.0, 6.0]),
    ],
)
def test_in_cross_a_completion_gets_the_mean_of_the_valid_returns(reduction, first, second):
    one, other = samples(node(CROSS, joint_mode="cross"), joint_mode="cross", cross_reduction=reduction)
    assert one.returns.tolist() == pytest.approx(first, abs=1e-12)
    assert other.returns.tolist() == pytest.approx(second, abs=1e-12)
    assert one.ks == other.ks == (0, 1, 2)
    assert one.advantages.tolist() == pytest.approx([x - sum(first) / 3 for x in first], abs=1e-12)
    if reduction == "sum":
        assert one.returns.tolist() != [6.0, 10.0, 9.0]  # what is left, added up, punishes the incomplete


def test_in_cross_three_agents_share_k_to_the_n_minus_1():
    rewards = [float(j) for j in range(8)]
    rewards[1] = None  # (0, 0, 1): the first agent's completion 0 is left with 0, 2, 3
    (first, second, third) = samples(
        node(rewards, joint_mode="cross", num_agents=3), joint_mode="cross", num_agents=3, num_generations=2
    )
    assert first.returns.tolist() == pytest.approx([5 / 3 * 4, 4 + 5 + 6 + 7], abs=1e-12)
    assert second.returns.tolist() == pytest.approx([(0 + 4 + 5) / 3 * 4, 2 + 3 + 6 + 7], abs=1e-12)
    assert third.returns.tolist() == pytest.approx([0 + 2 + 4 + 6, (3 + 5 + 7) / 3 * 4], abs=1e-12)


def test_in_cross_an_agent_with_fewer_than_two_completions_left_gets_no_sample():
    only_first_row = [1.0, 2.0, 4.0] + [None] * 6
    (other,) = samples(node(only_first_row, joint_mode="cross"), joint_mode="cross")
    assert (other.agent, other.ks) == (1, (0, 1, 2))
    assert other.returns.tolist() == [3.0, 6.0, 12.0]  # each the only one left of three
    (one,) = samples(node([1.0, None, None, 2.0] + [None] * 5, joint_mode="cross"), joint_mode="cross")
    assert (one.agent, one.ks, one.returns.tolist()) == (0, (0, 1), [3.0, 6.0])


@pytest.mark.parametrize(("rewards", "count"), [([1.0, None, 2.0], 2), ([1.0, None, None], 0), ([None] * 3, 0)])
def test_a_node_with_fewer_than_two_left_gives_no_sample(rewards, count):
    assert len(samples(node(rewards))) == count


@pytest.mark.parametrize("num_agents", [1, 2])
@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
def test_where_nothing_is_skipped_nothing_is_different(joint_mode, num_agents):
    draw = np.random.default_rng(0).normal
    for _ in range(20):
        rewards = [float(x) for x in draw(size=3**num_agents if joint_mode == "cross" else 3)]
        root = node(rewards, joint_mode=joint_mode, num_agents=num_agents)
        for sample in samples(root, joint_mode=joint_mode, num_agents=num_agents):
            slow = [0.0, 0.0, 0.0]
            for joint, reward in zip(root.joint_actions, rewards, strict=True):
                slow[joint[sample.agent]] += reward
            assert sample.returns.tolist() == slow  # bit for bit
            assert len(sample.completions) == 3


def two_turns():
    """Of the three joint actions of turn 1, one failed, and one has nothing but failures below it."""
    return node([1.0, 2.0, None, 4.0], [node([1.0, None, 2.0]), node([None] * 3), None, node([3.0, 3.0, None])])


def test_a_child_without_a_valid_return_invalidates_its_parents_joint_action():
    root = two_turns()
    assert assign_returns(root, num_turns=2, discount=0.5, hold=False) == [1 + 0.5 * 1.5, None, None, 4 + 0.5 * 3]
    first, _ = samples(root, discount=0.5, num_generations=4)
    assert first.ks == (0, 3)
    assert first.advantages.tolist() == pytest.approx([-1.875, 1.875], abs=1e-12)
    grandchild = node([1.0, 2.0], [node([5.0, 6.0], [node([None, None]), node([None, None])]), node([7.0, 8.0])])
    assert assign_returns(grandchild, num_turns=3, discount=1.0, hold=False) == [None, 2 + 7.5]
    # its reward alone would have stood for a future of 0
    assert assign_returns(node([1.0, 2.0]), num_turns=2, discount=1.0, hold=False) == [1.0, 2.0]


def test_what_was_skipped_is_counted_and_in_no_mean():
    root = two_turns()
    root.components = {"part": [1.0, 3.0, None, 8.0]}
    assign_returns(root, num_turns=2, discount=0.5, hold=False)
    assert node_metrics(root) == {
        "turn_1/part_mean": 4.0,
        "turn_1/part_std": pytest.approx(math.sqrt(26 / 3)),
        "turn_1/reward_std": pytest.approx(math.sqrt(14 / 9)),
        "turn_1/raw_reward_std": pytest.approx(math.sqrt(14 / 9)),
        "turn_1/expected_return_std": 1.875,
        "turn_1/reward_mean": pytest.approx(7 / 3),
        "turn_1/raw_reward_mean": pytest.approx(7 / 3),
        "turn_1/expected_return": pytest.approx((1.75 + 5.5) / 2),
    }
    assert node_metrics(root.children[1]) == {}
    assert skipped_metrics(root) == {"turn_1/skipped_rewards": 1, "turn_1/skipped_returns": 1}
    means = RunningMeans()
    means.add_trees([root, two_turns_counted()], 2, skips=True)
    found = means.take()
    assert (found["turn_1/skipped_rewards"], found["turn_2/skipped_rewards"]) == (2, 10)
    assert (found["turn_1/skipped_returns"], found["turn_2/skipped_returns"]) == (2, 0)
    means.add_trees([root], 2)
    assert not any("skipped" in name for name in means.take())
    assert number_env_steps([root], 0) == 4 + 9  # those skipped were played, too


def two_turns_counted():
    root = two_turns()
    assign_returns(root, num_turns=2, discount=0.5, hold=False)
    return root


def test_a_skipped_branch_is_in_no_carried_mean():
    assert carried_reward(two_turns(), 1) == pytest.approx((1.5 + 3) / 2)
    assert carried_reward(node([None, None]), 1) is None
    assert row_metrics(node([None, None]), 2) == {"turn_1/coverage": 1.0, "turn_2/coverage": 0.0}


def test_a_trees_weights_are_shared_by_those_with_a_return():
    root = two_turns_counted()
    assert [reach_weight(root.children[j]) for j in (0, 3)] == [0.5, 0.5]
    full = node([1.0, 2.0], [node([1.0, 2.0]), node([1.0, 2.0])])
    assign_returns(full, num_turns=2, discount=1.0, hold=False)
    assert reach_weight(full.children[1]) == 0.5


def test_the_kl_of_those_left_is_charged():
    kl = ReferenceKL(torch.tensor([0.1, 0.2, 0.4]).double(), torch.tensor([1.0, 2.0, 4.0]).double())
    fields = {"reference_kl_enabled": True, "reference_kl_coef": 1.0, "advantage_mode": "raw"}
    first, _ = samples(node([1.0, None, 2.0], kl=kl), **fields)
    assert first.kl.k3.tolist() == [1.0, 4.0]
    assert first.advantages.tolist() == pytest.approx([0.9, 1.6], abs=1e-6)
    root = node([1.0] + [None] * 4 + [2.0] + [None] * 3, joint_mode="cross", kl=kl)  # (0, 0) and (1, 2)
    one, other = samples(root, joint_mode="cross", **fields)
    assert one.advantages.tolist() == pytest.approx([3 * 0.9, 3 * 1.8], abs=1e-6)  # 3 = K^(N-1), as for the rewards
    assert (other.ks, other.advantages.tolist()) == ((0, 2), pytest.approx([3 * 0.9, 3 * 1.6], abs=1e-6))


# Everything else that looks at rewards


def test_early_termination_looks_at_valid_rewards():
    def stopped(rewards, threshold, on):
        episode = Episode(2, 3, Sampling(1), 0, early_termination_threshold=threshold, early_termination_on=on)
        return stopped_early(rewards, episode)

    assert stopped([1.0, None, 2.0], 1.4, "node_mean") == [True, False, True]
    assert stopped([1.0, None, 2.0], 1.6, "node_mean") == [False] * 3
    assert stopped([1.0, 0.0, 2.0], 1.4, "node_mean") == [False] * 3  # a 0 in its place
    assert stopped([1.0, None, 2.0], 1.4, "joint_action") == [False, False, True]
    assert stopped([None] * 3, -5.0, "node_mean") == [False] * 3
    assert stopped([1.0, None, 2.0], None, "node_mean") == [False] * 3


def test_lines_of_the_rollout_log_name_the_completions_kept():
    root = node([1.0, None, 2.0])
    root.env_step = 3
    lines = list(completion_records([root], samples(root), joint_mode="aligned", epoch=0, batch=1))
    assert [(line["agent"], line["k"], line["completion"], line["reward"]) for line in lines] == [
        (0, 0, "0", 1.0), (0, 2, "2", 2.0), (1, 0, "0", 1.0), (1, 2, "2", 2.0),
    ]  # fmt: skip
    cross = node(CROSS, joint_mode="cross")
    lines = list(completion_records([cross], samples(cross, joint_mode="cross"), joint_mode="cross", epoch=0, batch=1))
    assert lines[1]["rewards"] == [4.0, None, 6.0]
    assert lines[1]["return"] == 15.0


def test_a_sample_in_a_checkpoint_knows_which_completions_it_holds():
    sample = samples(node([1.0, None, 2.0]))[0]
    state = sample_state(sample)
    assert sample_of_state(state).ks == (0, 2)
    del state["ks"]  # of a checkpoint written before
    assert sample_of_state(state).ks == ()


def test_an_evaluation_leaves_skipped_rewards_out_and_counts_them():
    paths = []
    for rewards in ([1.0, 3.0], [2.0, None], [None]):
        path = [node([reward], num_agents=1) for reward in rewards]
        paths.append(path)
    found = summarise(paths, [0, 1, 2], [1], seed=0)
    assert (found["turn_1"]["reward_mean"], found["turn_1"]["samples"], found["turn_1"]["skipped_rewards"]) == (
        1.5,
        2,
        1,
    )
    assert (found["turn_2"]["reward_mean"], found["turn_2"]["samples"], found["turn_2"]["skipped_rewards"]) == (
        3.0,
        1,
        1,
    )
    assert found["gain_turn_2_over_turn_1"]["mean"] == 2.0
    assert found["final"]["reward_mean"] == 3.0
    nothing = summarise([[node([None], num_agents=1)]], [0], [1], seed=0)
    assert nothing["turn_1"] == {"samples": 0, "skipped_rewards": 1}
