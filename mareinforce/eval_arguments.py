"""`--run`, `--agents` and `--replace` of the evaluate command, turned into keys of the configuration."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from mareinforce.errors import ConfigError

_ROLE = re.compile(r"agent_(\d+)=(.+)", re.DOTALL)
_ONLY_FOR_TRAINING = {
    "model.agent_model": "null",
    "model.lora": "null",
    "model.share_policy": "false",
    "model.tokenizer": "null",
    "model.trainable": "null",
    "model.config.reference_kl_enabled": "false",
    "model.config.reference": "null",
    "model.config.reference_devices": "null",
}
"""What a configuration may say of agents that are now given one by one, and of references, which only training has."""


def configuration_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments as the configuration's parser takes them.

    ``--run RUN`` stands for the run's config.yaml with the agents it saved. ``--agents A B ...`` puts other agents in
    their places, ``--replace agent_1=NAME`` another one in one of them.

    Raises:
        ConfigError: a run without a configuration or agents, an agent that there is not, or one named in two ways.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--run")
    parser.add_argument("--agents", nargs="+")
    parser.add_argument("--replace", nargs="+", default=[])
    known, rest = parser.parse_known_args(list(arguments))
    if known.run is None and known.agents is None and not known.replace:
        return rest
    if any(argument.split("=")[0] == "--ckpt_path" for argument in rest):
        raise ConfigError("--ckpt_path with --run, --agents or --replace: a checkpoint has its own agents.")
    config, agents = [], known.agents
    if known.run is not None:
        folder = Path(known.run)
        if not (folder / "config.yaml").is_file():
            raise ConfigError(f"--run {known.run}: there is no config.yaml in it; give the folder of a run.")
        config = ["--config", str(folder / "config.yaml")]
        agents = agents or _saved_agents(folder)
    if known.replace:
        agents = _replaced(agents, known.replace)
    assert agents is not None
    overrides = [f"--{key}={value}" for key, value in _ONLY_FOR_TRAINING.items()]
    return [*config, *rest, *overrides, f"--model.num_agents={len(agents)}", f"--model.agents={json.dumps(agents)}"]


def _saved_agents(run: Path) -> list[str]:
    folders = sorted((run / "agents").glob("agent_*"), key=lambda folder: int(folder.name.split("_")[1]))
    if not folders:
        raise ConfigError(f"--run {run}: it has no agents/agent_0 ... yet; give --config and --ckpt_path.")
    return [str(folder) for folder in folders]


def _replaced(agents: list[str] | None, replacements: Sequence[str]) -> list[str]:
    if agents is None:
        raise ConfigError("--replace needs --run or --agents, which say who the other agents are.")
    changed = list(agents)
    for text in replacements:
        found = _ROLE.fullmatch(text)
        if found is None:
            raise ConfigError(f"--replace {text}: must be agent_I=NAME, such as agent_1=tiny-story.")
        if int(found[1]) >= len(agents):
            raise ConfigError(f"--replace {text}: there are {len(agents)} agents, agent_0 to agent_{len(agents) - 1}.")
        changed[int(found[1])] = found[2]
    return changed
