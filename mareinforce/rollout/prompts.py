"""What each agent is shown: the user's formatters at a row, and the conversation of its branch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

from mareinforce.calling import UserFunction, brief, callable_name, place
from mareinforce.errors import ConfigError, PromptError
from mareinforce.types import Prompt, Row

ORIGINAL_PROMPT = "_original_prompt"
"""Where a formatter finds the row's own prompt once a transition's prompt stands in its place."""

RULE = "A prompt is a text, a list of messages (dicts with 'role' and 'content'), or None for an agent that is idle"


class Formatters:
    """Makes each agent's prompt from a row, and from the transition's prompt after turn 1.

    Args:
        formatters: one callable ``row -> prompt`` for all agents, a list with one an agent, or None, which shows the
            row's prompt column. One that declares ``external_prompts`` (or ``**kwargs``) also gets the transition's
            prompt by that name, from the second turn on; at turn 1 it is left out, or None if it has no default.
            It may return None: the agent is idle. It gets a copy of the row.
        num_agents: agents (N).
        prompt_column: the column that holds a row's own prompt.
        external_prompt_passthrough: True shows the transition's prompt as it is. False puts it in place of the row's
            prompt, which moves to ``_original_prompt``, and formats that row.
        history: what of the branch a prompt contains: none, own or all; None: own where rows are messages, else none.

    Raises:
        ConfigError: not a callable, not N of them, or one that cannot be called with a row.
    """

    def __init__(
        self,
        formatters: Any,
        num_agents: int,
        prompt_column: str = "prompt",
        external_prompt_passthrough: bool = False,
        history: Literal["none", "own", "all"] | None = None,
    ) -> None:
        self.history = history
        self.prompt_column = prompt_column
        self.external_prompt_passthrough = external_prompt_passthrough
        self._functions: list[UserFunction] | None = None
        if formatters is None:
            return
        if isinstance(formatters, list | tuple):
            if len(formatters) != num_agents:
                raise ConfigError(
                    f"formatters has {len(formatters)} entries and num_agents is {num_agents}; give one an agent, or "
                    "one callable for all of them."
                )
            self._functions = [_formatter(each, f"formatters[{agent}]") for agent, each in enumerate(formatters)]
        elif callable(formatters):
            self._functions = [_formatter(formatters, "formatters")] * num_agents
        else:
            raise ConfigError(
                f"formatters is {brief(formatters)}; give a callable (row -> prompt), a list of one an agent, or None."
            )

    def row_prompt(self, row: Row) -> Any:
        """The row's own prompt, as the data set has it, unchecked. Raises PromptError if the row has no such column."""
        if self.prompt_column not in row:
            raise PromptError(
                f"a row has no column {self.prompt_column!r}; it has {', '.join(map(repr, row)) or 'none at all'}. "
                "Name the column that holds the prompt."
            )
        return row[self.prompt_column]

    def format(
        self,
        agent: int,
        row: Row,
        external_prompt: Prompt | None = None,
        *,
        prompt_history: Sequence[Prompt | None] = (),
        response_history: Sequence[str] = (),
    ) -> Prompt | None:
        """What the agent is shown; None if it is idle.

        ``external_prompt`` is what the transition made for it, None at turn 1. The histories are the agent's own on
        this branch, [turn] each: what `conversation` gave (None where it was idle) and answers.

        Raises:
            UserCodeError: the formatter raised.
            PromptError: it returned what is not a prompt.
        """
        function = None if self._functions is None else self._functions[agent]
        where = place(row.get(self.prompt_column))
        if external_prompt is None:
            if function is None:
                return self._own_prompt(row, where)
            # At turn 1 a default of the user's own stays in force; without one, the parameter is given None.
            values = {"external_prompts": None} if "external_prompts" in function.required else {}
            return check_prompt(function.call([dict(row)], values, where), function.label, agent, where)
        prompt: Prompt | None = self._before_formatting(row, external_prompt, prompt_history, response_history)
        if function is not None and not self.external_prompt_passthrough:
            changed = {**row, ORIGINAL_PROMPT: row.get(self.prompt_column), self.prompt_column: prompt}
            result = function.call([changed], {"external_prompts": external_prompt}, where)
            prompt = check_prompt(result, function.label, agent, where)
        if isinstance(prompt, str) and self.history in ("own", "all"):
            return [*conversation_so_far(prompt_history, response_history), {"role": "user", "content": prompt}]
        return copy.deepcopy(prompt)

    def conversation(
        self,
        row: Row,
        shown: Prompt,
        external_prompt: Prompt | None = None,
        *,
        prompt_history: Sequence[Prompt | None] = (),
        response_history: Sequence[str] = (),
    ) -> Prompt:
        """What a next turn's conversation goes on from: the prompt before a formatter added to it, else as shown.

        A formatter is given the conversation at every turn, so what it has once added must not come back to it.
        """
        if (
            self._functions is None
            or self.external_prompt_passthrough
            or not isinstance(row.get(self.prompt_column), list)
        ):
            return shown
        return self._before_formatting(row, external_prompt, prompt_history, response_history)

    def _before_formatting(
        self,
        row: Row,
        external_prompt: Prompt | None,
        prompt_history: Sequence[Prompt | None],
        response_history: Sequence[str],
    ) -> Prompt:
        own: Prompt = row.get(self.prompt_column, "")
        if external_prompt is None:
            return own
        if isinstance(external_prompt, str) and isinstance(own, list):
            if self.history == "none":
                system = [message for message in own if message.get("role") == "system"]
                return copy.deepcopy([*system, {"role": "user", "content": external_prompt}])
            return continue_conversation(own, external_prompt, prompt_history, response_history)
        return external_prompt

    def _own_prompt(self, row: Row, where: str) -> Prompt | None:
        prompt = self.row_prompt(row)
        if prompt is None:
            raise PromptError(f"column {self.prompt_column!r} of a row is None ({where}). {RULE}; a row needs one.")
        return check_prompt(prompt, f"column {self.prompt_column!r}", None, where)


