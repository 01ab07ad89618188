"""docs/troubleshooting.md: runs print its messages, and its columns and fields are there and mean what it says."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest

from mareinforce import MAGRPOConfig, callbacks, fit
from mareinforce.csv_log import read_metrics
from tests.documentation import QUICKSTART, ROOT, blocks, inside, refusal

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = [" ".join(block.code.split()) for block in blocks("troubleshooting.md", PAGE) if block.language == ""]
SHORT = {
    "model.config.num_generations": "2",
    "model.config.max_new_tokens": "6",
    "model.config.eval_interval": "0",
    "model.config.warmup_updates": "0",
    "data.train.split": "train[:2]",
    "trainer.accelerator": "cpu",
    "trainer.enable_progress_bar": "false",
}
FUNCTIONS = """
def constant(first, second):
    return [1.0] * len(first)

def nearly_equal(first, second):
    return [1.0 - 0.001 * (index == 0) for index in range(len(first))]

def apart(first, second):
    return [1.0 - (index == 0) for index in range(len(first))]

def shown(row, external_prompts=None):
    return row["prompt"]

def idle(row, external_prompts=None):
    return None

def again(prompt):
    return [prompt, prompt]

def at_length(prompt):
    return [prompt * 100, prompt * 100]

def nothing(prompt):
    return None
"""
TWICE = {"model.config.num_turns": "2", "model.external_transition": "my_task.again"}
REWARD = {"model.reward_func": "my_task.reward"}
HUGE = "def reward(first, second):\n    return [1e300 * index for index in range(len(first))]\n"

SAID: list[tuple[str, Mapping[str, str]]] = [
    ("", {**TWICE, "model.config.early_termination_threshold": "-0.2"}),
    ("", {"model.config.num_turns": "2"}),
    ("def transition(prompt):\n    return [prompt]\n", {**TWICE, "model.external_transition": "my_task.transition"}),
    ("def reward(first, second):\n    return [float('nan')] * len(first)\n", REWARD),
    (HUGE, {**REWARD, "model.config.advantage_normalization": "false"}),
    ("", {"model.config.max_new_tokens": "250"}),
    ("def reward(completions):\n    return [0.0] * len(completions)\n", REWARD),
    ("def reward(first, second):\n    return float(len(second[0]) > len(first[0]))\n", REWARD),
    ("def reward(first, second, batch_item):\n    return [0.0] * len(first)\n", REWARD),
    ("", {"wandb": "true"}),
    ("", {"ckpt_path": "last", "trainer.default_root_dir": "runs"}),
    ("", {"ckpt_path": "stopped/run_0001", "model.lora": "{r: 4}"}),
    ("", {"ckpt_path": "stopped/run_0001", "seed_everything": "5"}),
    ("", {"model.config.num_generatons": "4"}),
]
"""What leads to each quoted message, in the order of the page: what is in my_task.py, and options."""


def run(folder: Path, options: Mapping[str, str], functions: str = "") -> tuple[int, str]:
    """Exit status of a short run in a folder, and what it said on stderr."""
    (folder / "my_task.py").write_text(FUNCTIONS + functions, encoding="utf-8")
    said = io.StringIO()
    arguments = [f"--{key}={value}" for key, value in {**SHORT, **options}.items()]
    quietly = contextlib.redirect_stdout(None), contextlib.redirect_stderr(said)
    with inside(folder), quietly[0], quietly[1], warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        status = fit.main([f"--config={QUICKSTART}", *arguments])
    told = [said.getvalue(), *(str(one.message) for one in warned)]
    return status, " ".join(" ".join(told).split())


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run that ended in the middle of an epoch."""
    folder = tmp_path_factory.mktemp("stopped")
    assert run(folder, {"model.config.max_updates": "1"})[0] == 0
    (checkpoint,) = folder.glob("runs/run_0001/checkpoints/*.ckpt")
    return checkpoint


class TestMessages:
    @pytest.mark.parametrize(("quoted", "functions", "options"), [
        pytest.param(quoted, *case, id=quoted[:50]) for quoted, case in zip(QUOTED, SAID, strict=True)
    ])  # fmt: skip
    def test_a_quoted_message_is_what_a_run_prints(self, quoted, functions, options, tmp_path, monkeypatch, stopped):
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("HOME", str(tmp_path))
        if options.get("ckpt_path") == "stopped/run_0001":
            options = {**options, "ckpt_path": str(stopped)}
        status, said = run(tmp_path, options, functions)
        assert quoted in said
        assert status == (1 if quoted.startswith("error: ") else 0)

    def test_a_message_that_is_quoted_otherwise_is_noticed(self, tmp_path):
        _, said = run(tmp_path, {"model.config.num_generatons": "4"})
        assert QUOTED[-1] in said
        assert QUOTED[-1].replace("no such key", "no such field") not in said


