"""Weights in the order in which products of a few rows read them fastest, while tokens are drawn one by one on a CPU.

Such a product waits for the weights to come from memory. The library that multiplies (see `linear_products`) can lay a
weight out beforehand; a product then takes about two thirds of the time, and laying out takes as long as a few of them.
The layouts are copies: they live while a batch is sampled, when no gradients do.

Dims: R rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mareinforce.agents.linear_products import fast_forward, is_plain, onednn_is_faster, onednn_knows, product

FEWEST_TOKENS = 16
"""New tokens from which laying out pays."""
FEWEST_ROWS, MOST_ROWS = 3, 256
"""Rows between which products wait for the weights and the plain order is not as fast."""
SMALL_WEIGHT = 2**16
"""Weights of fewer numbers stay in the processor's cache anyway."""


def available() -> bool:
    """Has this torch a library that lays weights out? `torch.compile` uses the same operations on a CPU."""
    mkl = torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")  # type: ignore[no-untyped-call]
    return onednn_is_faster() or mkl


class PackedWeights:
    """A network's linear layers, working from layouts of their weights while this is open.

    Until there are layouts, the layers multiply with the faster library. Layers that are anything but plain ones of
    torch, on a CPU, in float32 or bfloat16, work as always.

    Args:
        network: what samples.
        new_tokens: how many tokens are to be sampled, at most.
    """

    def __init__(self, network: nn.Module, new_tokens: int) -> None:
        self._pays = new_tokens >= FEWEST_TOKENS and available()
        found = network.modules() if self._pays or onednn_is_faster() else ()
        self._layers: list[Any] = [layer for layer in found if is_plain(layer)]
        self._rows = 0

    def __enter__(self) -> PackedWeights:
        self._unpack()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for layer in self._layers:
            vars(layer).pop("forward", None)

    def pack(self, rows: int) -> None:
        """Lay out for batches of so many rows from now on, if what is there is for too many or too few."""
        if not self._pays or rows <= self._rows < 2 * rows:
            return
        if self._rows and onednn_is_faster():
            return  # one layout serves all
        self._unpack()
        if FEWEST_ROWS <= rows <= MOST_ROWS:
            for layer in self._layers:
                if layer.weight.numel() >= SMALL_WEIGHT and _has_layout(layer.weight.dtype):
                    layer.forward = _product(layer, rows)
            self._rows = rows

    def _unpack(self) -> None:
        for layer in self._layers:
            vars(layer).pop("forward", None)
            if onednn_is_faster() and layer.weight.dtype == torch.float32:
                layer.forward = fast_forward(layer)
        self._rows = 0


def _has_layout(dtype: torch.dtype) -> bool:
    return _is_mkls(dtype) or onednn_knows(dtype)


def _is_mkls(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 and not onednn_is_faster()


def _product(layer: nn.Linear, rows: int) -> Callable[[Tensor], Tensor]:
    """x W' + b from a layout of W."""
    return _mkl_product(layer, rows) if _is_mkls(layer.weight.dtype) else _onednn_product(layer, rows)


def _onednn_product(layer: nn.Linear, rows: int) -> Callable[[Tensor], Tensor]:
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)

    def forward(x: Tensor) -> Tensor:
        if x.dtype != weight.dtype or x.numel() == 0:
            return functional.linear(x, weight, bias)
        return product(x.reshape(-1, x.shape[-1]), packed, bias).view(*x.shape[:-1], len(weight))

    return forward


def _mkl_product(layer: nn.Linear, rows: int) -> Callable[[Tensor], Tensor]:
    """MKL's layout is for a number of rows, which fewer are filled up to; more are multiplied as always."""
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)

    def forward(x: Tensor) -> Tensor:
        given = x.numel() // x.shape[-1]
        if given > rows or x.dtype != torch.float32 or given == 0:
            return functional.linear(x, weight, bias)
        filled = x if given == rows else functional.pad(x.reshape(given, -1), (0, 0, 0, rows - given))
        product: Tensor = torch.ops.mkl._mkl_linear(filled, packed, weight, bias, rows)
        return product if given == rows else product[:given].reshape(*x.shape[:-1], -1)

    return forward
