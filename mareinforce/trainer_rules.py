"""Which arguments of Lightning's Trainer a run refuses, why, and what to set instead."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mareinforce.errors import ConfigError

HALVES = ("16-true", "bf16-true", "transformer-engine", "transformer-engine-float16")
_LOSS_SCALED = (16, "16", "16-mixed")
_ONE_DEVICE = (1, "1", "auto", "0", "0,")
_STRATEGIES = ("auto", "single_device", "ddp")

_Rule = tuple[Callable[[Any], bool], str]


def _only(*accepted: Any) -> Callable[[Any], bool]:
    return lambda value: value in accepted


_SECRET = re.compile(
    r"key|token|(.*_)?(api_?key|(access|secret|auth)_?key|(access|auth|api|hf|hub)_?token|password|passwd|secret)", re.I
)

_EVALUATION = "evaluation follows model.config.eval_interval and model.config.eval_num_samples; leave it out"

RULES: dict[str, _Rule] = {
    "max_steps": (_only(-1, None), "Lightning's steps add up every agent's; set model.config.max_updates instead"),
    "min_steps": (_only(None), "Lightning's steps add up every agent's; leave it out"),
    "max_epochs": (
        lambda value: value is None or value >= 0,
        "a run has an end, which its learning rates need; give a number (model.config.max_updates can end it earlier)",
    ),
    "gradient_clip_val": (_only(None), "each agent is clipped by itself; set model.config.max_grad_norm instead"),
    "gradient_clip_algorithm": (_only(None), "each agent is clipped by itself; set model.config.max_grad_norm instead"),
    "accumulate_grad_batches": (
        _only(1),
        "node samples are gathered before an update; set model.config.train_batch_size and "
        "model.config.rollout_buffer_size instead",
    ),
    "use_distributed_sampler": (_only(False), "rows are shared out by the data module; leave it out"),
    "barebones": (_only(False), "a run always writes metrics.csv; leave it out"),
    "val_check_interval": (_only(None), _EVALUATION),
    "check_val_every_n_epoch": (_only(1), _EVALUATION),
    "num_sanity_val_steps": (_only(None, 0), _EVALUATION),
}
TRAINING_ONLY: dict[str, _Rule] = {"limit_val_batches": (_only(None, 0), _EVALUATION)}


def check_trainer(arguments: Mapping[str, Any], *, training: bool) -> None:
    """Raise ConfigError for the first `trainer.*` argument that would do something else than its user hopes."""
    for name, (accepts, reason) in (RULES | (TRAINING_ONLY if training else {})).items():
        if name in arguments and not accepts(arguments[name]):
            raise ConfigError(f"trainer.{name}={arguments[name]!r}: {reason}.")
    refuse_secrets(arguments, "trainer")
    _check_precision(arguments.get("precision"))
    _check_strategy(arguments.get("strategy", "auto"))
    if training:
        _check_processes(arguments)


def several_processes(arguments: Mapping[str, Any]) -> bool:
    """Do the `trainer.*` arguments ask for several processes? `strategy: ddp` does, also for one device."""
    devices, strategy = arguments.get("devices", 1), arguments.get("strategy", "auto")
    one_device = devices in _ONE_DEVICE or (isinstance(devices, list) and len(devices) == 1)
    return strategy == "ddp" or not one_device or arguments.get("num_nodes", 1) > 1


def _check_processes(arguments: Mapping[str, Any]) -> None:
    strategy = arguments.get("strategy", "auto")
    if several_processes(arguments) and strategy == "single_device":
        raise ConfigError(
            f"trainer.strategy={strategy!r}: is one process on one device; with several devices or num_nodes set "
            f"trainer.strategy: ddp."
        )
    if several_processes(arguments) and hasattr(sys, "ps1"):
        raise ConfigError(
            f"trainer.strategy={strategy!r}: every process runs the script or command again, and there is none in an "
            f"interactive session; write a script, or train in one process (devices: 1)."
        )
    started = int(os.environ.get("WORLD_SIZE", 1))
    if not several_processes(arguments) and started > 1:
        raise ConfigError(
            f"trainer.strategy={strategy!r}: {started} processes were started, and each would train a team of its own; "
            f"set trainer.strategy: ddp, trainer.devices to those of one machine and trainer.num_nodes to the machines."
        )


def refuse_secrets(tree: Any, where: str) -> None:
    """Raise ConfigError if a text stands under a name that keys and passwords have: it would end in a run's files."""
    entries = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    for name, value in entries:
        place = f"{where}.{name}" if isinstance(name, str) else f"{where}[{name}]"
        if isinstance(name, str) and _SECRET.fullmatch(name) and isinstance(value, str) and value:
            raise ConfigError(
                f"{place}: a secret given here would be written into the files of the run; leave it out, and set it in "
                "the environment (WANDB_API_KEY, HF_TOKEN)."
            )
        refuse_secrets(value, place)


def _check_precision(precision: Any) -> None:
    if precision in HALVES:
        raise ConfigError(
            f"trainer.precision={precision!r}: at these learning rates a 16-bit weight hardly ever changes, so "
            f"trained weights stay float32; set trainer.precision: bf16-mixed to compute in bfloat16."
        )
    if precision in _LOSS_SCALED:
        raise ConfigError(
            f"trainer.precision={precision!r}: float16 needs a scaled loss, which one optimizer an agent does not do; "
            f"set trainer.precision: bf16-mixed or 32-true."
        )


def _check_strategy(strategy: Any) -> None:
    if strategy in _STRATEGIES:
        return
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    if any(word in name.lower() for word in ("fsdp", "deepspeed", "modelparallel")):
        reason = (
            "it cannot shard models that have an optimizer each and are stepped by hand. Set ddp, with agents that "
            "share one base (model.lora), or train in one process with an agent a device (model.config.agent_devices)"
        )
    elif any(word in name.lower() for word in ("spawn", "fork", "notebook")):
        reason = "processes run the command again instead, so that each builds its own callables; set ddp"
    elif "ddp" in name.lower():
        reason = "backward synchronises nothing here, so its options have no meaning; set ddp"
    else:
        reason = "is not known here; leave it at auto, or set ddp"
    raise ConfigError(f"trainer.strategy={name!r}: {reason}.")
