"""Linear layers on a CPU, multiplied by the library that does it fastest there.

torch leaves float32 products to MKL, which keeps its widest instructions to processors of Intel's. On others oneDNN,
which torch comes with as well, takes less than half of the time. It is asked through the operation that `torch.compile`
uses.

Dims: M tokens of a pass.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mareinforce.agents.modes import recomputes

FEWEST_MULTIPLICATIONS = 2**21
"""Of a product that is worth a call from Python."""


@cache
def onednn_is_faster() -> bool:
    """Does this torch multiply with MKL on a processor that is not Intel's, and is oneDNN there?"""
    mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return mkl and _has_onednn() and "GenuineIntel" not in _processor()


def onednn_knows(dtype: torch.dtype) -> bool:
    """Does oneDNN multiply in this precision without taking it for another?"""
    if not _has_onednn():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


def _has_onednn() -> bool:
    names = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")
    there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return there and all(hasattr(torch.ops.mkldnn, name) for name in names)


def _processor() -> str:
    """What names the maker of the processor; MKL runs on x86 alone."""
    told = Path("/proc/cpuinfo")
    return told.read_text() if told.exists() else platform.processor()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W' + b for x [M, in] with oneDNN, without gradients; W [out, in] may be laid out for it."""
    bias = None if bias is None else bias.contiguous()  # it is read as if it were
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found


def is_plain(layer: nn.Module) -> bool:
    """Is this one of torch's own linear layers on a CPU, which nobody has changed (or quantized)?

    A hook before its forward may make its weight anew, as those of weight_norm and of pruning do.
    """
    if type(layer) is not nn.Linear or "forward" in vars(layer) or layer._forward_pre_hooks:
        return False
    weight = layer.weight
    return type(weight) in (nn.Parameter, Tensor) and weight.layout == torch.strided and weight.device.type == "cpu"


@contextmanager
def fast_products(model: nn.Module) -> Iterator[None]:
    """Inside, plain float32 layers of a model on a CPU multiply with the faster library; gradients can be had outside.

    A layer that recomputes its activations does so after this has ended, and must find then what it found before: a
    model with such layers is left as it is.
    """
    modules = list(model.modules()) if onednn_is_faster() else []
    if any(recomputes(module) for module in modules):
        modules = []
    layers: list[Any] = [one for one in modules if is_plain(one) and one.weight.dtype == torch.float32]
    try:
        for layer in layers:
            layer.forward = fast_forward(layer)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def fast_forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """A plain float32 layer's `forward`, with oneDNN where that is worth a call from Python."""
    weight, bias = layer.weight, layer.bias
    fewest = max(1, FEWEST_MULTIPLICATIONS // weight.shape[0])

    def forward(x: Tensor) -> Tensor:
        if x.numel() < fewest or x.dtype != weight.dtype or torch.is_autocast_enabled("cpu"):
            return functional.linear(x, weight, bias)
        # laid flat out here, for a model that changes what it gets in place: it may not if the view is made inside
        flat: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias)  # type: ignore[no-untyped-call]
        return flat.view(*x.shape[:-1], len(weight))

    return forward


class _Linear(torch.autograd.Function):
    """x W' + b of x [M, in]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()  # [M, out]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            product(grad, weight.t()) if needs_x else None,
            product(grad.t(), x.t()) if needs_weight else None,
            grad.sum(dim=0) if needs_bias else None,
        )
