"""Sampling with a model's own ``generate``: for every architecture that transformers knows.

Dims: R rows of a batch (one completion each), P tokens of the longest prompt, L new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from mareinforce.agents.adapters import Network
from mareinforce.agents.scoring import aligned_right
from mareinforce.algorithms.masking import cut_at_end
from mareinforce.rollout.engines.batches import Batch, Sampled, StopStrings
from mareinforce.rollout.sampling import draw


def generate(batch: Batch) -> list[Sampled]:
    """Sample every row of the batch, in one call of ``generate``."""
    prompt_ids, attended = (tensor.to(batch.device) for tensor in aligned_right(batch.row_prompts()))
    drawing = _KeyedDraw(batch, prompt_ids.shape[1])
    inputs: dict[str, Any] = {
        "input_ids": prompt_ids,
        "attention_mask": attended,
        "logits_processor": LogitsProcessorList([drawing]),
        "generation_config": _settings(
            max_new_tokens=batch.sampling.max_new_tokens,
            do_sample=False,  # the processor leaves one token to choose
            eos_token_id=list(batch.end_ids),
            pad_token_id=batch.end_ids[0],
        ),
    }
    stopping = _StopStrings(batch, prompt_ids.shape[1])
    if stopping.strings.needed:
        inputs["stopping_criteria"] = StoppingCriteriaList([stopping])
    with batch.speaking() as speakers, _neutral_generation_config(batch.network):
        model, options = speakers(range(len(batch.sources)))
        sequences = cast(Any, model).generate(**inputs, **options)
    ids = sequences[:, prompt_ids.shape[1] :].cpu()
    logprobs = torch.stack(drawing.logprobs, dim=1).float().cpu()
    return [_cut(*row, batch.end_ids) for row in zip(ids, logprobs, stopping.lengths, strict=True)]


def _cut(ids: Tensor, logprobs: Tensor, stopped_at: int | None, end_ids: Any) -> Sampled:
    length, ended = cut_at_end(ids.tolist(), end_ids)
    if stopped_at is not None and stopped_at <= length:  # what follows is filler
        length, ended = stopped_at, True
    return Sampled(ids[:length].clone(), logprobs[:length].clone(), ended)


class _KeyedDraw(LogitsProcessor):
    """Draws each row's next token by its uniform number, and leaves only that one for ``generate`` to choose."""

    def __init__(self, batch: Batch, prompt_width: int) -> None:
        self.batch = batch
        self.prompt_width = prompt_width
        self.logprobs: list[Tensor] = []  # [R] a position

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        position, numbers = input_ids.shape[1] - self.prompt_width, self.batch.uniforms
        forbidden = self.batch.end_ids if position < self.batch.sampling.min_new_tokens else None
        ids, logprobs = draw(scores.to(numbers.device), numbers[:, position], self.batch.sampling, forbidden)
        self.logprobs.append(logprobs)
        return torch.full_like(scores, -torch.inf).scatter_(1, ids.unsqueeze(1).to(scores.device), 0.0)


class _StopStrings(StoppingCriteria):
    """Ends the rows whose answer has come to a stop string, and keeps how long each was then."""

    def __init__(self, batch: Batch, prompt_width: int) -> None:
        self.strings = StopStrings(batch)
        self.lengths: list[int | None] = [None] * len(batch.sources)
        self._prompt_width = prompt_width

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        for row, ids in enumerate(input_ids[:, self._prompt_width :].tolist()):
            if self.lengths[row] is None and self.strings.reached(row, ids):
                self.lengths[row] = len(ids)
        return torch.tensor([length is not None for length in self.lengths], device=input_ids.device)


def _settings(**fields: Any) -> GenerationConfig:
    return GenerationConfig(**fields)  # type: ignore[no-untyped-call]


@contextmanager
def _neutral_generation_config(network: Network) -> Iterator[None]:
    """Hide the settings that came with the model: ``generate`` fills in from them whatever it is not given."""
    holders = cast(Any, [network, network.get_base_model()] if isinstance(network, PeftModel) else [network])
    shipped = [getattr(holder, "generation_config", None) for holder in holders]
    for holder in holders:
        holder.generation_config = _settings()
    try:
        yield
    finally:
        for holder, config in zip(holders, shipped, strict=True):
            holder.generation_config = config
