"""Log-probs of the completions of whole nodes: behind one copy of their prompt where that pays, else a row each.

Dims: B nodes, K completions of a node, L tokens of the longest one, P tokens of the longest prompt, S columns.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from mareinforce.agents.linear_products import fast_products
from mareinforce.agents.modes import dropout_off, sparse_lookups
from mareinforce.agents.scoring import FILLER, Scored, aligned_right, score_rows
from mareinforce.algorithms.logprobs import chosen_logprobs
from mareinforce.algorithms.masking import counts_mask

PAYS_BELOW = 0.9
"""Prefixes are shared where that takes less than this share of the arithmetic: a mask of blocks costs a little too."""


class Told(NamedTuple):
    """Completions of one prompt."""

    prompt_ids: Tensor  # int64 [P]
    completion_ids: Sequence[Tensor]  # int64 [K] x [L_k]


def score_nodes(
    model: nn.Module,
    nodes: Sequence[Told],
    temperature: float,
    *,
    share_prefixes: bool | None = None,
    once: bool = False,
) -> list[Scored]:
    """Score the completions of several nodes under one model, dropout off; one `Scored` a node.

    Args:
        model: the transformers model of the agent that speaks.
        nodes: at least one, with at least one completion each.
        temperature: the sampling temperature.
        share_prefixes: whether a node's completions stand behind one copy of its prompt; None: where the model can,
            and where it takes less arithmetic (`PAYS_BELOW`).
        once: there will be one backward pass at most, which takes less memory and time then.
    """
    if share_prefixes is None:
        share_prefixes = can_share_prefixes(model) and shared_work(model, nodes) < PAYS_BELOW * own_work(model, nodes)
    if share_prefixes:
        return _behind_prefixes(model, nodes, temperature, once)
    prompts = [node.prompt_ids for node in nodes for _ in node.completion_ids]
    completions = [ids for node in nodes for ids in node.completion_ids]
    scored = score_rows(model, prompts, completions, temperature, once=once)
    sizes = [len(node.completion_ids) for node in nodes]
    widths = [max(map(len, node.completion_ids)) for node in nodes]
    parts = zip(*(torch.split(tensor, sizes) for tensor in scored), widths, strict=True)
    return [Scored(*(tensor[:, :width] for tensor in own)) for *own, width in parts]


def can_share_prefixes(model: nn.Module) -> bool:
    """Is every layer of the model one that looks at all positions, through the mask it is given?"""
    if not isinstance(model, PreTrainedModel) or not type(model).__module__.startswith("transformers.models."):
        return False
    config = model.config
    if config.is_encoder_decoder or getattr(model, "_is_stateful", False):
        return False
    if config._attn_implementation not in ("sdpa", "eager"):
        return False
    if not {"position_ids", "logits_to_keep"} <= inspect.signature(model.forward).parameters.keys():
        return False
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def shared_work(model: nn.Module, nodes: Sequence[Told]) -> float:
    """Arithmetic of a forward over the nodes behind their prompts, see `_work`."""
    longest = max(len(node.prompt_ids) for node in nodes)
    width = longest + max(sum(map(len, node.completion_ids)) for node in nodes)
    return _work(model, len(nodes), width)


def own_work(model: nn.Module, nodes: Sequence[Told]) -> float:
    """Arithmetic of a forward over a row a completion, see `_work`."""
    width = max(len(node.prompt_ids) for node in nodes) + max(len(ids) for node in nodes for ids in node.completion_ids)
    return _work(model, sum(len(node.completion_ids) for node in nodes), width)


def _work(model: nn.Module, rows: int, width: int) -> float:
    """Multiplications of a forward over ``rows`` of ``width`` tokens: each token meets every weight, and in every layer
    each token of its row."""
    config = cast(PreTrainedModel, model).config.get_text_config()
    weights = sum(weight.numel() for weight in model.parameters()) - config.vocab_size * config.hidden_size
    met = weights + 2.0 * width * config.hidden_size * config.num_hidden_layers
    return float(rows * width * met)


def _behind_prefixes(model: nn.Module, nodes: Sequence[Told], temperature: float, once: bool) -> list[Scored]:
    """A row a node: its prompt, then its completions one after the other, each of which sees the prompt and itself.

    A completion's positions go on from the prompt's end, and its first token is told by the prompt's last.
    """
    device = next(model.parameters()).device
    prompts, attended = aligned_right([node.prompt_ids for node in nodes])
    said = [torch.cat(list(node.completion_ids)) for node in nodes]
    completions = pad_sequence(said, batch_first=True, padding_value=FILLER)
    inputs = torch.cat([prompts, completions], dim=1)
    owners, positions = _layout(nodes, attended, inputs.shape[1])
    with dropout_off(model), sparse_lookups(model), fast_products(model):
        logits = model(
            input_ids=inputs.to(device),
            attention_mask=_blocks(cast(PreTrainedModel, model), owners.to(device)),
            position_ids=positions.to(device),
            use_cache=False,
            logits_to_keep=completions.shape[1] + 1,
        ).logits  # [B, 1 + columns of completions, V]
    columns = logits.shape[1]
    rows, ids = [], []
    for place, node in enumerate(nodes):
        start = 0
        for completion in node.completion_ids:
            before = torch.arange(start, start + len(completion))
            before[0] = 0  # the prompt's last token
            rows.append(place * columns + before)
            ids.append(completion)
            start += len(completion)
    picked = torch.cat(rows).to(device)
    said_ids = torch.cat(ids).to(device)
    logprobs, entropy = chosen_logprobs(logits.flatten(0, 1), picked, said_ids, temperature, reuse=once)
    lengths = [len(one) for one in ids]
    values = zip(torch.split(logprobs, lengths), torch.split(entropy[picked], lengths), strict=True)
    return [_one_node([next(values) for _ in node.completion_ids]) for node in nodes]


def _one_node(values: Sequence[tuple[Tensor, Tensor]]) -> Scored:
    logprobs, entropy = (pad_sequence(list(one), batch_first=True) for one in zip(*values, strict=True))
    counts = counts_mask([len(one) for one, _ in values], logprobs.shape[1])
    return Scored(logprobs, counts.to(logprobs.device), entropy)


def _layout(nodes: Sequence[Told], attended: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Whose each column is, int64 [B, S]: 0 the prompt's, k + 1 of completion k, -1 a filler's; and its position."""
    owners = torch.full((len(nodes), width), -1, dtype=torch.int64)
    positions = torch.zeros_like(owners)
    prompt_width = attended.shape[1]
    for row, node in enumerate(nodes):
        owners[row, :prompt_width] = attended[row] - 1
        length = len(node.prompt_ids)
        positions[row, prompt_width - length : prompt_width] = torch.arange(length)
        start = prompt_width
        for k, completion in enumerate(node.completion_ids):
            end = start + len(completion)
            owners[row, start:end] = k + 1
            positions[row, start:end] = torch.arange(length, length + len(completion))
            start = end
    return owners, positions


def _blocks(model: PreTrainedModel, owners: Tensor) -> Tensor:
    """What each column sees, [B, 1, S, S]: earlier columns of its own completion and of the prompt, and itself."""
    width = owners.shape[1]
    earlier = torch.ones(width, width, dtype=torch.bool, device=owners.device).tril()
    seen = (owners[:, :, None] == owners[:, None, :]) | (owners[:, None, :] == 0)
    seen &= earlier & (owners >= 0)[:, :, None] & (owners >= 0)[:, None, :]
    seen |= torch.eye(width, dtype=torch.bool, device=owners.device)  # a filler that saw nothing would be no number
    seen = seen.unsqueeze(1)
    if model.config._attn_implementation == "sdpa":
        return seen
    dtype = model.dtype
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
