"""`config.yaml` of a run from Python: in the keys of the command line, as far as things have names."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import yaml

from mareinforce.hyperparameters import log_hyperparameters
from mareinforce.run_folder import CONFIG_FILE
from mareinforce.whole_files import write_whole

_ABOVE = """\
# Written by {trainer}. What stands in <...> has no name that it could be found by: put a dotted path or a source in its
# place to run this file from the command line.
"""


class WriteRunConfig(L.Callback):
    """Writes `config.yaml` into the run folder, and tells every logger what is in it, without secrets.

    Args:
        configuration: what the run was made of, by the keys of the command line.
        trainer_name: who wrote it.
    """

    def __init__(self, configuration: Mapping[str, Any], trainer_name: str) -> None:
        self._configuration, self._trainer_name = named(configuration), trainer_name

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero:
            assert trainer.log_dir is not None
            text = yaml.safe_dump(self._configuration, sort_keys=False, allow_unicode=True)
            above = _ABOVE.format(trainer=self._trainer_name)
            write_whole(Path(trainer.log_dir) / CONFIG_FILE, above + text)
            log_hyperparameters(trainer.loggers, self._configuration)


def named(value: Any) -> Any:
    """A copy made of what YAML can hold: functions and classes by their dotted paths, all else as `<what it is>`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): named(inner) for key, inner in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: named(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [named(inner) for inner in value]
    name = getattr(value, "__name__", type(value).__qualname__)
    return dotted_path(value) or f"<{name.strip('<>')}>"


def rows_named(source: Any) -> Any:
    """Where rows come from; rows that were given as such are only counted."""
    if source is None or isinstance(source, str | Mapping) or dataclasses.is_dataclass(source):
        return named(source)
    count = f" of {len(source)} rows" if hasattr(source, "__len__") else ""
    return f"<{type(source).__qualname__}{count}>"


def dotted_path(thing: Any) -> str | None:
    """`my_task.reward`, if importing that gives this very thing in another process too; else None."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not module or not name or module == "__main__" or "<" in name:
        return None
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}.{name}" if found is thing else None