NO_SIGNAL = {
    "turn_1/zero_signal_fraction": 1, "agent_0/advantage_std": 0, "agent_0/stepped_fraction": 0, "agent_0/loss": 0,
}  # fmt: skip
TELLS: dict[str, tuple[Mapping[str, str], Mapping[str, float | None]]] = {
    "a constant reward": ({"model.reward_func": "my_task.constant"}, {**NO_SIGNAL, "turn_1/reward_std": 0}),
    "too cold": ({"model.config.temperature": "0.01"}, {**NO_SIGNAL, "agent_0/entropy": None}),
    "cut answers": (
        {},
        {"agent_0/truncated_fraction": 1, "agent_0/completion_length": 6, "agent_0/stepped_fraction": 1},
    ),
    "cut answers left out": (
        {"model.config.mask_truncated": "true"},
        {"agent_0/advantage_std": 1, "agent_0/truncated_fraction": 1, "agent_0/stepped_fraction": 0},
    ),
    "one turn": ({}, {"turn_2/coverage": None}),
    "a threshold below the rewards": (
        {**TWICE, "model.config.early_termination_threshold": "-0.2"},
        {"turn_2/coverage": 0, "turn_1/stopped_fraction": 1},
    ),
    "prompts too long": (
        {**TWICE, "model.external_transition": "my_task.at_length", "model.config.prompt_overflow": "stop_branch",
         "model.config.early_termination_threshold": "5"},
        {"turn_2/coverage": 0, "turn_1/stopped_fraction": 0, "overlong_prompts": 4},
    ),
    "a transition that gives nothing": (
        {**TWICE, "model.external_transition": "my_task.nothing", "model.config.early_termination_threshold": "5"},
        {"turn_2/coverage": 0, "turn_1/stopped_fraction": 0, "overlong_prompts": None},
    ),
    "a frozen agent": ({"model.trainable": "[true, false]"}, {"agent_0/updates": 2, "agent_1/updates": None}),
    "an idle agent": (
        {"model.formatters": "[my_task.shown, my_task.idle]"},
        {"agent_0/updates": 2, "agent_1/updates": 0, "agent_1/advantage_std": None, "agent_1/stepped_fraction": None},
    ),
}  # fmt: skip
"""What the page says of the last row, by what is the matter; None: not there."""


def last_row(folder: Path) -> dict[str, float]:
    """The columns of the last row that are there."""
    return {name: float(value) for name, value in read_metrics(folder / "metrics.csv")[-1].items() if value}


class TestColumns:
    @pytest.mark.parametrize("what", TELLS)
    def test_a_column_tells_what_the_page_says_it_tells(self, what, tmp_path):
        options, told = TELLS[what]
        assert run(tmp_path, options)[0] == 0
        row = last_row(tmp_path / "runs" / "run_0001")
        assert {name: row.get(name) for name in told} == pytest.approx(dict(told))

    def test_normalisation_makes_nothing_of_the_size_of_a_difference(self, tmp_path):
        rows = {}
        for reward in ("apart", "nearly_equal"):
            for normalised in ("true", "false"):
                folder = tmp_path / f"{reward}_{normalised}"
                folder.mkdir()
                options = {"model.reward_func": f"my_task.{reward}", "data.train.split": "train[:1]"}
                assert run(folder, {**options, "model.config.advantage_normalization": normalised})[0] == 0
                rows[reward, normalised] = last_row(folder / "runs" / "run_0001")
        norms = {case: row["agent_0/grad_norm"] for case, row in rows.items()}
        assert norms["nearly_equal", "true"] == pytest.approx(norms["apart", "true"], rel=1e-3)
        assert norms["nearly_equal", "false"] == pytest.approx(norms["apart", "false"] / 1000, rel=1e-3)
        assert rows["nearly_equal", "true"]["agent_0/advantage_std"] == pytest.approx(1)
        assert rows["nearly_equal", "true"]["turn_1/reward_std"] == pytest.approx(0.0005)


COLUMNS = set(re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE))
FIELDS = {field.name for field in dataclasses.fields(MAGRPOConfig)}
OTHERS = {
    "--help", "--print_config", "--trainer.default_root_dir", "WANDB_MODE=online", "_step", "agents/", "env_step",
    "config.yaml", "error:", "last", "memory", "metrics.csv", "model.agents", "model.external_transition",
    "model.lora", "model.share_policy", "model.trainable", "monitor", "scale", "stop_branch", "wandb sync",
    "RewardProcessors", "model.formatters",
    "TeamCheckpoint", "model.config", "python -m mareinforce.plot",
    "python -m mareinforce.evaluate --run runs/run_0001 --replace agent_1=tiny-story",
}  # fmt: skip
"""What else stands in backquotes: keys of the command line, names and words."""


NEEDED = {
    "num_turns": ["--model.external_transition=mareinforce.tasks.story.length_feedback"],
    "reward_worker_kind": ["--model.config.reward_workers=2"],
}
"""What a field cannot do without."""


def unknown_spans(text: str) -> list[str]:
    """What stands in backquotes and is neither a column, a field, a setting that is taken, nor listed."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [span for span in dict.fromkeys(re.findall(r"`([^`]+)`", prose)) if not _is_known(" ".join(span.split()))]


def _is_known(span: str) -> bool:
    pattern = re.sub(r"agent_\d+/", "agent_i/", re.sub(r"turn_\d+/", "turn_k/", span))
    if span in FIELDS or pattern in COLUMNS or span in OTHERS or span in callbacks.__all__:
        return True
    key, colon, value = span.partition(": ")
    setting = f"--{key if '.' in key else f'model.config.{key}'}={value}"
    return bool(colon) and refusal("fit", [f"--config={QUICKSTART}", setting, *NEEDED.get(key, ())]) is None


class TestNames:
    def test_every_column_field_and_setting_that_is_named_exists(self):
        assert unknown_spans(PAGE) == []

    def test_a_name_that_does_not_exist_is_noticed(self):
        text = "`agent_0/grad_nrm` `num_generationz` `num_generations: many` `num_turns: 2` `agent_3/loss` `TreeVue`"
        assert unknown_spans(text) == ["agent_0/grad_nrm", "num_generationz", "num_generations: many", "TreeVue"]
