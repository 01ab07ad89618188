"""The fields that shape an update do what they say, in closed form where a uniform policy gives one.

The policies here say x or end, each with probability 1/2, so a token costs ln 2 whatever it is.
"""

from __future__ import annotations

import math

import pytest
import torch

import mareinforce.learner
from mareinforce import MAREINFORCETrainer
from tests.system.runs import STATES, Recorder, column, llama_team, metrics, rank, table_team, train, unchanged, weights

LN2 = math.log(2.0)


def ending_team():
    return table_team(2, actions=["x", "<eos>"])


def ones(*texts):
    return [1.0] * len(texts[0])


def tokens(reward, call=0, agent=0):
    """Tokens of each completion of a call, the end token included, and whether it ended."""
    said = zip(reward.texts[call][agent], reward.known[call]["ended"][agent], strict=True)
    return [(len(text.split()) + ended, ended) for text, ended in said]


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({}, lambda lengths, ended: sum(lengths) / 8),
        ({"loss_aggregation": "token_mean"}, lambda lengths, ended: 1.0),
        ({"loss_aggregation": "constant"}, lambda lengths, ended: sum(lengths) / (8 * 3)),
        ({"exclude_final_token": True}, lambda lengths, ended: (sum(lengths) - 8) / 8),
        ({"mask_truncated": True}, lambda lengths, ended: sum(n for n, e in zip(lengths, ended, strict=True) if e) / 8),
        ({"mask_truncated": True, "loss_aggregation": "token_mean"}, lambda lengths, ended: 1.0),
    ],
)
def test_the_loss_is_the_sum_over_whole_completions_unless_told_otherwise(tmp_path, fields, value):
    reward = Recorder(ones)
    made = train(
        tmp_path, reward, ending_team(), kind=MAREINFORCETrainer, num_generations=8, max_new_tokens=3, **fields
    )
    lengths, ended = zip(*tokens(reward), strict=True)
    assert len(set(lengths)) > 1
    assert 0 < sum(ended) < 8
    assert column(made, "agent_0/loss") == pytest.approx([LN2 * value(lengths, ended)], abs=1e-5)
    assert column(made, "agent_0/completion_length") == pytest.approx([sum(lengths) / 8])
    assert column(made, "agent_0/truncated_fraction") == [1 - sum(ended) / 8]
    assert column(made, "agent_0/entropy") == pytest.approx([LN2], abs=1e-5)
    assert LN2 * value(lengths, ended) != pytest.approx(LN2 * (sum(lengths) - sum(ended)) / 8)  # end tokens dropped


@pytest.mark.parametrize("masked", [True, False])
def test_completions_that_are_all_cut_teach_nothing_where_they_are_masked(tmp_path, masked):
    agents = table_team()  # never ends
    before = weights(agents[0])
    made = train(tmp_path, agents=agents, rows=STATES, mask_truncated=masked)
    assert column(made, "agent_0/truncated_fraction") == [1.0] * 6
    assert unchanged(before, agents[0]) == [masked] * 2
    assert column(made, "agent_0/stepped_fraction") == [float(not masked)] * 6


@pytest.mark.filterwarnings("ignore:.*min_new_tokens=. keep some tokens")
@pytest.mark.parametrize(("least", "most"), [(0, 3), (2, 3), (3, 3)])
def test_no_completion_ends_before_min_new_tokens(tmp_path, least, most):
    reward = Recorder(ones)
    train(tmp_path, reward, ending_team(), num_generations=16, max_new_tokens=most, min_new_tokens=least)
    words = [len(text.split()) for text in reward.texts[0][0]]
    assert min(words) == least
    assert max(words) == most
    assert any(reward.known[0]["ended"][0]) is (least < most)


def test_agents_that_say_nothing_are_scored_by_their_end_token_and_go_on(tmp_path):
    agents, reward = table_team(2, actions=["<eos>"]), Recorder()
    made = train(
        tmp_path, reward, agents, num_turns=2, max_new_tokens=3, external_transition=lambda num_agents: ["on", "up"]
    )
    assert reward.texts == [(["", ""], ["", ""])] * 3
    assert [known["ended"] for known in reward.known] == [[[True, True]] * 2] * 3
    assert column(made, "agent_0/completion_length") == [1.0]
    assert column(made, "agent_0/truncated_fraction") == [0.0]
    assert all(math.isfinite(value) for value in metrics(made)[0].values())
    assert all(bool(weight.isfinite().all()) for one in weights(agents[0]) for weight in one.values())


