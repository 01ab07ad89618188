"""Text for a console that a progress bar may be in."""

from __future__ import annotations

import io
import os
import shutil
from typing import Any, TextIO

WIDTH = 120
"""Characters in a line where the output is no terminal and COLUMNS is not set."""


def rendered(content: Any, out: TextIO) -> str:
    """What `rich` makes of it for an output: as wide as the terminal and coloured, or plain and 120 (COLUMNS) wide."""
    from rich.console import Console

    terminal = out.isatty()
    width = shutil.get_terminal_size().columns if terminal or _columns() else WIDTH
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal)
    with console.capture() as captured:
        console.print(content)
    return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))


def _columns() -> bool:
    return os.environ.get("COLUMNS", "").isdigit()


def print_beside_progress(trainer: Any, text: str) -> None:
    """Print without breaking the progress bar, if there is one."""
    bar = trainer.progress_bar_callback
    if bar is not None and getattr(bar, "is_enabled", True):
        from rich.text import Text

        bar.print(Text.from_ansi(text))  # not as a string, in which rich would look for its own tags
    else:
        print(text)
