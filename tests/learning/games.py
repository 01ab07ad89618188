"""Games on table models: policies that are a table of logits, small enough to learn in seconds.

A prompt is one word, the model's logits are the row of its table that the prompt's last word names, and one token is
sampled: the action. So every prompt word is a state with a free policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mareinforce import MAGRPOConfig, MAGRPOTrainer
from tests.models import TableModel, table_model, table_tokenizer


def table_agents(words: Sequence[str], actions: Sequence[str], count: int = 2) -> tuple[list[TableModel], Any]:
    """`count` uniform policies over `actions` after any word, and the tokenizer they share."""
    texts = ["<eos>", *words]
    logits = torch.full((len(texts), len(texts)), -30.0)
    logits[:, [texts.index(action) for action in actions]] = 0.0
    return [table_model(logits, eos_token_id=0) for _ in range(count)], table_tokenizer(texts)


def policy(model: TableModel, tokenizer: Any, state: str) -> dict[str, float]:
    """Probability of every word after a state."""
    probabilities = model.table.weight[tokenizer.convert_tokens_to_ids(state)].softmax(-1)
    return {tokenizer.convert_ids_to_tokens(index): float(p) for index, p in enumerate(probabilities.detach())}


def train(
    agents: list[TableModel], tokenizer: Any, state: str, reward: Callable[..., Any], folder: Path, **fields: Any
) -> MAGRPOTrainer:
    """Train the agents on one state repeated, one token an answer."""
    settings = {
        "num_turns": 1,
        "num_train_epochs": 1,
        "num_generations": 16,
        "max_new_tokens": 1,
        "rollout_buffer_size": 1,
        "agent_learning_rate": 0.05,
        "early_termination_threshold": None,
        "eval_interval": 0,
        "logging_steps": 10**6,
    }
    transition = fields.pop("external_transition", None)
    steps = fields.pop("steps")
    trainer = MAGRPOTrainer(
        agents=agents,
        tokenizer=tokenizer,
        reward_func=reward,
        external_transition=transition,
        train_dataset=[{"prompt": state}] * steps,
        args=MAGRPOConfig(num_agents=len(agents), **{**settings, **fields}),
        default_root_dir=folder,
    )
    trainer.train()
    return trainer
