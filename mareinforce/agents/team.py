"""The N agents of a team: their models, their tokenizers, and what is asked of each of them."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mareinforce.agents.arguments import FLOAT32_REASON, check_agents, tokenizer_entries
from mareinforce.agents.loading import load_model, load_tokenizer, no_progress_bars
from mareinforce.agents.scoring import Scored, score_rows
from mareinforce.agents.tokenization import Tokenization
from mareinforce.errors import AgentError
from mareinforce.types import Prompt

__all__ = ["Team", "check_agents"]


class Team(nn.Module):
    """N agents. Each has its own weights, tokenizer and end tokens; nothing of one is used for another."""

    def __init__(
        self, models: Sequence[PreTrainedModel], tokenizers: Sequence[PreTrainedTokenizerBase], max_new_tokens: int
    ) -> None:
        """Raises AgentError if two agents share weights, or weights are not float32, or an agent has no end token."""
        super().__init__()
        if len(models) != len(tokenizers):
            raise AgentError(f"{len(models)} models with {len(tokenizers)} tokenizers: each agent needs one")
        _check_weights(models)
        self.agents = nn.ModuleList(models)
        self.tokenizations = [
            Tokenization(tokenizer, model, agent, max_new_tokens)
            for agent, (model, tokenizer) in enumerate(zip(models, tokenizers, strict=True))
        ]

    @classmethod
    def build(
        cls,
        agent_model: str | None = None,
        agents: Sequence[Any] | None = None,
        num_agents: int | None = None,
        tokenizer: Any = None,
        model_config: Mapping[str, Any] | None = None,
        *,
        max_new_tokens: int,
    ) -> Team:
        """A team of one base (``agent_model``, by name) or of a list of names and loaded models (``agents``).

        A name given to several agents is loaded once and copied; loaded models are trained as they are, not copied.
        """
        count = check_agents(agent_model, agents, num_agents, tokenizer, model_config)
        entries: list[Any] = list(agents) if agents is not None else [agent_model] * count
        wanted = tokenizer_entries(tokenizer, count)
        models: list[PreTrainedModel] = []
        tokenizers: list[PreTrainedTokenizerBase] = []
        loaded: dict[str, PreTrainedModel] = {}
        read: dict[str, PreTrainedTokenizerBase] = {}
        for agent, (entry, given) in enumerate(zip(entries, wanted, strict=True)):
            if not isinstance(entry, str):
                models.append(entry)
            elif entry in loaded:
                models.append(copy.deepcopy(loaded[entry]))
            else:
                loaded[entry] = load_model(entry, agent=agent, **(model_config or {}))
                models.append(loaded[entry])
            source = entry if given is None else given
            if isinstance(source, str) and source not in read:
                read[source] = load_tokenizer(source, agent=agent)
            tokenizers.append(read[source] if isinstance(source, str) else cast(PreTrainedTokenizerBase, source))
        return cls(models, tokenizers, max_new_tokens)

    def __len__(self) -> int:
        return len(self.agents)

    def model(self, agent: int) -> PreTrainedModel:
        """The agent's model."""
        return cast(PreTrainedModel, self.agents[agent])

    def encode(self, agent: int, prompt: Prompt) -> Tensor:
        """The prompt's ids, int64 [L] on the CPU. Raises PromptError if the agent cannot be given it."""
        return self.tokenizations[agent].encode(prompt)

    def decode(self, agent: int, ids: Tensor) -> str:
        """The text of the agent's ids, special tokens left out."""
        return self.tokenizations[agent].decode(ids)

    def end_ids(self, agent: int) -> tuple[int, ...]:
        """Every id that ends a completion of the agent."""
        return self.tokenizations[agent].end_ids

    def score(self, agent: int, prompt_ids: Tensor, completion_ids: Sequence[Tensor], temperature: float) -> Scored:
        """Log-probs, with gradient, of K completions of one prompt under the agent's current weights.

        Args:
            prompt_ids: int64 [P], the ids the completions were sampled after.
            completion_ids: K tensors int64 [L_k], the ids sampled, each at least one.
            temperature: the sampling temperature.
        """
        return score_rows(self.model(agent), [prompt_ids] * len(completion_ids), completion_ids, temperature)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write ``agent_0``, ``agent_1`` ...: each a model with its tokenizer, which ``from_pretrained`` loads.

        Each folder is written aside and then renamed: it is there whole or not at all.
        """
        root = Path(directory)
        root.mkdir(parents=True, exist_ok=True)
        for agent, tokenization in enumerate(self.tokenizations):
            target, fresh, old = (root / f"{prefix}agent_{agent}" for prefix in ("", ".writing-", ".replaced-"))
            for left_over in (fresh, old):
                shutil.rmtree(left_over, ignore_errors=True)
            with no_progress_bars():
                self.model(agent).save_pretrained(fresh)
            tokenization.tokenizer.save_pretrained(fresh)
            if target.exists():
                target.rename(old)
            fresh.rename(target)
            shutil.rmtree(old, ignore_errors=True)


def _check_weights(models: Sequence[PreTrainedModel]) -> None:
    owner: dict[int, int] = {}
    for agent, model in enumerate(models):
        for name, weight in model.named_parameters():
            if weight.requires_grad and weight.is_floating_point() and weight.dtype != torch.float32:
                raise AgentError(
                    f"agent {agent}: its weight {name} is {weight.dtype}, but {FLOAT32_REASON}. Load "
                    " it with dtype=torch.float32"
                )
            if owner.setdefault(id(weight), agent) != agent:
                raise AgentError(
                    f"agents {owner[id(weight)]} and {agent} share the weight {name}, so two optimizers would step it: "
                    "pass a copy.deepcopy of the model"
                )
