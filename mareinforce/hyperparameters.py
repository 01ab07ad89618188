"""What every logger is told of a run's configuration: all of it but secrets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "(hidden)"
_SECRET_NAMES = re.compile(
    r"(?i)(api_?key|secret|passw(or)?d|credential|authorization|^((hf|hub|auth|access|api|use_auth)_?)?token$)"
)
_SECRET_VALUES = re.compile(r"\b(hf_|sk-|ghp_|github_pat_|xox[abp]-)[\w-]{10,}|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")


def log_hyperparameters(loggers: Iterable[Any], configuration: Mapping[str, Any]) -> None:
    """Tell every logger, without secrets."""
    for logger in loggers:
        logger.log_hyperparams(without_secrets(configuration))


def without_secrets(value: Any) -> Any:
    """A copy without the texts of keys that are named like secrets, and without texts that look like one."""
    if isinstance(value, Mapping):
        return {
            name: HIDDEN if isinstance(inner, str) and _SECRET_NAMES.search(str(name)) else without_secrets(inner)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_secrets(inner) for inner in value]
    return _SECRET_VALUES.sub(HIDDEN, value) if isinstance(value, str) else value
