"""Pictures, tables and pages for Weights & Biases and for TensorBoard, where they are among a run's loggers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger


def log_picture(loggers: Sequence[Any], key: str, picture: Path, step: int) -> None:
    """Send a PNG."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.log_image(key, [str(picture)], step=step)
        elif isinstance(logger, TensorBoardLogger):
            from matplotlib.image import imread

            logger.experiment.add_image(key, imread(picture), step, dataformats="HWC")


def log_table(
    loggers: Sequence[Any], key: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
) -> None:
    """Send a whole table, in place of what was sent before under the key."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.log_table(key, columns=list(columns), data=[list(row) for row in rows], step=step)
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(key, markdown_table(columns, rows), step)


def log_page(loggers: Sequence[Any], key: str, page: str, text: str, step: int) -> None:
    """Send a page of HTML, or its text where no page can be shown."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            logger.log_metrics({key: wandb.Html(page, inject=False)}, step=step)  # type: ignore[dict-item]
        elif isinstance(logger, TensorBoardLogger):
            indented = "\n".join(f"    {line}" for line in text.split("\n"))  # Markdown's way to leave text as it is
            logger.experiment.add_text(key, indented, step)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown; what would break a cell is escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(_cell(value) for value in line)} |" for line in lines)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")
