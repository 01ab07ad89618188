"""`python -m tests.campaigns.soak`: many steps in one process, with everything on that writes files.

Two turns, evaluation, checkpoints with the best kept, every completion logged. After a warm-up the resident memory must
not grow, the number of live tensors must stay what it is, and no file but the logs may grow.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from mareinforce.callbacks import RolloutLog

from mareinforce import MAGRPOConfig, MAGRPOTrainer
from mareinforce.checkpoint import TeamCheckpoint
from tests.campaigns.noisy import again, reward
from tests.models import llama_model, word_tokenizer

MOST_GROWTH = 15.0  # MiB of resident memory after the warm-up
LOGS = ("metrics.csv", "rollouts.jsonl")
REWRITTEN = ("checkpoint", "scores.json")
MOST_FILES = 7  # the two logs, the scores, two last checkpoints and the two best
MAY_VARY = 1024  # bytes of a file that is written anew: its numbers have more digits


def resident() -> float:
    """Resident memory of this process, MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("there is no VmRSS in /proc/self/status: the soak needs Linux")


def live_tensors() -> int:
    """Tensors that are alive, whoever holds them."""
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


class Meter(L.Callback):
    """Measures between steps, when nothing of a step should be left."""

    def __init__(self, every: int, report: Callable[[str], None], leak: bool = False) -> None:
        self.every, self.report = every, report
        self.rows: list[dict[str, Any]] = []
        self.leaked: list[torch.Tensor] | None = [] if leak else None

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.leaked is not None:
            self.leaked.append(torch.zeros(2**14))
        if pl_module.batches and pl_module.batches % self.every == 0:
            self.measure(trainer, pl_module)

    def measure(self, trainer: L.Trainer, pl_module: Any) -> None:
        assert trainer.log_dir is not None
        sizes = {name: 0 for name in (*LOGS, *REWRITTEN)}
        found = [path for path in Path(trainer.log_dir).rglob("*") if path.is_file()]
        for path in found:  # of checkpoints, whose names change, the largest
            name = "checkpoint" if path.suffix == ".ckpt" else path.name
            sizes[name] = max(sizes.get(name, 0), path.stat().st_size)
        row = {"step": pl_module.batches, "resident_mib": round(resident(), 1), "tensors": live_tensors()}
        row |= {"files": len(found), **sizes}
        self.rows.append(row)
        if len(self.rows) == 1:
            self.report("  ".join(f"{name:>14}" for name in row))
        self.report("  ".join(f"{value:>14}" for value in row.values()))


def wrong(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What grew between the first row and the last, of what must not."""
    first, last = rows[0], rows[-1]
    names = [name for name in last if name not in ("step", "resident_mib", "tensors", "files", *LOGS)]
    grown = [name for name in names if last[name] - first.get(name, 0) > MAY_VARY]
    grown += ["number of files"] if last["files"] > MOST_FILES else []
    grown += ["resident memory"] if growth(rows) >= MOST_GROWTH else []
    return grown + (["live tensors"] if len({row["tensors"] for row in rows}) > 1 else [])


def growth(rows: Sequence[Mapping[str, Any]]) -> float:
    """MiB by which resident memory has been above what it was at the first row."""
    return float(max(row["resident_mib"] for row in rows) - rows[0]["resident_mib"])


def soak(
    folder: Path, steps: int, warm_up: int, seed: int, report: Callable[[str], None] = print, leak: bool = False
) -> dict[str, Any]:
    """Train so many steps; return the figures, and what is wrong with them."""
    words = word_tokenizer()
    meter = Meter(max(1, warm_up // 5), report, leak)
    trainer = MAGRPOTrainer(
        agents=[llama_model(len(words), seed=agent) for agent in range(2)],
        tokenizer=words,
        reward_func=reward,
        external_transition=again,
        train_dataset=[{"prompt": f"{chr(97 + row % 26)} {chr(97 + row % 7)}"} for row in range(steps // 4)],
        eval_dataset=["a b", "c d"],
        args=MAGRPOConfig(
            num_turns=2,
            num_train_epochs=5,  # the last of which is ended by max_updates
            max_updates=steps * 2 + 2,
            num_generations=2,
            max_new_tokens=4,
            agent_learning_rate=1e-4,
            rollout_buffer_size=3,
            logging_steps=1,
            eval_interval=50,
            eval_num_samples=2,
            early_termination_threshold=None,
            advantage_normalization=False,
            seed=seed,
        ),
        callbacks=[
            TeamCheckpoint(every_n_batches=meter.every, monitor="turn_1/reward_mean", keep_best=2, keep_last=2),
            RolloutLog(),
            meter,
        ],
        default_root_dir=folder,
        accelerator="cpu",
    )
    trainer.train()
    rows = [row for row in meter.rows if row["step"] >= warm_up]
    return {
        "campaign": "soak", "seed": seed, "steps": trainer.module.batches, "from_step": rows[0]["step"],
        "growth_mib": round(growth(rows), 1), "tensors": sorted({row["tensors"] for row in rows}),
        "log_bytes": {name: rows[-1][name] for name in LOGS}, "wrong": wrong(rows),
    }  # fmt: skip


def main() -> int:
    """Run the soak and say how it went; 1 if anything grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--warm-up", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = soak(Path(folder), options.steps, options.warm_up, options.seed)
    print(json.dumps({**found, "seconds": round(time.monotonic() - began)}))
    return int(bool(found["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
