"""Module flags while a policy is evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def dropout_off(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, every module's own flag back afterwards, also after an error.

    Sampling and scoring both run like this: with dropout on, the log-probs that are learned from would be those of
    another policy than the one that sampled.
    """
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training
