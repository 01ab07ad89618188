"""How a function that a user wrote is called: known beforehand to fit, called exactly once, never guessed at.

A function is matched against what it will be given when it is handed over, so that a wrong signature stops a run
before a model loads. When it is called, whatever it raises is its own error: it is passed on as the cause of a
UserCodeError, and nothing is tried again with other arguments. Everything it is given is a copy.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from mareinforce.errors import ConfigError, UserCodeError, did_you_mean
from mareinforce.event_loop import run_to_completion

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class UserFunction:
    """A user's callable with the arguments it is going to get.

    A function, a lambda, a bound method, a ``functools.partial``, a callable object or an ``async def``.

    Args:
        func: the callable.
        role: the field or argument it was given as, e.g. ``reward_func``; begins every message about it.
        positional: what it is called with by position, in words, in order.
        known: names it may be given by keyword. It gets those it declares, or all of them with ``**kwargs``; one
            that a ``partial`` has already bound keeps the bound value.
        leading: a known name that it may instead take as its first positional parameter.

    Raises:
        ConfigError: it is not callable, cannot take the positional arguments, or requires an argument not known.
    """

    def __init__(
        self,
        func: Any,
        role: str,
        *,
        positional: Sequence[str],
        known: Sequence[str] = (),
        leading: str | None = None,
    ) -> None:
        if not callable(func):
            raise ConfigError(f"{role} is {brief(func)}, which cannot be called. Give a function or a callable object.")
        self.func = func
        self.label = f"{role} {callable_name(func)}"
        if inspect.isclass(func) and func.__module__ != "builtins":
            raise ConfigError(
                f"{self.label} is a class; what is called is an instance of it. Write {func.__qualname__}(...), or in "
                "YAML `class_path` with `init_args`."
            )
        self._signature = _signature(func)
        self._variadic = {p.name for p in self._parameters() if p.kind in _VARIADIC}
        first = next(iter(self._parameters()), None)
        self.leads = leading is not None and first is not None and first.kind in _POSITIONAL and first.name == leading
        """True if it takes ``leading`` as its first positional argument, before the others."""
        if self.leads and leading is not None:
            positional, known = [leading, *positional], [name for name in known if name != leading]
        self.keywords, self.required = self._match(positional, known)
        """The known names it is given by keyword, and those of them that it cannot do without."""
        self.is_async = _is_async(func)
        """True if a call of it only begins, and is to be awaited."""

    def call(self, args: Sequence[Any], values: Mapping[str, Any], where: str) -> Any:
        """Call it once, with copies of ``args`` and of those ``values`` it takes; await what is awaitable.

        Raises UserCodeError from whatever it raises; ``where`` tells the reader at which turn and row.
        """
        arguments, keywords = self.arguments(args, values)
        try:
            result = self.func(*arguments, **keywords)
            return run_to_completion(result) if inspect.isawaitable(result) else result
        except Exception as error:
            raise self.failure(error, where, arguments, keywords) from error

    def arguments(self, args: Sequence[Any], values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """What one call of it is given, by position and by keyword: copies."""
        keywords = {name: copy.deepcopy(values[name]) for name in self.keywords if name in values}
        return copy.deepcopy(list(args)), keywords

    def failure(
        self, error: Exception, where: str, args: Sequence[Any] = (), values: Mapping[str, Any] | None = None
    ) -> UserCodeError:
        """What is said of an error that it raised, which is the cause. ``args``, ``values``: what it was called with,
        of which a row has its columns told where one was asked for that it has not."""
        row = _row_among(args, {name: value for name, value in (values or {}).items() if name in self.keywords})
        missing = isinstance(error, KeyError) and row is not None and not {*error.args[:1]} <= set(row)
        columns = f" The row has the columns: {', '.join(map(str, row))}." if missing and row is not None else ""
        told = UserCodeError(f"{self.label} raised {type(error).__name__}: {error} ({where}).{columns}")
        told.__cause__ = error
        return told

    def _parameters(self) -> list[inspect.Parameter]:
        return [] if self._signature is None else list(self._signature.parameters.values())

    def _match(self, positional: Sequence[str], known: Sequence[str]) -> tuple[tuple[str, ...], frozenset[str]]:
        if self._signature is None:  # of some built-in functions: they are called by position, unchecked
            return (), frozenset()
        shape = f"{self.label}{self._signature}"
        given = f"{len(positional)} positional argument{'s' * (len(positional) > 1)} ({', '.join(positional)})"
        given = given if positional else "no positional argument"
        try:
            taken = set(self._signature.bind_partial(*positional).arguments) - self._variadic
        except TypeError as error:
            raise ConfigError(
                f"{shape} is called with {given} and cannot take that: {error}. Declare a parameter for each, or *args."
            ) from error
        if misplaced := [name for name in known if name in taken]:
            raise ConfigError(
                f"{shape} is called with {given}, so its parameter {misplaced[0]!r} would receive one of those. "
                f"Declare {misplaced[0]!r} after them."
            )
        bound = set(self.func.keywords) if isinstance(self.func, functools.partial) else set()
        free = [p for p in self._parameters() if p.name not in taken and p.kind not in _VARIADIC]
        named = {p.name for p in free if p.kind is not inspect.Parameter.POSITIONAL_ONLY}
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self._parameters())
        keywords = tuple(name for name in known if (name in named or takes_any) and name not in bound)
        required = {p.name for p in free if p.default is inspect.Parameter.empty}
        if unknown := [p.name for p in free if p.name in required and p.name not in keywords]:
            fillable = f"by keyword it can be given {', '.join(known)}" if known else "it is given nothing by keyword"
            raise ConfigError(
                f"{shape} is called with {given} and requires {unknown[0]!r} besides, which nothing fills; {fillable}."
                f"{did_you_mean(unknown[0], known)} Remove it, give it a default, or bind it with functools.partial."
            )
        return keywords, frozenset(required)


def callable_name(func: Any) -> str:
    """The dotted name a user knows a callable by; of an object without one, its class's."""
    if isinstance(func, functools.partial):
        return f"partial({callable_name(func.func)})"
    named = func if hasattr(func, "__qualname__") else type(func)
    module = getattr(named, "__module__", None)
    return named.__qualname__ if module in (None, "builtins", "__main__") else f"{module}.{named.__qualname__}"