def continue_conversation(
    messages: list[dict[str, Any]],
    user_text: str,
    prompt_history: Sequence[Prompt | None],
    response_history: Sequence[str],
) -> list[dict[str, Any]]:
    """The agent's conversation so far with ``user_text`` as its new last user message.

    The conversation is the last message list it was shown and what it answered to that; the row's own ``messages``
    where it has not spoken yet. An answer to a prompt of text belongs to no conversation and is left out.
    """
    so_far = list(messages)
    for shown, answer in reversed(list(zip(prompt_history, response_history, strict=True))):
        if isinstance(shown, list):
            so_far = [*shown, {"role": "assistant", "content": answer}]
            break
    return copy.deepcopy([*so_far, {"role": "user", "content": user_text}])


def conversation_so_far(
    prompt_history: Sequence[Prompt | None], response_history: Sequence[str]
) -> list[dict[str, Any]]:
    """An agent's branch as messages: every text it was shown is the user's, every answer its own; a message list that
    it was shown stands for all before it."""
    messages: list[dict[str, Any]] = []
    for shown, answer in zip(prompt_history, response_history, strict=True):
        if shown is None:
            continue
        before = [*messages, {"role": "user", "content": shown}] if isinstance(shown, str) else shown
        messages = [*before, {"role": "assistant", "content": answer}]
    return copy.deepcopy(messages)


def with_others_words(external_prompt: str, agent: int, said: Sequence[str]) -> str:
    """The transition's text after what the other agents have just said; agents are numbered from 1 for readers."""
    others = [f"Agent {other + 1} answered:\n{text}" for other, text in enumerate(said) if other != agent and text]
    return "\n\n".join([*others, external_prompt])


def check_prompt(value: Any, source: str, agent: int | None, where: str) -> Prompt | None:
    """``value`` as a prompt of its own, or None. Raises PromptError naming ``source`` if it is not a prompt."""
    if value is None or isinstance(value, str):
        return value
    whom = "" if agent is None else f" for agent {agent}"
    if not isinstance(value, list) or not value:
        raise PromptError(f"{source} gave {kind_of(value)}{whom} ({where}). {RULE}.")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise PromptError(
                f"{source} gave a list{whom} whose entry {index} is {kind_of(message)}, not a message ({where}). "
                f"{RULE}."
            )
    return copy.deepcopy(value)


def _formatter(function: Any, role: str) -> UserFunction:
    return UserFunction(function, role, positional=["the row"], known=["external_prompts"])


def kind_of(value: Any) -> str:
    """What something that is not a prompt is, in words."""
    if isinstance(value, list | tuple) and not value:
        return f"an empty {type(value).__name__}"
    if callable(value):
        return f"the callable {callable_name(value)} (are its parentheses missing?)"
    return f"{brief(value)}, of type {type(value).__name__}"
