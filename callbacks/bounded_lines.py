"""Files of JSON lines that stay bounded in size, and lose nothing when a run is killed and goes on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn

from mareinforce.errors import ConfigError, MareinforceWarning
from mareinforce.rollout_table import older_file, whole_lines


class BoundedLines:
    """A file of lines and the full one before it, neither of them above `max_bytes`.

    Args:
        path: the file.
        max_bytes: when it would grow beyond this, it takes the place of the older one.
        owner: the callback whose file it is, for its words.
    """

    def __init__(self, path: Path, max_bytes: int, owner: str) -> None:
        self.path, self.older, self.max_bytes, self.owner = path, older_file(path), max_bytes, owner
        self._warned = False

    def append(self, lines: Sequence[bytes]) -> None:
        """Add whole lines, in one write where they fit. A line that fits into no file is left out, with a warning."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        size, block = self.path.stat().st_size if self.path.exists() else 0, b""
        for line in lines:
            if len(line) > self.max_bytes:
                self._warn_once(len(line))
                continue
            if size + len(block) + len(line) > self.max_bytes:
                self._write(block)
                os.replace(self.path, self.older)
                size, block = 0, b""
            block += line
        self._write(block)

    def go_on_from(self, env_step: int) -> None:
        """Leave no line of a later step, and no line half written.

        If none is left in the file, it was begun after that step, when the older one was the file: it is again.

        Raises:
            ConfigError: nothing has been trained yet, and there are lines all the same.
        """
        files = [file for file in (self.path, self.older) if file.exists()]
        if files and env_step == 0:
            raise ConfigError(
                f"{files[0]} holds the lines of another run, and this one starts anew: move it away, or train in "
                f"another folder."
            )
        for file in files:
            _cut(file, env_step)
        if self.older.exists() and not self.path.exists():
            os.replace(self.older, self.path)

    def _write(self, block: bytes) -> None:
        if block:
            with self.path.open("ab") as file:  # closed, so flushed, batch by batch
                file.write(block)

    def _warn_once(self, size: int) -> None:
        if not self._warned:
            rank_zero_warn(
                f"{self.owner} max_bytes={self.max_bytes}: a line has {size} bytes, more than a file may have, and is "
                f"left out, as all such lines will be. Set max_bytes above that.",
                category=MareinforceWarning,
            )
        self._warned = True


def _cut(file: Path, env_step: int) -> None:
    """Keep the whole lines up to a step; the file is replaced in one move, or removed if no line is left."""
    aside = file.with_name(f".{file.name}.part")
    with aside.open("wb") as kept:
        kept.writelines(line for line, record in whole_lines(file) if record["env_step"] <= env_step)
    if aside.stat().st_size:
        os.replace(aside, file)
    else:
        file.unlink()
        aside.unlink()
