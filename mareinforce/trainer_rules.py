"""Which arguments of Lightning's Trainer a run refuses, why, and what to set instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mareinforce.errors import ConfigError

HALVES = ("16-true", "bf16-true", "transformer-engine", "transformer-engine-float16")
_LOSS_SCALED = (16, "16", "16-mixed")
_ONE_DEVICE = (1, "1", "auto", "0", "0,")
_STRATEGIES = ("auto", "single_device")

_Rule = tuple[Callable[[Any], bool], str]


def _only(*accepted: Any) -> Callable[[Any], bool]:
    return lambda value: value in accepted


def _one_device(value: Any) -> bool:
    return value in _ONE_DEVICE or (isinstance(value, list) and len(value) == 1)


_EVALUATION = "evaluation follows model.config.eval_interval and model.config.eval_num_samples; leave it out"
_PROCESSES = "agents train in one process on one device as yet"

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
    "num_nodes": (_only(1), f"{_PROCESSES}; set it to 1"),
    "devices": (_one_device, f"{_PROCESSES}; set it to 1"),
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
    _check_precision(arguments.get("precision"))
    _check_strategy(arguments.get("strategy", "auto"))


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
        reason = "it cannot shard models that have an optimizer each and are stepped by hand"
    else:
        reason = _PROCESSES
    raise ConfigError(f"trainer.strategy={name!r}: {reason}; leave it at auto.")
