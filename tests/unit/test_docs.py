"""The documentation names every field and every column, with its default. (Its snippets: tests/documentation.py.)"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from mareinforce.callbacks import EarlyTerminationLogger, EvaluationCallback, ThroughputMonitor

from mareinforce import MAGRPOConfig, MAGRPOTrainer, callbacks
from mareinforce.csv_log import read_metrics
from tests.models import table_model, table_tokenizer

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *(DOCS.parent / name for name in ("README.md", "CONTRIBUTING.md"))]

_ROW = re.compile(r"^\| `(?P<name>[^`]+)` \| (?P<rest>.*) \|$", re.MULTILINE)
_WORDS = {"true": True, "false": False, "null": None}


def first_cells(text: str) -> dict[str, str]:
    """Name in the first cell of every table row -> the rest of the row."""
    return {found["name"]: found["rest"] for found in _ROW.finditer(text)}


def documented_defaults(text: str) -> dict[str, Any]:
    """Field -> the default that its row states, read as YAML would."""
    return {name: _value(rest.split(" | ")[0].strip("` ")) for name, rest in first_cells(text).items()}


def _value(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return tuple(value) if isinstance(value, list) else value


def wrong_fields(text: str, fields: Mapping[str, Any]) -> list[str]:
    """Fields without a row, rows without a field, and rows that state another default."""
    stated = documented_defaults(text)
    missing = [f"{name} is missing" for name in fields if name not in stated]
    surplus = [f"{name} is no field" for name in stated if name not in fields]
    wrong = [
        f"{name}: {stated[name]!r} is not {default!r}"
        for name, default in fields.items()
        if name in stated and (stated[name] != default or type(stated[name]) is not type(default))
    ]
    return missing + surplus + wrong


def pattern_of(column: str) -> str:
    """A column's name without its numbers, as the table writes it: `turn_k/...`, `agent_i/...`."""
    return re.sub(r"agent_\d+/", "agent_i/", re.sub(r"turn_\d+/", "turn_k/", column))


def wrong_columns(text: str, columns: Collection[str]) -> list[str]:
    """Columns without a row in the table, and rows of the table that no column fits."""
    stated, logged = set(first_cells(text)), {pattern_of(column) for column in columns}
    missing = [f"{name} is missing" for name in sorted(logged - stated)]
    return missing + [f"{name} is not logged" for name in sorted(stated - logged)]


def dead_links(page: Path, text: str) -> list[str]:
    """What a page links to that is not there: files, and headings of pages."""
    dead = []
    for target, heading in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        file = page.parent / target if target else page
        if not file.exists() or (heading and heading not in headings(file.read_text(encoding="utf-8"))):
            dead.append(f"{target}#{heading}" if heading else target)
    return dead


def headings(text: str) -> list[str]:
    """The headings of a page, as a link names them."""
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found]


CONFIGURATION = (DOCS / "configuration.md").read_text(encoding="utf-8")
METRICS = (DOCS / "metrics.md").read_text(encoding="utf-8")
FIELDS = {field.name: field.default for field in dataclasses.fields(MAGRPOConfig)}


class TestConfiguration:
    def test_every_field_has_a_row_with_its_default(self):
        assert wrong_fields(CONFIGURATION, FIELDS) == []

    def test_a_field_that_is_not_there_or_has_another_default_is_reported(self):
        assert wrong_fields(CONFIGURATION, {**FIELDS, "made_up": 1}) == ["made_up is missing"]
        assert wrong_fields(CONFIGURATION, {**FIELDS, "num_turns": 3}) == ["num_turns: 2 is not 3"]
        assert wrong_fields(CONFIGURATION, {**FIELDS, "eval_interval": 16.0}) == ["eval_interval: 16 is not 16.0"]
        without = {name: default for name, default in FIELDS.items() if name != "seed"}
        assert wrong_fields(CONFIGURATION, without) == ["seed is no field"]


