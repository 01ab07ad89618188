"""A reward, a transition or a formatter that fails ends training in words, before any weight changes."""

from __future__ import annotations

import math

import pytest

from mareinforce.errors import PromptError, RewardError, UserCodeError
from tests.system.runs import STATES, Recorder, table_team, train, trainer, unchanged, weights


@pytest.mark.parametrize(
    ("scores", "named"),
    [
        ([1.0, None, 0.0, math.nan], ["1 (None)", "3 (nan)"]),
        ([1.0, 0.0, math.inf, 0.0], ["2 (inf)"]),
        ([-math.inf, 0.0, 1.0, 0.0], ["0 (-inf)"]),
        ([1.0, 0.0, "2", 0.0], ["2 ('2')"]),
    ],
)
def test_what_is_no_number_ends_training_before_any_weight_changes(tmp_path, scores, named):
    agents, reward = table_team(), Recorder(lambda *texts: scores)
    before = weights(agents[0])
    with pytest.raises(RewardError) as told:
        train(tmp_path, reward, agents, STATES, num_generations=4, advantage_normalization=True)
    for words in (*named, "Recorder", "turn 1", reward.prompts[0], "expected 4"):
        assert words in str(told.value)
    assert len(reward.texts) == 1
    assert unchanged(before, agents[0]) == [True, True]
    train(tmp_path, Recorder(lambda *texts: [1.0, 0.0, 0.0, 2.0]), agents, STATES, num_generations=4)
    assert unchanged(before, agents[0]) == [False, False]


def test_a_bad_reward_at_the_second_turn_names_that_turn_and_leaves_the_first_unlearned(tmp_path):
    def reward(first, second, turn):
        return [0.0, 1.0] if turn == 0 else [0.0, None]

    agents = table_team()
    before = weights(agents[0])
    with pytest.raises(RewardError, match=r"joint action 1 \(None\).*turn 2 of 2"):
        train(tmp_path, reward, agents, num_turns=2, external_transition=lambda prompt: ["on", "up"])
    assert unchanged(before, agents[0]) == [True, True]


@pytest.mark.parametrize("count", [1, 3, 5, 0])
def test_a_wrong_number_of_rewards_is_never_stretched(tmp_path, count):
    agents, reward = table_team(), Recorder(lambda *texts: [1.0] * count)
    before = weights(agents[0])
    with pytest.raises(RewardError, match=rf"Recorder.*expected 4 numbers.*got {count} "):
        train(tmp_path, reward, agents, num_generations=4)
    assert len(reward.texts) == 1
    assert unchanged(before, agents[0]) == [True, True]


def test_what_a_reward_raises_is_the_cause_and_nothing_is_learned_after_it(tmp_path):
    class BadJson(Recorder):
        def __call__(self, *texts, **known):
            scores = super().__call__(*texts, **known)
            if len(self.texts) == 3:
                raise ValueError("bad json")
            return scores

    agents, stopped, reward = table_team(), table_team(), BadJson()
    with pytest.raises(UserCodeError, match=r"BadJson raised ValueError: bad json \(turn 1") as told:
        train(tmp_path, reward, agents, STATES, num_generations=8)
    assert isinstance(told.value.__cause__, ValueError)
    assert told.value.__cause__.__traceback__.tb_next.tb_frame.f_code.co_filename == __file__
    assert len(reward.texts) == 3
    train(tmp_path, agents=stopped, rows=STATES, num_generations=8, max_updates=2)  # the same two batches, and no third
    assert unchanged(weights(stopped[0]), agents[0]) == [True, True]
    train(tmp_path, agents=(three := table_team()), rows=STATES, num_generations=8, max_updates=3)
    assert unchanged(weights(three[0]), agents[0]) == [False, False]


def test_what_a_transition_raises_is_the_cause(tmp_path):
    asked = []

    def transition(prompt):
        asked.append(prompt)
        raise KeyError("feedback")

    agents = table_team()
    before = weights(agents[0])
    with pytest.raises(UserCodeError, match=r"external_transition .*transition raised KeyError: 'feedback'") as told:
        train(tmp_path, agents=agents, num_turns=2, external_transition=transition)
    assert isinstance(told.value.__cause__, KeyError)
    assert asked == ["go"]
    assert unchanged(before, agents[0]) == [True, True]


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        (["on"], "expected a list of 2 prompts, one an agent, got 1"),
        ("on", "returned 'on'"),
        (["on", 3], "gave 3, of type int for agent 1"),
        (["on", [{"role": "user", "content": "go"}]], "no chat template"),
    ],
)
def test_prompts_of_the_wrong_number_or_kind_are_refused(tmp_path, prompts, says):
    agents = table_team()
    before = weights(agents[0])
    with pytest.raises(PromptError) as told:
        train(tmp_path, agents=agents, num_turns=2, external_transition=lambda prompt: prompts)
    assert says in str(told.value)
    assert unchanged(before, agents[0]) == [True, True]


def test_every_first_prompt_is_tried_before_anything_is_sampled(tmp_path):
    reward = Recorder()

    def formatter(row):
        return None if row["prompt"] == "at" else row["prompt"]

    with pytest.raises(PromptError, match="row 5: the formatters gave None for all 2 agents"):
        train(tmp_path, reward, rows=STATES, formatters=formatter)
    assert reward.texts == []
    train(tmp_path, reward, rows=STATES[:5], formatters=formatter)
    assert len(reward.texts) == 5


def test_a_formatter_that_raises_is_the_cause(tmp_path):
    reward = Recorder()
    with pytest.raises(UserCodeError, match=r"formatters .* raised KeyError: 'title'") as told:
        train(tmp_path, reward, formatters=lambda row: row["title"])
    assert isinstance(told.value.__cause__, KeyError)
    assert reward.texts == []


def test_after_an_error_the_agents_can_still_be_saved(tmp_path):
    scores = [[0.0, 1.0], [None, 1.0], *[[0.0, 1.0]] * 10]
    made = trainer(tmp_path, Recorder(lambda *texts: scores.pop(0)), rows=STATES)
    with pytest.raises(RewardError):
        made.train()
    made.save_model(tmp_path / "saved")
    assert (tmp_path / "saved" / "agent_1" / "model.safetensors").is_file()
