"""Imports point one way, callbacks are nobody's, and the package lists what it holds."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from mareinforce.fit import asks_for_wandb, begin_wandb

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mareinforce"

LAYERS = [
    {
        "errors",
        "types",
        "call_child",
        "call_process",
        "calling",
        "concurrent_calls",
        "daemon_threads",
        "event_loop",
        "heap",
        "config",
        "config_rules",
        "quiet",
        "run_folder",
        "assets",
        "devices",
        "whole_files",
        "phases",
        "random_states",
        "ranks",
        "ddp",
        "metric_names",
        "hyperparameters",
    },
    {"algorithms", "rollout.tree"},
    {"rewards", "agents", "data", "tasks"},
    {"rollout"},
    {
        "optim",
        "metrics",
        "checkpoint",
        "checkpoint_files",
        "signals",
        "csv_log",
        "tracking",
        "run_summary",
        "rollout_table",
        "notices",
        "evaluation",
        "curves",
    },
    {"eval_statistics", "eval_summary", "eval_protocol"},
    {"learner", "run_state"},
    {"team_module"},
    {"module", "progress", "run_header"},
    {
        "cli",
        "trainers",
        "parse_errors",
        "trainer_rules",
        "reporting",
        "config_links",
        "own_arguments",
        "eval_arguments",
        "saved_config",
        "default_callbacks",
    },
    {"fit", "evaluate", "plot"},
]
"""Rooms of one set may import each other and everything in the sets above."""


def layer(name: str) -> int:
    """The index of the layer a module (without the package's name) lives in; its longest listed prefix decides."""
    for length in range(len(name.split(".")), 0, -1):
        prefix = ".".join(name.split(".")[:length])
        for index, rooms in enumerate(LAYERS):
            if prefix in rooms:
                return index
    raise AssertionError(f"{name} is in no layer")


def imports(source: str) -> Iterator[str]:
    """The modules of ours that a file imports when it runs (what only type checkers import does not count)."""
    tree = ast.parse(source)
    unseen = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in unseen:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("mareinforce", "callbacks"):
            names = [f"mareinforce.{a.name}" for a in node.names]
            yield from (names if node.module == "mareinforce" else [str(node.module)])
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in ("mareinforce", "callbacks"))


def violations(module: str, source: str) -> list[str]:
    """What a module imports from a later layer, or from the callbacks."""
    found = []
    for imported in imports(source):
        inside = imported.removeprefix("mareinforce").removeprefix(".")
        if imported.startswith(("callbacks", "mareinforce.callbacks")) or (inside and layer(inside) > layer(module)):
            found.append(f"{module} imports {imported}")
    return found


def test_imports_point_one_way():
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        if module != "__init__":  # the lazy front door names everything and imports nothing
            found += violations(module, file.read_text())
    assert found == []


def test_a_wrong_import_is_found():
    assert violations("algorithms.loss", "from mareinforce.module import MultiAgentReinforce")
    assert violations("types", "import mareinforce.rollout.expand")
    assert violations("module", "from mareinforce.callbacks import anything")
    assert not violations("module", "from mareinforce.rollout.expand import Episode")


def test_the_package_lists_all_its_folders():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {"mareinforce." + ".".join(f.parent.relative_to(PACKAGE).parts) for f in PACKAGE.rglob("__init__.py")}
    assert listed == {name.rstrip(".") for name in folders} | {"mareinforce.callbacks"}


def test_importing_the_package_imports_nothing_heavy():
    heavy = ["torch", "lightning", "transformers", "datasets"]
    program = f"import sys, mareinforce; print([name for name in {heavy!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.strip() == "[]"


def at_the_end_of(*arguments: str) -> dict[str, Any]:
    """What a process looks like after `python -m mareinforce.fit` with these arguments."""
    program = (
        "import gc, json, sys; from mareinforce.fit import main; status = main(sys.argv[1:]); "
        "seen = {'status': status, 'modules': list(sys.modules), 'collects': gc.isenabled(), "
        "'kept': gc.get_freeze_count()}; print('\\n' + json.dumps(seen))"
    )
    command = [sys.executable, "-c", program, "--config", "configs/quickstart.yaml", "--print_config", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    seen: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert seen["status"] == 0
    return seen


def test_where_it_is_asked_for_the_client_of_wandb_is_imported_before_the_libraries_that_make_its_import_slow():
    modules = at_the_end_of("--wandb")["modules"]
    assert modules.index("wandb.apis.public") < modules.index("torch")


@pytest.mark.parametrize(("rank", "begun"), [(None, True), ("0", True), ("1", False)])
def test_the_process_of_wandb_is_begun_once_a_machine_while_others_are_imported(monkeypatch, rank, begun):
    import wandb

    called = Event()
    monkeypatch.setattr(wandb, "setup", called.set)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    begin_wandb()
    assert called.wait(10 if begun else 0.2) == begun


@pytest.mark.parametrize(
    ("arguments", "text", "asks"),
    [
        (["--wandb"], "", True),
        (["--wandb-project", "mine"], "", True),
        (["--config", "{file}"], "wandb: true\n", True),
        (["--config={file}"], "model: {}\nwandb:  True  # to see it\n", True),
        (["--config", "{file}"], "wandb: false\nwandb_name: true\n", False),
        (["--config", "{file}"], "# wandb: true\nmodel: {reward_func: a.wandb}\n", False),
        (["--config", "{file}.yaml"], "", False),
        (["--model.config.system_prompt", f"{'Answer. ' * 40}Name the file answer.yaml"], "", False),
    ],
)
def test_wandb_is_begun_early_where_an_argument_or_a_file_switches_it_on(tmp_path, arguments, text, asks):
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    assert asks_for_wandb([argument.format(file=file) for argument in arguments]) == asks


def test_what_libraries_made_is_left_to_the_end_and_what_comes_later_is_collected():
    seen = at_the_end_of()
    assert "wandb" not in seen["modules"]
    assert seen["collects"]
    assert seen["kept"] > 100_000


def test_no_file_has_outgrown_its_room():
    lengths = {str(file): len(file.read_text().splitlines()) for file in PACKAGE.rglob("*.py")}
    assert {name: length for name, length in lengths.items() if length > 400} == {}
