"""How a network gets adapters (fresh, saved, or another wrapped model's), and how each is saved."""

from __future__ import annotations

import copy
import itertools
import shutil
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    PeftType,
    get_peft_model,
    load_peft_weights,
    set_peft_model_state_dict,
)
from peft.tuners import lora
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mareinforce.agents.adapters import (
    Network,
    adapter_weights,
    base_weights,
    belongs_to,
    inner_model,
    plain_name,
    renamed,
)
from mareinforce.agents.lora import LoRA
from mareinforce.errors import AgentError

ADAPTER_FILE = "adapter_config.json"


def add_fresh_adapter(network: Network, name: str, setting: LoRA, agent: int, seed: int) -> PeftModel:
    """Give a network one more adapter, with which it answers as before. Raises AgentError if it does not fit."""
    model = inner_model(network)
    _refuse_tied(model, setting.modules_to_save, agent)
    wanted = setting.target_modules
    if wanted == "all-linear" and isinstance(network, PeftModel):
        wanted = _linear_layers(model)
    config = LoraConfig(
        r=setting.r,
        lora_alpha=cast(int, setting.lora_alpha),
        target_modules=wanted,
        exclude_modules=setting.exclude_modules,
        lora_dropout=setting.lora_dropout,
        use_rslora=setting.use_rslora,
        use_dora=setting.use_dora,
        init_lora_weights=cast(Any, setting.init_lora_weights),
        modules_to_save=setting.modules_to_save,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type="CAUSAL_LM",
    )
    return _with_adapter(network, name, config, agent, seed)


def add_saved_adapter(network: Network, name: str, folder: str, agent: int) -> PeftModel:
    """Give a network the adapter that lies in a folder. Raises AgentError if it is not whole or does not fit."""
    config = read_adapter_config(folder, agent)
    config.inference_mode = False
    _refuse_tied(inner_model(network), getattr(config, "modules_to_save", None), agent)
    adapted = _with_adapter(network, name, config, agent, seed=0)
    try:
        result: Any = set_peft_model_state_dict(adapted, load_peft_weights(folder, device="cpu"), adapter_name=name)
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        raise AgentError(f"agent {agent}: the adapter in {folder!r} does not fit its base: {_line(error)}") from error
    missing = [key for key in result.missing_keys if belongs_to(key, name)]
    if missing or result.unexpected_keys:
        raise AgentError(
            f"agent {agent}: the adapter in {folder!r} does not fit its base: it lacks {missing[:2] or 'nothing'} and "
            f"brings {list(result.unexpected_keys)[:2] or 'nothing'} that the base has no place for"
        )
    return adapted


def read_adapter_config(folder: str, agent: int) -> LoraConfig:
    """The settings of the adapter in a folder. Raises AgentError for another kind than LoRA."""
    try:
        config = PeftConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AgentError(f"agent {agent}: the adapter in {folder!r} cannot be read: {_line(error)}") from error
    _refuse_other_kinds(config, agent)
    return cast(LoraConfig, config)


def own_adapter(network: PeftModel, agent: int) -> str:
    """The one adapter of a wrapped model that came from its user. Raises AgentError if there is not exactly one."""
    active = network.active_adapters
    if len(active) != 1:
        raise AgentError(f"agent {agent}: its model has the active adapters {active}; make exactly one active")
    _refuse_other_kinds(network.peft_config[active[0]], agent)
    return active[0]


def copy_adapter(network: PeftModel, adapter: str, wanted: str) -> str:
    """Add an equal adapter, to be kept as it is, under the wanted name or one like it. Returns its name."""
    before, name = network.active_adapter, _free_name(network, wanted)
    with torch.random.fork_rng():
        network.add_adapter(name, copy.deepcopy(network.peft_config[adapter]))
    copies = adapter_weights(network, name)
    with torch.no_grad():
        for weight_name, weight in adapter_weights(network, adapter).items():
            copies[renamed(weight_name, adapter, name)].copy_(weight)
    network.set_adapter(before)
    return name


def same_base(network: Network, other: Network) -> bool:
    """Have both the same architecture and settings and, outside of adapters, equal weights on the same device?"""
    ours, theirs = base_weights(network), base_weights(other)
    return (
        type(inner_model(network)) is type(inner_model(other))
        and _base_settings(network) == _base_settings(other)
        and ours.keys() == theirs.keys()
        and all(
            weight.shape == theirs[name].shape
            and weight.dtype == theirs[name].dtype
            and weight.device == theirs[name].device
            and torch.equal(weight, theirs[name])
            for name, weight in ours.items()
        )
    )


