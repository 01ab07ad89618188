"""Formatters: from a row, or a row and the transition's prompt, to what each agent is shown."""

import copy

import pytest

from mareinforce.errors import ConfigError, PromptError, UserCodeError
from mareinforce.rollout.prompts import Formatters, continue_conversation
from tests.names import shown

ROW = {"prompt": "add 1 and 2", "answer": 3, "meta": {"tags": ["sum"]}}
CHAT = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_without_a_formatter_the_prompt_column_is_shown():
    assert Formatters(None, 2).format(1, ROW) == "add 1 and 2"
    assert Formatters(None, 2, prompt_column="question").format(0, {"question": "why", "prompt": "no"}) == "why"
    assert Formatters(None, 1).format(0, {"prompt": CHAT}) == CHAT


def test_one_formatter_serves_all_agents_and_a_list_serves_one_each():
    shared = Formatters(lambda row: f"Q: {row['prompt']}", 3)
    assert [shared.format(agent, ROW) for agent in range(3)] == ["Q: add 1 and 2"] * 3
    each = Formatters([lambda row: "first", lambda row: None, lambda row: CHAT], 3)
    assert [each.format(agent, ROW) for agent in range(3)] == ["first", None, CHAT]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_number_of_formatters_names_both_numbers(count):
    with pytest.raises(ConfigError, match=rf"formatters has {count} entries and num_agents is 2"):
        Formatters([lambda row: ""] * count, 2)
    Formatters([lambda row: ""] * 2, 2)


@pytest.mark.parametrize(
    ("formatters", "says"),
    [
        ("my.formatter", "formatters is 'my.formatter'"),
        ([lambda row: "", "text"], r"formatters\[1\] is 'text'"),
        (lambda: "", r"the row\) and cannot take"),
        (lambda row, external_prompt: "", "requires 'external_prompt'.*Did you mean 'external_prompts'"),
    ],
)
def test_a_formatter_that_does_not_fit_is_refused_when_it_is_handed_over(formatters, says):
    with pytest.raises(ConfigError, match=says):
        Formatters(formatters, 2)


def test_the_external_prompt_takes_the_place_of_the_rows_prompt():
    seen = []

    def formatter(row):
        seen.append(row)
        return f"<{row['prompt']}>"

    formatters = Formatters(formatter, 1)
    assert formatters.format(0, ROW) == "<add 1 and 2>"
    assert formatters.format(0, ROW, "again") == "<again>"
    assert seen == [ROW, {**ROW, "prompt": "again", "_original_prompt": "add 1 and 2"}]
    assert "_original_prompt" not in ROW
    named = Formatters(lambda row: f"{row['question']}|{row['_original_prompt']}", 1, prompt_column="question")
    assert named.format(0, {"question": "why"}, "again") == "again|why"


def test_passthrough_shows_the_external_prompt_as_it_is():
    def formatter(row):
        return f"<{row['prompt']}>"

    formatters = Formatters(formatter, 1, external_prompt_passthrough=True)
    assert formatters.format(0, ROW) == "<add 1 and 2>"
    assert formatters.format(0, ROW, "again") == "again"
    assert Formatters(formatter, 1).format(0, ROW, "again") == "<again>"
    assert Formatters(None, 1).format(0, ROW, "again") == "again"


def test_external_prompts_is_passed_where_declared_and_at_turn_1_only_if_it_must_be():
    default = Formatters(lambda row, external_prompts="mine": str(external_prompts), 1)
    required = Formatters(lambda row, external_prompts: str(external_prompts), 1)
    keywords = Formatters(lambda row, **kwargs: str(kwargs), 1)
    assert [f.format(0, ROW) for f in (default, required, keywords)] == ["mine", "None", "{}"]
    assert [f.format(0, ROW, "x") for f in (default, required, keywords)] == ["x", "x", "{'external_prompts': 'x'}"]


def test_a_formatter_cannot_change_the_row():
    row = copy.deepcopy(ROW)

    def vandal(row):
        row["meta"]["tags"].clear()
        row["prompt"] = "mine"
        return row["prompt"]

    assert Formatters(vandal, 1).format(0, row) == "mine"
    assert Formatters(vandal, 1).format(0, row, "external") == "mine"
    assert row == ROW