@pytest.fixture(scope="module")
def logged_columns(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The columns of a run that logs everything: two turns, old samples, importance weights, evaluation, callbacks."""
    texts = ["<eos>", "go", "a", "b"]

    def reward(first: list[str], second: list[str]) -> dict[str, list[float]]:
        values = [float(one == other) + len(one) / 10 for one, other in zip(first, second, strict=True)]
        return {"reward": values, "COMPONENT": values}

    trainer = MAGRPOTrainer(
        agents=[table_model(len(texts), eos_token_id=0) for _ in range(2)],
        tokenizer=table_tokenizer(texts),
        reward_func=reward,
        external_transition=lambda prompt: [prompt, prompt],
        eval_logger=lambda batch_items: [{} for _ in batch_items],
        eval_aggregator=lambda metrics: {"NAME": float(len(metrics))},
        train_dataset=["go", "go"],
        eval_dataset=["go"],
        args=MAGRPOConfig(
            num_train_epochs=1,
            max_new_tokens=2,
            early_termination_threshold=0.5,
            early_termination_on="joint_action",
            early_termination_value="hold",
            importance_sampling="token",
            reference_kl_enabled=True,
            prompt_overflow="truncate_left",
            advantage_normalization=False,
            on_reward_error="skip",
            logging_steps=1,
        ),
        default_root_dir=tmp_path_factory.mktemp("runs"),
        accelerator="cpu",
        callbacks=[EarlyTerminationLogger(), EvaluationCallback(), ThroughputMonitor()],
    )
    trainer.train()
    assert trainer.run_folder is not None
    rows = read_metrics(trainer.run_folder / "metrics.csv")
    assert any(float(row["agent_0/sample_age"] or 0) > 0 for row in rows)
    columns = [column.replace("COMPONENT", "<component>").replace("NAME", "<name>") for column in rows[0]]
    return [*columns, "memory/device_gib"]  # not on a CPU


class TestMetrics:
    def test_every_column_has_a_row_and_every_row_a_column(self, logged_columns):
        assert wrong_columns(METRICS, logged_columns) == []

    def test_a_column_without_a_row_and_a_row_without_a_column_are_reported(self, logged_columns):
        assert wrong_columns(METRICS, [*logged_columns, "agent_7/made_up"]) == ["agent_i/made_up is missing"]
        fewer = [column for column in logged_columns if not column.endswith("/grad_norm")]
        assert wrong_columns(METRICS, fewer) == ["agent_i/grad_norm is not logged"]


class TestCallbacks:
    def test_every_callback_is_made_as_its_section_says(self):
        text = (DOCS / "callbacks.md").read_text(encoding="utf-8")
        blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
        blocks = [block["trainer"]["callbacks"] if isinstance(block, dict) else block for block in blocks]
        made = []
        for path, options in ((one["class_path"], one.get("init_args", {})) for block in blocks for one in block):
            package, name = path.rsplit(".", 1)
            made.append(getattr(importlib.import_module(package), name)(**options))
        kinds = {type(one).__name__ for one in made}
        assert kinds == set(callbacks.__all__) - {"RolloutLog"}  # which has a page of its own
        assert all(f"## {name}\n" in text for name in kinds)


def rooms(text: str) -> list[str]:
    """Every path in the first cells of a table of rooms; a bare `NAME.py` is one of the package."""
    cells = re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return [f"mareinforce/{name}" if "/" not in name else name for name in names]


def wrong_rooms(text: str, tree: Collection[str]) -> list[str]:
    """Files and folders without a place in the table, named twice, or not there."""
    named = rooms(text)
    twice = sorted({name for name in named if named.count(name) > 1})
    missing = [f"{name} is missing" for name in sorted(set(tree) - set(named))]
    return missing + [f"{name} is not there" for name in sorted(set(named) - set(tree))] + [f"{n} twice" for n in twice]


class TestContributing:
    def test_the_table_of_rooms_is_the_tree(self):
        root = DOCS.parent
        files = {f"mareinforce/{file.name}" for file in (root / "mareinforce").glob("[!_]*.py")}
        packages = [*(root / "mareinforce").glob("*/__init__.py"), *(root / "tests").glob("*/__init__.py")]
        tree = files | {f"{file.parent.relative_to(root)}/" for file in packages} | {"callbacks/", "configs/"}
        assert wrong_rooms((root / "CONTRIBUTING.md").read_text(encoding="utf-8"), tree) == []

    def test_a_room_that_is_missing_or_not_there_is_reported(self):
        text = "| where | what |\n| --- | --- |\n| `mareinforce/a/`, `b.py` | x |\n| `b.py`, `c.py` | y |\n"
        assert wrong_rooms(text, {"mareinforce/a/", "mareinforce/b.py", "mareinforce/d.py"}) == [
            "mareinforce/d.py is missing",
            "mareinforce/c.py is not there",
            "mareinforce/b.py twice",
        ]


class TestLinks:
    def test_links_between_pages_lead_somewhere(self):
        dead = {page.name: dead_links(page, page.read_text(encoding="utf-8")) for page in PAGES}
        assert dead == {page.name: [] for page in PAGES}

    def test_a_link_that_leads_nowhere_is_reported(self):
        text = "## A `b`-c\n[a](metrics.md) [b](no_such.md#x) [c](https://example.org) [d](#a-b-c) [e](metrics.md#no)"
        assert dead_links(DOCS / "algorithms.md", text) == ["no_such.md#x", "#a-b-c", "metrics.md#no"]
        assert headings(text) == ["a-b-c"]