def adopt_adapter(network: PeftModel, other: PeftModel, adapter: str, wanted: str) -> str:
    """Move the adapter of another wrapped model, whose base is equal, onto this one, and its base into this memory.

    The other model stays usable and goes on holding the very weights that are trained. Returns the adapter's name
    here: the wanted one or one like it, or that under which it is here already, from an earlier team.
    """
    brought = {id(weight) for weight in adapter_weights(other, adapter).values()}
    for present in network.peft_config:
        if brought == {id(weight) for weight in adapter_weights(network, present).values()}:
            return present
    name = _free_name(network, wanted)
    with torch.random.fork_rng():
        network.add_adapter(name, copy.deepcopy(other.peft_config[adapter]))
    theirs = dict(other.named_modules())
    for path, module in network.named_modules():
        for kind, held in module.named_children():
            if (kind.startswith("lora_") or kind == "modules_to_save") and name in held:
                held[name] = getattr(theirs[path], kind)[adapter]
    ours = base_weights(network)
    for weight_name, weight in base_weights(other).items():
        weight.data = ours[weight_name].data
    return name


def save_adapter(network: PeftModel, adapter: str, folder: Path) -> None:
    """Write one adapter, and nothing of another, as a plain peft folder."""
    network.save_pretrained(str(folder), selected_adapters=[adapter], save_embedding_layers=False)
    inside = folder / adapter  # where peft puts an adapter of another name than "default"
    if inside.is_dir():
        for file in inside.iterdir():
            file.rename(folder / file.name)
        shutil.rmtree(inside)


def save_base(network: PeftModel, folder: Path) -> None:
    """Write the base as the plain model it was before it got adapters."""
    weights = {
        plain_name(name): weight for name, weight in inner_model(network).state_dict().items() if not belongs_to(name)
    }
    inner_model(network).save_pretrained(folder, state_dict=weights)


def _with_adapter(network: Network, name: str, config: LoraConfig, agent: int, seed: int) -> PeftModel:
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
            torch.manual_seed(seed)
            if isinstance(network, PeftModel):
                network.add_adapter(name, config)
                return network
            return cast(PeftModel, get_peft_model(network, config, adapter_name=name))
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        raise AgentError(f"agent {agent}: its model cannot have this adapter: {_line(error)}") from error


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """What all-linear means where there are adapters already: not a layer inside of theirs, which peft would take too.

    A layer that another adapter trains whole is named, and so refused, as it cannot have both.
    """
    head: Any = cast(Any, model).get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(getattr(module, "original_module", module), (nn.Linear, Conv1D, lora.Linear))
        and module is not head
        and not belongs_to(f"{name}.weight")
        and plain_name(f"{name}.") == f"{name}."
    ]


def _refuse_other_kinds(config: Any, agent: int) -> None:
    if config.peft_type != PeftType.LORA:
        raise AgentError(f"agent {agent}: its adapter is {config.peft_type}; agents train LoRA or whole models")
    if getattr(config, "bias", "none") != "none":
        raise AgentError(
            f"agent {agent}: its adapter trains biases (bias={config.bias!r}), which belong to the base that agents "
            "share; make one with bias='none'"
        )


def _refuse_tied(model: PreTrainedModel, modules_to_save: Any, agent: int) -> None:
    """A copy of one of two tied layers would leave the other behind."""
    head: Any = cast(Any, model).get_output_embeddings()
    embeddings = {id(model.get_input_embeddings()), id(head)}
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    for name, module in model.named_modules():
        if tied and id(module) in embeddings and any(name.endswith(wanted) for wanted in modules_to_save or []):
            raise AgentError(
                f"agent {agent}: lora.modules_to_save names {name}, which is tied to the other embedding of its model, "
                "and a copy would come loose from it; leave it out"
            )


def _base_settings(network: Network) -> dict[str, Any]:
    """What, besides its weights, decides what a base says, and where it ends."""
    model = inner_model(network)
    settings = {key: value for key, value in model.config.to_dict().items() if not key.startswith("_")}
    return {**settings, "ends": getattr(model.generation_config, "eos_token_id", None)}


def _free_name(network: PeftModel, wanted: str) -> str:
    """The wanted name for an adapter, with a number behind it if it is taken."""
    names = itertools.chain([wanted], (f"{wanted}_{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in network.peft_config)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