def test_what_is_shown_is_not_the_rows_own_list():
    row = {"prompt": copy.deepcopy(CHAT)}
    for formatters in (Formatters(None, 1), Formatters(lambda row: row["prompt"], 1)):
        shown = formatters.format(0, row)
        shown[0]["content"] = "changed"
        shown.append(user("more"))
        assert row["prompt"] == CHAT


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (3, "gave 3, of type int"),
        ({"role": "user", "content": "x"}, "of type dict"),
        ([], "an empty list"),
        (["hi"], "entry 0 is 'hi', of type str"),
        ([user("hi"), {"role": "user"}], "entry 1 is {'role': 'user'}"),
        ([{"role": None, "content": "x"}], "entry 0"),
        ((user("hi"),), "of type tuple"),
    ],
    ids=shown,
)
def test_what_is_not_a_prompt_is_named_with_formatter_and_agent(result, says):
    def my_formatter(row):
        return result

    with pytest.raises(PromptError, match=says) as error:
        Formatters([lambda row: "", my_formatter], 2).format(1, ROW)
    for part in ("formatters[1]", "my_formatter", "agent 1", "add 1 and 2"):
        assert part in str(error.value)


def test_a_missing_or_empty_prompt_column_names_the_columns_found():
    with pytest.raises(PromptError, match="no column 'prompt'; it has 'question', 'answer'"):
        Formatters(None, 1).format(0, {"question": "why", "answer": 1})
    with pytest.raises(PromptError, match="column 'prompt' of a row is None"):
        Formatters(None, 1).format(0, {"prompt": None})
    with pytest.raises(PromptError, match="column 'prompt' gave 7, of type int"):
        Formatters(None, 1).format(0, {"prompt": 7})


def test_an_error_in_a_formatter_is_passed_on():
    with pytest.raises(UserCodeError, match=r"formatters .*KeyError: 'question'") as error:
        Formatters(lambda row: row["question"], 2).format(0, ROW)
    assert type(error.value.__cause__) is KeyError


# Rows of messages with a transition that gives text


def test_a_text_becomes_the_new_last_user_message_of_a_message_row():
    formatters = Formatters(None, 1)
    second = formatters.format(0, {"prompt": CHAT}, "and now?", prompt_history=[CHAT], response_history=["hello"])
    assert second == [*CHAT, assistant("hello"), user("and now?")]
    third = formatters.format(
        0, {"prompt": CHAT}, "really?", prompt_history=[CHAT, second], response_history=["hello", "bye"]
    )
    assert third == [*second, assistant("bye"), user("really?")]
    assert formatters.format(0, {"prompt": CHAT}, [user("new")], prompt_history=[CHAT], response_history=["hello"]) == [
        user("new")
    ]


def test_a_formatter_is_given_the_rows_messages_not_what_it_made_of_them():
    def with_rules(row):
        return [{"role": "system", "content": "rules"}, *row["prompt"]]

    row, first = {"prompt": [user("hi")]}, [{"role": "system", "content": "rules"}, user("hi")]
    expected = [*first, assistant("hello"), user("go on")]
    for passthrough in (False, True):
        formatters = Formatters(with_rules, 1, external_prompt_passthrough=passthrough)
        assert formatters.format(0, row) == first
        goes_on_from = formatters.conversation(row, first)
        assert goes_on_from == (first if passthrough else [user("hi")])
        history = {"prompt_history": [goes_on_from], "response_history": ["hello"]}
        assert formatters.format(0, row, "go on", **history) == expected


def test_turns_in_which_an_agent_was_idle_are_no_part_of_its_conversation():
    never_spoke = continue_conversation(CHAT, "your turn", [None], [""])
    assert never_spoke == [*CHAT, user("your turn")]
    spoke_first = continue_conversation(CHAT, "your turn", [CHAT, None], ["hello", ""])
    assert spoke_first == [*CHAT, assistant("hello"), user("your turn")]
    formatted = Formatters(lambda row: row["prompt"], 1)
    assert formatted.format(0, {"prompt": CHAT}, "x", prompt_history=[None], response_history=[""]) == [
        *CHAT,
        user("x"),
    ]


def test_text_rows_take_the_text_alone():
    assert Formatters(None, 1).format(0, ROW, "x", prompt_history=["add 1 and 2"], response_history=["3"]) == "x"
