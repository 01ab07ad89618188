"""The order of rows, and which rows are evaluated."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from jsonargparse import ArgumentParser
from torch.utils.data import DataLoader

import mareinforce.cli  # noqa: F401 (Lightning keeps the stderr it is imported with)
from mareinforce import fit
from mareinforce.data.datamodule import DealtRows, IndexedRows, KeyedOrder, RowsDataModule, TrainingLoader, as_list
from mareinforce.data.sources import Source
from mareinforce.errors import ConfigError, DataError
from mareinforce.quiet import quiet
from mareinforce.ranks import Ranks

ROWS = [{"prompt": str(index)} for index in range(7)]


def order(seed: int, epoch: int, shuffle: bool = True) -> list[int]:
    sampler = KeyedOrder(7, seed, shuffle)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_the_order_depends_on_seed_and_epoch_alone():
    assert sorted(order(0, 0)) == list(range(7))
    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert order(0, 0, shuffle=False) == list(range(7))


@pytest.mark.parametrize(("size", "ranks"), [(2, 2), (1, 3), (3, 1), (1, 8)])
def test_ranks_share_the_order_of_one_process_and_no_row_comes_twice(size, ranks):
    dealt = [list(DealtRows(KeyedOrder(7, 3, True), size, rank, ranks)) for rank in range(ranks)]
    assert {len(steps) for steps in dealt} == {len(DealtRows(KeyedOrder(7, 3, True), size, 0, ranks))}
    for step, together in enumerate(zip(*dealt, strict=True)):
        rows = [own[place] for place in range(size) for own in together if place < len(own)]
        assert rows == order(3, 0)[step * size * ranks : (step + 1) * size * ranks]
        assert max(map(len, together)) - min(map(len, together)) <= 1  # also where rows end


def test_a_resumed_rank_goes_on_with_the_rows_it_has_not_had():
    def loader(rank: int, done: int) -> TrainingLoader:
        return TrainingLoader(IndexedRows(ROWS), KeyedOrder(7, 3, True), 1, lambda: done, Ranks(rank, 2))

    whole = [[index for index, _ in batch] for batch in loader(1, 0)]
    resumed = loader(1, 0)
    resumed.load_state_dict(loader(0, 2).state_dict())  # rank 0 alone writes
    assert [[index for index, _ in batch] for batch in resumed] == whole[2:]
    assert whole == [[row] for row in order(3, 0)[1::2]] + [[]]


def test_a_batch_is_its_rows_with_their_positions_untouched():
    rows = IndexedRows(ROWS)
    batches = list(DataLoader(rows, batch_size=3, collate_fn=as_list))
    assert [[index for index, _ in batch] for batch in batches] == [[0, 1, 2], [3, 4, 5], [6]]
    assert batches[1][0][1] is ROWS[3]


def test_evaluation_takes_the_first_rows_each_once():
    data = RowsDataModule(train=ROWS, eval=ROWS[:3])
    data.setup("fit")
    assert [index for index, _ in data.eval_rows(2)] == [0, 1]
    assert [index for index, _ in data.eval_rows(99)] == [0, 1, 2]
    assert len(list(data.train_rows())) == 7


def test_without_evaluation_rows_there_is_nothing_to_evaluate():
    data = RowsDataModule(train=ROWS)
    data.setup("fit")
    assert data.eval_rows(4) == []


def test_missing_and_empty_sources_are_named():
    with pytest.raises(ConfigError, match=r"data\.train is missing"):
        RowsDataModule().setup("fit")
    with pytest.raises(DataError, match=r"data\.eval has no rows"):
        RowsDataModule(train=ROWS, eval=[]).setup("fit")


class Recorder(L.LightningModule):
    """Notes which rows each batch had."""

    def __init__(self, prompts_per_step: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seed = 3
        self.config = SimpleNamespace(prompts_per_step=prompts_per_step, eval_batch_size=2, eval_num_samples=3)
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.trained: list[list[int]] = []
        self.validated: list[list[int]] = []

    def training_step(self, batch, batch_idx):
        assert all(row is ROWS[index] for index, row in batch)
        self.trained.append([index for index, _ in batch])

    def validation_step(self, batch, batch_idx):
        self.validated.append([index for index, _ in batch])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def trainer() -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.mark.parametrize("shuffle", [True, False])
def test_lightning_trains_on_every_row_once_an_epoch_in_a_new_order(trainer, shuffle):
    module = Recorder(prompts_per_step=3)
    with quiet():
        trainer.limit_val_batches = 0  # as the real module sets it
        trainer.fit(module, datamodule=RowsDataModule(train=ROWS, eval=ROWS, shuffle=shuffle))
    assert [len(batch) for batch in module.trained] == [3, 3, 1] * 2
    epochs = [[*chain(*module.trained[:3])], [*chain(*module.trained[3:])]]
    assert epochs == [order(3, 0, shuffle), order(3, 1, shuffle)]
    assert (epochs[0] != epochs[1]) == shuffle
    assert module.validated == []  # evaluation has its own schedule while fitting


def test_validation_takes_the_asked_number_of_rows_in_batches(trainer):
    module = Recorder(prompts_per_step=1)
    with quiet():
        trainer.validate(module, datamodule=RowsDataModule(eval=ROWS), verbose=False)
    assert module.validated == [[0, 1], [2]]


def test_a_source_is_a_mapping_or_a_list_and_its_fields_can_be_overridden(tmp_path):
    config = tmp_path / "data.yaml"
    config.write_text('data: {train: {path: story-prompts, split: "train[:150]"}, eval: [one, two]}')
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(RowsDataModule, "data")
    data = parser.instantiate(parser.parse_args(["--config", str(config)])).data
    assert data.train == Source("story-prompts", "train[:150]")
    assert data.eval == ["one", "two"]
    data = parser.instantiate(parser.parse_args(["--config", str(config), "--data.train.path", "x"])).data
    assert data.train == Source("x", "train[:150]")


def test_a_misspelt_field_of_a_source_is_named_with_its_near_match(tmp_path, capsys):
    arguments = [
        "--model.agent_model=tiny-story",
        "--model.reward_func=mareinforce.tasks.story.length_ratio_reward",
        "--model.config.num_turns=1",
        f"--trainer.default_root_dir={tmp_path}",
        "--data.train.path=story-prompts",
    ]
    assert fit.main([*arguments, "--data.train.splt=train"]) == 1
    told = capsys.readouterr().err
    assert "splt" in told
    assert "Did you mean 'split'" in told
