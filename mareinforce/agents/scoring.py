"""One batched forward that gives the log-probs of completions under an agent's current weights.

Dims: K completions, L tokens of the longest one, P tokens of the longest prompt.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mareinforce.agents.linear_products import fast_products
from mareinforce.agents.modes import dropout_off, sparse_lookups
from mareinforce.algorithms.logprobs import chosen_logprobs
from mareinforce.algorithms.masking import counts_mask

FILLER = 0
"""Id at positions that never count. Any id of the vocabulary would do."""


class Scored(NamedTuple):
    """What a forward says about K completions."""

    logprobs: Tensor  # float32 [K, L], with gradient; only where counts is True do they mean anything
    counts: Tensor  # bool [K, L]
    entropy: Tensor  # float32 [K, L], no gradient


def aligned_right(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Prompts in one int64 [K, P] that all end in the last column, and int64 [K, P], 1 where a prompt is."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), FILLER, dtype=torch.int64)
    attended = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        attended[row, width - len(prompt) :] = 1
    return ids, attended


def score_rows(
    model: nn.Module,
    prompts: Sequence[Tensor],
    completions: Sequence[Tensor],
    temperature: float,
    *,
    once: bool = False,
) -> Scored:
    """Score each completion after its own prompt, all rows in one forward, dropout off.

    Prompts end and completions begin in the same column, so that only the columns of the completions need logits. A
    row's log-probs depend on no other row: fillers are masked and positions count from each prompt's first token.
    ``once``: there will be one backward pass at most.
    """
    prompt_ids, prompt_attended = aligned_right(prompts)
    lengths = [len(completion) for completion in completions]
    completion_ids = pad_sequence(list(completions), batch_first=True, padding_value=FILLER)
    counts = counts_mask(lengths, completion_ids.shape[1])
    device = next(model.parameters()).device
    # The last token predicts nothing that is scored.
    inputs = torch.cat([prompt_ids, completion_ids], dim=1)[:, :-1].to(device)
    attended = torch.cat([prompt_attended, counts.long()], dim=1)[:, :-1].to(device)
    ids = completion_ids.to(device)
    with dropout_off(model), sparse_lookups(model), fast_products(model):
        logits = _logits(model, inputs, attended, ids.shape[1])
    every = torch.arange(ids.numel(), device=device)
    # transformers' own models do not look at their logits again
    reuse = once and type(model).__module__.startswith("transformers.models.")
    logprobs, entropy = chosen_logprobs(logits.flatten(0, 1), every, ids.flatten(), temperature, reuse=reuse)
    return Scored(logprobs.view(ids.shape), counts.to(device), entropy.view(ids.shape))


def _logits(model: nn.Module, inputs: Tensor, attended: Tensor, width: int) -> Tensor:
    """Logits of the last ``width`` columns, [K, width, V]."""
    accepted = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": False}
    if "position_ids" in accepted:
        # Counted from each row's first token: models with absolute positions would otherwise count the fillers too.
        options["position_ids"] = (attended.cumsum(dim=-1) - 1).clamp(min=0)
    if "logits_to_keep" in accepted:
        options["logits_to_keep"] = width
    logits: Tensor = model(input_ids=inputs, attention_mask=attended, **options).logits
    return logits[:, -width:]
