"""The rows of a run, for Lightning: one batch is the rows rolled out together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, Dataset, Sampler

from mareinforce.data.sources import Source, load_rows
from mareinforce.errors import ConfigError
from mareinforce.ranks import ALONE, Ranks
from mareinforce.types import IndexedRow

_NO_EVAL = "data.eval is missing: name the rows to evaluate on, with --data.eval.path FILE."


class IndexedRows(Dataset[IndexedRow]):
    """Rows with their positions, unchanged."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> IndexedRow:
        return index, self._rows[index]


class KeyedOrder(Sampler[int]):
    """The order of the rows in an epoch: a function of (seed, epoch) alone, so nothing of it needs saving.

    Attributes:
        start: rows at the beginning of the next iteration that a resumed run has trained on already.
    """

    def __init__(self, size: int, seed: int, shuffle: bool) -> None:
        self._size, self._seed, self._shuffle, self._epoch = size, seed, shuffle, 0
        self.start = 0

    def described(self) -> dict[str, Any]:
        """What decides the order."""
        return {"rows": self._size, "seed": self._seed, "shuffle": self._shuffle}

    def set_epoch(self, epoch: int) -> None:
        """Lightning tells the epoch that begins."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        if not self._shuffle:
            return iter(range(start, self._size))
        stream = np.random.Generator(np.random.Philox(np.random.SeedSequence((self._seed, self._epoch))))
        return iter(stream.permutation(self._size).tolist()[start:])


class DealtRows(Sampler[list[int]]):
    """The rows of each step for one rank: as from a pack of cards, in the one order of the epoch, none of them twice.

    A step takes `prompts_per_step` rows a rank. Where rows end, it takes what is left, and a rank may have none.
    """

    def __init__(self, order: KeyedOrder, prompts_per_step: int, rank: int, ranks: int) -> None:
        self.sampler = order  # by this name Lightning finds whom to tell the epoch
        self._step, self._rank, self._ranks = prompts_per_step * ranks, rank, ranks

    def __len__(self) -> int:
        return -(-len(self.sampler) // self._step)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        for start in range(0, len(order), self._step):
            yield order[start : start + self._step][self._rank :: self._ranks]


class TrainingLoader(DataLoader[IndexedRow]):
    """Batches of training rows; a checkpoint keeps how many of the epoch's are done, and a resumed run goes on there.

    ``prompts_per_step``: rows of each rank. ``batches_done``: tells how many batches of this epoch have been trained.
    The loader draws from no global random stream, so that those of the user's functions are the same with and without a
    resume.
    """

    def __init__(
        self,
        rows: IndexedRows,
        order: KeyedOrder,
        prompts_per_step: int,
        batches_done: Callable[[], int],
        ranks: Ranks = ALONE,
    ) -> None:
        dealt = DealtRows(order, prompts_per_step, ranks.rank, ranks.size)
        super().__init__(rows, batch_sampler=dealt, collate_fn=as_list, generator=torch.Generator())
        self._order, self._batches_done = order, batches_done
        self._prompts_per_step, self._ranks = prompts_per_step, ranks.size

    def state_dict(self) -> dict[str, Any]:
        """How far the epoch has come (0 at its end), and what the order of its rows and batches depends on."""
        return {"batches": self._batches_done() % len(self), **self._order_of_epoch()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Leave out what is done, the next time that rows are asked for.

        Raises ConfigError in the middle of an epoch whose rows would now come in another order, or in other batches.
        """
        here = self._order_of_epoch()
        differing = [name for name, value in here.items() if state[name] != value] if state["batches"] else []
        if differing:
            name = differing[0]
            raise ConfigError(
                f"the checkpoint is from the middle of an epoch with {name}={state[name]!r}, and here it is "
                f"{here[name]!r}, so rows would be left out or come twice. Set it as it was, or go on from the end of "
                f"an epoch."
            )
        self._order.start = state["batches"] * self._prompts_per_step * self._ranks

    def _order_of_epoch(self) -> dict[str, Any]:
        return {"prompts_per_step": self._prompts_per_step, **self._order.described()}


def as_list(batch: list[IndexedRow]) -> list[IndexedRow]:
    """A batch is the list of its rows; nothing is stacked."""
    return batch


class RowsDataModule(L.LightningDataModule):
    """Training and evaluation rows.

    Args:
        train: rows to train on: a source (path, split, name), a list of rows, or a `datasets.Dataset`.
        eval: rows to evaluate on, likewise; None: no evaluation.
        prompt_column: the column with each row's prompt.
        shuffle: train on the rows in a new order every epoch, decided by the seed.
    """

    def __init__(
        self,
        train: Source | list[Any] | None = None,
        eval: Source | list[Any] | None = None,
        prompt_column: str = "prompt",
        shuffle: bool = True,
    ) -> None:
        super().__init__()
        self.train, self.eval, self.prompt_column, self.shuffle = train, eval, prompt_column, shuffle
        self.validates_all = False
        """Does `Trainer.validate` play all evaluation rows, rather than `eval_num_samples`?"""
        self._train_rows: Any = None
        self._eval_rows: Any = None

    def setup(self, stage: str) -> None:
        """Load what the stage needs and refuse what cannot be used, before any model loads. Raises DataError."""
        if stage == "fit" and self._train_rows is None:
            if self.train is None:
                raise ConfigError("data.train is missing: name the rows to train on.")
            self._train_rows = load_rows(self.train, self.prompt_column, "data.train")
        if stage == "validate" and self.eval is None:
            raise ConfigError(_NO_EVAL)
        if self.eval is not None and self._eval_rows is None:
            self._eval_rows = load_rows(self.eval, self.prompt_column, "data.eval")

    def train_rows(self) -> Iterator[IndexedRow]:
        """Every training row once, in order."""
        return ((index, self._train_rows[index]) for index in range(len(self._train_rows)))

    def eval_rows(self, count: int | None = None) -> list[IndexedRow]:
        """The first `count` evaluation rows (None: all), each once; [] if there are none."""
        if self._eval_rows is None:
            return []
        size = len(self._eval_rows) if count is None else min(count, len(self._eval_rows))
        return [(index, self._eval_rows[index]) for index in range(size)]

    def train_dataloader(self) -> DataLoader[IndexedRow]:
        """Batches of `prompts_per_step` rows for this rank; the last may be smaller."""
        module = self._module()
        rows = IndexedRows(self._train_rows)
        order = KeyedOrder(len(rows), module.seed, self.shuffle)
        size, done = module.config.prompts_per_step, lambda: int(module.batches_in_epoch)
        return TrainingLoader(rows, order, size, done, getattr(module, "ranks", ALONE))

    def val_dataloader(self) -> Any:
        """Batches of evaluation rows for `Trainer.validate`; while fitting, evaluation has its own schedule."""
        if self.trainer is None or self.trainer.state.fn != TrainerFn.VALIDATING:
            return []
        if self._eval_rows is None:
            raise ConfigError(_NO_EVAL)
        config = self._module().config
        rows: Sequence[IndexedRow] = self.eval_rows(None if self.validates_all else config.eval_num_samples)
        return DataLoader(rows, batch_size=config.eval_batch_size, collate_fn=as_list)  # type: ignore[arg-type]

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Rows are the user's: they are not walked through, copied or moved."""
        return batch

    def _module(self) -> Any:
        assert self.trainer is not None
        return self.trainer.lightning_module