@pytest.mark.parametrize(("temperature", "gap"), [(0.5, 4.0), (2.0, 1.0)])
def test_what_is_trained_is_the_policy_at_the_sampling_temperature(tmp_path, temperature, gap):
    agents = table_team()
    for model in agents[0]:
        model.table.weight.data[:, 7] += 2.0  # x before y
    reward = Recorder(ones)
    made = train(tmp_path, reward, agents, kind=MAREINFORCETrainer, num_generations=16, temperature=temperature)
    share = reward.texts[0][0].count("y") / 16
    costs = {"x": math.log(1 + math.exp(-gap)), "y": math.log(1 + math.exp(gap))}
    assert column(made, "agent_0/loss") == pytest.approx([(1 - share) * costs["x"] + share * costs["y"]], abs=1e-4)
    assert column(made, "agent_0/sampling_gap")[0] < 1e-5


LR_CASES = [
    ({}, [1.0, 1.0, 1.0, 1.0]),
    ({"lr_schedule": "linear"}, [1.0, 0.75, 0.5, 0.25]),
    ({"lr_schedule": "cosine"}, [1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2]),
    ({"warmup_updates": 2}, [1 / 3, 2 / 3, 1.0, 1.0]),
    ({"lr_schedule": "linear", "warmup_updates": 1}, [0.5, 0.75, 0.5, 0.25]),
    ({"lr_schedule": "linear", "max_updates": 2}, [1.0, 0.5]),  # ends before the rows do
    ({"lr_schedule": "linear", "max_updates": 100}, [1.0, 0.75, 0.5, 0.25]),  # the rows end first
    ({"lr_schedule": "linear", "num_train_epochs": 2}, [1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
]


@pytest.mark.parametrize(("fields", "factors"), LR_CASES)
def test_learning_rates_follow_their_schedule_over_the_run(tmp_path, fields, factors):
    made = train(tmp_path, rows=STATES[:4], agent_learning_rate=[0.1, 0.02], **fields)
    for agent, rate in enumerate((0.1, 0.02)):
        logged = column(made, f"agent_{agent}/learning_rate")
        assert logged == pytest.approx([rate * factor for factor in factors], rel=1e-6)


def test_the_learning_rate_logged_is_the_one_stepped_with(tmp_path):
    agents = table_team()
    before = weights(agents[0])
    train(tmp_path, agents=agents, agent_learning_rate=[0.1, 0.02], warmup_updates=1, num_generations=8)
    for agent, rate in enumerate((0.05, 0.01)):  # AdamW's first step moves by the rate itself
        moved = (weights(agents[0])[agent]["table.weight"] - before[agent]["table.weight"]).abs().max()
        assert float(moved) == pytest.approx(rate, rel=1e-3)


class Updates:
    """Keeps what every update of a run was made of and what it gave."""

    def __init__(self, monkeypatch):
        self.batches, self.results, self._update = [], [], mareinforce.learner.compute_gradient
        monkeypatch.setattr(mareinforce.learner, "compute_gradient", self)

    def __call__(self, team, optimizer, batch, *rest):
        result = self._update(team, optimizer, batch, *rest)
        self.batches.append(batch)
        self.results.append(result)
        return result


@pytest.mark.filterwarnings("ignore:turn_weighting=tree with rollout_buffer_size=2")
@pytest.mark.parametrize(
    ("fields", "turns"),
    [
        ({"rollout_buffer_size": "rollout"}, [[0], [1, 1]]),  # never mixes turns, the lowest first
        ({"rollout_buffer_size": "rollout", "turn_weighting": "tree"}, [[0, 1, 1]]),
        ({"rollout_buffer_size": "rollout", "train_batch_size": 1}, [[0], [1], [1]]),
        ({"rollout_buffer_size": 1}, [[0], [1], [1]]),
        ({"rollout_buffer_size": 2}, [[0], [1], [1]]),
        ({"rollout_buffer_size": 2, "turn_weighting": "tree"}, [[0, 1], [1]]),
    ],
)
def test_a_buffer_is_cut_into_updates(tmp_path, monkeypatch, fields, turns):
    updates = Updates(monkeypatch)
    made = train(tmp_path, agents=table_team(1), num_turns=2, external_transition=lambda prompt: ["on"], **fields)
    assert [[sample.turn for sample in batch] for batch in updates.batches] == turns
    assert made.module.updates == [len(turns)]


@pytest.mark.parametrize(("weighting", "losses"), [("tree", [2.0]), ("sample", [1.5, 1.0])])
def test_a_tree_is_weighted_turn_by_turn(tmp_path, monkeypatch, weighting, losses):
    updates = Updates(monkeypatch)
    train(
        tmp_path, ones, table_team(1), kind=MAREINFORCETrainer, num_turns=2, external_transition=lambda prompt: ["on"],
        discount=0.5, rollout_buffer_size="rollout", turn_weighting=weighting,
    )  # fmt: skip
    # turn 1 returns 1.5, each of two nodes at turn 2 returns 1; tree: 1.5 + 0.5 * (1 + 1) / 2
    assert [result.losses[0] for result in updates.results] == pytest.approx([LN2 * loss for loss in losses], abs=1e-5)


@pytest.mark.parametrize(("buffer", "sizes"), [("rollout", [3, 3]), (4, [4, 2]), (1, [1] * 6)])
def test_rows_rolled_out_together_share_a_buffer(tmp_path, monkeypatch, buffer, sizes):
    updates = Updates(monkeypatch)
    made = train(
        tmp_path, agents=table_team(1), rows=STATES, prompts_per_step=3, rollout_buffer_size=buffer,
        importance_sampling="token",
    )  # fmt: skip
    assert [len(batch) for batch in updates.batches] == sizes
    assert column(made, "batch") == [1, 2]
    # the second half of the first four samples, and all of the third to sixth single ones, are older than the weights
    assert (max(column(made, "agent_0/sample_age")) > 0) is (buffer != "rollout")


@pytest.mark.parametrize("level", ["none", "token", "sequence"])
def test_samples_older_than_the_weights_are_weighed_by_their_ratio(tmp_path, monkeypatch, level):
    updates, agents, cap = Updates(monkeypatch), table_team(1), 1.3
    tables = []
    monkeypatch.setattr(
        "mareinforce.learner.learning_rate_factor", lambda *args: tables.append(weights(agents[0])[0]) or 1.0
    )
    made = train(
        tmp_path, agents=agents, rows=["go", "go"], rollout_buffer_size=2, train_batch_size=1, num_generations=5,
        max_new_tokens=2, importance_sampling=level, importance_cap=cap, agent_learning_rate=0.4,
    )  # fmt: skip
    fresh, stale = (result.metrics[0] for result in updates.results)
    assert column(made, "agent_0/sample_age") == [0.5]  # 0 and 1
    if level == "none":
        assert not any("importance" in name or "effective" in name for name in metrics(made)[-1])
        return
    assert [fresh["importance_ratio_mean"], fresh["importance_ratio_max"], fresh["effective_sample_size"]] == [1.0] * 3
    policy, state = tables[1]["table.weight"].softmax(-1), updates.batches[1][0].prompt_ids[-1]
    ratios = []
    for completion in updates.batches[1][0].completions:
        first, second = completion.ids.tolist()
        each = torch.stack([policy[state, first] / 0.5, policy[first, second] / 0.5])
        ratios.append(each if level == "token" else each.prod().expand(2))
    uncapped = torch.cat(ratios)
    expected = uncapped.clamp(max=cap)
    assert float(uncapped.max()) > cap
    assert stale["importance_ratio_mean"] == pytest.approx(float(expected.mean()), abs=1e-5)
    assert stale["importance_ratio_max"] == pytest.approx(cap, abs=1e-6)
    size = float(expected.sum() ** 2 / expected.square().sum() / len(expected))
    assert stale["effective_sample_size"] == pytest.approx(size, abs=1e-5)
    assert size < 0.9999
    assert "sampling_gap" not in stale


@pytest.mark.parametrize(("reward", "age"), [(ones, 0.0), (rank, 0.5)])
def test_only_an_update_that_moves_the_weights_makes_samples_older(tmp_path, reward, age):
    fields = {"rollout_buffer_size": 2, "train_batch_size": 1, "num_generations": 8}
    made = train(tmp_path, reward, agents=table_team(1), rows=["go", "go"], **fields)
    assert made.module.updates == [2]
    assert column(made, "agent_0/sample_age") == [age]


def test_the_ratio_changes_the_gradient(tmp_path):
    ends = []
    for level in ("none", "token", "sequence"):
        agents = table_team(1)
        train(
            tmp_path, agents=agents, rows=["go", "go"], rollout_buffer_size=2, train_batch_size=1, num_generations=5,
            max_new_tokens=2, importance_sampling=level, agent_learning_rate=0.4,
        )  # fmt: skip
        ends.append(weights(agents[0]))
    assert [unchanged(ends[one], agents[0]) for one in (0, 1)] == [[False], [False]]
    assert not torch.equal(ends[0][0]["table.weight"], ends[1][0]["table.weight"])


@pytest.mark.parametrize(("buffer", "alike"), [(2, True), (1, False)])
@pytest.mark.filterwarnings("ignore:.*prompts_per_step")
def test_two_rows_a_step_learn_what_one_row_a_step_does_if_the_buffer_holds_both(tmp_path, buffer, alike):
    after = []
    for rows in (1, 2):
        models, words = llama_team()
        train(
            tmp_path / str(rows), agents=(models, words), rows=("a", "b c", "d", "e f"), prompts_per_step=rows,
            rollout_buffer_size=buffer, max_new_tokens=4, num_generations=4, agent_learning_rate=0.01,
        )  # fmt: skip
        after.append(torch.cat([weight.flatten() for state in weights(models) for weight in state.values()]))
    assert bool((after[0] - after[1]).abs().max() < 1e-5) == alike
