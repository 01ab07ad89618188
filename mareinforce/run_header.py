"""What will be trained, in five lines, before it is."""

from __future__ import annotations

from collections import Counter
from typing import Any

import lightning as L

from mareinforce.agents.team import Team
from mareinforce.config import ALGORITHMS, MAGRPOConfig

_ADAM_AND_GRADIENT = 12
"""Bytes for each trained weight: a float32 gradient and AdamW's two float32 moments."""


class RunHeader(L.Callback):
    """Prints the header when training begins.

    Attributes:
        printed: whether it has been.
    """

    def __init__(self) -> None:
        self.printed = False

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        module: Any = pl_module
        data: Any = getattr(trainer, "datamodule", None)
        rows = None if data is None else sum(1 for _ in data.train_rows())
        folder = trainer.log_dir  # asked on every rank: it is rank 0's
        if trainer.is_global_zero:
            print("\n".join(header(module.loaded_team(), module.config, module.agent_names())))
            print(f"run folder  {folder}{_how_far(module)}{_how_long(rows, trainer)}", flush=True)
            self.printed = True


def header(team: Team, config: MAGRPOConfig, names: list[str]) -> list[str]:
    """Who learns how, how many weights, how many joint actions, and how much memory that takes at least."""
    trainable, total = count_weights(team)
    algorithm = next(name for name, mode in ALGORITHMS.items() if mode == config.advantage_mode)
    normalised = {True: ", normalised", "scale": ", scaled", False: ""}[config.advantage_normalization]
    who = ", ".join(f"{count} x {name}" for name, count in Counter(names).items())
    loaded = f"{len(team.networks)} model{'s' * (len(team.networks) > 1)} in memory"
    turns = f"{config.num_turns} turn{'s' * (config.num_turns > 1)}"
    held, learning = memory(team)
    return [
        f"agents      {who} ({loaded}); {algorithm}{normalised}",
        f"parameters  {trainable:,} trainable of {total:,}",
        f"rollouts    at most {most_joint_actions(config):,} joint actions a prompt ({turns}, {config.num_generations} "
        f"answers, {config.joint_mode})",
        f"memory      at least {in_bytes(held + learning)} (weights {in_bytes(held)}, gradients and AdamW "
        f"{in_bytes(learning)})",
    ]


def most_joint_actions(config: MAGRPOConfig) -> int:
    """Joint actions of a tree whose branches all play all turns: J + J^2 + ... + J^T."""
    per_node = config.num_generations ** (config.num_agents if config.joint_mode == "cross" else 1)
    return sum(per_node ** (turn + 1) for turn in range(config.num_turns))


def count_weights(team: Team) -> tuple[int, int]:
    """Weights that are trained, and weights of the agents in all; what agents share counts once."""
    trained = {id(weight): weight.numel() for policy in team.policies for weight in team.weights(policy).values()}
    return sum(trained.values()), sum(weight.numel() for weight in team.networks.parameters())


def memory(team: Team) -> tuple[int, int]:
    """Bytes of all weights and buffers (also of references), and of gradients and moments; over all devices."""
    held = {id(tensor): tensor.nbytes for tensor in (*team.parameters(), *team.buffers())}
    return sum(held.values()), _ADAM_AND_GRADIENT * count_weights(team)[0]


def in_bytes(count: float) -> str:
    """`12 MB`, `3.4 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _how_far(module: Any) -> str:
    return f" (goes on after batch {module.batches})" if module.batches else ""


def _how_long(rows: int | None, trainer: L.Trainer) -> str:
    if rows is None or trainer.max_epochs is None:
        return ""
    return f"; {rows} rows, {trainer.max_epochs} epoch{'s' * (trainer.max_epochs != 1)}"
