"""What a user says about LoRA: the settings of an agent's adapter, checked before anything loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mareinforce.errors import ConfigError, did_you_mean


@dataclass
class LoRA:
    """An agent's low-rank adapter (Hu et al. 2021); every field is that of `peft.LoraConfig`."""

    r: int = 16
    """Rank."""
    lora_alpha: float = 32
    """The adapter's output is scaled by lora_alpha / r."""
    target_modules: str | list[str] = "all-linear"
    """Names of the layers that get an adapter; all-linear: every linear layer but the output embedding."""
    exclude_modules: str | list[str] | None = None
    """Names of layers that get none."""
    lora_dropout: float = 0.0
    """Has no effect here: dropout is off both when sampling and when scoring."""
    bias: str = "none"
    """Only none: biases belong to the base, which agents share."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r) instead."""
    use_dora: bool = False
    """Weight-decomposed adapters; agents that use it are sampled one after the other."""
    init_lora_weights: bool | str = True
    """true or gaussian: how the first matrix begins; the second begins at 0, so that the agent begins as its base."""
    modules_to_save: list[str] | None = None
    """Layers trained whole, a copy an agent."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that cannot work."""
        if isinstance(self.r, bool) or not isinstance(self.r, int) or self.r < 1:
            raise ConfigError(f"lora.r={self.r!r}: must be a whole number of at least 1.")
        if isinstance(self.lora_alpha, bool) or not isinstance(self.lora_alpha, int | float) or self.lora_alpha <= 0:
            raise ConfigError(f"lora.lora_alpha={self.lora_alpha!r}: must be a number above 0.")
        if isinstance(self.lora_dropout, bool) or not isinstance(self.lora_dropout, int | float):
            raise ConfigError(f"lora.lora_dropout={self.lora_dropout!r}: must be a number from 0 to below 1.")
        if not 0 <= self.lora_dropout < 1:
            raise ConfigError(f"lora.lora_dropout={self.lora_dropout!r}: must be a number from 0 to below 1.")
        for name in ("target_modules", "exclude_modules", "modules_to_save"):
            value = getattr(self, name)
            fits = value is None or isinstance(value, str) or _are_names(value)
            if not fits or (name == "target_modules" and not value) or (name == "modules_to_save" and value == "all"):
                raise ConfigError(f"lora.{name}={value!r}: must be a name, or a list of names, of layers.")
        if isinstance(self.modules_to_save, str):
            self.modules_to_save = [self.modules_to_save]
        if self.bias != "none":
            raise ConfigError(
                f"lora.bias={self.bias!r}: biases belong to the base, which agents share; set it to none."
            )
        if self.init_lora_weights not in (True, "gaussian"):
            raise ConfigError(
                f"lora.init_lora_weights={self.init_lora_weights!r}: an agent must begin as its base, which agents "
                "share and which stays as it is; set it to true or gaussian."
            )


def lora_settings(lora: Any, num_agents: int) -> list[LoRA | None]:
    """One setting an agent (None: no adapter), from None, one for all, or a list. Raises ConfigError."""
    if isinstance(lora, Sequence) and not isinstance(lora, str):
        if len(lora) != num_agents:
            raise ConfigError(
                f"lora lists {len(lora)} for {num_agents} agents: give one for all, or one an agent (null: the agent "
                "has no adapter)."
            )
        return [_setting(entry, f"lora[{index}]") for index, entry in enumerate(lora)]
    setting = _setting(lora, "lora")
    return [setting] * num_agents


def _setting(value: Any, name: str) -> LoRA | None:
    if value is None or isinstance(value, LoRA):
        return value
    if type(value).__name__ == "LoraConfig" and dataclasses.is_dataclass(value):  # peft's own
        ours = {field.name for field in dataclasses.fields(LoRA)}
        given = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.name in ours}
        given = {key: sorted(item) if isinstance(item, set) else item for key, item in given.items()}
        return LoRA(**{key: item for key, item in given.items() if not (key == "target_modules" and item is None)})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value!r}: must map names to values, such as {{r: 16, lora_alpha: 32}}.")
    known = [field.name for field in dataclasses.fields(LoRA)]
    for key in value:
        if key not in known:
            raise ConfigError(
                f"{name}.{key}: unknown, must be one of {', '.join(known)}.{did_you_mean(str(key), known)}"
            )
    return LoRA(**value)


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) and name for name in value)
