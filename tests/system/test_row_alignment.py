"""Rows reach the reward and the transition whole, unchanged and with the answers they belong to."""

from __future__ import annotations

import copy

import datasets
import pytest

from mareinforce.errors import DataError
from tests.system.runs import STATES, Recorder, rank, train, trainer

ROWS = [
    {"prompt": word, "answer": index, "about": {"word": word, "tags": [index, index + 1]}}
    for index, word in enumerate(STATES[:5])
]
EXPECTED = {row["prompt"]: row for row in ROWS}
TWO_TURNS = {"num_turns": 2, "num_generations": 3, "prompts_per_step": 2, "rollout_buffer_size": "rollout"}


@pytest.mark.parametrize("rows", [ROWS, datasets.Dataset.from_list(ROWS)], ids=["list", "dataset"])
def test_every_call_gets_the_row_of_its_answers(tmp_path, rows):
    reward, handed_on = Recorder(), []

    def transition(prompt, batch_item, agent_completions, prompt_history_per_agent, response_history_per_agent):
        assert batch_item == EXPECTED[prompt]
        assert [history[-1] for history in response_history_per_agent] == agent_completions
        assert prompt_history_per_agent == [[prompt], [prompt]]
        handed_on.append(prompt)
        return [f"{prompt} on", f"{prompt} up"]

    train(tmp_path, reward, rows=rows, external_transition=transition, **TWO_TURNS)
    assert len(reward.texts) == 5 * (1 + 3)
    for texts, known in zip(reward.texts, reward.known, strict=True):
        prompt = known["prompts"][0]
        assert known["prompts"] == [prompt] * 3
        assert known["batch_items"] == [EXPECTED[prompt]] * 3  # nothing dropped, every type as it was
        assert [len(column) for column in texts] == [3, 3]
        shown = [history[-1] for history in known["prompt_history_per_agent"]]
        assert shown == ([prompt] * 2 if known["turn"] == 0 else [f"{prompt} on", f"{prompt} up"])
    played = [prompt for prompt, known in zip(reward.prompts, reward.known, strict=True) if known["turn"] == 0]
    assert sorted(played) == sorted(EXPECTED)
    assert played != list(EXPECTED)  # shuffled: rows by position would be the wrong ones
    assert sorted(handed_on) == sorted([*EXPECTED] * 3)


def test_the_answers_of_one_branch_stay_in_that_branch(tmp_path):
    reward = Recorder()

    def transition(agent_completions):
        return [f"heard {agent_completions[1]} go", f"heard {agent_completions[0]} go"]

    train(tmp_path, reward, rows=ROWS, external_transition=transition, **TWO_TURNS)
    said = {}
    for texts, known in zip(reward.texts, reward.known, strict=True):
        if known["turn"] == 0:
            said[known["prompts"][0]] = list(zip(*texts, strict=True))
    branches = {prompt: [] for prompt in said}
    for known in reward.known:
        if known["turn"] == 1:
            first, second = (history[0] for history in known["response_history_per_agent"])
            assert [history[1] for history in known["prompt_history_per_agent"]] == [
                f"heard {second} go", f"heard {first} go",
            ]  # fmt: skip
            branches[known["prompts"][0]].append((first, second))
    assert branches == said  # one child a joint answer, in order
    assert len({answer for answers in said.values() for answer in answers}) > 1


def test_what_a_reward_does_to_its_row_is_not_seen_by_the_next_call(tmp_path):
    seen = []

    def reward(first, second, batch_items):
        seen.append(copy.deepcopy(batch_items))
        for item in batch_items:
            item["about"]["tags"].clear()
            del item["answer"]
        return rank(first)

    train(tmp_path, reward, rows=ROWS, external_transition=lambda prompt: ["on", "up"], **TWO_TURNS)
    assert len(seen) == 20
    assert all(item == EXPECTED[item["prompt"]] for items in seen for item in items)
    assert EXPECTED["on"]["about"]["tags"] == [1, 2]


def test_a_reward_that_asks_for_no_columns_gets_none(tmp_path):
    calls = []

    def reward(first, second):
        calls.append((first, second))
        return rank(first)

    train(tmp_path, reward, rows=ROWS)
    assert len(calls) == 5


@pytest.mark.parametrize("make", [list, datasets.Dataset.from_list], ids=["list", "dataset"])
def test_a_renamed_prompt_column_is_named_before_any_model_work(tmp_path, make):
    renamed = make([{"question": row["prompt"], "answer": row["answer"], "about": row["about"]} for row in ROWS])
    reward = Recorder()
    made = trainer(tmp_path, reward, rows=renamed)
    with pytest.raises(DataError) as told:
        made.train()
    for words in ("'prompt'", "question", "answer", "about", "prompt_column"):
        assert words in str(told.value)
    assert made.module.team is None
    assert reward.texts == []
    assert not list(tmp_path.iterdir())
    train(tmp_path, reward, rows=renamed, prompt_column="question")
    assert sorted(reward.prompts) == sorted(EXPECTED)


@pytest.mark.parametrize("rows", [[], datasets.Dataset.from_list([])], ids=["list", "dataset"])
def test_no_rows_are_refused(tmp_path, rows):
    made = trainer(tmp_path, rows=rows)
    with pytest.raises(DataError, match=r"data\.train"):
        made.train()
    assert made.module.team is None


def test_texts_are_prompts(tmp_path):
    reward = Recorder()
    train(tmp_path, reward, rows=["go", "on"])
    assert sorted(reward.prompts) == ["go", "on"]
