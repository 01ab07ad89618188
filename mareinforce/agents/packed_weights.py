"""Weights in the order in which products of a few rows read them fastest, while tokens are drawn one by one on a CPU.

Such a product waits for the weights to come from memory. MKL can lay a weight out beforehand for a number of rows; it
then takes about two thirds of the time, and laying out takes as long as a few products. The layouts are copies: they
live while a batch is sampled, when no gradients do.

Dims: R rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

FEWEST_TOKENS = 16
"""New tokens from which laying out pays."""
FEWEST_ROWS, MOST_ROWS = 3, 256
"""Rows between which products wait for the weights and MKL's plain order is not as fast."""
SMALL_WEIGHT = 2**16
"""Weights of fewer numbers stay in the processor's cache anyway."""


def available() -> bool:
    """Does this torch have MKL's layouts? They are what `torch.compile` uses on a CPU."""
    return torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")  # type: ignore[no-untyped-call]


class PackedWeights:
    """A network's linear layers, working from layouts of their weights while this is open.

    Layers that are anything but plain ones of torch, on a CPU, in float32, work as always; so does a product of more
    rows than `pack` was told.

    Args:
        network: what samples.
        new_tokens: how many tokens are to be sampled, at most.
    """

    def __init__(self, network: nn.Module, new_tokens: int) -> None:
        found = list(network.modules()) if new_tokens >= FEWEST_TOKENS and available() else []
        self._layers: list[Any] = [layer for layer in found if _is_packable(layer)]
        self._rows = 0

    def __enter__(self) -> PackedWeights:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._unpack()

    def pack(self, rows: int) -> None:
        """Lay out for batches of so many rows from now on, if what is there is for too many or too few."""
        if rows <= self._rows < 2 * rows:
            return
        self._unpack()
        if FEWEST_ROWS <= rows <= MOST_ROWS:
            for layer in self._layers:
                layer.forward = _product(layer, rows)
            self._rows = rows

    def _unpack(self) -> None:
        if self._rows:
            for layer in self._layers:
                del layer.forward
        self._rows = 0


def _is_packable(layer: nn.Module) -> bool:
    if type(layer) is not nn.Linear or "forward" in vars(layer):  # a quantized one, or one that others have changed
        return False
    weight = layer.weight
    plain = type(weight) in (nn.Parameter, Tensor) and weight.layout == torch.strided
    return plain and weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= SMALL_WEIGHT


def _product(layer: nn.Linear, rows: int) -> Callable[[Tensor], Tensor]:
    """x W' + b for x of at most so many rows; MKL's layout is for a number of rows, which fewer are filled up to."""
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)

    def forward(x: Tensor) -> Tensor:
        given = x.numel() // x.shape[-1]
        if given > rows or x.dtype != torch.float32:
            return functional.linear(x, weight, bias)
        filled = x if given == rows else functional.pad(x.reshape(given, -1), (0, 0, 0, rows - given))
        product: Tensor = torch.ops.mkl._mkl_linear(filled, packed, weight, bias, rows)
        return product if given == rows else product[:given].reshape(*x.shape[:-1], -1)

    return forward
