"""User functions: matched before they are called, called once, their errors passed on as theirs."""

import asyncio
import functools
import traceback

import pytest
from torch import nn

from mareinforce.calling import UserFunction, brief, callable_name, place
from mareinforce.errors import ConfigError, UserCodeError
from mareinforce.event_loop import run_to_completion

KNOWN = ("turn", "num_turns", "ended")


def make(func, **options):
    return UserFunction(func, "a_field", **{"positional": ["first", "second"], "known": KNOWN, **options})


def call(func, **values):
    return make(func).call([1, 2], {"turn": 10, "num_turns": 20, "ended": 30, **values}, "somewhere")


class Adder:
    def __init__(self, extra=0):
        self.extra = extra

    def __call__(self, a, b, *, turn):
        return a + b + turn + self.extra

    def method(self, a, b, turn):
        return a + b + turn + self.extra


async def async_add(a, b, turn):
    await asyncio.sleep(0)
    return a + b + turn


def keyword_only(a, b, *, turn):
    return a + b + turn


@pytest.mark.parametrize(
    "func",
    [
        keyword_only,
        lambda a, b, turn: a + b + turn,
        lambda *lists, turn: sum(lists) + turn,
        lambda a, b, **kwargs: a + b + kwargs["turn"],
        lambda a, b, turn=-99: a + b + turn,
        lambda a, b, mine=0, *, turn, other=0: a + b + turn + mine + other,
        functools.partial(lambda scale, a, b, turn: scale * (a + b + turn), 1),
        functools.partial(keyword_only),
        Adder(),
        Adder().method,
        async_add,
        functools.partial(async_add),
    ],
)
def test_every_kind_of_callable_gets_its_positions_and_its_declared_keywords(func):
    assert call(func) == 13


def test_only_declared_keywords_are_passed_and_all_of_them_to_kwargs():
    assert call(lambda a, b, **kwargs: kwargs) == {"turn": 10, "num_turns": 20, "ended": 30}
    assert call(lambda a, b, ended, **kwargs: (ended, kwargs)) == (30, {"turn": 10, "num_turns": 20})
    assert call(lambda a, b: (a, b)) == (1, 2)


def test_what_a_partial_has_bound_stays_bound():
    assert call(functools.partial(keyword_only, turn=100)) == 103
    assert call(functools.partial(lambda a, b, **kwargs: kwargs["turn"], turn=100)) == 100


def test_a_module_is_matched_by_its_forward():
    class Scorer(nn.Module):
        def forward(self, a, b):
            return a * b

    assert call(Scorer()) == 2


def test_a_builtin_without_a_signature_is_called_with_positions_only():
    assert call(max) == 2


def test_a_parameter_with_an_unknown_name_and_no_default_is_refused_with_the_near_match():
    with pytest.raises(ConfigError, match=r"a_field .*requires 'turns'.*turn, num_turns, ended.*Did you mean 'turn'"):
        make(lambda a, b, turns: 0)
    make(lambda a, b, turns=None: 0)


def test_too_few_positions_are_refused_naming_signature_and_call():
    with pytest.raises(
        ConfigError, match=r"a_field .*<lambda>\(a\) is called with 2 positional .*first, second.* cannot take"
    ):
        make(lambda a: 0)
    with pytest.raises(ConfigError, match=r"\(a, b, c\).* requires 'c'"):
        make(lambda a, b, c: 0)
    with pytest.raises(ConfigError, match="requires 'turn'"):
        make(eval("lambda a, b, turn, /: 0"))
    make(lambda a, b, c=0: 0)


def test_a_known_name_in_the_place_of_a_position_is_refused():
    with pytest.raises(ConfigError, match="'turn' would receive one of those"):
        make(lambda a, turn: 0)


def test_a_leading_name_is_given_first_by_position_and_not_again():
    function = make(lambda turn, a, b, **kwargs: kwargs, leading="turn")
    assert function.leads
    assert function.keywords == ("num_turns", "ended")
    assert not make(lambda a, b, turn: 0, leading="turn").leads
    assert not make(lambda *all, turn: 0, leading="turn").leads


@pytest.mark.parametrize("wrong", [None, "my.module.reward", 3.0])
def test_what_cannot_be_called_is_refused_by_value(wrong):
    with pytest.raises(ConfigError, match=r"a_field is .*cannot be called") as error:
        make(wrong)
    assert repr(wrong) in str(error.value)


