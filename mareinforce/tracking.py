"""Weights & Biases: off unless asked for, offline where there is no key, and never a question."""

from __future__ import annotations

import math
import netrc
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from mareinforce.csv_log import FILE_NAME, read_metrics
from mareinforce.errors import ConfigError, did_you_mean

STEP = "env_step"
"""The x axis."""
_SECONDS_BETWEEN = 1.0
_OFFLINE = ("offline", "dryrun")
_NO_KEY = "there is no W&B key here (WANDB_API_KEY, or what `wandb login` stores)"


@dataclass(frozen=True)
class WandbSettings:
    """Where a run goes at Weights & Biases; names are those of `wandb.init`."""

    project: str | None = None
    """Default: WANDB_PROJECT, else mareinforce."""
    entity: str | None = None
    """The account or team; default: that of the key."""
    name: str | None = None
    """What the run is called there; default: its run folder."""
    group: str | None = None
    """What it is grouped with."""
    job_type: str | None = None
    """What it is within the group."""
    notes: str | None = None
    """A description."""
    tags: Sequence[str] | None = None
    """Words to find it by."""
    dir: str | os.PathLike[str] | None = None
    """Where its files lie; default: the run folder."""
    offline: bool = False
    """Write files only, to be uploaded with `wandb sync`."""
    save_models: bool = False
    """Upload every agent at the end, as an artifact."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> WandbSettings:
        """The settings of a `wandb_config`. Raises ConfigError for a key that there is not."""
        known = [field.name for field in fields(cls)]
        for key in given:
            if key not in known:
                hint = did_you_mean(key, known) or f" There are {', '.join(known)}."
                raise ConfigError(f"wandb_config.{key}: there is no such key.{hint}")
        return cls(**given)


class WandbTracker(WandbLogger):
    """Lightning's W&B logger with environment steps as the x axis, which never go back.

    A resumed run goes on with the run of its checkpoint. Rows that a killed run had sent after that checkpoint are not
    sent twice, and nothing is sent for a step that lies before them. Rows are handed over once a second, since handing
    over waits for W&B's process; those of the last second are lost where ours is killed.

    Args:
        settings: what was asked for.
        folder: the run folder.
        goes_on: what `record` returned when the checkpoint was written; None: a new run.

    Raises:
        ConfigError: it shall be online, and there is no key.
    """

    def __init__(self, settings: WandbSettings, folder: Path, goes_on: Mapping[str, Any] | None = None) -> None:
        self.settings, self.folder = settings, folder
        self.mode = wandb_mode(settings.offline)
        directory = Path(settings.dir or folder)
        if self.mode == "offline":
            rank_zero_info(_offline_note(directory, has_key=_has_key()))
        super().__init__(
            name=settings.name or (None if goes_on else folder.name),
            save_dir=directory,
            project=settings.project or os.environ.get("WANDB_PROJECT", "mareinforce"),
            id=None if goes_on is None else goes_on["id"],
            entity=settings.entity, group=settings.group, job_type=settings.job_type, notes=settings.notes,
            tags=None if settings.tags is None else list(settings.tags), mode=self.mode,
        )  # fmt: skip
        self._wandb_init.pop("anonymous")  # Lightning 2.6 gives it, and wandb 0.31 warns of it
        self._is_ours = False
        self._sent = _rows_sent(folder) if goes_on else []
        self._at = self._sent[-1][0] if self._sent else 0  # the step of the row sent last
        self._waiting: list[dict[str, Any]] = []
        self._handed_over = -math.inf  # time.monotonic
        self._first_row = goes_on["rows"] + self._at if goes_on and self.mode == "offline" else None

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The `wandb.Run`; begun when it is first needed."""
        if self._experiment is None:
            import wandb

            self._is_ours = wandb.run is None
            # offline there is no page to name, and what is left to say we have said; WANDB_QUIET=false says it all
            terse = self.mode == "offline" and "WANDB_QUIET" not in os.environ
            settings = wandb.Settings(quiet=True) if terse else wandb.Settings()
            run = wandb.init(**self._wandb_init, settings=settings) if wandb.run is None else wandb.run
            run.define_metric(STEP)
            run.define_metric("*", step_metric=STEP)
            self._experiment = run
        # whoever asks for the run, to log a table or to end it, comes after the rows that wait
        waiting, self._waiting = self._waiting, []
        for row in waiting:
            first_row, self._first_row = self._first_row, None
            self._experiment.log(row, step=first_row, commit=True)
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Send a row, at the step of the row before if its own is an earlier one: x never goes back."""
        if step is not None and self._was_sent(metrics, step):
            return
        self._at = max(self._at, step or 0)
        self._waiting.append({**metrics, STEP: self._at})
        if time.monotonic() - self._handed_over >= _SECONDS_BETWEEN:
            _ = self.experiment
            self._handed_over = time.monotonic()

    @rank_zero_only
    def log_agents(self, folder: Path) -> None:
        """Upload `agent_0`, `agent_1` ... as an artifact each, loadable by `from_pretrained` once it is downloaded."""
        import wandb

        for agent in sorted(folder.glob("agent_*")):
            artifact = wandb.Artifact(f"{agent.name}-{self.experiment.id}", type="model")
            artifact.add_dir(str(agent), policy="immutable")
            self.experiment.log_artifact(artifact)

    def record(self) -> dict[str, Any]:
        """What a checkpoint keeps: which run this is, and how many rows it had."""
        rows = 0 if self._experiment is None else self.experiment.step
        return {"id": self.version, "rows": rows}

    @rank_zero_only
    def close(self, exit_status: int = 0) -> None:
        """End the run, if this began it."""
        if self._experiment is not None:
            run = self.experiment
            if self._is_ours:
                run.finish(exit_code=exit_status)

    def _was_sent(self, metrics: Mapping[str, Any], step: int) -> bool:
        """Does a resumed run say again what the run it goes on from had said?"""
        if not self._sent:
            return False
        last = self._sent[-1][0]
        if step > last:
            self._sent = []
            return False
        return step < last or (step, frozenset(metrics)) in self._sent


def wandb_mode(offline: bool = False) -> Literal["online", "offline", "disabled", "shared"]:
    """How W&B is to be used: as WANDB_MODE says, else offline if that is asked for or if there is no key.

    Raises ConfigError if it must be online and there is no key: W&B would ask for it.
    """
    asked = "offline" if offline else os.environ.get("WANDB_MODE", "")
    if asked in _OFFLINE or (not asked and not _has_key()):
        return "offline"
    if asked == "disabled":
        return "disabled"
    if not _has_key():
        raise ConfigError(
            f"WANDB_MODE={asked}, but {_NO_KEY}: run `wandb login`, set WANDB_MODE=offline to upload later, or leave "
            f"W&B out."
        )
    return "shared" if asked == "shared" else "online"


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb

    settings = wandb.setup().settings
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    host = urlsplit(settings.base_url).netloc
    return bool(settings.api_key or (file.is_file() and netrc.netrc(file).authenticators(host)))


def _offline_note(folder: Path, *, has_key: bool) -> str:
    why = "" if has_key else f", because {_NO_KEY}"
    return f"W&B is offline{why}: `wandb sync {folder}/wandb/offline-run-*` uploads the run later."


def _rows_sent(folder: Path) -> list[tuple[int, frozenset[str]]]:
    """Step and columns of every row of metrics.csv, which loggers are given before they are given to W&B."""
    path = folder / FILE_NAME
    rows = read_metrics(path) if path.exists() else []
    return [
        (int(row["step"]), frozenset(name for name, value in row.items() if value and name != "step")) for row in rows
    ]
