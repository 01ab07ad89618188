"""Several agents on one network: named LoRA adapters, and which of them speaks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

BASE_ROWS = "__base__"
"""peft's name for the rows of a mixed batch that no adapter touches."""

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


def base_weights(network: Network) -> dict[str, nn.Parameter]:
    """What is no adapter's, by the names of the plain model, whichever of its layers have adapters."""
    named = inner_model(network).named_parameters()
    return {plain_name(name): weight for name, weight in named if not belongs_to(name)}


def plain_name(name: str) -> str:
    """A base weight's name as it was before adapters were put around its layer."""
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def renamed(weight_name: str, adapter: str, name: str) -> str:
    """The name of the same weight of another adapter."""
    parts = weight_name.split(".")
    for index in range(1, len(parts)):
        if belongs_to(".".join(parts[: index + 1]), adapter):
            parts[index] = name
            return ".".join(parts)
    raise KeyError(weight_name)
