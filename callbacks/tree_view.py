"""One rollout tree now and then, as a page to open in a browser."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from mareinforce.callbacks.console import print_beside_progress
from mareinforce.callbacks.trackers import log_page
from mareinforce.callbacks.tree_page import TreePage, tree_page

from mareinforce.errors import ConfigError
from mareinforce.whole_files import write_whole

FOLDER = "trees"


class TreeView(L.Callback):
    """Writes one rollout tree, every so often, as a page of its own: `trees/step_000000020.html` in the run folder.

    The page has the nodes with their prompts, every agent's texts, rewards, returns and advantages, and which branches
    were stopped; it needs nothing from elsewhere. It is also sent to Weights & Biases or TensorBoard, where they are
    among the loggers. In a notebook the callback itself, as the last line of a cell, shows the last tree.

    Args:
        every_n_env_steps: show the first tree of the first batch, and of the batch in which as many steps have passed
            since.
        keep_last: how many pages are kept.
        console: print the tree as text too.

    Raises:
        ConfigError: a number below 1.
    """

    def __init__(self, every_n_env_steps: int = 1000, keep_last: int = 20, console: bool = False) -> None:
        for name, number in {"every_n_env_steps": every_n_env_steps, "keep_last": keep_last}.items():
            if number < 1:
                raise ConfigError(f"TreeView {name}={number}: must be at least 1.")
        self.every_n_env_steps, self.keep_last, self.console = every_n_env_steps, keep_last, console
        self.page: TreePage | None = None
        """The last tree shown."""
        self._shown_at: int | None = None  # environment step
        self._folder: Path | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Find the folder: asked on every rank, since it is rank 0's."""
        folder = Path(trainer.log_dir or trainer.default_root_dir) / FOLDER
        self._folder = folder if trainer.is_global_zero else None
        if pl_module.env_step == 0:
            self._shown_at = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Show the batch's first tree, if it is time."""
        step = pl_module.env_step
        if self._shown_at is not None and step - self._shown_at < self.every_n_env_steps:
            return
        if self._folder is None or not outputs["trees"]:
            return
        self._shown_at = step
        self.page = page = tree_page(outputs["trees"][0], outputs["samples"])
        write_whole(self._folder / f"step_{step:09d}.html", page.document())
        for old in sorted(self._folder.glob("step_*.html"))[: -self.keep_last]:
            old.unlink()
        if self.console:
            print_beside_progress(trainer, _printable(str(page)))
        log_page(trainer.loggers, "tree", page.document(), str(page), step)

    def state_dict(self) -> dict[str, Any]:
        """When it last showed a tree."""
        return {"shown_at": self._shown_at}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        self._shown_at = state_dict["shown_at"]

    def _repr_html_(self) -> str:
        return "<p>no tree yet</p>" if self.page is None else self.page.html

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython shows where there is no HTML."""
        printer.text("no tree yet" if self.page is None else self.page.text)


def _printable(text: str) -> str:
    """The text with `?` for what the output cannot show."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)
