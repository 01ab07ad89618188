"""Trees have the nodes they should have: numbers of agents, turns and joint actions, idle agents, early ends."""

from __future__ import annotations

import itertools

import pytest

from mareinforce import MAREINFORCETrainer
from mareinforce.rewards import RewardProcessors
from tests.system.runs import Recorder, column, metrics, table_team, train, unchanged, weights


def next_states(num_agents):
    return ["on"] * num_agents


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("mode", ["aligned", "cross"])
def test_a_full_tree_scores_every_joint_action_once(tmp_path, mode, count, turns):
    if mode == "cross" and count * turns > 6:
        count = 2  # 4 + 16 + 64 joint actions show the rule as well as 8 + 64 + 512
    reward, completions = Recorder(), 2
    made = train(
        tmp_path, reward, table_team(count), joint_mode=mode, num_turns=turns, num_generations=completions,
        external_transition=next_states, rollout_buffer_size="rollout",
    )  # fmt: skip
    joint = completions ** (count if mode == "cross" else 1)
    assert [known["turn"] for known in reward.known] == [t for t in range(turns) for _ in range(joint**t)]
    assert {len(column) for texts in reward.texts for column in texts} == {joint}
    assert {len(texts) for texts in reward.texts} == {count}
    total = sum(joint ** (t + 1) for t in range(turns))
    assert reward.joint_actions == total == made.module.env_step == metrics(made)[-1]["step"]
    assert made.module.updates == [turns] * count  # one mini-batch a turn


def test_cross_pairs_every_completion_with_every_other_in_order(tmp_path):
    reward = Recorder()
    agents = table_team(2)
    train(tmp_path, reward, agents, joint_mode="crossed", num_generations=3, rows=("go", "on", "up"))
    for first, second in reward.texts:
        mine, yours = first[::3], second[:3]
        assert list(zip(first, second, strict=True)) == list(itertools.product(mine, yours))
    aligned = Recorder()
    train(tmp_path, aligned, table_team(2), num_generations=3, rows=("go", "on", "up"))
    # the same completions, the k-th of every agent together
    assert [(first[::3], second[:3]) for first, second in reward.texts] == [tuple(texts) for texts in aligned.texts]


@pytest.mark.parametrize(("reduction", "factor"), [("sum", 3.0), ("mean", 1.0)])
def test_a_completion_in_a_cross_gets_the_returns_of_its_joint_actions(tmp_path, reduction, factor):
    fields = {"joint_mode": "cross", "num_generations": 3, "cross_reduction": reduction}
    made = train(tmp_path, lambda *texts: [2.0] * 9, kind=MAREINFORCETrainer, **fields)
    assert column(made, "agent_0/loss") == pytest.approx([2.0 * factor * 0.6931472], abs=1e-5)
    assert column(made, "turn_1/expected_return") == [2.0]  # of joint actions, whatever agents get


@pytest.mark.parametrize(("mode", "joint"), [("aligned", 3), ("cross", 3)])
def test_an_agent_whose_formatter_gives_nothing_is_silent_and_does_not_learn(tmp_path, mode, joint):
    agents, reward = table_team(), Recorder()
    before = weights(agents[0])
    made = train(
        tmp_path, reward, agents, formatters=[lambda row: row["prompt"], lambda row: None], num_generations=3,
        joint_mode=mode,
    )  # fmt: skip
    assert reward.texts[0][1] == [""] * joint  # cross: the other agent's 3, not 9
    assert set(reward.texts[0][0]) <= {"x", "y"}
    assert reward.known[0]["ended"] == [[False] * joint, [True] * joint]
    assert reward.shown(0) == [["go", None]]
    assert unchanged(before, agents[0]) == [False, True]
    assert not any(name.startswith("agent_1/") and value for name, value in metrics(made)[0].items())


