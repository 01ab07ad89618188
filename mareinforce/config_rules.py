"""What every field of the configuration may be. One rule a line; each refusal says field, value, rule and way out."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from mareinforce.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from mareinforce.config import MAGRPOConfig

LARGEST_GRADIENT = 1.8446743e19
"""The root of the largest float32: no gradient above it is learned from."""

Rule = tuple[str, Callable[[Any], bool]]


def _at_least(low: int) -> Rule:
    return f"at least {low}", lambda value: value >= low


_POSITIVE: Rule = ("a finite number above 0", lambda value: math.isfinite(value) and value > 0)
_NOT_NEGATIVE: Rule = ("a finite number of at least 0", lambda value: math.isfinite(value) and value >= 0)
_SHARE: Rule = ("between 0 and 1", lambda value: 0 <= value <= 1)

RULES: dict[str, Rule] = {
    "num_agents": _at_least(1),
    "num_turns": _at_least(1),
    "num_train_epochs": _at_least(1),
    "max_updates": _at_least(1),
    "warmup_updates": _at_least(0),
    "weight_decay": _NOT_NEGATIVE,
    "adam_betas": ("two numbers from 0 to below 1", lambda pair: all(0 <= beta < 1 for beta in pair)),
    "adam_eps": _POSITIVE,
    "max_grad_norm": _POSITIVE,
    "logging_steps": _at_least(1),
    "num_generations": ("at least 2: a group of one completion has no baseline", lambda value: value >= 2),
    "max_new_tokens": _at_least(1),
    "min_new_tokens": _at_least(0),
    "temperature": ("above 0 (greedy answers cannot be learned from; eval_temperature may be 0)", _POSITIVE[1]),
    "eval_temperature": _NOT_NEGATIVE,
    "top_p": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "top_k": ("at least 1, or null for no limit", lambda value: value >= 1),
    "discount": _SHARE,
    "early_termination_threshold": ("a finite number, or null to never stop early", math.isfinite),
    "importance_cap": ("a finite number of at least 1", lambda value: math.isfinite(value) and value >= 1),
    "prompts_per_step": _at_least(1),
    "rollout_buffer_size": ('at least 1, or "rollout"', lambda value: value == "rollout" or value >= 1),
    "train_batch_size": _at_least(1),
    "update_token_budget": _at_least(1),
    "rollout_token_budget": _at_least(1),
    "eval_interval": _at_least(0),
    "eval_num_samples": _at_least(0),
    "eval_batch_size": _at_least(1),
    "reference_kl_coef": _NOT_NEGATIVE,
    "reward_timeout": _POSITIVE,
    "reward_workers": _at_least(0),
    "seed": _at_least(0),
    "stop": ("texts that are not empty", lambda value: bool(value) and all(value)),
}


def check(config: MAGRPOConfig) -> None:
    """Coerce numbers written as text, then check every field and their combinations. Raises ConfigError."""
    hints = get_type_hints(type(config))
    for name, hint in hints.items():
        value = coerce(name, getattr(config, name), hint)
        setattr(config, name, value)
        if value is None:
            continue
        if name in RULES and not RULES[name][1](value):
            raise ConfigError(f"{name}={value!r}: must be {RULES[name][0]}.")
    _check_together(config)
    _check_devices(config)


def check_for_ranks(config: MAGRPOConfig, ranks: int) -> None:
    """Raise ConfigError for what cannot be meant when several processes train the team."""
    if ranks == 1:
        return
    if config.parallel_training != "none":
        raise ConfigError(
            f"parallel_training={config.parallel_training!r}: {ranks} processes work at the same time already, each "
            f"with all agents; set parallel_training: none, or train in one process."
        )
    for field in ("agent_devices", "reference_devices"):
        devices = getattr(config, field)
        if any(device != "cpu" for device in ([devices] if isinstance(devices, str) else devices or [])):
            raise ConfigError(
                f"{field}={devices!r}: each of {ranks} processes has a device of its own, and would put its agents on "
                f"these too; leave the field out, or train in one process."
            )


def _check_together(config: MAGRPOConfig) -> None:
    if config.value_clip_range is not None:
        raise ConfigError(
            f"value_clip_range={config.value_clip_range!r}: there is no critic, so no value to clip; remove the field."
        )
    rate = config.agent_learning_rate
    rates = rate if isinstance(rate, list) else [rate]
    if not all(math.isfinite(number) and number > 0 for number in rates):
        raise ConfigError(f"agent_learning_rate={rate!r}: must be {_POSITIVE[0]}.")
    if isinstance(rate, list) and len(rate) != config.num_agents:
        raise ConfigError(
            f"agent_learning_rate has {len(rate)} numbers for num_agents={config.num_agents}: give one number, or one "
            f"an agent."
        )
    least = max(rates) / ((1 - config.adam_betas[0]) * LARGEST_GRADIENT)
    if config.adam_eps < least:
        raise ConfigError(
            f"adam_eps={config.adam_eps!r}: with agent_learning_rate={rate!r} and adam_betas={config.adam_betas} one "
            f"update could leave the range of float32; must be at least {least:.3g}."
        )
    if max(rates) * config.weight_decay >= 1:
        raise ConfigError(
            f"weight_decay={config.weight_decay!r}: with agent_learning_rate={rate!r} a weight would overshoot 0 at "
            f"every update; must be below {1 / max(rates):.3g}."
        )
    if config.min_new_tokens > config.max_new_tokens:
        raise ConfigError(
            f"min_new_tokens={config.min_new_tokens}: must be at most max_new_tokens={config.max_new_tokens}."
        )
    buffer, batch = config.rollout_buffer_size, config.train_batch_size
    if batch is not None and isinstance(buffer, int) and batch > buffer:
        raise ConfigError(
            f"train_batch_size={batch}: must be at most rollout_buffer_size={buffer}; raise the buffer, or leave "
            f"train_batch_size out to use the whole buffer."
        )
    ours = {"conversation", "messages", "tokenize", "add_generation_prompt", "continue_final_message"}
    if taken := ours & (config.chat_template_kwargs or {}).keys():
        raise ConfigError(f"chat_template_kwargs.{min(taken)}: is set for every prompt already; leave it out.")
    for field in ("system_prompt", "assistant_prefill"):
        texts = getattr(config, field)
        if isinstance(texts, list) and len(texts) != config.num_agents:
            raise ConfigError(
                f"{field} lists {len(texts)} texts for num_agents={config.num_agents}: give one for all, or one an "
                f"agent (null: none)."
            )
    if config.reward_worker_kind == "process" and config.reward_workers == 0:
        raise ConfigError("reward_worker_kind='process' with reward_workers=0: set reward_workers to their number.")
    if config.turn_weighting == "tree" and batch is not None:
        raise ConfigError(
            f"train_batch_size={batch}: turn_weighting=tree makes one optimizer step of the whole buffer; leave "
            f"train_batch_size out."
        )


def _check_devices(config: MAGRPOConfig) -> None:
    if config.parallel_training == "mp" and config.agent_devices is None:
        raise ConfigError(
            "parallel_training='mp' needs agent_devices: one device for all, or one an agent, such as [cuda:0, cuda:1]."
        )
    for field in ("agent_devices", "reference_devices"):
        if getattr(config, field) is not None:
            from mareinforce.devices import agent_places  # brings torch, which a configuration alone does not need

            agent_places(getattr(config, field), config.num_agents, field)
    if config.reference_devices is not None and not config.references:
        raise ConfigError(
            f"reference_devices={config.reference_devices!r}: there is no reference; set reference_kl_enabled: true "
            f"(and a reference_kl_coef above 0), or leave it out."
        )


def coerce(name: str, value: Any, hint: Any) -> Any:
    """Return `value` as the first alternative of the type hint that it fits. Raises ConfigError."""
    alternatives = get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for alternative in alternatives:
        fits, coerced = _fit(name, value, alternative)
        if fits:
            return coerced
    wanted = " or ".join(_say(alternative) for alternative in alternatives)
    words = [str(word) for alternative in alternatives for word in _literals(alternative)]
    hint_text = did_you_mean(value, words) if isinstance(value, str) else ""
    raise ConfigError(f"{name}={value!r}: must be {wanted}.{hint_text}")


def _literals(alternative: Any) -> tuple[Any, ...]:
    return get_args(alternative) if get_origin(alternative) is Literal else ()


def _fit(name: str, value: Any, alternative: Any) -> tuple[bool, Any]:
    """Does the value fit one alternative, and as what? A number written as text counts as that number."""
    if alternative is type(None):
        return value is None, None
    if alternative in (bool, str):
        return isinstance(value, alternative), value
    if alternative in (int, float):
        number = _number(value)
        if number is None or (alternative is int and not float(number).is_integer()):
            return False, None
        return True, alternative(number)
    if get_origin(alternative) is Literal:
        return isinstance(value, str) and value in get_args(alternative), value
    if get_origin(alternative) is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value), value
    if alternative is Any:
        return True, value
    if not isinstance(value, list | tuple):
        return False, None
    inner = get_args(alternative)
    if get_origin(alternative) is tuple:
        return (len(value) == len(inner)), tuple(coerce(name, item, inner[0]) for item in value)
    return True, [coerce(name, item, inner[0]) for item in value]


def _number(value: Any) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return value


def _say(alternative: Any) -> str:
    if alternative is type(None):
        return "null"
    if alternative is int:
        return "a whole number"
    if alternative is float:
        return "a number"
    if alternative is bool:
        return "true or false"
    if alternative is str:
        return "text"
    if get_origin(alternative) is Literal:
        return " | ".join(str(word) for word in get_args(alternative))
    if get_origin(alternative) is dict:
        return "key: value pairs"
    if get_origin(alternative) is tuple:
        return f"{len(get_args(alternative))} numbers"
    inner = get_args(alternative)[0]
    each = get_args(inner) if get_origin(inner) in (typing.Union, types.UnionType) else (inner,)
    return f"a list ({' or '.join(_say(one) for one in each)} each)"
