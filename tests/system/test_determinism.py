"""The same rows, seed and weights give the same texts, whatever is batched with them or happens in between."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from mareinforce.agents.team import Team
from tests.system.runs import Recorder, column, llama_team, table_team, train, trainer, unchanged, weights

ROWS = ("a", "b c d", "e f", "g a b c e")
TWO_TURNS = {
    "num_turns": 2,
    "num_generations": 2,
    "max_new_tokens": 4,
    "agent_learning_rate": 0.01,
    "external_transition": lambda prompt, agent_completions: [f"{prompt} {text}" for text in agent_completions[::-1]],
}


def said(reward: Recorder) -> dict[tuple, list]:
    """What was said in training at every node, by the row's prompt and the answers that led there."""
    nodes: dict[tuple, list] = {}
    for texts, known in zip(reward.texts, reward.known, strict=True):
        if len(texts[0]) > 1:  # evaluation scores one joint answer at a time
            key = (known["prompts"][0], str(known["response_history_per_agent"]))
            nodes.setdefault(key, []).append(texts)
    return nodes


def run(folder, reward=None, **options):
    """Train two Llamas on the rows; return what was said and what was learned."""
    agents, reward = llama_team(), reward or Recorder()
    train(folder, reward, agents, ROWS, **{**TWO_TURNS, **options})
    return said(reward), weights(agents[0]), agents[0]


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """What was said and what was learned where nothing is special."""
    texts, learned, _ = run(tmp_path_factory.mktemp("usual"))
    return texts, learned


def test_the_same_seed_gives_the_same_texts_and_weights_and_another_seed_others(tmp_path, usual):
    texts, learned = usual
    again, _, models = run(tmp_path, seed=0)
    assert len(texts) > len(ROWS) + 2  # nodes of both turns
    assert texts == again
    assert unchanged(learned, models) == [True, True]
    other, _, models = run(tmp_path, seed=1)
    assert other != texts
    assert unchanged(learned, models) == [False, False]


def test_nothing_outside_of_the_seed_decides(tmp_path, usual):
    class Rolling(Recorder):
        """Draws from every global stream of random numbers, and sets them."""

        def __call__(self, *texts, **known):
            torch.rand(3), np.random.rand(2), random.random()
            torch.manual_seed(len(self.texts))
            return super().__call__(*texts, **known)

    texts, learned = usual
    torch.manual_seed(77)
    np.random.seed(5)
    again, _, models = run(tmp_path, Rolling())
    assert again == texts
    assert unchanged(learned, models) == [True, True]


@pytest.mark.parametrize("together", [2, 4])
def test_rows_rolled_out_together_say_what_they_say_alone(tmp_path, usual, together):
    no_update = {"rollout_buffer_size": 10**6, "importance_sampling": "token"}  # until the end of the epoch
    texts, _, _ = run(tmp_path, **no_update)
    batched, _, _ = run(tmp_path, prompts_per_step=together, **no_update)
    assert batched == texts
    assert list(batched) != list(texts)  # level by level over the rows, not row by row
    assert usual[0] != texts  # with updates in between the weights are others


def test_rows_rolled_out_together_are_learned_from_alike(tmp_path):
    fields = {"num_turns": 1, "rollout_buffer_size": 10**6, "importance_sampling": "token"}
    _, learned, _ = run(tmp_path, **fields)
    _, _, models = run(tmp_path, prompts_per_step=3, **fields)
    assert unchanged(learned, models) == [True, True]
    _, _, models = run(tmp_path, prompts_per_step=3, **{**fields, "rollout_buffer_size": 2})
    assert unchanged(learned, models) == [False, False]


@pytest.mark.parametrize("fields", [{}, {"eval_temperature": 0.0, "eval_batch_size": 3}])
def test_evaluating_in_between_changes_nothing(tmp_path, usual, fields):
    evaluated = Recorder()
    texts, learned = usual
    again, _, models = run(tmp_path, evaluated, eval_interval=1, eval_dataset=list(ROWS), eval_num_samples=3, **fields)
    assert sum(len(texts[0]) == 1 for texts in evaluated.texts) == 4 * 3 * 2  # batches, rows, turns
    assert again == texts
    assert unchanged(learned, models) == [True, True]


def test_every_epoch_row_agent_and_turn_has_numbers_of_its_own(tmp_path):
    agents, reward = table_team(), Recorder()  # equal policies, whatever they are asked
    train(
        tmp_path, reward, agents, ["go"] * 2, num_train_epochs=2, num_generations=40, agent_learning_rate=1e-9,
        num_turns=2, external_transition=lambda turn, reward: ["go", "go"] if reward < 2 else None,
    )  # fmt: skip
    groups = [tuple(texts) for call in reward.texts for texts in call]
    assert len(groups) == 2 * 2 * 3 * 2  # epochs, rows, nodes, agents
    assert len(set(groups)) == len(groups)


def test_evaluation_draws_numbers_of_its_own(tmp_path):
    rows, reward = ["go"] * 20, Recorder()
    made = trainer(tmp_path, reward, rows=rows, eval_dataset=rows, agent_learning_rate=1e-9, shuffle=False)
    made.evaluate(20)
    made.evaluate(20)
    made.train()
    first, again, trained = ([texts[0][0] for texts in reward.texts[start : start + 20]] for start in (0, 20, 40))
    assert first == again
    assert first != trained  # the first completions of the same rows, under the same weights
    assert set(first) == set(trained) == {"x", "y"}


def test_sampled_and_rescored_logprobs_agree_before_the_first_update(tmp_path, monkeypatch):
    def gaps(temperature):
        agents = llama_team()
        made = train(tmp_path, agents=agents, rows=ROWS, num_generations=4, max_new_tokens=8, temperature=temperature)
        return [column(made, f"agent_{agent}/sampling_gap")[0] for agent in range(2)]

    assert all(gap < 1e-4 for temperature in (1.0, 0.7) for gap in gaps(temperature))
    score = Team.score_nodes
    monkeypatch.setattr(Team, "score_nodes", lambda team, agent, nodes, _, **options: score(team, agent, nodes, 1.0))
    assert min(gaps(0.7)) > 1e-2  # scored as another policy


def test_truncated_sampling_is_told_once_and_leaves_logprobs_whole(tmp_path):
    with pytest.warns(UserWarning, match="top_p=0.5") as told:
        made = train(tmp_path, agents=llama_team(), rows=ROWS, max_new_tokens=8, top_p=0.5, num_train_epochs=2)
    assert len(told) == 1
    assert column(made, "agent_0/sampling_gap")[0] < 1e-4  # those of the whole policy, on both sides


def test_order_of_rows_is_decided_by_the_seed_and_new_in_every_epoch(tmp_path):
    orders = []
    for seed in (0, 0, 1):
        reward = Recorder()
        train(tmp_path, reward, rows=("go", "on", "up", "by", "in", "at"), num_train_epochs=2, seed=seed)
        orders.append((reward.prompts[:6], reward.prompts[6:]))
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][0] != orders[0][1]
    assert sorted(orders[0][0]) == sorted(orders[0][1])