@pytest.mark.parametrize("mode", ["aligned", "cross"])
def test_an_agent_that_the_transition_leaves_out_is_silent_for_that_turn(tmp_path, mode):
    agents, reward = table_team(), Recorder()

    def transition(turn):
        return [None, "on"] if turn == 0 else ["up", "by"]

    before = weights(agents[0])
    made = train(
        tmp_path, reward, agents, num_turns=3, external_transition=transition, joint_mode=mode,
        rollout_buffer_size="rollout",
    )  # fmt: skip
    joint = 2 if mode == "aligned" else 4
    assert reward.shown(0) == [["go", "go"]]
    assert reward.shown(1) == [[None, "on"]] * joint
    assert reward.shown(2) == [["up", "by"]] * joint * 2  # only one agent's answers branch at turn 2
    silent = [texts for texts, known in zip(reward.texts, reward.known, strict=True) if known["turn"] == 1]
    assert [first for first, _ in silent] == [["", ""]] * joint
    for known in reward.known:
        if known["turn"] == 2:
            assert known["response_history_per_agent"][0][1] == ""
            assert known["prompt_history_per_agent"][0][1] is None
    assert unchanged(before, agents[0]) == [False, False]
    assert made.module.updates == [2, 3]


@pytest.mark.parametrize("ends", [None, [None, None]])
def test_a_transition_that_leaves_out_everybody_ends_the_branch(tmp_path, ends):
    reward = Recorder()

    def transition(reward):
        return ["on", "up"] if reward == 0.0 else ends

    made = train(tmp_path, reward, num_turns=2, num_generations=3, external_transition=transition)
    assert [known["turn"] for known in reward.known] == [0, 1]  # one branch of three went on
    assert made.module.env_step == 6
    row = metrics(made)[0]
    assert row["turn_2/coverage"] == 1.0
    assert row["turn_2/reward_mean_carried"] == pytest.approx((1.0 + 1.0 + 2.0) / 3)
    over = train(tmp_path, num_turns=2, num_generations=3, external_transition=lambda prompt: ends)
    assert metrics(over)[0]["turn_2/coverage"] == 0.0
    assert "turn_2/reward_mean" not in metrics(over)[0]
    assert over.module.env_step == 3


@pytest.mark.filterwarnings("ignore:a branch that is stopped early earns nothing")
@pytest.mark.parametrize(
    ("on", "value", "threshold", "calls", "expected_return"),
    [
        ("node_mean", "zero", 0.49, 1, 0.5),  # (0 + 1) / 2: everything stops
        ("node_mean", "hold", 0.49, 1, 0.75),  # (0 + 1.5) / 2
        ("node_mean", "zero", 0.5, 3, 0.75),  # the mean is not above: all go on, (0.25 + 1.25) / 2
        ("joint_action", "zero", 0.5, 2, 0.625),  # (0.25 + 1) / 2
        ("joint_action", "hold", 0.5, 2, 0.875),  # (0.25 + 1.5) / 2
        ("joint_action", "hold", 1.0, 3, 0.75),
        ("node_mean", "hold", None, 3, 0.75),
    ],
)
def test_early_termination_stops_what_it_should(tmp_path, on, value, threshold, calls, expected_return):
    reward = Recorder()
    made = train(
        tmp_path, reward, num_turns=2, external_transition=next_states, discount=0.5, early_termination_on=on,
        early_termination_value=value, early_termination_threshold=threshold,
    )  # fmt: skip
    assert len(reward.texts) == calls
    row = metrics(made)[0]
    assert row["turn_1/expected_return"] == pytest.approx(expected_return)
    assert row["turn_1/reward_mean"] == 0.5
    assert row["turn_2/coverage"] == float(calls > 1)
    # a stopped branch counts with its last reward: 1 for the second one where only that stopped
    assert row["turn_2/reward_mean_carried"] == (0.75 if calls == 2 else 0.5)
    assert row.get("turn_2/reward_mean") == (None if calls == 1 else 0.5)


@pytest.mark.parametrize(("shift", "calls"), [(-1.0, 3), (1.0, 1)])
def test_the_threshold_is_compared_with_processed_rewards(tmp_path, shift, calls):
    reward, told = Recorder(), []

    def transition(reward):
        told.append(reward)
        return next_states(2)

    made = train(
        tmp_path, reward, num_turns=2, external_transition=transition, early_termination_threshold=0.5,
        reward_processor=RewardProcessors.shift(value=shift),
    )  # fmt: skip
    assert len(reward.texts) == calls
    assert told == ([0.0, 1.0] if calls == 3 else [])  # the transition is told the user's own number
    assert metrics(made)[0]["turn_1/raw_reward_mean"] == 0.5
    assert metrics(made)[0]["turn_1/reward_mean"] == 0.5 + shift
