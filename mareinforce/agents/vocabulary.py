"""Special tokens that a user adds: a copy of the tokenizer that knows them, and embeddings with room for them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mareinforce.errors import AgentError, ConfigError


def add_special_tokens(
    tokenizer: PreTrainedTokenizerBase, tokens: Mapping[str, Any], agent: int, notes: list[str]
) -> PreTrainedTokenizerBase:
    """The tokenizer itself if there is nothing to add, else a copy that has the tokens. Adds a line to ``notes``.

    Raises:
        ConfigError: for a role that tokenizers do not have.
    """
    if not tokens:
        return tokenizer
    extended = copy.deepcopy(tokenizer)
    try:
        added = extended.add_special_tokens(dict(tokens))
    except (ValueError, AttributeError, TypeError, AssertionError, KeyError) as error:
        raise ConfigError(f"model_config.special_tokens={dict(tokens)}: {' '.join(str(error).split())}") from error
    notes.append(f"agent {agent}: special_tokens added {added} tokens to its tokenizer, which now has {len(extended)}.")
    return extended


def fit_embeddings(
    model: PreTrainedModel,
    tokenizers: Sequence[PreTrainedTokenizerBase],
    agent: int,
    shared: bool,
    notes: list[str],
) -> None:
    """Give every token a row. A table with rows to spare (padded beyond its tokenizer) is left alone.

    New rows begin as the mean of the old ones. Adds a line to ``notes``.

    Raises:
        AgentError: if rows are needed but nothing would train them, because the base is shared, or if the model
            cannot be given any.
    """
    typed: Any = model
    before, needed = typed.get_input_embeddings().weight.shape[0], max(len(tokenizer) for tokenizer in tokenizers)
    if needed <= before:
        return
    if shared:
        raise AgentError(
            f"agent {agent}: special_tokens needs {needed} embeddings, its base has {before}, and the new rows would "
            "never be trained, as nothing but adapters is: leave special_tokens out, or train the whole model"
        )
    try:
        model.resize_token_embeddings(needed, mean_resizing=False)
    except (NotImplementedError, ValueError, RuntimeError) as error:
        raise AgentError(
            f"agent {agent}: special_tokens needs {needed} embeddings, its model has {before} and takes no more: "
            f"{' '.join(str(error).split())}"
        ) from error
    with torch.no_grad():
        for layer in (typed.get_input_embeddings(), typed.get_output_embeddings()):
            if layer is not None and layer.weight.shape[0] == needed:
                layer.weight[before:] = layer.weight[:before].mean(dim=0)
    notes.append(f"agent {agent}: special_tokens resized its embeddings from {before} to {needed} rows.")
