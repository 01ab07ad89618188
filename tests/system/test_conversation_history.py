"""What of its branch an agent is shown next, and what happens to prompts that are too long, in training."""

from __future__ import annotations

import pytest

from mareinforce.csv_log import read_metrics
from mareinforce.errors import MareinforceWarning, PromptError
from tests.models import TEMPLATE, gpt2_model, word_tokenizer
from tests.system.runs import Recorder, train

WORDS = ("go", "on", "x", "y", "user", "assistant", "system", "Agent", "1", "2", "answered:", "up", "left")


def chat_team(count: int = 2, positions: int = 256):
    words = word_tokenizer(WORDS, template=TEMPLATE)
    return [gpt2_model(len(words), seed=seed, positions=positions) for seed in range(count)], words


def shown_at_turn_two(tmp_path, rows, **fields):
    """What the first joint action's agents were shown at turn 2, and what they had said, [N] each."""
    reward = Recorder()
    train(
        tmp_path,
        agents=chat_team(),
        rows=[{"prompt": prompt} for prompt in rows],
        reward=reward,
        num_turns=2,
        max_new_tokens=3,
        external_transition=lambda prompt: ["on", "up"],
        **fields,
    )
    call = next(known for known in reward.known if known["turn"] == 1)
    said = [history[0] for history in call["response_history_per_agent"]]
    return [history[1] for history in call["prompt_history_per_agent"]], said


def test_text_rows_have_no_history_unless_asked_for(tmp_path):
    shown, _ = shown_at_turn_two(tmp_path, ["go"])
    assert shown == ["on", "up"]


@pytest.mark.parametrize("rows", [["go"], [[{"role": "user", "content": "go"}]]])
def test_own_history_is_the_agents_prompts_and_answers(tmp_path, rows):
    shown, said = shown_at_turn_two(tmp_path, rows, history="own")
    for agent, new in enumerate(["on", "up"]):
        assert shown[agent] == [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": said[agent]},
            {"role": "user", "content": new},
        ]


@pytest.mark.parametrize("rows", [["go"], [[{"role": "user", "content": "go"}]]])
def test_all_history_also_tells_what_the_others_said(tmp_path, rows):
    shown, said = shown_at_turn_two(tmp_path, rows, history="all")
    assert said[0] != said[1]
    assert shown[0][-1]["content"] == f"Agent 2 answered:\n{said[1]}\n\non"
    assert shown[1][-1]["content"] == f"Agent 1 answered:\n{said[0]}\n\nup"
    assert shown[0][1] == {"role": "assistant", "content": said[0]}


def test_message_rows_can_be_asked_without_history(tmp_path):
    row = [{"role": "system", "content": "x"}, {"role": "user", "content": "go"}]
    shown, _ = shown_at_turn_two(tmp_path, [row], history="none")
    assert shown[0] == [{"role": "system", "content": "x"}, {"role": "user", "content": "on"}]


def test_formatted_text_is_what_the_history_holds(tmp_path):
    shown, said = shown_at_turn_two(tmp_path, ["go"], history="own", formatters=lambda row: f"x {row['prompt']}")
    assert shown[1] == [
        {"role": "user", "content": "x go"},
        {"role": "assistant", "content": said[1]},
        {"role": "user", "content": "x up"},
    ]


def long_turn_two(tmp_path, **fields):
    return train(
        tmp_path,
        agents=chat_team(positions=16),
        num_turns=2,
        max_new_tokens=4,
        external_transition=lambda prompt, turn: ["on " * 20, "up"],
        **fields,
    )


def test_an_overlong_prompt_is_an_error_that_names_its_row_and_turn(tmp_path):
    with pytest.raises(PromptError, match=r"row \d, turn 2: agent 0: the prompt has 20 tokens.*set prompt_overflow"):
        long_turn_two(tmp_path)


def test_an_overlong_prompt_can_be_cut_to_its_last_tokens(tmp_path):
    with pytest.warns(MareinforceWarning, match="20 tokens, with room for 12; it was cut to its last 12"):
        made = long_turn_two(tmp_path, prompt_overflow="truncate_left", rows=["go", "go"])
    rows = read_metrics(made.run_folder / "metrics.csv")
    assert [float(row["overlong_prompts"]) for row in rows] == [2, 4]  # K branches a row
    assert float(rows[-1]["turn_2/coverage"]) == 1.0


def test_an_overlong_prompt_can_end_its_branch(tmp_path):
    with pytest.warns(MareinforceWarning, match="its branch ends there"):
        made = long_turn_two(tmp_path, prompt_overflow="stop_branch", rows=["go", "go"])
    rows = read_metrics(made.run_folder / "metrics.csv")
    assert float(rows[-1]["overlong_prompts"]) == 4
    assert float(rows[-1]["turn_2/coverage"]) == 0.0


def test_there_is_no_branch_to_end_at_turn_one(tmp_path):
    with pytest.raises(PromptError, match="row 0, turn 1: agent 0"):
        train(tmp_path, agents=chat_team(positions=16), rows=["go " * 20], prompt_overflow="stop_branch")
