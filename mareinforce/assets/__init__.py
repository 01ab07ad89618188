"""What comes with the package: a tiny story model and small sets of prompts."""

from __future__ import annotations

from pathlib import Path

ASSETS = Path(__file__).parent

EMBEDDED_MODELS = ("tiny-story",)
EMBEDDED_DATA = ("story-prompts", "creative-prompts", "posts")


def embedded_model(name: str) -> Path:
    """The folder of an embedded model, as `from_pretrained` reads it."""
    return ASSETS / name.replace("-", "_")


def embedded_data(name: str) -> dict[str, Path]:
    """The files of an embedded data set, by split."""
    stem = name.replace("-", "_")
    return {file.stem.removeprefix(f"{stem}_"): file for file in sorted(ASSETS.glob(f"{stem}_*.jsonl"))}
