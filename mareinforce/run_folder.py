"""A new numbered folder for every run, and for every evaluation that writes files."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mareinforce.errors import ConfigError

_OF_RANK_0 = "MAREINFORCE_RUN_FOLDER"
CONFIG_FILE = "config.yaml"


def new_run_folder(parent: str | os.PathLike[str], kind: str = "run") -> Path:
    """Make and return the next `run_0001`, `run_0002` ... below `parent` (or of another kind), one above the highest.

    Making a folder is atomic: of two processes at once each gets its own. Raises ConfigError if none can be made.
    """
    parent = Path(parent)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        number = 1 + max((run_number(entry, kind) for entry in parent.iterdir()), default=0)
        while True:
            folder = parent / f"{kind}_{number:04d}"
            try:
                folder.mkdir()
            except FileExistsError:
                number += 1
            else:
                return folder
    except OSError as error:
        raise ConfigError(
            f"default_root_dir={str(parent)!r}: no folder for a run can be made there ({error.strerror}); give one "
            "that can be written to."
        ) from error


def rank_by_environment() -> int:
    """The rank that torchrun, SLURM or Lightning has given this process, before processes are connected; 0 if none.

    Of a machine that is not the first (`NODE_RANK`) it is above 0, whatever it will be.
    """
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        if name in os.environ and int(os.environ[name]) > 0:
            return int(os.environ[name])
    return 0 if "RANK" in os.environ else int(os.environ.get("NODE_RANK", 0))


def run_folder_of_rank(parent: str | os.PathLike[str]) -> Path:
    """The run folder of this process: a new one on rank 0, and on the ranks that it starts the same.

    A rank that another program has started is told when processes are connected; until then it is given `parent`.
    """
    if rank_by_environment() > 0:
        return Path(os.environ.get(_OF_RANK_0, parent))
    folder = new_run_folder(parent)
    os.environ[_OF_RANK_0] = str(folder)  # inherited by the processes that rank 0 starts
    return folder


def discard_if_nothing_came(folder: Path) -> bool:
    """Remove a run folder with a config.yaml at most: its run was refused, or failed before anything was logged.

    Returns whether it was removed.
    """
    if not folder.is_dir():
        return False
    entries = list(folder.iterdir())
    empty = [entry for entry in entries if entry.is_dir() and not any(entry.iterdir())]
    if not {entry.name for entry in entries if entry not in empty} <= {CONFIG_FILE}:
        return False
    for entry in empty:  # made ready for checkpoints
        entry.rmdir()
    (folder / CONFIG_FILE).unlink(missing_ok=True)
    folder.rmdir()
    return True


def run_number(folder: Path, kind: str = "run") -> int:
    """The number in a run folder's name, 0 for any other name."""
    found = re.fullmatch(rf"{kind}_(\d+)", folder.name)
    return int(found[1]) if found else 0
