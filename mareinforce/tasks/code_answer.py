"""A joint answer to a programming problem: what the two completions amount to, and how the whole is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mareinforce.rewards.sandbox as default_sandbox
from mareinforce.errors import PromptError
from mareinforce.tasks.code_analysis import AUX, State, extract_code, function_state, joined, syntax_error
from mareinforce.tasks.code_checks import given_code


class Sandbox(Protocol):
    """What runs the code: by default the module `mareinforce.rewards.sandbox`, and anything else with these two."""

    def Limits(self, *, wall_seconds: float, cpu_seconds: float) -> Any:
        """The limits, as `run_checks` takes them; there it is a class."""

    def run_checks(self, source: str, checks: Sequence[str], limits: Any) -> list[bool]:
        """Run a program once and then each check; one verdict a check, all False if the program itself fails."""


@dataclass(frozen=True)
class Runner:
    """Runs checks for a number of seconds at most, in a sandbox (None: `mareinforce.rewards.sandbox`)."""

    wall_seconds: float = 10.0
    sandbox: Sandbox | None = None

    def __call__(self, source: str, checks: Sequence[str]) -> list[bool]:
        sandbox: Any = self.sandbox or default_sandbox
        limits = sandbox.Limits(wall_seconds=self.wall_seconds, cpu_seconds=self.wall_seconds)
        return list(sandbox.run_checks(source, checks, limits))


@dataclass(frozen=True)
class Answer:
    """What can be said of a joint answer without running it."""

    helper: str
    main: str
    """The two agents' code."""
    states: tuple[State, State]
    """Whether `aux` and the asked function are there and return."""
    errors: tuple[str | None, str | None]
    """Their syntax errors."""
    program: str
    """What the problem gives and both agents' code, as it is run."""

    @classmethod
    def read(cls, helper: str, main: str, row: Mapping[str, Any]) -> Answer:
        """From the two completions. Raises PromptError if the row is no programming problem."""
        for name in ("prompt", "entry_point", "test"):
            if not isinstance(row.get(name), str):
                raise PromptError(
                    f"the code task needs rows with a text in column {name!r}; this one has "
                    f"{', '.join(map(repr, row))}. Use rows with the columns of HumanEval."
                )
        codes = extract_code(helper), extract_code(main)
        return cls(
            *codes,
            states=(function_state(codes[0], AUX), function_state(codes[1], row["entry_point"])),
            errors=(syntax_error(codes[0]), syntax_error(codes[1])),
            program=joined(given_code(row["prompt"], row["entry_point"]), *codes),
        )

    @property
    def is_complete(self) -> bool:
        """Are both functions defined, and do both return?"""
        return self.states == ("defined", "defined")

    @property
    def compiles(self) -> bool:
        """Is there no syntax error in either part nor in the whole?"""
        return self.errors == (None, None) and syntax_error(self.program) is None

    @property
    def runs(self) -> bool:
        """Is there something to run?"""
        return self.is_complete and self.compiles
