"""Module flags while a policy is evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


@contextmanager
def dropout_off(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, every module's own flag back afterwards, also after an error.

    Sampling and scoring both run like this: with dropout on, the log-probs that are learned from would be those of
    another policy than the one that sampled. Layers that recompute their activations in the backward pass do so in
    training mode only, so these layers, and nothing inside of them, stay in it while gradients are recorded.
    """
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    if torch.is_grad_enabled():
        for module, _ in flags:
            if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
                module.training = True
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


def drops_by_itself(model: nn.Module) -> str | None:
    """The name of a recomputing layer that applies dropout itself rather than in a module inside of it, if any."""
    for name, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
        if isinstance(module, GradientCheckpointingLayer):
            for field, value in vars(module).items():
                if "dropout" in field and isinstance(value, float) and value > 0:
                    return name
    return None
