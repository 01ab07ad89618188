"""Tries what the pages show: every fenced block is run, or parsed by what would run it.

Python blocks are run in order in a folder of the page's own. A block that begins with `# continues` goes on in the
namespace of the one before, one that begins with `# needs ...` cannot run everywhere: it is compiled, and its imports
and keywords are looked at. YAML is parsed by the command line's own parser; a part of a recipe is laid over the
quickstart. Of bash every command is parsed by what it calls. A block without a language is output, and may hold no
command.

A block whose paragraph is a file's name (`` `my_task.py`: ``) is also that file, for what comes after it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import io
import itertools
import re
import shlex
import sys
import textwrap
import tomllib
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

import mareinforce
from mareinforce import MAGRPOConfig, plot
from mareinforce.cli import MareinforceCLI
from mareinforce.eval_arguments import configuration_arguments
from mareinforce.quiet import quiet
from mareinforce.team_module import TeamModule

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
NEEDS, CONTINUES = "# needs ", "# continues"

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"`([\w-]+\.(?:py|yaml))`[^\n]*:\n\n *\Z")
_KNOWN = {
    "cd": ("mareinforce",),
    "git": ("clone", "switch"),
    "mypy": ("",),
    "ruff": ("check", "format"),
    "source": (".venv/bin/activate",),
    ".": (".venv/bin/activate",),
    "wandb": ("sync", "login"),
}
"""Commands that are not parsed, and how they may begin."""
_COMMAND = re.compile(r"^\s*(python|pip|pytest|torchrun|srun|wandb|ruff|mypy|git) ")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page. ``line``: of its first line, counted from 1. ``file``: what it is to be saved as."""

    page: str
    line: int
    language: str
    code: str
    file: str | None = None

    def at(self, offset: int, complaint: object) -> str:
        """A complaint about one of its lines, counted from 0, with its place in the page."""
        return f"{self.page}:{self.line + offset}: {complaint}"


def blocks(page: str, text: str) -> list[Block]:
    """Every fenced block of a page."""
    found = []
    for fence in _FENCE.finditer(text):
        name = _FILE.search(text[: fence.start()])
        line = text[: fence.start(3)].count("\n") + 1
        found.append(Block(page, line, fence[2], textwrap.dedent(fence[3]), name[1] if name else None))
    return found


def problems(page: str, text: str, folder: Path) -> list[str]:
    """What does not hold in a page's blocks, each with page and line; files are written into ``folder``."""
    ways = {"python": Python(folder).problems, "yaml": yaml_problems, "bash": bash_problems, "": output_problems}
    found = []
    with inside(folder):
        for block in blocks(page, text):
            if block.file is not None:
                (folder / block.file).write_text(block.code, encoding="utf-8")
            way = ways.get(block.language)
            found += [block.at(-1, "which language is this?")] if way is None else way(block)
    return found


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """In a folder, whose modules can be imported, and are forgotten afterwards."""
    with contextlib.chdir(folder), mock.patch.object(sys, "path", [str(folder), *sys.path]):
        try:
            yield
        finally:
            for name, module in list(sys.modules.items()):
                if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
                    del sys.modules[name]


# Python


