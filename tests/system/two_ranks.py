"""Trainings that two processes do together, one after the other: `python -m tests.system.two_ranks FOLDER`.

Each process writes what it saw to `FOLDER/rank_0.pt` and `rank_1.pt`; what both wrote is looked at by
`test_several_processes.py`, which trains the same in one process too.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from mareinforce.callbacks import CompletionTable, EarlyTerminationLogger, EvaluationCallback, RolloutLog, TreeView

from mareinforce.checkpoint import TeamCheckpoint
from mareinforce.errors import MareinforceError
from mareinforce.eval_protocol import EvalProtocol, ProtocolEvaluation
from mareinforce.ranks import Ranks
from tests.system.runs import llama_team, rank, trainer

ROWS = ["go", "on", "up", "by", "in", "at", "a"]
"""An odd number, so that in the last step rank 1 has no row."""
FIELDS = {
    "num_train_epochs": 2,
    "num_generations": 3,
    "max_new_tokens": 3,
    "agent_learning_rate": 0.01,
    "adam_eps": 1e-3,  # with a small one, rounding of the smallest gradients would decide
    "max_grad_norm": 0.5,
    "logging_steps": 4,
}
TREES = {"num_turns": 2, "early_termination_threshold": 0.9, "early_termination_on": "joint_action"}
SAME: dict[str, dict[str, Any]] = {
    "buffers": {},
    "trees": {**TREES, "rollout_buffer_size": "rollout"},
    "tree weights": {**TREES, "rollout_buffer_size": "rollout", "turn_weighting": "tree"},
    "some idle": {"rollout_buffer_size": "rollout", "max_updates": 3},
}
"""Trainings in two processes with a row each that must be those in one process with two rows a step."""


def by_text(first: list[str], second: list[str]) -> list[float]:
    """Depends on what was said alone; for some words all answers earn the same."""
    return [0.5 * len(set(b.split())) + (len(a) % 3) - 1.0 for a, b in zip(first, second, strict=True)]


def no_signal_on_rank_1(*texts: list[str], batch_items: list[dict[str, Any]]) -> list[float]:
    """Rank 1 gets the 2nd, 4th and 6th row."""
    return [0.0] * len(texts[0]) if batch_items[0]["prompt"] in ("on", "by", "at") else rank(*texts)


def noisy(*texts: list[str]) -> list[float]:
    """Draws from a global stream, of which every rank has its own state."""
    return [len(text) + random.random() * (index + 1) for index, text in enumerate(texts[0])]


class EveryStep(L.Callback):
    """Keeps, after each step, the weights, the rows, and how many updates there were."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.rows: list[list[int]] = []
        self.samples: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.weights.append(torch.cat([weight.detach().flatten() for weight in pl_module.team.parameters()]))
        self.rows.append([index for index, _ in batch])
        self.samples.append(len(outputs["samples"]))


def speaks_up(row: dict[str, Any]) -> str | None:
    """The second agent's prompt: nothing for half of the rows."""
    return None if row["prompt"] in ("on", "by", "at") else str(row["prompt"])


def run(folder: Path, name: str, reward: Any = by_text, *, resume: Any = None, **options: Any) -> dict[str, Any]:
    """Train, in as many processes as there are, and say how it went."""
    random.seed(5)
    seen = EveryStep()
    two_turns = options.get("num_turns") == 2
    made = trainer(
        folder / name,
        reward,
        agents=options.pop("agents", None) or llama_team(),
        rows=ROWS,
        external_transition=(lambda prompt: [prompt, "go"]) if two_turns else None,
        formatters=[lambda row: row["prompt"], speaks_up] if name.endswith("some idle") else None,
        eval_dataset=ROWS[:3],
        shuffle=False,
        callbacks=[
            seen,
            RolloutLog(),
            EarlyTerminationLogger(),
            *options.pop("callbacks", [TeamCheckpoint(every_n_batches=1, keep_last=99)]),
        ],
        **{**FIELDS, **options},
    )
    told: dict[str, Any] = {"error": None}
    try:
        made.train(resume_from_checkpoint=resume)
    except (MareinforceError, SystemExit) as error:
        told["error"] = f"{type(error).__name__}: {error}"
    module = made.module
    return {
        **told,
        "steps": seen.weights,
        "rows": seen.rows,
        "samples": seen.samples,
        "folder": str(made.run_folder),
        "env_step": module.env_step,
        "updates": module.updates,
    }


def in_two(folder: Path, local: int) -> dict[str, Any]:
    """Everything that two processes do."""
    two = {"devices": 2, "strategy": "ddp"}
    found: dict[str, Any] = {name: run(folder, name, **fields, **two) for name, fields in SAME.items()}
    found["no signal"] = run(folder, "no signal", no_signal_on_rank_1, logging_steps=1, **two)
    found["unbroken"] = run(folder, "unbroken", noisy, rollout_buffer_size=3, **two)
    checkpoint = Path(found["unbroken"]["folder"]) / "checkpoints" / "batch=5-updates=2.ckpt"
    found["resumed"] = run(folder, "unbroken", noisy, resume=checkpoint, rollout_buffer_size=3, **two)
    looking = [EvaluationCallback(save_best=True), TreeView(1), CompletionTable(1, console=False)]
    found["evaluated"] = run(
        folder, "evaluated", callbacks=[ProtocolEvaluation(EvalProtocol(at_start=True)), *looking], eval_interval=2,
        **two,
    )  # fmt: skip

    def fails(*texts: list[str], batch_items: list[dict[str, Any]]) -> list[float]:
        if local == 1 and batch_items[0]["prompt"] == "by":
            raise ValueError("the judge is out")
        return rank(*texts)

    found["fails"] = run(folder, "fails", fails, **two)

    def stops(*texts: list[str], batch_items: list[dict[str, Any]]) -> list[float]:
        if local == 1 and batch_items[0]["prompt"] == "by":
            os.kill(os.getpid(), signal.SIGTERM)
        return rank(*texts)

    found["stops"] = run(folder, "stops", stops, **two)
    others = llama_team()
    with torch.no_grad():
        others[0][0].get_input_embeddings().weight[0, 0] += local
    found["other weights"] = run(folder, "other weights", agents=others, **two)
    Ranks.add_up_gradients = lambda self, weights: None  # type: ignore[method-assign]
    found["not added up"] = run(folder, "not added up", **two)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    local = int(os.environ["LOCAL_RANK"])
    torch.save(in_two(Path(sys.argv[1]), local), Path(sys.argv[1]) / f"rank_{local}.pt")
