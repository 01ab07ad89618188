"""Checkpoint files: written whole or not at all, found again, and refused if they are not ours."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from mareinforce.errors import CheckpointError, ConfigError

FOLDER = "checkpoints"
PART = ".part"


class WholeCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint beside its place, straight to the disk, and moves it there when it is whole.

    Lightning's own way holds the file twice in memory, and leaves it in the system's temporary folder if it is killed.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write it. Raises CheckpointError, with nothing of it left, if the disk does not take it."""
        place = Path(path)
        aside = place.with_name(f".{place.name}{PART}")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())  # the name must not be on the disk before what it names
            os.replace(aside, place)
        except (OSError, RuntimeError) as error:  # torch has the second for a disk that is full
            aside.unlink(missing_ok=True)
            raise CheckpointError(
                f"the checkpoint {place} could not be written ({error}). Those written before are whole: make room, "
                "and go on from the last of them."
            ) from error


def make_ready(folder: Path) -> None:
    """Make a folder for checkpoints and try to write there. Raises ConfigError if that cannot be done."""
    probe = folder / f".writable{PART}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"checkpoints cannot be written to {str(folder)!r} ({error.strerror}): give trainer.default_root_dir, or "
            "the checkpoint's dirpath, a folder that can be written to."
        ) from error


def remove_parts(folder: Path) -> None:
    """Remove what a killed process left half written."""
    for left in folder.glob(f".*.ckpt{PART}"):
        left.unlink()


def newest_checkpoint(parent: str | os.PathLike[str], runs: str = "*") -> Path | None:
    """The checkpoint last written in any run folder below `parent` that is whole, or None. ``runs``: which folders."""
    found = sorted(Path(parent).glob(f"{runs}/{FOLDER}/*.ckpt"), key=lambda path: (path.stat().st_mtime_ns, str(path)))
    return next((path for path in reversed(found) if zipfile.is_zipfile(path)), None)


def folder_of_run(checkpoint: str | None) -> Path | None:
    """The run folder that a checkpoint lies in, in which training goes on; None for one that lies elsewhere."""
    found = Path(checkpoint or "").absolute()
    return Path(checkpoint or "").parent.parent if checkpoint and found.parent.name == FOLDER else None


def checkpoint_to_resume(
    path: str | os.PathLike[str] | None, parent: str | os.PathLike[str], key: str, run: Path | None = None
) -> str | None:
    """The checkpoint file that is meant: ``path``, or for "last" the newest whole one below ``parent``.

    With a ``run`` folder, "last" is that run's, whatever ran after it.

    Raises ConfigError, in the words of ``key`` and before a model loads, if it is not there, or is not one of ours.
    """
    if path is None:
        return None
    name = os.fspath(path)
    if name == "last":
        newest = newest_checkpoint(parent) if run is None else newest_checkpoint(run.parent, run.name)
        if newest is None and run is not None:
            raise ConfigError(f"{key}=last: there is no whole checkpoint in {str(run)!r}, whose file was given.")
        if newest is None:
            raise ConfigError(f"{key}=last: there is no whole checkpoint in any run folder below {str(parent)!r}.")
        name = str(newest)
    if not Path(name).is_file():
        raise ConfigError(f"{key}={name!r}: there is no such file; give a .ckpt file, or last.")
    try:
        content = torch.load(name, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{key}={name!r}: cannot be read as a checkpoint ({type(error).__name__}).") from error
    if not isinstance(content, dict) or "mareinforce" not in content:
        raise ConfigError(f"{key}={name!r}: is not a checkpoint that a run of this framework wrote.")
    return name


def tracked_run(checkpoint: str | None) -> dict[str, Any] | None:
    """Which run at a tracker a checkpoint belongs to; None: none."""
    if checkpoint is None:
        return None
    content = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)
    record: dict[str, Any] | None = content["mareinforce"].get("wandb")
    return record
