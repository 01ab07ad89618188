"""When checkpoints of the team are written, under which names, and which are kept."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from mareinforce.checkpoint import TeamCheckpoint
from mareinforce.checkpoint_files import WholeCheckpoints, newest_checkpoint
from mareinforce.csv_log import MetricsCSV
from mareinforce.errors import CheckpointError, ConfigError

ROOT = Path(__file__).parents[2]


class CountingModule(LightningModule):
    """Two optimizers stepped by hand, twice a batch: Lightning's own counter runs four times as fast."""

    def __init__(self, updates_per_batch: int = 2, stop_after: int | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.batches, self.updates, self.env_step = 0, [0, 0], 0
        self.updates_per_batch, self.stop_after = updates_per_batch, stop_after
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1)) for _ in range(2)])

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([weight], lr=0.1) for weight in self.weights]

    def training_step(self, batch: Any, batch_index: int) -> None:
        for optimizer in self.optimizers():
            for _ in range(self.updates_per_batch):
                optimizer.step()
        self.batches += 1
        self.env_step += 10
        self.updates = [number + self.updates_per_batch for number in self.updates]
        self.trainer.should_stop = self.batches == self.stop_after

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counters"] = [self.batches, self.updates, self.env_step]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.batches, self.updates, self.env_step = checkpoint["counters"]