class Python:
    """Runs the Python blocks of one page.

    Attributes:
        namespaces: what the blocks that ran have defined.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.namespaces: list[dict[str, Any]] = []

    def problems(self, block: Block) -> list[str]:
        """What happens when it is run."""
        try:
            program = compile("\n" * (block.line - 1) + block.code, block.page, "exec")
        except SyntaxError as error:
            return [block.at((error.lineno or block.line) - block.line, f"{error.msg}")]
        if block.code.startswith(NEEDS):
            return unknown_names(block)
        if not block.code.startswith(CONTINUES) or not self.namespaces:
            self.namespaces.append({"__name__": "example"})
        try:
            with contextlib.redirect_stdout(None):
                exec(program, self.namespaces[-1])
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            line = next((one.lineno for one in reversed(frames) if one.filename == block.page), None) or block.line
            return [block.at(line - block.line, f"{type(error).__name__}: {error}")]
        return []


def unknown_names(block: Block) -> list[str]:
    """Of a block that cannot be run: what it imports from us that is not there, and keywords that nothing takes."""
    found = []
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "mareinforce":
            module = importlib.import_module(str(node.module))
            missing = [one.name for one in node.names if not hasattr(module, one.name)]
            found += [block.at(node.lineno - 1, f"{node.module} has no {name}") for name in missing]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in mareinforce.__all__:
            takes = inspect.signature(getattr(mareinforce, node.func.id)).parameters
            unknown = [one for one in node.keywords if one.arg is not None and one.arg not in takes]
            found += [block.at(one.value.lineno - 1, f"{node.func.id} has no {one.arg}") for one in unknown]
    return found


# YAML


def yaml_problems(block: Block) -> list[str]:
    """What the command line says to it: as a recipe, or as a part of one, laid over the quickstart."""
    try:
        content = yaml.safe_load(block.code)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        return [block.at(mark.line if mark else 0, getattr(error, "problem", error))]
    settings = as_settings(content)
    file = Path("shown.yaml")
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    is_recipe = "reward_func" in (settings.get("model") or {}) and "data" in settings
    files = [*([] if is_recipe else [f"--config={QUICKSTART}"]), f"--config={file}"]
    complaint = refusal("fit", files, build=not block.code.startswith(NEEDS))
    if complaint is None:
        return []
    path = re.findall(r"\w+", complaint.split(":")[0].split("=")[0])
    keys = [*re.findall(r"has no argument '(\w+)'", complaint), *reversed(path)]
    lines = block.code.splitlines()
    return [block.at(next((i for key in keys for i, line in enumerate(lines) if key in line), 0), complaint)]


def as_settings(content: Any) -> dict[str, Any]:
    """A part of a recipe where it belongs: callbacks, keys of the model, or fields of its configuration."""
    if isinstance(content, list):
        return {"trainer": {"callbacks": content}}
    if not isinstance(content, Mapping):
        return {"": content}
    keys = set(content)
    if keys <= {field.name for field in dataclasses.fields(MAGRPOConfig)}:
        return {"model": {"config": dict(content)}}
    if keys <= set(inspect.signature(TeamModule).parameters):
        return {"model": dict(content)}
    return dict(content)


class ParsedOnly(MareinforceCLI):
    """The command line up to where it would make a Trainer: everything is parsed, checked and, but for it, built."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """None."""
        return None

    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing."""

    @functools.cached_property
    def _plain(self) -> Any:
        return super()._plain_parser()

    def _plain_parser(self) -> Any:
        return self._plain

    def take(self, arguments: Sequence[str], *, build: bool) -> None:
        """Go through other arguments with the parsers that are there."""
        self.parse_arguments(self.parser, [self.command, *arguments])
        self.before_instantiate_classes()
        if build:
            self.instantiate_classes()


@functools.cache
def _parsed_only(command: str) -> ParsedOnly:
    return ParsedOnly(command, [f"--config={QUICKSTART}"])


def refusal(command: str, arguments: Sequence[str], *, build: bool = True) -> str | None:
    """What the command line says against `fit` or `validate` with these arguments; None: nothing."""
    try:
        with quiet():
            _parsed_only(command).take(arguments, build=build)
    except (Exception, SystemExit) as error:
        return f"{error}" or type(error).__name__
    return None


# bash


def bash_problems(block: Block) -> list[str]:
    """What is wrong with each of its commands."""
    return [
        block.at(offset, f"{complaint} ({shlex.join(words)})")
        for offset, words in commands(block.code)
        if (complaint := wrong_command(words))
    ]


def commands(code: str) -> Iterator[tuple[int, list[str]]]:
    """Every command with the line it begins at, from 0: continued lines joined, comments and shell words taken away."""
    lines = code.splitlines()
    while lines:
        offset, line = len(code.splitlines()) - len(lines), lines.pop(0)
        while line.endswith("\\") and lines:
            line = line[:-1] + lines.pop(0)
        text = re.sub(r"\$\{?\w+\}?", "0", line)  # a variable has some value
        command: list[str] = []
        for word in [*_words(text), ";"]:
            if word not in (";", "&&", "||", "|", "&"):
                command.append(word)
                continue
            while command and command[0] in ("do", "then", "time"):
                command = command[1:]
            if command and command[0] not in ("for", "done", "wait"):
                yield offset, command
            command = []


def _words(text: str) -> list[str]:
    reader = shlex.shlex(text, posix=True, punctuation_chars=";&|")
    reader.whitespace_split = True
    return list(reader)


def wrong_command(words: Sequence[str]) -> str | None:
    """What is wrong with a command, or None. One that is not known here is wrong too."""
    name, arguments = words[0], list(words[1:])
    if name.startswith("python"):
        return _wrong_module(arguments)
    if name == "torchrun":
        return _wrong_torchrun(arguments)
    if name == "srun":
        return wrong_command(list(itertools.dropwhile(lambda word: word.startswith("-"), arguments)))
    if name in ("pip", "pytest"):
        return {"pip": _wrong_pip, "pytest": _wrong_pytest}[name](arguments)
    known = _KNOWN.get(name)
    if known is None:
        return f"the command {name} is not known here"
    return None if (arguments or [""])[0] in known else f"{name} is known here with {', '.join(known)}"


