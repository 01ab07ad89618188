"""Text for a console that a progress bar may be in."""

from __future__ import annotations

import io
import shutil
from typing import Any, TextIO

WIDTH = 120
"""Characters in a line where the output is no terminal."""


def rendered(content: Any, out: TextIO) -> str:
    """What `rich` makes of it for an output: as wide as the terminal and coloured, or 120 wide and plain."""
    from rich.console import Console

    terminal = out.isatty()
    width = shutil.get_terminal_size().columns if terminal else WIDTH
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal)
    with console.capture() as captured:
        console.print(content)
    return captured.get().rstrip("\n")


def print_beside_progress(trainer: Any, text: str) -> None:
    """Print without breaking the progress bar, if there is one."""
    bar = trainer.progress_bar_callback
    if bar is not None and getattr(bar, "is_enabled", True):
        bar.print(text)
    else:
        print(text)