def train(folder: Path, checkpoint: TeamCheckpoint, epochs: int = 1, resume: Path | None = None, **module: Any) -> list:
    trainer = Trainer(
        accelerator="cpu", max_epochs=epochs, logger=MetricsCSV(folder), callbacks=[checkpoint], devices=1,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(folder), log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(CountingModule(**module), DataLoader(range(6)), ckpt_path=resume, weights_only=True)
    return names(folder)


def names(folder: Path) -> list[str]:
    found = [path.name for path in (folder / "checkpoints").iterdir()]
    return sorted(found, key=lambda name: int(name.split("-")[0].split("=")[1]))


pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")


def test_default_is_the_last_batch_of_every_epoch_and_the_newest_is_kept(tmp_path: Path) -> None:
    assert train(tmp_path, TeamCheckpoint(), epochs=2) == ["batch=12-updates=24.ckpt"]
    assert train(tmp_path / "all", TeamCheckpoint(keep_last=9), epochs=2) == [
        "batch=6-updates=12.ckpt", "batch=12-updates=24.ckpt",
    ]  # fmt: skip


def test_names_and_cadence_follow_the_modules_counters_not_lightnings(tmp_path: Path) -> None:
    found = train(tmp_path, TeamCheckpoint(every_n_batches=3, keep_last=9), updates_per_batch=1)
    assert found == ["batch=3-updates=3.ckpt", "batch=6-updates=6.ckpt"]
    content = torch.load(tmp_path / "checkpoints" / found[0], weights_only=True)
    assert content["global_step"] == 6  # Lightning's: both optimizers added up


def test_every_n_updates_saves_after_the_batch_that_passed_the_number(tmp_path: Path) -> None:
    found = train(tmp_path, TeamCheckpoint(every_n_updates=5, keep_last=9))
    assert found == ["batch=3-updates=6.ckpt", "batch=5-updates=10.ckpt", "batch=6-updates=12.ckpt"]


def test_a_run_that_stops_itself_is_saved_where_it_stopped(tmp_path: Path) -> None:
    assert train(tmp_path, TeamCheckpoint(every_n_batches=100), stop_after=4) == ["batch=4-updates=8.ckpt"]
    content = torch.load(tmp_path / "checkpoints" / "batch=4-updates=8.ckpt", weights_only=True)
    assert content["loops"]["fit_loop"]["epoch_progress"]["current"]["completed"] == 0  # the epoch is not over


def test_every_n_env_steps_counts_joint_actions(tmp_path: Path) -> None:
    found = train(tmp_path, TeamCheckpoint(every_n_env_steps=25, keep_last=9))
    assert found == ["batch=3-updates=6.ckpt", "batch=5-updates=10.ckpt", "batch=6-updates=12.ckpt"]


def test_every_n_minutes_counts_from_the_last_save(tmp_path: Path, monkeypatch) -> None:
    now = {"time": 0.0}

    def step(self: CountingModule, batch: Any, batch_index: int) -> None:
        original(self, batch, batch_index)
        now["time"] += 50.0

    original = CountingModule.training_step
    monkeypatch.setattr("mareinforce.checkpoint.time.monotonic", lambda: now["time"])
    monkeypatch.setattr(CountingModule, "training_step", step)
    found = train(tmp_path, TeamCheckpoint(every_n_minutes=2, keep_last=9))
    assert found == ["batch=3-updates=6.ckpt", "batch=6-updates=12.ckpt"]  # 150 s and 300 s
    assert train(tmp_path / "slow", TeamCheckpoint(every_n_minutes=60, keep_last=9)) == ["batch=6-updates=12.ckpt"]


def test_any_of_several_cadences_is_enough(tmp_path: Path) -> None:
    found = train(tmp_path, TeamCheckpoint(every_n_batches=4, every_n_updates=6, keep_last=9, every_n_minutes=60))
    assert [int(name[6]) for name in found] == [3, 4, 6]


class Watched(WholeCheckpoints):
    """Notes what lies in the folder while a file is being written."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.seen = folder, []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        save = torch.save

        def watched(content: Any, file: Any) -> None:
            save(content, file)
            self.seen.append(sorted(path.name for path in (self.folder / "checkpoints").iterdir()))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "save", watched)
            super().save_checkpoint(checkpoint, path, storage_options)


def test_older_ones_go_only_after_the_new_one_is_there(tmp_path: Path, monkeypatch) -> None:
    watched = Watched(tmp_path)
    monkeypatch.setattr("mareinforce.checkpoint.WholeCheckpoints", lambda: watched)
    train(tmp_path, TeamCheckpoint(every_n_batches=2, keep_last=1))
    assert watched.seen == [
        [".batch=2-updates=4.ckpt.part"],
        [".batch=4-updates=8.ckpt.part", "batch=2-updates=4.ckpt"],
        [".batch=6-updates=12.ckpt.part", "batch=4-updates=8.ckpt"],
    ]
    assert names(tmp_path) == ["batch=6-updates=12.ckpt"]


def full_disk(after: int) -> Any:
    """A writer that stops in the middle of one of its files."""
    save, calls = torch.save, []

    def failing(content: Any, file: Any) -> None:
        calls.append(1)
        if len(calls) < after:
            save(content, file)
        else:
            file.write(b"PK half of it")
            raise OSError(errno.ENOSPC, "No space left on device")

    return failing


def test_a_full_disk_is_told_and_leaves_the_checkpoint_before_it_and_nothing_half_written(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "save", full_disk(after=2))
    with pytest.raises(CheckpointError, match=r"batch=4-updates=8.ckpt could not be written .*No space left") as error:
        train(tmp_path, TeamCheckpoint(every_n_batches=2))
    assert isinstance(error.value.__cause__, OSError)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["batch=2-updates=4.ckpt"]
    assert torch.load(tmp_path / "checkpoints" / "batch=2-updates=4.ckpt", weights_only=True)["state_dict"]


LIMITED = """
import resource, signal, sys
import torch
from mareinforce.checkpoint_files import WholeCheckpoints
from mareinforce.errors import CheckpointError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
files = WholeCheckpoints()
files.save_checkpoint({"weights": torch.zeros(1000)}, sys.argv[1] + "/small.ckpt")
try:
    files.save_checkpoint({"weights": torch.zeros(100_000)}, sys.argv[1] + "/large.ckpt")
except CheckpointError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of file sizes are told in another way")
def test_a_disk_that_really_takes_no_more_is_told_too(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert "large.ckpt could not be written" in run.stdout, run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["small.ckpt"]


def test_what_a_kill_left_half_written_is_removed_when_the_run_goes_on(tmp_path: Path) -> None:
    train(tmp_path, TeamCheckpoint())
    left = tmp_path / "checkpoints" / ".batch=7-updates=14.ckpt.part"
    left.write_bytes(b"half")
    train(tmp_path, TeamCheckpoint(dirpath=str(tmp_path / "checkpoints")))
    assert left.exists()  # it may be another run's, which is at work
    train(tmp_path, TeamCheckpoint())
    assert not left.exists()


def test_a_kill_between_the_new_file_and_the_end_of_the_old_leaves_nothing_for_good(tmp_path: Path) -> None:
    train(tmp_path, TeamCheckpoint(every_n_batches=3))
    folder = tmp_path / "checkpoints"
    (folder / "batch=3-updates=6.ckpt").write_bytes(b"not removed any more")
    (folder / "batch=1-updates=2.ckpt").write_bytes(b"not of this run's doing")
    train(tmp_path, TeamCheckpoint(every_n_batches=3), epochs=2, resume=folder / "batch=6-updates=12.ckpt")
    assert names(tmp_path) == ["batch=1-updates=2.ckpt", "batch=12-updates=24.ckpt"]


def test_state_is_saved_with_the_checkpoint_and_gone_on_from(tmp_path: Path) -> None:
    train(tmp_path, TeamCheckpoint(every_n_batches=4), stop_after=4)
    path = tmp_path / "checkpoints" / "batch=4-updates=8.ckpt"
    state = torch.load(path, weights_only=True)["callbacks"]["TeamCheckpoint"]
    assert state["saved"] == {"batches": 4, "updates": 8, "env_steps": 40}
    assert state["kept"] == {"batch=4-updates=8.ckpt": None}
    restored = TeamCheckpoint()
    restored.load_state_dict(state)
    assert restored.state_dict() == state != TeamCheckpoint().state_dict()


def test_a_resumed_run_removes_the_checkpoint_it_came_from(tmp_path: Path) -> None:
    train(tmp_path, TeamCheckpoint())
    checkpoint = tmp_path / "checkpoints" / "batch=6-updates=12.ckpt"
    assert train(tmp_path, TeamCheckpoint(), epochs=2, resume=checkpoint) == ["batch=12-updates=24.ckpt"]


@pytest.mark.parametrize(
    "field", ["every_n_batches", "every_n_updates", "every_n_env_steps", "every_n_minutes", "keep_last", "keep_best"]
)
def test_numbers_below_one_are_refused(field: str) -> None:
    monitor = {"monitor": "turn_1/reward_mean"} if field == "keep_best" else {}
    with pytest.raises(ConfigError, match=f"{field}=0: must be "):
        TeamCheckpoint(**{field: 0}, **monitor)
    TeamCheckpoint(**{field: 1}, **monitor)


def test_fields_that_say_nothing_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="keep_best=2: by which metric"):
        TeamCheckpoint(keep_best=2)
    with pytest.raises(ConfigError, match="mode='largest': must be max or min"):
        TeamCheckpoint(monitor="turn_1/reward_mean", mode="largest")
    with pytest.raises(ConfigError, match="every_n_minutes=inf: must be a finite number above 0"):
        TeamCheckpoint(every_n_minutes=float("inf"))


def test_a_folder_that_is_none_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    checkpoint = TeamCheckpoint(dirpath=str(tmp_path / "file" / "checkpoints"))
    with pytest.raises(ConfigError, match=r"cannot be written to .*Not a directory.*dirpath"):
        train(tmp_path, checkpoint)
    assert not (tmp_path / "metrics.csv").exists()


def test_newest_checkpoint_is_the_last_written_whole_one(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "missing") is None
    paths = []
    for number, run in enumerate(["run_0002", "run_0001", "run_0003"]):
        path = tmp_path / run / "checkpoints" / "batch=1-updates=1.ckpt"
        path.parent.mkdir(parents=True)
        torch.save({"a": 1}, path)
        os.utime(path, (number + 1, number + 1))
        paths.append(path)
    assert newest_checkpoint(tmp_path) == paths[2]
    paths[2].write_bytes(paths[2].read_bytes()[:100])  # cut short
    os.utime(paths[2], (9, 9))
    aside = paths[0].with_name(".batch=2-updates=2.ckpt.part")
    torch.save({"a": 1}, aside)
    assert newest_checkpoint(tmp_path) == paths[1]
