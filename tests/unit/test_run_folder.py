"""Numbered run folders."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mareinforce.run_folder import (
    discard_if_nothing_came,
    new_run_folder,
    rank_by_environment,
    run_folder_of_rank,
)


def test_folders_are_numbered_from_one_and_on(tmp_path: Path) -> None:
    parent = tmp_path / "deep" / "runs"
    assert [new_run_folder(parent).name for _ in range(3)] == ["run_0001", "run_0002", "run_0003"]


def test_numbers_go_on_above_the_highest_and_other_names_count_for_nothing(tmp_path: Path) -> None:
    for name in ("run_0007", "run_x", "run_0009_old", "other"):
        (tmp_path / name).mkdir()
    assert new_run_folder(tmp_path).name == "run_0008"


def test_a_number_taken_meanwhile_is_passed_over(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "run_0001").mkdir()
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(()))  # another process made it after we looked
    assert new_run_folder(tmp_path).name == "run_0002"


def test_threads_at_once_get_a_folder_each(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: new_run_folder(tmp_path), range(40)))
    assert len({folder.name for folder in folders}) == 40


@pytest.mark.parametrize(
    ("names", "left"),
    [
        ([], False),
        (["config.yaml"], False),
        (["config.yaml", "metrics.csv"], True),
        (["checkpoints/a.ckpt"], True),
        (["notes.txt"], True),
    ],
)
def test_a_folder_with_a_configuration_at_most_is_discarded(tmp_path: Path, names: list[str], left: bool) -> None:
    folder = new_run_folder(tmp_path)
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    assert discard_if_nothing_came(folder) != left
    assert folder.exists() == left
    assert all((folder / name).exists() for name in names if left)
    assert not discard_if_nothing_came(tmp_path / "none")  # was discarded already, or never was there


def test_processes_at_once_get_a_folder_each(tmp_path: Path) -> None:
    code = (
        "import sys; from mareinforce.run_folder import new_run_folder\n"
        "for _ in range(20): print(new_run_folder(sys.argv[1]).name)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    names = [name for process in processes for name in process.communicate()[0].split()]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(names) == [f"run_{number:04d}" for number in range(1, 41)]


@pytest.fixture
def environment(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "NODE_RANK", "MAREINFORCE_RUN_FOLDER"):
        monkeypatch.delenv(name, raising=False)
    return lambda **names: [monkeypatch.setenv(name, value) for name, value in names.items()]


@pytest.mark.parametrize(
    ("names", "rank"),
    [
        ({}, 0),
        ({"LOCAL_RANK": "1"}, 1),
        ({"RANK": "2", "LOCAL_RANK": "0"}, 2),  # torchrun, on the second of two machines
        ({"RANK": "0", "LOCAL_RANK": "0", "NODE_RANK": "0"}, 0),
        ({"SLURM_PROCID": "3"}, 3),
        ({"NODE_RANK": "1"}, 1),  # the command was started by hand on the second machine
    ],
)
def test_the_rank_is_what_the_launcher_says(environment, names, rank):
    environment(**names)
    assert rank_by_environment() == rank


def test_ranks_that_rank_0_starts_inherit_its_folder_and_make_none(tmp_path: Path, environment) -> None:
    folder = run_folder_of_rank(tmp_path)
    assert folder == tmp_path / "run_0001"
    environment(LOCAL_RANK="1")
    assert run_folder_of_rank(tmp_path) == folder
    assert [path.name for path in tmp_path.iterdir()] == ["run_0001"]


def test_a_rank_that_another_program_has_started_makes_none_either(tmp_path: Path, environment) -> None:
    environment(RANK="1")
    assert run_folder_of_rank(tmp_path) == tmp_path  # until it is told
    assert list(tmp_path.iterdir()) == []
