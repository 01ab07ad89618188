"""Module flags while a policy is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def recomputes(module: nn.Module) -> bool:
    """Does this layer run again in the backward pass, in place of keeping its activations?"""
    return isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing


@contextmanager
def dropout_off(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, every module's own flag back afterwards, also after an error.

    Sampling and scoring both run like this: with dropout on, the log-probs that are learned from would be those of
    another policy than the one that sampled. Layers that recompute their activations in the backward pass do so in
    training mode only, so these layers, and nothing inside of them, stay in it while gradients are recorded (see
    `recompute_alike`).
    """
    flags = [(module, module.training) for module in model.modules()]
    recording = torch.is_grad_enabled()
    for module, training in flags:
        trains = recording and recomputes(module)
        if training != trains:
            module.training = trains
    try:
        yield
    finally:
        for module, training in flags:
            if module.training != training:
                module.training = training


@contextmanager
def sparse_lookups(model: nn.Module) -> Iterator[None]:
    """Inside, a forward's look-ups in embeddings that are the head's weights as well give sparse gradients.

    The head's gradient is dense, and autograd adds sparse ones into it where it lies. A dense one would be as large as
    the vocabulary, for the few rows of it that were looked up: a tenth of a gigabyte at the very peak, and three passes
    over it. On a CPU; elsewhere the order of such a sum is nobody's.
    """
    embeddings = _tied_embeddings(model)
    if embeddings is None or embeddings.scale_grad_by_freq or embeddings.weight.device.type != "cpu":
        yield
        return
    before, embeddings.sparse = embeddings.sparse, True
    try:
        yield
    finally:
        embeddings.sparse = before


def _tied_embeddings(model: Any) -> nn.Embedding | None:
    """The embeddings, if the head has the same weights."""
    if not isinstance(model, PreTrainedModel):
        return None
    typed: Any = model
    embeddings, head = typed.get_input_embeddings(), typed.get_output_embeddings()
    tied = type(embeddings) is nn.Embedding and head is not None and head.weight is embeddings.weight
    return embeddings if tied else None


def recompute_alike(model: nn.Module) -> None:
    """Let the backward pass run layers again as the forward pass did, dropout off, whatever mode they are in by then.

    Only for layers that recompute; doing it again changes nothing.
    """
    for layer in model.modules():
        if recomputes(layer):
            typed: Any = layer
            checkpoint = typed._gradient_checkpointing_func
            if getattr(checkpoint, "func", None) is not _checkpoint_alike:
                typed._gradient_checkpointing_func = partial(_checkpoint_alike, layer, checkpoint)


def _checkpoint_alike(layer: nn.Module, checkpoint: Callable[..., Any], run: Callable[..., Any], *inputs: Any) -> Any:
    def alike(*inputs: Any) -> Any:
        with dropout_off(layer):
            return run(*inputs)

    return checkpoint(alike, *inputs)


def drops_by_itself(model: nn.Module) -> str | None:
    """The name of a recomputing layer that applies dropout itself rather than in a module inside of it, if any."""
    for name, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
        if recomputes(module):
            for field, value in vars(module).items():
                if "dropout" in field and isinstance(value, float) and value > 0:
                    return name
    return None