def _wrong_module(arguments: list[str]) -> str | None:
    if arguments[:1] != ["-m"] or len(arguments) < 2:
        return "python is given no -m MODULE"
    module, rest = arguments[1], arguments[2:]
    if module == "venv":
        return None if len(rest) == 1 else "venv takes one folder"
    if module == "mareinforce.fit":
        return _missing(_files(rest, "--config")) or refusal("fit", rest)
    if module == "mareinforce.evaluate":
        try:
            return _missing(_files(rest, "--config")) or refusal("validate", configuration_arguments(rest))
        except mareinforce.MareinforceError as error:
            return str(error)
    if module == "mareinforce.plot":
        return _said_by(plot.main, rest)
    if module.split(".")[0] != "tests":
        return f"the module {module} is not known here"
    return _wrong_arguments(module, rest)


def _wrong_arguments(module: str, arguments: list[str]) -> str | None:
    """What the parser of a module of the tests says, which is made in its `main`."""
    if importlib.util.find_spec(module) is None:
        return f"there is no module {module}"
    found = importlib.import_module(module)
    main = (found if hasattr(found, "main") else importlib.import_module(f"{module}.__main__")).main
    parse = argparse.ArgumentParser.parse_args

    def parsed_only(self: Any, args: Any = None, namespace: Any = None) -> Any:
        self.allow_abbrev = False  # half an option works, and is none to show
        parse(self, arguments, namespace)
        raise _Parsed

    def complain(self: Any, message: str) -> Any:
        raise ValueError(message)

    changes = {"parse_args": parsed_only, "error": complain}
    with mock.patch.multiple(argparse.ArgumentParser, **changes), mock.patch.object(sys, "argv", [module, *arguments]):
        try:
            main()
        except _Parsed:
            return None
        except ValueError as error:
            return str(error)
    return f"{module} has read no arguments"


class _Parsed(Exception):
    """The arguments were taken."""


def _wrong_torchrun(arguments: list[str]) -> str | None:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.allow_abbrev = False

    def complain(self: Any, message: str) -> Any:
        raise ValueError(message)

    with mock.patch.object(argparse.ArgumentParser, "error", complain):
        try:
            given = parser.parse_args(arguments)
        except ValueError as error:
            return str(error)
    return _wrong_module(["-m", given.training_script, *given.training_script_args]) if given.module else "no -m MODULE"


def _wrong_pip(arguments: list[str]) -> str | None:
    if arguments[:1] != ["install"]:
        return "only pip install is known here"
    rest = iter(arguments[1:])
    for word in rest:
        if word == "-c":
            if not (ROOT / next(rest)).is_file():
                return "there is no such file of constraints"
        elif word == "-e":
            found = re.fullmatch(r"\.(?:\[([\w,-]+)\])?", next(rest))
            wanted = [] if found is None or found[1] is None else found[1].split(",")
            if found is None or (unknown := sorted({*wanted} - extras())):
                return f"there is no extra {', '.join(unknown) if found else word}"
        elif not word.startswith("-") and not re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", _sources()):
            return f"nothing here needs the package {word}"
        elif word.startswith("-") and word not in ("--no-deps", "-q"):
            return f"the option {word} is not known here"
    return None


def _wrong_pytest(arguments: list[str]) -> str | None:
    rest = iter(arguments)
    for word in rest:
        if word == "-m":
            names = set(re.findall(r"\w+", next(rest))) - {"not", "and", "or"}
            if unknown := names - markers():
                return f"there is no marker {', '.join(sorted(unknown))}"
        elif word in ("-k", "-n"):
            next(rest)
        elif word.startswith("-"):
            if word not in ("-x", "-q"):
                return f"the option {word} is not known here"
        elif not (ROOT / word).exists():
            return f"there is no {word}"
    return None


def _said_by(main: Any, arguments: list[str]) -> str | None:
    """What a command writes to stderr where it fails."""
    said = io.StringIO()
    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(said):
        return said.getvalue().strip() or "it failed" if main(arguments) else None


def _files(arguments: Sequence[str], key: str) -> list[str]:
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    return [value for word, value in pairs if word == key] + [
        word.split("=", 1)[1] for word in arguments if word.startswith(f"{key}=")
    ]


def _missing(files: Iterable[str]) -> str | None:
    return next((f"there is no {file}" for file in files if not Path(file).is_file()), None)


@functools.cache
def extras() -> frozenset[str]:
    """The optional dependencies there are."""
    return frozenset(_project()["project"]["optional-dependencies"])


@functools.cache
def markers() -> frozenset[str]:
    """The markers of tests there are."""
    return frozenset(one.split(":")[0] for one in _project()["tool"]["pytest"]["ini_options"]["markers"])


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@functools.cache
def _sources() -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "mareinforce").rglob("*.py")))


# what a run has said


def output_problems(block: Block) -> list[str]:
    """Commands in a block that is no bash; what shows the form of one (`[--KEY VALUE ...]`) is none."""
    lines = enumerate(block.code.splitlines())
    wrong = [i for i, line in lines if _COMMAND.match(line) and "[" not in line]
    return [block.at(i, "a command in a block that is not bash") for i in wrong]
