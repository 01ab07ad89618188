"""`config.yaml` of a run: what it was given, so that it can be run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback

from mareinforce.whole_files import write_whole


class SavedConfig(SaveConfigCallback):
    """Writes `config.yaml` into the run folder, whole or not at all; a run that goes on writes it anew."""

    def __init__(self, parser: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(parser, config, **kwargs, save_to_log_dir=False)  # Lightning's own way is to write over it

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)  # asked on every rank: it is rank 0's
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        write_whole(self._folder / self.config_filename, self.parser.dump(self.config, skip_none=False))
