"""Text files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write beside the place and move there in one step, over what may be there. Makes the folder if it is missing."""
    aside = path.with_name(f".{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside.write_text(text, encoding="utf-8", newline="")
    os.replace(aside, path)
