"""Several agents on one network: named LoRA adapters, which of them speaks, and how each is read and saved."""

from __future__ import annotations

import copy
import itertools
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

from mareinforce.agents.lora import LoRA
from mareinforce.errors import AgentError

BASE_ROWS = "__base__"
"""peft's name for the rows of a mixed batch that no adapter touches."""

ADAPTER_FILE = "adapter_config.json"

Network = PreTrainedModel | PeftModel


def inner_model(network: Network) -> PreTrainedModel:
    """The transformers model, in which the adapters' layers lie."""
    return cast(PreTrainedModel, network.get_base_model()) if isinstance(network, PeftModel) else network


@contextmanager
def speaking(network: Network, adapter: str | None) -> Iterator[PreTrainedModel]:
    """The network as one agent: with its adapter, or, for None, with all adapters off.

    An adapter stays on afterwards, so that a backward pass still finds it. What was off is on again afterwards, also
    after an error.
    """
    if not isinstance(network, PeftModel):
        yield network
    elif adapter is not None:
        if network.active_adapter != adapter:
            network.set_adapter(adapter)
        yield inner_model(network)
    else:
        tuner: Any = network.base_model
        tuner.disable_adapter_layers()
        try:
            yield inner_model(network)
        finally:
            tuner.enable_adapter_layers()


@contextmanager
def mixing(network: Network) -> Iterator[None]:
    """While a batch's rows belong to different adapters: take away the hooks that peft leaves there after an error."""
    before = [(module, set(module._forward_pre_hooks)) for module in network.modules()]
    try:
        yield
    except BaseException:
        for module, hooks in before:
            for added in set(module._forward_pre_hooks) - hooks:
                del module._forward_pre_hooks[added]
                module._forward_pre_hooks_with_kwargs.pop(added, None)
        raise


def adapter_weights(network: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    """The weights of one adapter, by their names in the network."""
    return {name: weight for name, weight in network.named_parameters() if belongs_to(name, adapter)}


def belongs_to(weight_name: str, adapter: str | None = None) -> bool:
    """Is this a weight of the adapter (None: of any adapter), by its name?"""
    parts = weight_name.split(".")
    homes = [part.startswith("lora_") or part == "modules_to_save" for part in parts[:-1]]
    return any(home and adapter in (None, owner) for home, owner in zip(homes, parts[1:], strict=True))


def can_mix(network: PeftModel, adapters: Sequence[str]) -> bool:
    """Can rows of one batch belong to different ones of these adapters?

    With layers that an adapter trains whole, peft asks all adapters for a copy of them.
    """
    whole = {name for config in network.peft_config.values() for name in getattr(config, "modules_to_save", None) or ()}
    configs = [network.peft_config[adapter] for adapter in adapters]
    return not any(
        getattr(config, "use_dora", False)
        or getattr(config, "target_parameters", None)
        or whole != set(getattr(config, "modules_to_save", None) or ())
        for config in configs
    )


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
            copies[_renamed(weight_name, adapter, name)].copy_(weight)
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
        _plain(name): weight for name, weight in inner_model(network).state_dict().items() if not belongs_to(name)
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
        and _plain(f"{name}.") == f"{name}."
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


def base_weights(network: Network) -> dict[str, nn.Parameter]:
    """What is no adapter's, by the names of the plain model, whichever of its layers have adapters."""
    named = inner_model(network).named_parameters()
    return {_plain(name): weight for name, weight in named if not belongs_to(name)}


def _base_settings(network: Network) -> dict[str, Any]:
    """What, besides its weights, decides what a base says, and where it ends."""
    model = inner_model(network)
    settings = {key: value for key, value in model.config.to_dict().items() if not key.startswith("_")}
    return {**settings, "ends": getattr(model.generation_config, "eos_token_id", None)}


def _free_name(network: PeftModel, wanted: str) -> str:
    """The wanted name for an adapter, with a number behind it if it is taken."""
    names = itertools.chain([wanted], (f"{wanted}_{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in network.peft_config)


def _plain(name: str) -> str:
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def _renamed(weight_name: str, adapter: str, name: str) -> str:
    parts = weight_name.split(".")
    for index in range(1, len(parts)):
        if belongs_to(".".join(parts[: index + 1]), adapter):
            parts[index] = name
            return ".".join(parts)
    raise KeyError(weight_name)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
