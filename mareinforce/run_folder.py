"""A new numbered folder for every run."""

from __future__ import annotations

import os
import re
from pathlib import Path

_NUMBERED = re.compile(r"run_(\d+)")


def new_run_folder(parent: str | os.PathLike[str]) -> Path:
    """Make and return the next `run_0001`, `run_0002` ... below `parent`, one above the highest number there.

    Making a folder is atomic: of two processes at once each gets its own.
    """
    parent = Path(parent)
    parent.mkdir(parents=True, exist_ok=True)
    number = 1 + max((run_number(entry) for entry in parent.iterdir()), default=0)
    while True:
        folder = parent / f"run_{number:04d}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def run_number(folder: Path) -> int:
    """The number in a run folder's name, 0 for any other name."""
    found = _NUMBERED.fullmatch(folder.name)
    return int(found[1]) if found else 0
