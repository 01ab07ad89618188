"""One batch, several adapters: each row through its own, while nothing is learned.

Dims: R rows of a batch, L tokens, r rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear, LoraLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.nn import functional

Ranks = tuple[tuple[str, int], ...]
"""Adapters of a layer and their ranks, in the order in which the layer holds them."""


class Mixture:
    """Which row of a batch belongs to which adapter."""

    def __init__(self) -> None:
        self._adapters: list[str | None] = []
        self._masks: dict[Ranks, Tensor] = {}

    def tell(self, adapters: Sequence[str | None]) -> None:
        """Every row's adapter; None: the base."""
        if self._adapters != (now := list(adapters)):
            self._adapters, self._masks = now, {}

    def others(self, ranks: Ranks, device: torch.device) -> Tensor:
        """False where a row's own adapter has its ranks, True where others have theirs: [R, 1, sum of r]."""
        if ranks not in self._masks:
            others = [[adapter != owner for owner, r in ranks for _ in range(r)] for adapter in self._adapters]
            self._masks[ranks] = torch.tensor(others, device=device).unsqueeze(1)
        return self._masks[ranks]


def can_split(network: PeftModel) -> bool:
    """Are all adapters plain ones on linear layers, which can be worked on side by side?

    peft's own way serves all others. It asks every layer again which rows are whose, and copies them.
    """
    layers: list[Any] = [module for module in network.modules() if isinstance(module, LoraLayer)]
    if any(isinstance(module, AuxiliaryTrainingWrapper) for module in network.modules()):
        return False
    return all(type(layer) is Linear and not layer.lora_variant and not layer.merged for layer in layers) and not any(
        up.bias is not None for layer in layers for up in layer.lora_B.values()
    )


@contextmanager
def split_by_rows(network: PeftModel, mixture: Mixture) -> Iterator[nn.Module]:
    """The plain model inside, whose adapted layers send each row through its own adapter, without gradients."""
    layers: list[Any] = [module for module in network.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.forward = _forward(layer, mixture)
    try:
        yield network.get_base_model()
    finally:
        for layer in layers:
            del layer.forward


def _forward(layer: Any, mixture: Mixture) -> Any:
    """x W' + s (x A') B' (Hu et al. 2021), with the A, B and s of each row's adapter.

    All adapters' A and B lie side by side, and between them each row keeps what is its own's: two products, however
    many adapters there are.
    """
    ranks: Ranks = tuple((adapter, len(down.weight)) for adapter, down in layer.lora_A.items())
    with torch.no_grad():
        down = torch.cat([layer.lora_A[adapter].weight for adapter, _ in ranks])  # [sum of r, in]
        ups = [layer.lora_B[adapter].weight * layer.scaling[adapter] for adapter, _ in ranks]
        up = torch.cat(ups, dim=1)  # [out, sum of r]

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = layer.base_layer(x, *args, **kwargs)
        low = functional.linear(x.to(down.dtype), down)  # [R, L, sum of r]
        low.masked_fill_(mixture.others(ranks, x.device), 0.0)
        return found.add_(functional.linear(low, up))

    return torch.no_grad()(forward)
