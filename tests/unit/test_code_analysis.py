"""Reading answers and problems: code out of text, single checks out of a test, examples out of a docstring."""

from __future__ import annotations

import pytest

from mareinforce.tasks.code_analysis import cooperation, extract_code, function_state, joined, syntax_error
from mareinforce.tasks.code_checks import Example, docstring_examples, given_code, parameters, split_checks
from tests.programming import CANONICAL, PROBLEM

CODE = "import math\n\n\ndef f(x):\n    return math.sqrt(x)"


@pytest.mark.parametrize(
    "completion",
    [
        f"```python\n{CODE}\n```",
        f"Sure:\n\n```py\n{CODE}\n```\nThis works because of the root.",
        f"```\n{CODE}\n```",
        f"```python\n{CODE}",  # cut off before the fence is closed
        f"```python\n{CODE}\n\nThat was it",
        f"  ```Python title=x\n{CODE}\n  ```",
        f"```bash\npip install it\n```\n```python\n{CODE}\n```",
        CODE,
        f"Here is the function:\n{CODE}\n\nThis function takes the root.\nIt needs math.",
        f"{CODE}\n\n# Example:\nHere f(4) == 2.",
        CODE.replace("\n", "\r\n"),
    ],
)
def test_the_code_is_found_whatever_is_around_it(completion):
    assert extract_code(completion).splitlines()[:5] == CODE.splitlines()
    assert syntax_error(extract_code(completion)) is None
    assert function_state(extract_code(completion), "f") == "defined"


def test_several_blocks_are_one_program_and_no_code_is_none():
    found = extract_code("```python\nimport math\n```\nand\n```python\ndef f(x):\n    return math.sqrt(x)\n```")
    assert found == "import math\n\ndef f(x):\n    return math.sqrt(x)"
    for nothing in (
        "",
        "I would use a loop.",
        "```bash\nls\n```",
        "from here on it is easy",
        "import is a keyword here",
    ):
        assert extract_code(nothing) == ""


def test_unindented_text_in_a_string_is_no_end_and_an_error_inside_is_not_cut_away():
    documented = 'def f(x):\n    """Doc\nwith unindented text.\n"""\n    return x'
    assert extract_code(f"{documented}\nThat is it.") == documented
    broken = "def f(x):\n    y = 1\n    return (y"
    assert extract_code(f"{broken}\n\nThis returns y.") == broken
    assert syntax_error(broken) == "line 3: '(' was never closed"


def test_states_of_a_function_also_where_the_code_is_no_python():
    assert function_state("def f():\n    return 1", "f") == "defined"
    assert function_state("def f():\n    return", "f") == "no return"
    assert function_state("def f():\n    return 1\n\ndef f():\n    pass", "f") == "no return"
    assert function_state("async def f():\n    return 1", "f") == "missing"
    broken = "def f():\n    return (1\n\ndef g():\n    x = (\n"
    assert [function_state(broken, name) for name in "fgh"] == ["defined", "no return", "missing"]
    assert function_state("def f(): return (1", "f") == "defined"
    assert syntax_error("return 1") is not None
    assert syntax_error("x = '\\d'") is None  # a warning of Python's is no error


def test_the_program_keeps_imports_and_definitions_and_calls_the_helpers_aux():
    helper = "from __future__ import annotations\nimport re\nLIMIT = 3\ndef aux(x):\n    return LIMIT\nprint(aux(1))"
    main = (
        "def aux(x):\n    return 0\ndef f(x):\n    return aux(x)\nassert f(1) == 0\nif __name__ == '__main__':\n    f()"
    )
    program = joined("import math", helper, main)
    assert program.startswith("from __future__ import annotations\n")
    assert all(kept in program for kept in ("import math", "import re", "LIMIT = 3", "def f(x)"))
    assert not any(dropped in program for dropped in ("print", "assert", "__main__", "return 0"))
    names: dict = {}
    exec(program, names)
    assert names["f"](1) == 3
    assert joined("", "def aux(:", "def f():\n    return 1").startswith("def aux(:")


def test_a_main_function_is_read_and_not_what_stands_beside_it():
    assert cooperation("def g(x):\n    return aux(x) + 1\ndef f(x):\n    return x", "f") == 0.0
    assert cooperation("def f(x, aux):\n    return aux(x) + 1", "f") == 0.0
    assert cooperation("def f(x):\n    def inner(y):\n        return aux(y)\n    return inner(x) + 1", "f") == 1.0
    assert cooperation("def f(x):\n    return list(map(aux, x))", "f") == 1.0
    assert cooperation("def f(x):\n    a, b = aux(x)\n    return a", "f") == 1.0
    assert cooperation('def f(x):\n    """Doc."""\n    import math\n    return aux(x)', "f") == 0.5
    assert cooperation("def f(x:", "f") == 0.0


