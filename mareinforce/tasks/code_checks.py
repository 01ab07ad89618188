"""What a HumanEval problem says and asks: its signature, what it gives, its examples, its hidden checks one by one."""

from __future__ import annotations

import ast
import contextlib
import copy
import doctest
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mareinforce.tasks.code_analysis import function_named, parsed

_GIVES = re.compile(r"\s*(?:==>|==|=>|->|\u279e|\u2192|\breturns\b|\bshould return\b)\s*")
"""What stands between a call and its value. A lone "=" does not count: recurrences in the text use it."""
_WORDS = {"true": "True", "false": "False", "none": "None", "null": "None"}


@dataclass(frozen=True, slots=True)
class Example:
    """A call with its value, both as the problem's docstring has them."""

    call: str
    value: str

    @property
    def check(self) -> str:
        """A statement that raises AssertionError unless the call gives the value."""
        return f"assert ({self.call}) == ({self.value})"


def parameters(prompt: str, entry_point: str) -> str:
    """The parameters of the function that is asked for, as in ``numbers, threshold``; "..." if they cannot be read."""
    tree = parsed(prompt)
    function = None if tree is None else function_named(tree, entry_point)
    if function is None:
        return "..."
    return ", ".join(arg.arg for arg in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs))


def given_code(prompt: str, entry_point: str) -> str:
    """What the problem gives beside the asked function: imports, and functions that its tests or its text rely on."""
    tree = parsed(prompt)
    if tree is None:
        return ""
    tree.body = [node for node in tree.body if not (isinstance(node, ast.FunctionDef) and node.name == entry_point)]
    return ast.unparse(tree)


def split_checks(test: str, entry_point: str) -> list[str]:
    """The assertions of a problem's ``check(candidate)``, each as a program of its own that raises if it fails.

    A statement that holds assertions (a loop, say) is one check. Statements without one go before every later check.
    Assertions of a constant (``assert True``) are left out: they are no test of anything. The whole function is one
    check if a later statement needs what a check computes, or if nothing but constants is asserted. A test that is no
    Python or has no ``check`` is one check as it is, followed by the call of ``check``.
    """
    tree = parsed(test)
    function = None if tree is None else function_named(tree, "check")
    if tree is None or function is None:
        return [f"{test}\ncheck({entry_point})"]
    outside = [node for node in tree.body if node is not function]
    before: list[ast.stmt] = []
    bodies: list[list[ast.stmt]] = []
    computed: set[str] = set()  # names that checks so far have bound
    for statement in function.body:
        if _names(statement, ast.Load) & (computed - _names(statement, ast.Store)):
            return [_program(outside, function, function.body, entry_point)]
        if not _asserts(statement):
            before.append(statement)
        elif not (isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Constant)):
            bodies.append([*before, statement])
            computed |= _names(statement, ast.Store)
    if not bodies:
        return [_program(outside, function, function.body, entry_point)]
    return [_program(outside, function, body, entry_point) for body in bodies]


def _asserts(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False  # asserts when it is called, not here
    return any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(statement))


def _names(statement: ast.stmt, context: type[ast.expr_context]) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


def _program(outside: Sequence[ast.stmt], function: ast.FunctionDef, body: Sequence[ast.stmt], entry_point: str) -> str:
    check = copy.copy(function)
    check.body = list(body)
    call = ast.parse(f"{function.name}({entry_point})").body
    return ast.unparse(ast.fix_missing_locations(ast.Module([*outside, check, *call], type_ignores=[])))


def docstring_examples(prompt: str, entry_point: str) -> list[Example]:
    """The examples that the problem's own docstring shows, as doctests or as ``f(1) == 2``, ``f(1) => 2`` and the like.

    Only what can be read for sure: a call of the asked function and a literal value.
    """
    tree = parsed(prompt)
    function = None if tree is None else function_named(tree, entry_point)
    text = (ast.get_docstring(function) if function is not None else None) or ""
    try:
        found = [(each.source, each.want) for each in doctest.DocTestParser().get_examples(text)]
    except ValueError:  # of doctests with uneven indentation
        found = []
    for line in text.splitlines():
        start = line.find(f"{entry_point}(")
        if start >= 0:
            found += _call_and_value(line[start:])
    return list(dict.fromkeys(example for pair in found for example in _readable(*pair, entry_point)))


def _call_and_value(line: str) -> list[tuple[str, str]]:
    """``f(1) == 2, because ...`` as a call and what follows the sign, or nothing."""
    depth = 0
    for position, letter in enumerate(line):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0 and letter == ")":
            sign = _GIVES.match(line, position + 1)
            return [(line[: position + 1], line[sign.end() :])] if sign else []
    return []


def _readable(call: str, value: str, entry_point: str) -> list[Example]:
    tree = parsed(call.strip())
    if tree is None or len(tree.body) != 1 or not isinstance(tree.body[0], ast.Expr):
        return []
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    # "round" stands in doctests of HumanEval; any other name would be one that only the text explains
    if entry_point not in names or not names <= {entry_point, "round"}:
        return []
    value = value.strip()
    first = value.partition("\n")[0]  # a doctest's value ends at a blank line, and text may follow before that
    for text in (value, first, first.rstrip(" .,;"), re.split(r"\s*(?:#|,? because)", first)[0]):
        literal = parsed(_WORDS.get(text, text))
        if literal is not None and len(literal.body) == 1 and isinstance(literal.body[0], ast.Expr):
            with contextlib.suppress(ValueError, RecursionError):
                return [Example(ast.unparse(tree), repr(ast.literal_eval(literal.body[0].value)))]
    return []
