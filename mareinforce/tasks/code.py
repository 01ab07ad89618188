"""Two agents solve a programming problem: a helper writes `aux`, the main agent the asked function, which may call it.

Rows are those of HumanEval: `prompt` (a signature with a docstring), `entry_point`, `test` (a ``check(candidate)``).
The reward has four parts, whose points add up to at most 4.0:

============  ====  =======================================================================
structure      1.0  0.4 for an `aux`, 0.6 for the asked function, each defined and returning
syntax         0.5  the program of both compiles
tests          1.5  share of the problem's assertions that pass, run in the sandbox
cooperation    1.0  `code_analysis.cooperation`: 0, 0.25, 0.5 or 1
============  ====  =======================================================================

Without all of structure nothing else is earned, and without syntax no tests and no cooperation. `passed` (1.0 where all
assertions pass) is logged with them and is no part of the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mareinforce.errors import ConfigError, PromptError
from mareinforce.tasks.code_analysis import AUX, cooperation
from mareinforce.tasks.code_answer import Answer, Runner
from mareinforce.tasks.code_checks import docstring_examples, parameters, split_checks
from mareinforce.tasks.row_means import row_means

POINTS = {"structure": 1.0, "syntax": 0.5, "tests": 1.5, "cooperation": 1.0}
"""The most that each part can earn."""
AUX_SHARE = 0.4
"""The part of `structure` that is for the helper's function."""


def points(answer: Answer, row: Mapping[str, Any], run: Runner) -> dict[str, float]:
    """The points of each part of one joint answer, and `passed`."""
    found = dict.fromkeys([*POINTS, "passed"], 0.0)
    there = [state == "defined" for state in answer.states]
    found["structure"] = POINTS["structure"] * (AUX_SHARE * there[0] + (1 - AUX_SHARE) * there[1])
    if not answer.runs:
        return found
    verdicts = run(answer.program, split_checks(row["test"], row["entry_point"]))
    found["syntax"] = POINTS["syntax"]
    found["tests"] = POINTS["tests"] * sum(verdicts) / len(verdicts)
    found["cooperation"] = POINTS["cooperation"] * cooperation(answer.main, row["entry_point"])
    found["passed"] = float(all(verdicts))
    return found


@dataclass(frozen=True)
class CodeReward:
    """The sum of the parts, 0 to 4, with each part's points as a component, and `passed`.

    Args:
        wall_seconds: what a program with all its tests may take.
        sandbox: see `code_answer.Sandbox`; None: the one that comes with this package.
    """

    wall_seconds: float = 10.0
    sandbox: Any = None

    def __call__(
        self, helper: Sequence[str], main: Sequence[str], batch_items: Sequence[Mapping[str, Any]]
    ) -> dict[str, list[float]]:
        run = Runner(self.wall_seconds, self.sandbox)
        parts = [points(Answer.read(a, b, row), row, run) for a, b, row in zip(helper, main, batch_items, strict=True)]
        return {
            "reward": [sum(each[name] for name in POINTS) for each in parts],
            **{name: [each[name] for each in parts] for name in [*POINTS, "passed"]},
        }


def code_reward(
    helper: Sequence[str], main: Sequence[str], batch_items: Sequence[Mapping[str, Any]]
) -> dict[str, list[float]]:
    """`CodeReward` with its defaults."""
    return CodeReward()(helper, main, batch_items)


def helper_prompt(row: Mapping[str, Any], external_prompts: Any = None) -> Any:
    """The helper agent's prompt; after turn 1 that of the transition as it is."""
    if external_prompts is not None:
        return external_prompts
    return (
        f"A colleague writes the Python function `{row['entry_point']}` for the problem below. Write a helper function "
        f"`{AUX}({parameters(row['prompt'], row['entry_point'])})` with the same parameters that computes and returns "
        f"something useful for it. Write the function `{AUX}` alone, in a ```python block, without examples.\n\n"
        f"Problem:\n{row['prompt']}"
    )


def main_prompt(row: Mapping[str, Any], external_prompts: Any = None) -> Any:
    """The main agent's prompt; after turn 1 that of the transition as it is."""
    if external_prompts is not None:
        return external_prompts
    return (
        f"Write the Python function `{row['entry_point']}` for the problem below. A colleague writes a helper function "
        f"`{AUX}({parameters(row['prompt'], row['entry_point'])})` with the same parameters that returns something "
        f"useful for it. Call `{AUX}` and build on its result; do not define it, and do not merely return what it "
        f"returns. Write the whole function `{row['entry_point']}` with its imports, in a ```python block, without "
        f"examples.\n\nProblem:\n{row['prompt']}"
    )


Level = Literal["none", "summary", "tests"]


