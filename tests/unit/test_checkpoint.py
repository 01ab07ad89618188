"""When checkpoints of the team are written, under which names, and which are kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from mareinforce.checkpoint import TeamCheckpoint, newest_checkpoint
from mareinforce.csv_log import MetricsCSV
from mareinforce.errors import ConfigError


class CountingModule(LightningModule):
    """Two optimizers stepped by hand, twice a batch: Lightning's own counter runs four times as fast."""

    def __init__(self, updates_per_batch: int = 2, stop_after: int | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.batches, self.updates = 0, [0, 0]
        self.updates_per_batch, self.stop_after = updates_per_batch, stop_after
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1)) for _ in range(2)])

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([weight], lr=0.1) for weight in self.weights]

    def training_step(self, batch: Any, batch_index: int) -> None:
        for optimizer in self.optimizers():
            for _ in range(self.updates_per_batch):
                optimizer.step()
        self.batches += 1
        self.updates = [number + self.updates_per_batch for number in self.updates]
        self.trainer.should_stop = self.batches == self.stop_after


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


def test_older_ones_go_only_after_the_new_one_is_there(tmp_path: Path, monkeypatch) -> None:
    seen: list[list[str]] = []
    save = Trainer.save_checkpoint

    def watched(self: Trainer, path: Path, **kwargs: Any) -> None:
        seen.append(names(tmp_path) if (tmp_path / "checkpoints").exists() else [])
        save(self, path, **kwargs)
        assert not Path(str(path).replace(".part", "").replace("/.batch", "/batch")).exists()

    monkeypatch.setattr(Trainer, "save_checkpoint", watched)
    train(tmp_path, TeamCheckpoint(every_n_batches=2, keep_last=1))
    assert seen == [[], ["batch=2-updates=4.ckpt"], ["batch=4-updates=8.ckpt"]]


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch) -> None:
    save = Trainer.save_checkpoint

    def failing(self: Trainer, path: Path, **kwargs: Any) -> None:
        if "batch=4" in str(path):
            raise OSError("disk full")
        save(self, path, **kwargs)

    monkeypatch.setattr(Trainer, "save_checkpoint", failing)
    with pytest.raises(OSError, match="disk full"):
        train(tmp_path, TeamCheckpoint(every_n_batches=2))
    assert names(tmp_path) == ["batch=2-updates=4.ckpt"]


def test_state_is_saved_with_the_checkpoint_and_gone_on_from(tmp_path: Path) -> None:
    train(tmp_path, TeamCheckpoint(every_n_batches=4), stop_after=4)
    path = tmp_path / "checkpoints" / "batch=4-updates=8.ckpt"
    state = torch.load(path, weights_only=True)["callbacks"]["TeamCheckpoint"]
    assert state == {"batches": 4, "updates": 8, "kept": ["batch=4-updates=8.ckpt"]}
    restored = TeamCheckpoint()
    restored.load_state_dict(state)
    assert restored.state_dict() == state != TeamCheckpoint().state_dict()


def test_a_resumed_run_removes_the_checkpoint_it_came_from(tmp_path: Path) -> None:
    train(tmp_path, TeamCheckpoint())
    assert train(tmp_path, TeamCheckpoint(), epochs=2, resume=tmp_path / "checkpoints" / "batch=6-updates=12.ckpt") == [
        "batch=6-updates=12.ckpt"
    ]  # the stand-in does not restore its counters: its second epoch ends at batch 6 again


@pytest.mark.parametrize("field", ["every_n_batches", "every_n_updates", "keep_last"])
def test_numbers_below_one_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}=0: must be at least 1"):
        TeamCheckpoint(**{field: 0})
    TeamCheckpoint(**{field: 1})


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
