"""Bases in folders, and what tests look at in teams of adapters on them.

Imported by tests as ``tests.lora``.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from mareinforce.agents.adapters import adapter_weights, belongs_to, inner_model
from mareinforce.agents.team import Team
from tests.models import llama_model, word_tokenizer

LORA = {"r": 2, "lora_alpha": 8}
IDS = torch.tensor([[5, 6, 7, 8]])
PROMPT, COMPLETIONS = torch.tensor([4, 5]), [torch.tensor([6, 7, 8]), torch.tensor([9, 10])]


def save_base(folder: Path, model: Any = None) -> str:
    """A folder with a model and its tokenizer."""
    words = word_tokenizer()
    (model or llama_model(len(words))).save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)


def wrap(model: Any, config: PeftConfig, name: str = "default") -> PeftModel:
    """What a user makes with peft, which itself asks transformers for a name that is no more."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        return get_peft_model(model, config, adapter_name=name)


def plain(name: str) -> str:
    """The name of a base's weight before there were adapters."""
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def base_weights(network: nn.Module) -> dict[str, Tensor]:
    """What is no adapter's, by the names of the plain model."""
    named = inner_model(network).named_parameters()
    return {plain(name): weight.detach() for name, weight in named if not belongs_to(name)}


def is_untouched(network: nn.Module, folder: str) -> bool:
    """Is every bit of the base as it lies in the folder?"""
    loaded = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    found = base_weights(network)
    return found.keys() == loaded.keys() and all(torch.equal(found[name], weight) for name, weight in loaded.items())


def adapter_of(team: Team, agent: int) -> dict[str, Tensor]:
    """A copy of an agent's adapter."""
    weights = adapter_weights(team.network(agent), team.seats[agent].adapter)
    return {name: weight.detach().clone() for name, weight in weights.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Equal names and equal bits?"""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def stir(network: nn.Module, seed: int = 0) -> None:
    """Give every adapter weights of its own: fresh ones answer as their base."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if belongs_to(name):
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))


@torch.no_grad()
def logits(team: Team, agent: int, ids: Tensor = IDS) -> Tensor:
    """What an agent's model says of these ids, dropout off."""
    with team.speaking(agent) as model:
        training = model.training
        found = model.eval()(ids).logits
        model.train(training)
    return found


def wrap_lora(model: Any, seed: int = 0, name: str = "default", **settings: Any) -> PeftModel:
    """LoRA on some layers, with weights of its own."""
    torch.manual_seed(seed)
    linear = ["c_attn", "c_proj"] if hasattr(model, "transformer") else ["q_proj", "v_proj"]
    settings = {"r": 2, "target_modules": linear, "fan_in_fan_out": hasattr(model, "transformer"), **settings}
    made = wrap(model, LoraConfig(task_type="CAUSAL_LM", **settings), name)
    stir(made, seed)
    return made


def sgd_step(team: Team, agent: int, rate: float = 0.1) -> None:
    """One step on everything that the agent's policy trains."""
    (policy,) = [policy for policy in team.policies if agent in policy.agents]
    team.zero_grad()
    team.score(agent, PROMPT, COMPLETIONS, 1.0).logprobs.sum().backward()
    torch.optim.SGD(team.weights(policy).values(), lr=rate).step()
