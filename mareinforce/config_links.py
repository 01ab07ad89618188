"""Which keys of the YAML set which fields of `model.config`, and what happens if both are given."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.cli import LightningArgumentParser

from mareinforce.config import ALGORITHMS
from mareinforce.errors import ConfigError


def link_arguments(parser: LightningArgumentParser) -> None:
    """Let `model.algorithm` and the number of agents set their twins in `model.config`."""
    parser.link_arguments("model.algorithm", "model.config.advantage_mode", compute_fn=ALGORITHMS.__getitem__)
    parser.link_arguments(("model.num_agents", "model.agents"), "model.config.num_agents", compute_fn=team_size)


def team_size(num_agents: int, agents: list[str] | None) -> int:
    """The number of agents: that of the list, if there is one."""
    return len(agents) if agents else num_agents


def check_twins(model: dict[str, Any]) -> None:
    """Refuse a twin that contradicts what sets it. ``model``: what was given under `model`, without defaults.

    Raises ConfigError naming both keys.
    """
    config, agents = model.get("config") or {}, model.get("agents")
    algorithm, num_agents = model.get("algorithm", "magrpo"), model.get("num_agents", team_size(2, agents))
    if agents and num_agents != len(agents):
        raise ConfigError(
            f"model.num_agents={num_agents}, but model.agents lists {len(agents)}: leave model.num_agents out."
        )
    if config.get("num_agents", num_agents) != num_agents:
        raise ConfigError(
            f"model.config.num_agents={config['num_agents']}, but model.num_agents={num_agents}, which sets it: give "
            f"model.num_agents instead."
        )
    mode = config.get("advantage_mode", ALGORITHMS[algorithm])
    if mode != ALGORITHMS[algorithm]:
        fitting = next(name for name, its_mode in ALGORITHMS.items() if its_mode == mode)
        raise ConfigError(
            f"model.config.advantage_mode={mode!r} contradicts model.algorithm={algorithm!r}, which sets it: give "
            f"model.algorithm: {fitting} instead."
        )
