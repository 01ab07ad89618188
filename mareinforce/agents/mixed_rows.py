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

    def own(self, ranks: Ranks, low: Tensor) -> Tensor:
        """1 where a row's own adapter has its ranks, 0 where others have theirs: [R, 1, sum of r], for that `low`."""
        if ranks not in self._masks:
            own = [[adapter == owner for owner, r in ranks for _ in range(r)] for adapter in self._adapters]
            self._masks[ranks] = torch.tensor(own, dtype=low.dtype, device=low.device).unsqueeze(1)
        return self._masks[ranks]


def fit_side_by_side(network: PeftModel) -> bool:
    """Are all adapters plain ones on linear layers, which can be worked on side by side?

    peft's own way serves all others. It asks every layer again which rows are whose, and copies them.
    """
    modules = list(network.modules())
    if any(isinstance(module, AuxiliaryTrainingWrapper) for module in modules):
        return False
    layers: list[Any] = [module for module in modules if isinstance(module, LoraLayer)]
    return all(type(layer) is Linear and not layer.lora_variant and not layer.merged for layer in layers) and not any(
        up.bias is not None for layer in layers for up in layer.lora_B.values()
    )


@contextmanager
def side_by_side(network: PeftModel, mixture: Mixture) -> Iterator[nn.Module]:
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
        downs = [layer.lora_A[adapter].weight for adapter, _ in ranks]
        ups = [layer.lora_B[adapter].weight * layer.scaling[adapter] for adapter, _ in ranks]
        down = torch.cat(downs).t().contiguous()  # [in, sum of r]
        up = torch.cat(ups, dim=1).t().contiguous()  # [sum of r, out]

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = layer.base_layer(x, *args, **kwargs)
        low = torch.mm(x.reshape(-1, x.shape[-1]).to(down.dtype), down)
        low.view(len(x), -1, low.shape[-1]).mul_(mixture.own(ranks, low))
        if found.dtype == up.dtype == torch.float32:
            found.view(-1, found.shape[-1]).addmm_(low, up)
            return found
        return found.add_(torch.mm(low, up).view_as(found))  # rounded twice, as peft does it

    return torch.no_grad()(forward)
