"""Ready-made reward processors. Each is called with one reward and returns what is used in its place.

They are plain objects, so that they pickle, and can be named in YAML::

    reward_processor: {class_path: mareinforce.rewards.Scale, init_args: {factor: 100}}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mareinforce.errors import ConfigError


@dataclass(frozen=True)
class Scale:
    """Multiplies a reward by ``factor``. With normalised advantages this cancels."""

    factor: float | int = 1.0

    def __post_init__(self) -> None:
        _require_finite("Scale", "factor", self.factor)

    def __call__(self, reward: float) -> float:
        return reward * self.factor


@dataclass(frozen=True)
class Shift:
    """Adds ``value`` to a reward. With centred advantages this cancels; early termination sees the shifted reward."""

    value: float | int = 0.0

    def __post_init__(self) -> None:
        _require_finite("Shift", "value", self.value)

    def __call__(self, reward: float) -> float:
        return reward + self.value


@dataclass(frozen=True)
class Chain:
    """Applies processors one after the other, the first one first."""

    processors: Sequence[Callable[[float], float]]

    def __call__(self, reward: float) -> float:
        for processor in self.processors:
            reward = processor(reward)
        return reward


class RewardProcessors:
    """Makes the ready-made processors."""

    @staticmethod
    def scale(factor: float | int = 1.0) -> Scale:
        """Reward times ``factor``."""
        return Scale(factor)

    @staticmethod
    def shift(value: float | int = 0.0) -> Shift:
        """Reward plus ``value``."""
        return Shift(value)

    @staticmethod
    def chain(*processors: Callable[[float], float]) -> Chain:
        """Each of ``processors`` on what the one before it made."""
        return Chain(processors)


def _require_finite(owner: str, field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, float | int) or not math.isfinite(value):
        raise ConfigError(f"{owner}({field}={value!r}): {field} must be a finite number, e.g. {owner}({field}=2.0).")
