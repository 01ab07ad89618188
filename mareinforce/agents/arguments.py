"""The checks of a team's arguments that need no model: they run before anything loads."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mareinforce.agents.lora import LoRA, lora_settings
from mareinforce.agents.model_config import FLOAT32_REASON, loading_options, special_tokens
from mareinforce.errors import AgentError, ConfigError, did_you_mean

if TYPE_CHECKING:
    from mareinforce.config import MAGRPOConfig

EMBEDDED_MODELS = ("tiny-story", "smollm2-135m-instruct")
"""Names of models that need no hub."""

DEFAULT_NUM_AGENTS = 2


def check_agents(
    agent_model: Any = None,
    agents: Any = None,
    num_agents: int | None = None,
    tokenizer: Any = None,
    model_config: Mapping[str, Any] | None = None,
    *,
    lora: Any = None,
    share_policy: bool = False,
    trainable: Any = None,
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
    if not isinstance(share_policy, bool):
        raise ConfigError(f"share_policy={share_policy!r}: must be true or false")
    if share_policy:
        _check_one_policy(entries, lora if lora is not None else (model_config or {}).get("lora"))
    else:
        _check_distinct(entries)
    trains = trained_agents(trainable, len(entries), share_policy)
    options = loading_options(model_config, len(entries))
    settings = agent_adapters(lora, model_config, len(entries))
    _check_adapters(entries, settings, [one["dtype"] for one in options], trains)
    special_tokens(model_config)
    if any(not isinstance(entry, str) for entry in entries):
        for key in ("attn_implementation", "gguf_file", "revision"):
            if (model_config or {}).get(key):
                raise ConfigError(f"model_config.{key}: a loaded model keeps its own, so set it when loading it")
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


def trained_agents(trainable: Any, num_agents: int, share_policy: bool = False) -> list[bool]:
    """Which agents learn, from None (all), one for all, or a list. Raises ConfigError if none does."""
    flags = [True if trainable is None else trainable] * num_agents if not isinstance(trainable, list) else trainable
    if len(flags) != num_agents or not all(isinstance(flag, bool) for flag in flags):
        raise ConfigError(
            f"trainable={trainable!r}: must be true or false for each of {num_agents} agents, such as [true, false]"
        )
    if not any(flags):
        raise ConfigError(f"trainable={trainable!r}: at least one agent must learn")
    if share_policy and not all(flags):
        raise ConfigError(f"trainable={trainable!r} with share_policy: agents that share their weights all learn")
    return flags


def agent_adapters(lora: Any, model_config: Mapping[str, Any] | None, num_agents: int) -> list[LoRA | None]:
    """The LoRA setting of each agent, given as `lora` or as `model_config.lora`, not both. Raises ConfigError."""
    inside = (model_config or {}).get("lora")
    if lora is not None and inside is not None:
        raise ConfigError("lora and model_config.lora are both given: leave one out")
    return lora_settings(inside if lora is None else lora, num_agents)


def adapted_agents(
    agent_model: Any = None,
    agents: Any = None,
    num_agents: int | None = None,
    model_config: Mapping[str, Any] | None = None,
    lora: Any = None,
    trainable: Any = None,
    **_: Any,
) -> list[bool | None]:
    """For each agent: does it learn with an adapter (True), whole (False), or not at all (None)?"""
    count = len(agents) if agents is not None else num_agents or DEFAULT_NUM_AGENTS
    entries = agents if agents is not None else [agent_model] * count
    settings, trains = agent_adapters(lora, model_config, count), trained_agents(trainable, count)
    return [
        (setting is not None or has_adapter(entry)) if learns else None
        for entry, setting, learns in zip(entries, settings, trains, strict=True)
    ]


def check_team_config(config: MAGRPOConfig, *, share_policy: bool = False, **team: Any) -> None:
    """Refuse fields that the agents of this team (the arguments of `check_agents`) cannot have. Raises ConfigError."""
    if share_policy and len(set(config.learning_rates)) > 1:
        raise ConfigError(
            f"agent_learning_rate={config.agent_learning_rate}: agents that share their weights (share_policy) have "
            "one learning rate; give one number"
        )
    adapted = adapted_agents(**team)
    if config.reference == "base" and False in adapted:
        raise ConfigError(
            f"reference='base': agent {adapted.index(False)} is trained whole and has no base under it; set "
            "reference: start, which keeps it near where it starts"
        )
    if config.reference_devices is not None and False not in adapted:
        raise ConfigError(
            f"reference_devices={config.reference_devices!r}: the reference of an adapter is on its agent's own base "
            "and costs no second model; leave it out"
        )


def has_adapter(entry: Any) -> bool:
    """Is this the folder of an adapter, or a model that has one?"""
    if isinstance(entry, str):
        return os.path.isfile(os.path.join(os.path.expanduser(entry), "adapter_config.json"))
    return hasattr(entry, "peft_config")


def _check_adapters(
    entries: Sequence[Any], settings: Sequence[LoRA | None], dtypes: Sequence[str], trains: Sequence[bool]
) -> None:
    for agent, (entry, setting) in enumerate(zip(entries, settings, strict=True)):
        if hasattr(entry, "peft_config") and not hasattr(entry, "get_base_model"):
            raise AgentError(
                f"agent {agent}: its model has adapters in its layers but is no peft model, so it could not be saved: "
                "give the PeftModel around it, or the folder of a saved adapter"
            )
        if setting is not None and has_adapter(entry):
            raise ConfigError(
                f"agent {agent} brings an adapter, so lora cannot give it another: leave lora out, or give a list with "
                "null for that agent"
            )
        if setting is not None and setting.modules_to_save and dtypes[agent] != "float32" and trains[agent]:
            raise ConfigError(
                f"model_config.dtype={dtypes[agent]} with lora.modules_to_save={setting.modules_to_save}: layers that "
                f"are trained whole have the type of the base, and {FLOAT32_REASON}. Leave modules_to_save out, or "
                "set dtype: float32"
            )
        adapted = setting is not None or has_adapter(entry)
        if dtypes[agent] != "float32" and trains[agent] and not adapted and isinstance(entry, str):
            raise ConfigError(
                f"model_config.dtype={dtypes[agent]}: {FLOAT32_REASON}. Set it to float32 or leave it out, or train "
                "adapters (lora)"
            )


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
        inside = id(entry.get_base_model() if hasattr(entry, "get_base_model") else entry)  # of a peft model
        if inside in seen:
            raise AgentError(
                f"agents {seen[inside]} and {index} are the same model object, so two optimizers would step "
                "the same weights: pass a copy.deepcopy of it, or a name twice (each agent then gets its own copy)"
            )
        seen[inside] = index


def _check_one_policy(entries: Sequence[Any], lora: Any) -> None:
    if isinstance(lora, list | tuple):
        raise ConfigError("lora is a list, but with share_policy all agents speak with one adapter: give one setting")
    first = entries[0]
    for index, entry in enumerate(entries):
        if not (entry is first or (isinstance(entry, str) and entry == first)):
            raise ConfigError(
                f"share_policy: agents 0 and {index} are different models, so they cannot share their weights: give "
                "agent_model, or the same model for every agent"
            )
