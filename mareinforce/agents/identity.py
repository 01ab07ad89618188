"""What a team is, in a few lines: kept in checkpoints, so that one of another team is refused in words."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from mareinforce.agents import adapters
from mareinforce.agents.adapters import inner_model
from mareinforce.agents.team import Team
from mareinforce.errors import ConfigError

PROBED = 64
"""Numbers looked at in each frozen tensor."""


def describe(team: Team) -> list[dict[str, str]]:
    """One record an agent: its architecture, how it learns, and a digest of the frozen weights under it."""
    policies = {agent: policy for policy in team.policies for agent in policy.agents}
    return [_describe_agent(team, agent, agent in policies) for agent in range(len(team))]


def check_same_team(saved: list[dict[str, str]], here: list[dict[str, str]]) -> None:
    """Raises ConfigError naming the first difference between a checkpoint's team and this one."""
    if len(saved) != len(here):
        raise ConfigError(f"the checkpoint is of {len(saved)} agents, but this team has {len(here)}.")
    for agent, (before, now) in enumerate(zip(saved, here, strict=True)):
        for what in sorted(before.keys() | now.keys()):
            if before.get(what) != now.get(what):
                raise ConfigError(
                    f"the checkpoint is of another team: agent {agent} had {what} {before.get(what)!r}, and here "
                    f"has {now.get(what)!r}. Give the agents, adapters and bases that it was trained with."
                )


def check_weights_are_there(team: Team, state: Mapping[str, Tensor], prefix: str) -> None:
    """Raises ConfigError unless the state holds exactly the trained weights of the team, in their shapes."""
    shapes = {name: weight.shape for name, weight in team.state_dict().items()}
    wanted = {prefix + name: shapes[name] for name in team.trained_state()}
    for name, shape in wanted.items():
        if name not in state or state[name].shape != shape:
            found = "not there" if name not in state else f"of shape {tuple(state[name].shape)}"
            raise ConfigError(f"the checkpoint is not whole: {name}, of shape {tuple(shape)}, is {found}.")
    foreign = sorted(state.keys() - wanted.keys())
    if foreign:
        raise ConfigError(f"the checkpoint holds weights that this team does not train: {', '.join(foreign[:3])}.")


def digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """A short name of weights: of their names, shapes, types and evenly spaced values."""
    hashed = hashlib.blake2b(digest_size=8)
    for name, weight in sorted(weights):
        hashed.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        values = weight.detach().flatten()[:: max(1, weight.numel() // PROBED)]
        hashed.update(values.to("cpu", torch.float64).numpy().tobytes())
    return hashed.hexdigest()


def _describe_agent(team: Team, agent: int, learns: bool) -> dict[str, str]:
    network, adapter = team.network(agent), team.seats[agent].adapter
    model: Any = inner_model(network)
    record = {"architecture": type(model).__name__, "training": "none" if not learns else "whole"}
    if isinstance(network, PeftModel):
        record["base"] = digest(adapters.base_weights(network).items())
        if adapter is not None:
            config: Any = network.peft_config[adapter]
            scaled = " use_rslora" if config.use_rslora else ""
            record["adapter"] = f"r={config.r} lora_alpha={config.lora_alpha}{scaled}"
            record["training"] = "adapter" if learns else "none"
            if not learns:
                record["frozen adapter"] = digest(adapters.adapter_weights(network, adapter).items())
    elif not learns:
        record["base"] = digest(model.named_parameters())
    if agent in team.references:
        record["reference"] = _describe_reference(team, agent)
    return record


def _describe_reference(team: Team, agent: int) -> str:
    seat = team.references[agent]
    if seat.adapter is not None:
        return digest(adapters.adapter_weights(team.networks[seat.network], seat.adapter).items())
    if team.seats[agent].adapter is not None:
        return "base"
    return digest(team.frozen[seat.network].named_parameters())
