"""Multi-agent REINFORCE for cooperating language models. Public names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mareinforce.config import MAGRPOConfig, MAREINFORCEConfig, MAReMaxConfig, MARLOOConfig
    from mareinforce.data.datamodule import RowsDataModule
    from mareinforce.errors import MareinforceError, MareinforceWarning
    from mareinforce.module import MultiAgentReinforce
    from mareinforce.rewards.processors import RewardProcessors
    from mareinforce.rollout_table import read_rollouts
    from mareinforce.trainers.reinforce import MAGRPOTrainer, MAREINFORCETrainer, MAReMaxTrainer, MARLOOTrainer

__version__ = "0.1.0"

_HOMES = {
    "MAGRPOConfig": "config",
    "MAREINFORCEConfig": "config",
    "MAReMaxConfig": "config",
    "MARLOOConfig": "config",
    "MareinforceError": "errors",
    "MareinforceWarning": "errors",
    "MultiAgentReinforce": "module",
    "RewardProcessors": "rewards.processors",
    "read_rollouts": "rollout_table",
    "RowsDataModule": "data.datamodule",
    "MAGRPOTrainer": "trainers.reinforce",
    "MAREINFORCETrainer": "trainers.reinforce",
    "MAReMaxTrainer": "trainers.reinforce",
    "MARLOOTrainer": "trainers.reinforce",
}

__all__ = [
    "MAGRPOConfig",
    "MAGRPOTrainer",
    "MAREINFORCEConfig",
    "MAREINFORCETrainer",
    "MARLOOConfig",
    "MARLOOTrainer",
    "MAReMaxConfig",
    "MAReMaxTrainer",
    "MareinforceError",
    "MareinforceWarning",
    "MultiAgentReinforce",
    "RewardProcessors",
    "RowsDataModule",
    "read_rollouts",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mareinforce' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mareinforce.{_HOMES[name]}"), name)