def brief(value: Any, limit: int = 80) -> str:
    """``repr(value)``, its middle left out beyond ``limit`` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 4 :]}"


def place(prompt: Any, turn: int | None = None, num_turns: int | None = None, path: Sequence[int] = ()) -> str:
    """Where in a run something happened, for messages: ``turn`` counts from 0 here and from 1 in the text.

    ``path``: the joint actions that led to the node, from the first turn on.
    """
    row = f"row with prompt {brief(prompt)}"
    if path:
        row = f"after joint action{'s' * (len(path) > 1)} {', '.join(map(str, path))}, {row}"
    if turn is None:
        return row
    return f"turn {turn + 1}, {row}" if num_turns is None else f"turn {turn + 1} of {num_turns}, {row}"


def _row_among(args: Sequence[Any], values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The row of data, or the first, that a function is given: by keyword, or by position first."""
    row = next(iter(values.get("batch_items") or ()), values.get("batch_item", args[0] if args else None))
    return row if isinstance(row, Mapping) else None


def _signature(func: Callable[..., Any]) -> inspect.Signature | None:
    # A module's own __call__ takes anything; what it accepts is what its forward does.
    try:
        return inspect.signature(func.forward if isinstance(func, nn.Module) else func)
    except (TypeError, ValueError):
        return None


def _is_async(func: Any) -> bool:
    while isinstance(func, functools.partial):
        func = func.func
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(type(func).__call__)
