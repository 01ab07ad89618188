"""What agents are shown: formatters, the transition's prompts, and how the two combine."""

from __future__ import annotations

import pytest

from tests.system.runs import Recorder, table_team, train

FEEDBACK = {"num_turns": 2, "external_transition": lambda num_agents: ["first up", "second by"]}


def say(row):
    return f"say {row['prompt']}"


def whisper(row):
    return f"whisper {row['prompt']}"


def reply(row, external_prompts=None):
    return f"say {row['prompt']}" if external_prompts is None else f"{row['_original_prompt']} then {external_prompts}"


def insist(row, external_prompts):
    return f"say {external_prompts or row['prompt']}"


@pytest.mark.parametrize(
    ("formatters", "passthrough", "first", "second"),
    [
        (None, False, ["go", "go"], ["first up", "second by"]),
        (None, True, ["go", "go"], ["first up", "second by"]),
        (say, False, ["say go"] * 2, ["say first up", "say second by"]),
        (say, True, ["say go"] * 2, ["first up", "second by"]),
        ([say, whisper], False, ["say go", "whisper go"], ["say first up", "whisper second by"]),
        ([say, whisper], True, ["say go", "whisper go"], ["first up", "second by"]),
        (reply, False, ["say go"] * 2, ["go then first up", "go then second by"]),
        (reply, True, ["say go"] * 2, ["first up", "second by"]),
        (insist, False, ["say go"] * 2, ["say first up", "say second by"]),
        ([say, reply], False, ["say go"] * 2, ["say first up", "go then second by"]),
    ],
)
def test_formatters_make_the_prompts_of_every_turn_but_for_passthrough(
    tmp_path, formatters, passthrough, first, second
):
    reward = Recorder()
    train(tmp_path, reward, formatters=formatters, external_prompt_passthrough=passthrough, **FEEDBACK)
    assert reward.shown(0) == [first]
    assert reward.shown(1) == [second] * 2


def test_the_model_answers_to_what_it_is_shown(tmp_path):
    """After 'up' the first agent says x, after 'by' the second says y; after anything else both say anything."""
    agents, tokenizer = table_team()
    for agent, (state, action) in enumerate([("up", "x"), ("by", "y")]):
        ids = tokenizer.convert_tokens_to_ids([state, action])
        agents[agent].table.weight.data[ids[0], ids[1]] += 40.0
    reward = Recorder()
    train(tmp_path, reward, (agents, tokenizer), formatters=say, num_generations=8, **FEEDBACK)
    assert reward.texts[1:] == [(["x"] * 8, ["y"] * 8)] * 8
    assert set(reward.texts[0][0]) == set(reward.texts[0][1]) == {"x", "y"}


def test_an_agent_can_be_idle_first_and_speak_later(tmp_path):
    def second_speaks_later(row):
        return row["prompt"] if "_original_prompt" in row else None

    reward = Recorder()
    train(tmp_path, reward, formatters=[say, second_speaks_later], **FEEDBACK)
    assert reward.shown(0) == [["say go", None]]
    assert reward.shown(1) == [["say first up", "second by"]] * 2
    assert reward.texts[0][1] == ["", ""]
    assert "" not in reward.texts[1][1]


def test_the_reward_is_told_the_rows_own_prompt_at_every_turn(tmp_path):
    reward = Recorder()
    train(tmp_path, reward, formatters=reply, **FEEDBACK)
    assert reward.prompts == ["go"] * 3
    assert [sorted(known["batch_items"][0]) for known in reward.known] == [["prompt"]] * 3
    assert [(known["turn"], known["num_turns"]) for known in reward.known] == [(0, 2), (1, 2), (1, 2)]
