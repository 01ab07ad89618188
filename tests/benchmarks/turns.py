"""Two processes that take turns: each has the machine for itself, and counts the seconds for which it had it."""

from __future__ import annotations

import contextlib
import os
import time


class Turns:
    """One end of two pipes; a byte is the word to go on."""

    ENOUGH = 65536  # a pipe's usual capacity; for a partner that goes on alone

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self.seconds: list[float] = []
        """Of each turn."""
        self._began = 0.0

    def take(self) -> None:
        """Wait for one's turn."""
        os.read(self._read, 1)
        self._began = time.perf_counter()

    def give(self, words: int = 1) -> None:
        """Let the other go on."""
        self.seconds.append(time.perf_counter() - self._began)
        with contextlib.suppress(BrokenPipeError):  # it has ended
            os.write(self._write, b"." * words)

    def leave(self) -> None:
        """Let the other go on to its end."""
        os.set_blocking(self._write, False)
        self.give(self.ENOUGH)


OF_THIS_PROCESS: list[Turns] = []
"""One, in a process that takes turns."""