@dataclass(frozen=True)
class CodeFeedback:
    """A transition: shows both agents both functions, says what is wrong with them, and asks again.

    Args:
        level: none: nothing is said of what is wrong. summary: syntax errors, missing functions, a result that is not
            used, and how many of the hidden tests pass. tests: also which examples of the problem's own docstring
            fail. Hidden tests are only ever counted.
        wall_seconds: what a program with all its tests may take.
        sandbox: see `code_answer.Sandbox`; None: the one that comes with this package.

    Raises:
        ConfigError: there is no such level.
        PromptError: when called for another number of agents than two.
    """

    level: Level = "summary"
    wall_seconds: float = 10.0
    sandbox: Any = None

    def __post_init__(self) -> None:
        if self.level not in ("none", "summary", "tests"):
            raise ConfigError(f"level={self.level!r}: choose none, summary or tests.")

    def __call__(self, agent_completions: Sequence[str], num_agents: int, batch_item: Mapping[str, Any]) -> list[str]:
        if num_agents != 2:
            raise PromptError(f"code_feedback is for two agents, but num_agents is {num_agents}; set num_agents: 2.")
        answer = Answer.read(agent_completions[0], agent_completions[1], batch_item)
        said = "\n".join(self.diagnose(answer, batch_item))
        shown = (
            f"The helper's code so far:\n```python\n{answer.helper}\n```\n"
            f"The main agent's code so far:\n```python\n{answer.main}\n```\n"
        )
        return [
            f"{prompt(batch_item)}\n\n{shown}{said}\nYou are the {role}. Write an improved version of your function."
            for prompt, role in ((helper_prompt, "helper"), (main_prompt, "main agent"))
        ]

    def diagnose(self, answer: Answer, row: Mapping[str, Any]) -> list[str]:
        """What is wrong, one sentence each, as far as the level lets it be said."""
        if self.level == "none":
            return []
        entry_point = row["entry_point"]
        found = []
        for name, state, error in zip((AUX, entry_point), answer.states, answer.errors, strict=True):
            if error is not None:
                found.append(f"The code of `{name}` has a syntax error in {error}.")
            if state != "defined":
                missing = "is not defined" if state == "missing" else "returns nothing"
                found.append(f"The function `{name}` {missing}.")
        if not answer.runs:
            return found or ["The two parts do not compile together."]
        if cooperation(answer.main, entry_point) < 1.0:
            found.append(f"`{entry_point}` should call `{AUX}` and build on its result.")
        checks = split_checks(row["test"], entry_point)
        run = Runner(self.wall_seconds, self.sandbox)
        found.append(f"{sum(run(answer.program, checks))} of {len(checks)} hidden tests pass.")
        if self.level == "tests":
            examples = docstring_examples(row["prompt"], entry_point)
            verdicts = run(answer.program, [each.check for each in examples]) if examples else []
            failed = [each for each, passed in zip(examples, verdicts, strict=True) if not passed]
            found += [
                f"This example of the problem fails: `{each.call}` should give `{each.value}`." for each in failed
            ]
        return found


def code_feedback(
    agent_completions: Sequence[str], num_agents: int, batch_item: Mapping[str, Any], level: Level = "summary"
) -> list[str]:
    """`CodeFeedback` of a level."""
    return CodeFeedback(level)(agent_completions, num_agents, batch_item)


@dataclass(frozen=True)
class CodeEvalLogger:
    """The parts' points and `passed` at each turn, one dict a row. ``agent_completions_turns``: [2][rows][turn]."""

    wall_seconds: float = 10.0
    sandbox: Any = None

    def __call__(
        self,
        agent_completions_turns: Sequence[Sequence[Sequence[str]]],
        batch_items: Sequence[Mapping[str, Any]],
    ) -> list[dict[str, float]]:
        run = Runner(self.wall_seconds, self.sandbox)
        rows = []
        for helpers, mains, row in zip(*agent_completions_turns, batch_items, strict=True):
            values: dict[str, float] = {}
            for turn, (helper, main) in enumerate(zip(helpers, mains, strict=True), start=1):
                found = points(Answer.read(helper, main, row), row, run)
                values |= {f"turn_{turn}/{name}": value for name, value in found.items()}
            rows.append(values)
        return rows


def code_eval_logger(
    agent_completions_turns: Sequence[Sequence[Sequence[str]]], batch_items: Sequence[Mapping[str, Any]]
) -> list[dict[str, float]]:
    """`CodeEvalLogger` with its defaults."""
    return CodeEvalLogger()(agent_completions_turns, batch_items)


def code_eval_aggregator(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the rows that have the metric: of `passed`, the share of problems solved at that turn."""
    return row_means(metrics)
