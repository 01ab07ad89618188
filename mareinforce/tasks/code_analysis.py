"""Reading code that a model wrote, without running it: what is code, what is defined, who calls whom."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from typing import Literal

AUX = "aux"
"""The name of the helper agent's function."""

State = Literal["missing", "no return", "defined"]
"""What a text says of a function: not there, there without returning a value, there and returning one."""

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_PYTHON = ("python", "py", "python3")
_STARTS = re.compile(
    r"(?:def|async\s+def|class)\s+\w+"
    r"|import\s+\w[\w.]*(?:\s+as\s+\w+)?(?:\s*,.*)?$"
    r"|from\s+[\w.]+\s+import\s"
    r"|@\w"
)
"""An unindented line that only code has."""
_GOES_ON = re.compile(
    r"\s|#|[)\]}\"']"
    r"|[A-Za-z_][\w.\[\], ]*\s*(?::[^:]+)?[-+*/|&%^]?=[^=]"
    r"|(?:if|for|while|try|else|elif|except|finally|with)\b.*:\s*(?:#.*)?$"
)
"""An unindented line that code can go on with."""


def extract_code(completion: str) -> str:
    """The code in an answer, "" if there is none.

    With fences: all blocks marked as Python, else all unmarked blocks, one after the other; a fence that is never
    closed ends where code ends. Without: from the first line that begins an import, a definition or a decorator, up to
    the first unindented line that is not code.
    """
    blocks = list(_FENCE.finditer(completion))
    chosen = [block for block in blocks if block[1].lower() in _PYTHON] or [block for block in blocks if not block[1]]
    if not blocks:
        return _code_lines(completion)
    bodies = [block[2] if block[0].rstrip().endswith("```") else _code_lines(block[2]) for block in chosen]
    return "\n\n".join(body.strip("\n") for body in bodies).strip("\n")


def _code_lines(text: str) -> str:
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if _STARTS.match(line)), None)
    if start is None:
        return ""
    code = [not line or bool(_STARTS.match(line) or _GOES_ON.match(line)) for line in lines]
    strays = [number for number in range(start, len(lines)) if not code[number]]
    # the longest part that is Python, as text inside of a string literal is no end; else up to the first stray line
    whole = (end for end in [len(lines), *reversed(strays)] if parsed("\n".join(lines[start:end])) is not None)
    end = next(whole, strays[0] if strays else len(lines))
    return "\n".join(lines[start:end]).rstrip()


def parsed(code: str) -> ast.Module | None:
    """The syntax tree, or None if this is no Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that will be refused one day: not our code
        try:
            return ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def syntax_error(code: str) -> str | None:
    """``line 3: '(' was never closed``, or None if the code compiles."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(code, "<answer>", "exec", dont_inherit=True)
        except SyntaxError as error:
            return f"line {error.lineno}: {error.msg}"
        except (ValueError, RecursionError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
    return None


def function_named(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    """The last definition of a function at the top level, which is the one that counts."""
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return found[-1] if found else None


def function_state(code: str, name: str) -> State:
    """Whether the code defines the function and returns a value from it. Code that is no Python is read by lines."""
    tree = parsed(code)
    if tree is not None:
        function = function_named(tree, name)
        if function is None:
            return "missing"
        returns = any(isinstance(node, ast.Return) and node.value is not None for node in own_nodes(function))
        return "defined" if returns else "no return"
    found = re.search(rf"^def\s+{re.escape(name)}\s*\(.*?(?=^\S|\Z)", code, re.MULTILINE | re.DOTALL)
    if found is None:
        return "missing"
    return "defined" if re.search(r"^\s+return\s+\S|:\s*return\s+\S", found[0], re.MULTILINE) else "no return"


def own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function's body without those of functions and classes defined inside of it."""
    queue: list[ast.AST] = list(function.body)
    while queue:
        node = queue.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            queue += ast.iter_child_nodes(node)


def joined(preamble: str, helper: str, main: str) -> str:
    """One program: what the problem gives, the helper's code and the main agent's code.

    Of each agent's code the imports, definitions and assignments of the top level are kept; examples of use are not. An
    `aux` in the main agent's code is left out, as the helper's is the one to be called. Code that is no Python is kept
    as it is.
    """
    parts, futures = [], []
    for code, without in ((preamble, ""), (helper, ""), (main, AUX)):
        tree = parsed(code)
        if tree is None:
            parts.append(code)
            continue
        kept = [node for node in tree.body if _is_kept(node, without)]
        futures += [node for node in kept if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
        parts.append("\n\n".join(_written(node, code) for node in kept if node not in futures))
    first = [ast.unparse(node) for node in futures]  # Python wants them before everything else
    return "\n\n".join(part for part in [*first, *parts] if part) + "\n"


def _written(node: ast.stmt, code: str) -> str:
    try:
        return ast.unparse(node)
    except (RecursionError, ValueError):  # nested too deeply, or a number of too many digits, to be written anew
        start = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        return "\n".join(code.splitlines()[start - 1 : node.end_lineno])


def _is_kept(node: ast.stmt, without: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name != without
    return isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign)


def cooperation(main: str, entry_point: str) -> float:
    """How far the main function builds on the helper's, 0 to 1.

    0: it does not call `aux`, or calls one of its own. 0.25: it calls `aux` and drops the result. 0.5: it does no more
    than return what `aux` returns. 1: it uses the result and does something itself.
    """
    tree = parsed(main)
    function = None if tree is None else function_named(tree, entry_point)
    if tree is None or function is None or _binds(function, AUX) or _binds_above(tree, AUX):
        return 0.0
    uses = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == AUX]
    if not uses:
        return 0.0
    parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    read = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    if not any(_is_used(use, parents, read) for use in uses):
        return 0.25
    return 0.5 if _only_returns_aux(function) else 1.0


def _binds(function: ast.FunctionDef, name: str) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.arg) and node.arg == name:
            return True
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
            return True
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return True
    return False


def _binds_above(tree: ast.Module, name: str) -> bool:
    """Does an import or an assignment of the top level, which the program keeps, give the name something else?"""
    kept = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign)]
    found = [each for node in kept for each in ast.walk(node)]
    return any(
        (isinstance(each, ast.alias) and (each.asname or each.name) == name)
        or (isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, ast.Store))
        for each in found
    )


def _is_used(use: ast.Name, parents: dict[ast.AST, ast.AST], read: set[str]) -> bool:
    """Does anything become of the value: of the call's, or of `aux` itself where it is passed on uncalled?"""
    value: ast.AST = use
    if isinstance(parents[use], ast.Call) and parents[use].func is use:  # type: ignore[attr-defined]
        value = parents[use]
    holder = parents[value]
    if isinstance(holder, ast.Expr):
        return False
    if isinstance(holder, ast.Assign | ast.AnnAssign):
        targets = holder.targets if isinstance(holder, ast.Assign) else [holder.target]
        names = {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        return bool(names & read) or not all(isinstance(target, ast.Name | ast.Tuple) for target in targets)
    return True


def _only_returns_aux(function: ast.FunctionDef) -> bool:
    """Is the body, without docstring, imports and `pass`, `return aux(...)` or that in two steps?"""
    body = [
        node
        for node in function.body
        if not isinstance(node, ast.Import | ast.ImportFrom | ast.Pass)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    match body:
        case [ast.Return(value=ast.Call(func=ast.Name(id=name)))]:
            return name == AUX
        case [
            ast.Assign(targets=[ast.Name(id=kept)], value=ast.Call(func=ast.Name(id=name))),
            ast.Return(value=ast.Name(id=given)),
        ]:
            return name == AUX and kept == given
    return False