def test_a_class_in_place_of_its_instance_is_refused():
    class Pair:
        def __init__(self, a, b): ...

    with pytest.raises(ConfigError, match="is a class"):
        make(Pair)


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_an_error_inside_is_wrapped_once_with_the_users_traceback(kind):
    calls = []

    def broken(a, b, **kwargs):
        calls.append((a, b))
        raise TypeError("broken() takes 1 positional argument but 2 were given")

    async def broken_later(a, b, **kwargs):
        broken(a, b)

    with pytest.raises(
        UserCodeError, match=r"a_field .*broken.* raised TypeError: broken\(\) takes.*\(somewhere\)"
    ) as e:
        call(broken if kind == "plain" else broken_later)
    assert calls == [(1, 2)]
    assert type(e.value.__cause__) is TypeError
    frames = traceback.extract_tb(e.value.__cause__.__traceback__)
    assert frames[-1].name == "broken"
    assert "raise TypeError" in frames[-1].line


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_request_to_stop_is_not_taken_for_an_error_and_async_calls_still_work_after_it(stop):
    async def leave(a, b):
        raise stop

    def leave_now(a, b):
        raise stop

    for func in (leave, leave_now):
        with pytest.raises(stop):
            call(func)
    assert call(async_add) == 13


def test_async_functions_run_while_the_callers_own_loop_is_running():
    async def notebook_cell():
        return call(async_add)

    assert asyncio.run(notebook_cell()) == 13
    with pytest.raises(RuntimeError, match="running event loop"):  # why it needs a loop of its own
        asyncio.run(nested_run())


async def nested_run():
    coroutine = async_add(1, 2, 3)
    try:
        return asyncio.run(coroutine)
    finally:
        coroutine.close()


def test_all_async_calls_share_one_loop():
    async def loop():
        return asyncio.get_running_loop()

    assert run_to_completion(loop()) is run_to_completion(loop())
    assert asyncio.run(loop()) is not run_to_completion(loop())


def test_arguments_are_copies():
    values, texts = {"turn": [[1]]}, [["a"], ["b"]]

    def vandal(a, b, turn):
        a.append("x")
        turn[0].clear()
        return a, turn

    result = make(vandal).call(texts, values, "")
    assert result == (["a", "x"], [[]])  # it did change what it was given
    assert texts == [["a"], ["b"]]
    assert values == {"turn": [[1]]}


def test_names_and_places_are_the_users_own():
    assert callable_name(Adder()).endswith("test_calling.Adder")
    assert callable_name(Adder().method).endswith("test_calling.Adder.method")
    assert callable_name(functools.partial(keyword_only)).startswith("partial(")
    assert callable_name(max) == "max"
    assert place("hi", 0, 2) == "turn 1 of 2, row with prompt 'hi'"
    assert place("hi", 1) == "turn 2, row with prompt 'hi'"
    assert len(brief("x" * 1000)) < 100
    assert brief("short") == "'short'"


class TestAColumnThatARowHasNot:
    ROW = {"prompt": "go", "targets": "x"}
    SAYS = "raised KeyError: 'target' (somewhere). The row has the columns: prompt, targets."

    def told(self, function: UserFunction, args=(), column="target", **values) -> str:
        with pytest.raises(UserCodeError) as caught:
            function.call(args, values, "somewhere")
        return str(caught.value)

    def test_the_columns_are_named_however_the_row_is_given(self):
        by_name = {"positional": [], "known": ("batch_items", "batch_item")}
        rows = make(lambda batch_items: batch_items[0]["target"], **by_name)
        assert self.told(rows, batch_items=[self.ROW, self.ROW], batch_item=None).endswith(self.SAYS)
        row = make(lambda batch_item: batch_item["target"], **by_name)
        assert self.told(row, batch_items=None, batch_item=self.ROW).endswith(self.SAYS)
        first = make(lambda row: row["target"], positional=["the row"])
        assert self.told(first, [self.ROW]).endswith(self.SAYS)

    def test_they_are_not_where_something_else_went_wrong(self):
        options = {"positional": ["text"], "known": ("batch_items",)}
        ends = "(somewhere)."
        other = make(lambda text, batch_items: {}[batch_items[0]["prompt"] and "targets"], **options)
        assert self.told(other, ["hi"], batch_items=[self.ROW]).endswith(ends)  # a column, of something else
        error = make(lambda text, batch_items: batch_items[0]["targets"] + 1, **options)
        assert self.told(error, ["hi"], batch_items=[self.ROW]).endswith(ends)
        without = make(lambda text: {}["target"], **options)
        assert self.told(without, ["hi"], batch_items=[self.ROW]).endswith(ends)
