"""The checks of a team's arguments that need no model: they run before anything loads."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from mareinforce.errors import AgentError, ConfigError, did_you_mean

EMBEDDED_MODELS = ("tiny-story", "smollm2-135m-instruct")
"""Names of models that need no hub."""

MODEL_CONFIG_KEYS = ("dtype", "attn_implementation")
LATER_MODEL_CONFIG_KEYS = (
    "lora",
    "special_tokens",
    "gguf_file",
    "revision",
    "gradient_checkpointing",
    "trust_remote_code",
)
DEFAULT_NUM_AGENTS = 2

FLOAT32_REASON = (
    "trainable weights must be float32: at these learning rates a 16-bit weight hardly ever changes, because an update "
    "is smaller than the distance to the next number it can hold"
)


def check_agents(
    agent_model: Any = None,
    agents: Any = None,
    num_agents: int | None = None,
    tokenizer: Any = None,
    model_config: Mapping[str, Any] | None = None,
) -> int:
    """Check what needs no model and return the number of agents.

    Raises:
        ConfigError: for an argument, or a combination of them, that cannot be meant.
        AgentError: for a model that cannot be used: one object for two agents, no tokenizer, a path that is not there.
    """
    if agent_model is not None and agents is not None:
        raise ConfigError("agent_model and agents are both given: keep agent_model for equal agents, or agents")
    if agent_model is None and agents is None:
        raise ConfigError("no agents: set agent_model (one name for equal agents) or agents (a list, one entry each)")
    if agent_model is not None and not isinstance(agent_model, str):
        raise ConfigError(
            f"agent_model={type(agent_model).__name__}: must be a name or a folder. Give loaded models, one an agent, "
            "in the list agents"
        )
    if agents is not None and (isinstance(agents, str) or not isinstance(agents, Sequence) or not agents):
        given = repr(agents) if isinstance(agents, str | list | tuple) else type(agents).__name__
        raise ConfigError(f"agents={given}: must be a list with one name, folder or loaded model for each agent")
    if num_agents is not None and (isinstance(num_agents, bool) or not isinstance(num_agents, int) or num_agents < 1):
        raise ConfigError(f"num_agents={num_agents!r}: must be a whole number of at least 1")
    if agents is not None and num_agents not in (None, len(agents)):
        raise ConfigError(
            f"num_agents={num_agents} but agents lists {len(agents)}: leave num_agents out, or make it match"
        )
    entries = list(agents) if agents is not None else [agent_model] * (num_agents or DEFAULT_NUM_AGENTS)
    tokenizers = tokenizer_entries(tokenizer, len(entries))
    for index, entry in enumerate(entries):
        if isinstance(entry, str):
            check_name(entry, index)
        elif not (hasattr(entry, "generate") and hasattr(entry, "parameters")):
            raise ConfigError(
                f"agents[{index}] is a {type(entry).__name__}: must be a name, a folder or a loaded causal model"
            )
        elif tokenizers[index] is None:
            raise AgentError(
                f"agent {index} is a loaded model without a tokenizer: pass tokenizer (one, or one an agent)"
            )
    _check_distinct(entries)
    check_model_config(model_config)
    if any(not isinstance(entry, str) for entry in entries) and (model_config or {}).get("attn_implementation"):
        raise ConfigError("model_config.attn_implementation: a loaded model keeps its own, so set it when loading it")
    return len(entries)


def tokenizer_entries(tokenizer: Any, num_agents: int) -> list[Any]:
    """One tokenizer (or None) an agent, from None, one for all, or a list."""
    if tokenizer is None or isinstance(tokenizer, str) or callable(tokenizer):  # a loaded tokenizer is callable
        return [tokenizer] * num_agents
    if not isinstance(tokenizer, Sequence):
        raise ConfigError(
            f"tokenizer={type(tokenizer).__name__}: must be a tokenizer, its name, or a list of one an agent"
        )
    if len(tokenizer) != num_agents:
        raise ConfigError(f"tokenizer lists {len(tokenizer)} for {num_agents} agents: give one, or one an agent")
    for index, entry in enumerate(tokenizer):
        if entry is not None and not isinstance(entry, str) and not callable(entry):
            raise ConfigError(f"tokenizer[{index}] is a {type(entry).__name__}: must be a tokenizer or its name")
    return list(tokenizer)


def check_model_config(model_config: Mapping[str, Any] | None) -> None:
    """Refuse unknown keys (with the near match), keys that do not work yet, and dtypes that cannot be trained."""
    if model_config is not None and not isinstance(model_config, Mapping):
        raise ConfigError(f"model_config={model_config!r}: must map names to values, such as {{dtype: float32}}")
    for key in model_config or {}:
        if key in LATER_MODEL_CONFIG_KEYS:
            raise ConfigError(f"model_config.{key}: not available yet; leave it out")
        if key not in MODEL_CONFIG_KEYS:
            known = (*MODEL_CONFIG_KEYS, *LATER_MODEL_CONFIG_KEYS)
            raise ConfigError(
                f"model_config.{key}: unknown, must be one of {', '.join(MODEL_CONFIG_KEYS)}."
                f"{did_you_mean(str(key), known)}"
            )
    check_dtype((model_config or {}).get("dtype", "float32"))


def check_dtype(dtype: Any) -> None:
    """Refuse every dtype but float32, with the reason."""
    if str(dtype) not in ("float32", "torch.float32"):
        raise ConfigError(f"model_config.dtype={dtype}: {FLOAT32_REASON}. Set it to float32 or leave it out")


def check_name(name: str, agent: int) -> None:
    """Refuse names that cannot be a hub id and are not there as a folder, and misspelt embedded names."""
    if name in EMBEDDED_MODELS or os.path.isdir(os.path.expanduser(name)):
        return
    if name.startswith((".", "~", os.sep)) or name.count("/") > 1 or not name.strip():
        raise AgentError(f"agent {agent}: the model folder {name!r} does not exist{_names_hint(name)}")
    # The hub is slow to say no, so a name without an owner that all but is an embedded one is taken for a slip.
    if "/" not in name and difflib.get_close_matches(name, EMBEDDED_MODELS, n=1, cutoff=0.8):
        raise AgentError(f"agent {agent}: there is no model {name!r}.{did_you_mean(name, EMBEDDED_MODELS)}")


def _names_hint(name: str) -> str:
    return f" (embedded models: {', '.join(EMBEDDED_MODELS)}).{did_you_mean(name, EMBEDDED_MODELS)}"


def _check_distinct(entries: Sequence[Any]) -> None:
    seen: dict[int, int] = {}
    for index, entry in enumerate(entries):
        if isinstance(entry, str):
            continue
        if id(entry) in seen:
            raise AgentError(
                f"agents {seen[id(entry)]} and {index} are the same model object, so two optimizers would step "
                "the same weights: pass a copy.deepcopy of it, or a name twice (each agent then gets its own copy)"
            )
        seen[id(entry)] = index
