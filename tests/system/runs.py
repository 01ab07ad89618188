"""Short trainings in process, and what a test looks at afterwards.

The usual agents are tables: after any word they answer one of two action words.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mareinforce import MAGRPOConfig, MAGRPOTrainer
from mareinforce.csv_log import read_metrics
from tests.learning.games import table_agents
from tests.models import llama_model, word_tokenizer

STATES = ("go", "on", "up", "by", "in", "at")
"""Words a prompt may end with; each is a state of its own."""
ACTIONS = ("x", "y")
FIELDS = {field.name for field in dataclasses.fields(MAGRPOConfig)}
SHORT = {
    "num_turns": 1,
    "num_train_epochs": 1,
    "num_generations": 2,
    "max_new_tokens": 1,
    "rollout_buffer_size": 1,
    "agent_learning_rate": 0.1,
    "early_termination_threshold": None,
    "advantage_normalization": False,
    "eval_interval": 0,
    "logging_steps": 1,
}
"""One turn, one word, an update a row, and a row of metrics a batch."""


def table_team(count: int = 2, actions: Sequence[str] = ACTIONS) -> tuple[list[Any], Any]:
    """Uniform policies over `actions`, and their tokenizer."""
    return table_agents([*STATES, *ACTIONS], actions, count)


def llama_team(count: int = 2) -> tuple[list[Any], Any]:
    """Llamas with weights of their own, and their tokenizer."""
    words = word_tokenizer()
    return [llama_model(len(words), seed=seed) for seed in range(count)], words


def rank(*texts: Sequence[str]) -> list[float]:
    """0, 1, 2 ... in joint-action order: there is a signal, whatever is said."""
    return [float(index) for index in range(len(texts[0]))]


class Recorder:
    """A reward that keeps what it is called with."""

    def __init__(self, score: Callable[..., Any] = rank) -> None:
        self.score = score
        self.texts: list[tuple[list[str], ...]] = []  # a call: [N][J]
        self.known: list[dict[str, Any]] = []  # a call: everything it may declare by name

    def __call__(self, *texts: list[str], **known: Any) -> Any:
        self.texts.append(texts)
        self.known.append(known)
        return self.score(*texts)

    @property
    def joint_actions(self) -> int:
        """Joint actions scored in all."""
        return sum(len(texts[0]) for texts in self.texts)

    @property
    def prompts(self) -> list[str]:
        """The row's prompt, call by call."""
        return [known["prompts"][0] for known in self.known]

    def shown(self, turn: int) -> list[list[Any]]:
        """What the agents were shown at a turn (0-based), call by call, [N]."""
        calls = [known for known in self.known if known["turn"] == turn]
        return [[history[turn] for history in known["prompt_history_per_agent"]] for known in calls]


def trainer(
    folder: Path,
    reward: Any = rank,
    agents: tuple[list[Any], Any] | None = None,
    rows: Any = ("go",),
    kind: type[MAGRPOTrainer] = MAGRPOTrainer,
    **options: Any,
) -> MAGRPOTrainer:
    """A trainer of short settings; options are fields of the config or arguments of the trainer."""
    models, tokenizer = agents or table_team()
    fields = {**SHORT, **{name: options.pop(name) for name in list(options) if name in FIELDS}}
    return kind(
        agents=models,
        tokenizer=tokenizer,
        reward_func=reward,
        train_dataset=list(rows) if isinstance(rows, tuple) else rows,
        args=kind.config_class(num_agents=len(models), **fields),
        default_root_dir=folder,
        accelerator="cpu",
        **options,
    )


def train(folder: Path, *args: Any, **options: Any) -> MAGRPOTrainer:
    """A trainer that has trained."""
    made = trainer(folder, *args, **options)
    made.train()
    return made


def metrics(made: MAGRPOTrainer) -> list[dict[str, float]]:
    """The rows of metrics.csv without what was not logged."""
    assert made.run_folder is not None
    rows = read_metrics(made.run_folder / "metrics.csv")
    return [{name: float(value) for name, value in row.items() if value != ""} for row in rows]


def column(made: MAGRPOTrainer, name: str) -> list[float]:
    """One column, where it was logged."""
    return [row[name] for row in metrics(made) if name in row]


def rollouts(made: MAGRPOTrainer, name: str = "rollouts.jsonl") -> list[dict[str, Any]]:
    """The lines of rollouts.jsonl; each must be strict JSON."""
    assert made.run_folder is not None
    whole = (made.run_folder / name).read_bytes().decode().removesuffix("\n")
    return [json.loads(line, parse_constant=_not_json) for line in whole.split("\n")]


def _not_json(text: str) -> None:
    raise AssertionError(f"{text} is no JSON")


def weights(models: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
    """A copy of every agent's weights."""
    return [{name: weight.detach().clone() for name, weight in model.state_dict().items()} for model in models]


def unchanged(before: Sequence[dict[str, torch.Tensor]], models: Sequence[Any]) -> list[bool]:
    """Of each agent: is every bit of every weight as it was?"""
    return [
        all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(before, weights(models), strict=True)
    ]
