"""The external transition: what it is given, what it may give back, and what is said of the rest."""

import copy

import pytest

from mareinforce.errors import ConfigError, PromptError, UserCodeError
from mareinforce.rollout.transition import Branch, Transition
from tests.names import shown

GIVEN = {
    "prompt": "tell a story",
    "agent_completions": ["one", "two"],
    "prompt_history_per_agent": [["p"], [None]],
    "response_history_per_agent": [["one"], ["two"]],
    "batch_item": {"prompt": "tell a story", "meta": {"tags": ["x"]}},
    "turn": 0,
    "reward": 0.25,
}


def ask(func, **changes):
    (prompts,) = Transition(func, 2).next_prompts([Branch(**{**GIVEN, **changes})])
    return prompts


def returning(result):
    def my_transition(prompt, agent_completions):
        return result

    return my_transition


def test_it_gets_by_keyword_what_it_declares_and_everything_with_kwargs():
    seen = {}

    def everything(**kwargs):
        seen.update(kwargs)
        return ["a", "b"]

    assert ask(everything) == ["a", "b"]
    assert seen == {**GIVEN, "num_agents": 2}
    assert ask(lambda prompt, agent_completions: [prompt, agent_completions[1]]) == ["tell a story", "two"]
    assert ask(lambda *, reward, turn, mine="x": [str(reward), f"{turn}{mine}"]) == ["0.25", "0x"]
    assert ask(lambda: ["a", "b"]) == ["a", "b"]


def test_an_unknown_required_parameter_is_refused_when_it_is_handed_over():
    with pytest.raises(ConfigError, match=r"external_transition .*requires 'completions'.*agent_completions"):
        Transition(lambda prompt, completions: [], 2)
    with pytest.raises(ConfigError, match=r"requires 'agent_completion' .*Did you mean 'agent_completions'"):
        Transition(lambda prompt, agent_completion: [], 2)
    Transition(lambda prompt, completions=None: [], 2)


@pytest.mark.parametrize(
    "prompts",
    [["a", "b"], ["a", None], [None, None], [[{"role": "user", "content": "a"}], "b"]],
    ids=shown,
)
@pytest.mark.parametrize("kind", [list, tuple])
def test_texts_message_lists_and_none_are_taken(prompts, kind):
    assert ask(returning(kind(prompts))) == prompts


def test_a_single_none_is_none_for_all():
    assert ask(returning(None)) == [None, None]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_number_of_prompts_is_named(count):
    with pytest.raises(PromptError, match=rf"my_transition .*expected a list of 2 prompts, .*got {count} ") as error:
        ask(returning(["a"] * count))
    assert "after turn 1, row with prompt 'tell a story'" in str(error.value)


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ("ab", "'ab', of type str"),  # two characters are not two prompts
        ({"a": 1, "b": 2}, "of type dict"),
        (["a", 3], "gave 3, of type int for agent 1"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "of type dict for agent 0"),
        ([["a"], "b"], "list for agent 0 whose entry 0 is 'a'"),
        (["a", ask], "gave the callable .*ask .*parentheses.* for agent 1"),
    ],
    ids=shown,
)
def test_a_wrong_kind_is_named_with_the_agent(result, says):
    with pytest.raises(PromptError, match=f"external_transition .*my_transition .*{says}"):
        ask(returning(result))


def test_an_error_inside_is_passed_on_after_a_single_call():
    calls = []

    def my_transition(prompt, **kwargs):
        calls.append(prompt)
        raise TypeError("unexpected keyword argument 'reward'")

    with pytest.raises(UserCodeError, match=r"my_transition raised TypeError: .*after turn 1") as error:
        ask(my_transition)
    assert type(error.value.__cause__) is TypeError
    assert calls == ["tell a story"]


def test_an_async_transition_is_awaited():
    async def later(agent_completions):
        return agent_completions

    assert ask(later) == ["one", "two"]


def test_changing_what_it_was_given_or_gave_changes_nothing_outside():
    given, kept = copy.deepcopy(GIVEN), [[{"role": "user", "content": "a"}], "b"]

    def vandal(agent_completions, prompt_history_per_agent, response_history_per_agent, batch_item):
        agent_completions.clear()
        prompt_history_per_agent[0].append("mine")
        response_history_per_agent.pop()
        batch_item["meta"]["tags"].append("mine")
        return kept

    (prompts,) = Transition(vandal, 2).next_prompts([Branch(**given)])
    assert given == GIVEN
    kept[0][0]["content"] = "changed later"
    assert prompts == [[{"role": "user", "content": "a"}], "b"]