class TestChecks:
    def run(self, program: str, function) -> bool:
        try:
            exec(program, {"f": function})
        except AssertionError:
            return False
        return True

    def verdicts(self, test: str, function) -> list[bool]:
        return [self.run(program, function) for program in split_checks(test, "f")]

    def test_every_assertion_is_a_check_with_what_stands_before_it(self):
        test = (
            "K = 2\n\ndef check(candidate):\n    import math\n    assert candidate(1) == 1\n    n = 4\n"
            "    assert candidate(n) == n * K\n    assert candidate(9) == math.factorial(3)\n"
        )
        assert self.verdicts(test, lambda x: x) == [True, False, False]
        assert self.verdicts(test, lambda x: 8 if x == 4 else x) == [True, True, False]
        assert self.verdicts(test, lambda x: {1: 1, 4: 8, 9: 6}[x]) == [True, True, True]
        assert "n = 4" not in split_checks(test, "f")[0]

    def test_a_loop_is_one_check_and_constants_are_none(self):
        test = (
            "def check(candidate):\n    for n in range(3):\n        assert candidate(n) == n\n    assert True\n"
            "    for n in range(3):\n        assert candidate(-n) == -n\n    assert candidate(7) == 7, 'x'\n"
        )
        assert self.verdicts(test, lambda x: x) == [True, True, True]
        assert self.verdicts(test, lambda x: max(x, 0)) == [True, False, True]
        assert self.verdicts(test, lambda x: 0 if x == 2 else x) == [False, True, True]

    @pytest.mark.parametrize(
        "test",
        [
            "def check(candidate):\n    for n in 1, 2:\n        r = candidate(n)\n        assert r == n\n    r + 1\n",
            "def check(candidate):\n    r = candidate(2)\n    if r != 2:\n        raise AssertionError\n",
            "def check(candidate):\n    assert all(candidate(n) == n for n in range(3))\n",
        ],
    )
    def test_what_cannot_be_split_runs_as_one(self, test):
        assert self.verdicts(test, lambda x: x) == [True]
        assert self.verdicts(test, lambda x: x + 1) == [False]

    def test_nothing_but_constants_or_no_check_function(self):
        assert self.verdicts("def check(candidate):\n    assert True\n", lambda x: x) == [True]
        assert split_checks("assert f(1) == 1", "f") == ["assert f(1) == 1\ncheck(f)"]
        assert len(split_checks("def check(", "f")) == 1
        assert len(split_checks(PROBLEM["test"], "above")) == 4


def test_a_problem_says_its_parameters_what_it_gives_and_its_examples():
    assert parameters(PROBLEM["prompt"], "above") == "numbers, limit"
    assert parameters("no python at all", "above") == "..."
    assert given_code(PROBLEM["prompt"], "above") == "from typing import List"
    assert docstring_examples(PROBLEM["prompt"], "above") == [
        Example("above([3, 1, 2], 1)", "[2, 3]"),
        Example("above([], 5)", "[]"),
    ]
    assert docstring_examples(CANONICAL, "below") == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("f(1) == 2", [("f(1)", "2")]),
        ("f((1, 2)) => true", [("f((1, 2))", "True")]),
        ("f('a') \\u279e 'b'  # because", [("f('a')", "'b'")]),
        ("f([1]) returns [2].", [("f([1])", "[2]")]),
        (">>> f(3) == 'x'", [("f(3)", "'x'")]),
        (">>> round(f(3), 1)\n    2.5", [("round(f(3), 1)", "2.5")]),
        ("f(x) == 2", []),
        ("f(1) = 2", []),
        ("f(1) == f(2)", []),
        ("f(1) is large", []),
        ("f(1", []),
    ],
)
def test_an_example_is_a_call_and_a_literal_or_none_at_all(line, found):
    prompt = f'def f(x):\n    """Says:\n    {line}\n    """\n'
    assert docstring_examples(prompt, "f") == [Example(*pair) for pair in found]
    assert all(Example(*pair).check == f"assert ({pair[0]}) == ({pair[1]})" for pair in found)
