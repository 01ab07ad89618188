"""Where agents are placed: devices named by the user, checked before anything loads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mareinforce.errors import ConfigError


def agent_places(devices: str | Sequence[str] | None, num_agents: int, field: str) -> list[torch.device] | None:
    """One device an agent from None, one for all, or a list.

    Raises:
        ConfigError: for a list of another length, a name that is no device, or a device that this machine lacks.
    """
    if devices is None:
        return None
    names = [devices] * num_agents if isinstance(devices, str) else list(devices)
    if len(names) != num_agents:
        raise ConfigError(f"{field} lists {len(names)} for {num_agents} agents: give one for all, or one an agent.")
    return [_device(name, field) for name in names]


def _device(name: str, field: str) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{field}={name!r}: is no device; such as cpu, cuda:0 or mps.") from error
    if device.type == "cpu":
        return device
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type != device.type:
        here = "cpu only" if accelerator is None else f"cpu and {accelerator.type}"
        raise ConfigError(f"{field}={name!r}: this machine has no such device ({here}).")
    count = torch.accelerator.device_count()
    if device.index is not None and device.index >= count:
        raise ConfigError(f"{field}={name!r}: this machine has {count} {device.type} device(s), numbered from 0.")
    return torch.device(device.type, device.index or 0)
