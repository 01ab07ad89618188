"""How models are loaded: the keys of `model_config`, checked before anything loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mareinforce.errors import ConfigError, did_you_mean

LOADING_KEYS = ("dtype", "attn_implementation", "gguf_file", "revision", "trust_remote_code", "gradient_checkpointing")
"""Keys that take one value for all agents, or a list of one an agent."""

MODEL_CONFIG_KEYS = (*LOADING_KEYS, "special_tokens", "lora")

DTYPES = ("float32", "bfloat16", "float16")

FLOAT32_REASON = (
    "trainable weights must be float32: at these learning rates a 16-bit weight hardly ever changes, because an update "
    "is smaller than the distance to the next number it can hold"
)


def loading_options(model_config: Mapping[str, Any] | None, num_agents: int) -> list[dict[str, Any]]:
    """What each agent's model is loaded with: dtype, attn_implementation, gguf_file, revision, trust_remote_code,
    gradient_checkpointing.

    Raises:
        ConfigError: an unknown key (with the near match), a list of another length, or a value of another kind.
    """
    if model_config is not None and not isinstance(model_config, Mapping):
        raise ConfigError(f"model_config={model_config!r}: must map names to values, such as {{dtype: float32}}")
    for key in model_config or {}:
        if key not in MODEL_CONFIG_KEYS:
            raise ConfigError(
                f"model_config.{key}: unknown, must be one of {', '.join(MODEL_CONFIG_KEYS)}."
                f"{did_you_mean(str(key), MODEL_CONFIG_KEYS)}"
            )
    options: list[dict[str, Any]] = [{} for _ in range(num_agents)]
    for key in LOADING_KEYS:
        value = (model_config or {}).get(key)
        values = value if isinstance(value, list | tuple) else [value] * num_agents
        if len(values) != num_agents:
            raise ConfigError(
                f"model_config.{key} lists {len(values)} for {num_agents} agents: give one for all, or one an agent"
            )
        for agent, one in enumerate(values):
            options[agent][key] = _checked(key, one)
    return options


def special_tokens(model_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The tokens to add, as transformers' `add_special_tokens` takes them. Raises ConfigError for another shape."""
    given = (model_config or {}).get("special_tokens")
    if given is None:
        return {}
    if isinstance(given, Sequence) and not isinstance(given, str) and all(isinstance(one, str) for one in given):
        return {"additional_special_tokens": list(given)} if given else {}
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):
        return dict(given)
    raise ConfigError(
        f"model_config.special_tokens={given!r}: must be a list of tokens, or map roles to tokens, such as "
        "{pad_token: <pad>}"
    )


def _checked(key: str, value: Any) -> Any:
    if key == "dtype":
        name = str(value if value is not None else "float32").removeprefix("torch.")
        if name not in DTYPES:
            raise ConfigError(f"model_config.dtype={value}: must be one of {', '.join(DTYPES)}")
        return name
    if key in ("trust_remote_code", "gradient_checkpointing"):
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"model_config.{key}={value!r}: must be true or false")
        return bool(value)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"model_config.{key}={value!r}: must be text")
    return value
