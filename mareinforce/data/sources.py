"""Rows from wherever a user has them: embedded sets, local files, a hub, a list, a data set object."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mareinforce.assets import EMBEDDED_DATA, embedded_data
from mareinforce.data import human_eval
from mareinforce.errors import DataError, did_you_mean

READERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
"""File ending -> reader of the `datasets` library."""


@dataclass
class Source:
    """A data set in YAML."""

    path: str
    """An embedded set (story-prompts, creative-prompts, posts), human-eval (the problems of that installed package), a
    local .json, .jsonl, .csv or .parquet file, or a hub id."""
    split: str | None = None
    """A split with an optional slice, such as "train[:100]"; None: train."""
    name: str | None = None
    """The subset of a hub data set."""


def load_rows(source: Any, prompt_column: str = "prompt", key: str = "data.train") -> Any:
    """Random-access rows with a prompt column, as a `datasets.Dataset` or as the list that was given.

    Args:
        source: a Source, the mapping of its fields or its path alone, a list of rows (dicts, or texts that become
            prompts), or a `datasets.Dataset`.
        prompt_column: the column that must be there.
        key: what the user calls this source, for messages.

    Raises:
        DataError: it cannot be read, has no rows, or lacks the column.
    """
    rows = _read(source, prompt_column, key)
    if isinstance(rows, Mapping):
        raise DataError(f"{key} is a dictionary of splits ({', '.join(map(str, rows))}): give one of them.")
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise DataError(
            f"{key}: {type(rows).__name__} has no length, so epochs and slices mean nothing; load it as a data set "
            f"that is not streamed."
        )
    if len(rows) == 0:
        raise DataError(f"{key} has no rows: {_say(source)}. Training needs at least one.")
    columns = getattr(rows, "column_names", None)
    if columns is None:
        for position, row in enumerate(rows):
            if hasattr(row, "key") and hasattr(row, "val"):  # how the command line hands on a field it does not know
                raise DataError(
                    f"{key}.{row.key}: unknown, a source has path, split and name."
                    f"{did_you_mean(row.key, ('path', 'split', 'name'))}"
                )
            if not isinstance(row, Mapping):
                raise DataError(f"{key}: row {position} is {type(row).__name__}, not a mapping of columns.")
            if prompt_column not in row:
                raise DataError(_no_column(f"{key}: row {position}", prompt_column, list(row)))
    elif prompt_column not in columns:
        raise DataError(_no_column(key, prompt_column, columns))
    return rows


def _no_column(where: str, wanted: str, columns: list[str]) -> str:
    found = ", ".join(columns) or "none"
    return (
        f"{where} has no column {wanted!r}; the columns are: {found}.{did_you_mean(wanted, columns)} Name the one with "
        f"the prompts by data.prompt_column."
    )


def _say(source: Any) -> str:
    return f"{source.path} {source.split or ''}".strip() if isinstance(source, Source) else type(source).__name__


def _read(source: Any, prompt_column: str, key: str) -> Any:
    if isinstance(source, str):
        source = Source(source)
    if isinstance(source, Mapping) and "path" in source:
        try:
            source = Source(**source)
        except TypeError as error:
            raise DataError(f"{key}: {error}; a source has path, split and name.") from error
    if isinstance(source, list | tuple):
        return [{prompt_column: row} if isinstance(row, str) else row for row in source]
    return _load(source, key) if isinstance(source, Source) else source


def _load(source: Source, key: str) -> Any:
    import datasets

    split, path = source.split or "train", Path(source.path)
    if source.path in EMBEDDED_DATA:
        files = {name: str(file) for name, file in embedded_data(source.path).items()}
        return _from_files("json", files, split, key, source)
    if source.path == human_eval.NAME:
        return _from_files("json", {_split_name(split): str(human_eval.problems_file(key))}, split, key, source)
    if path.suffix.lower() in READERS:
        if not path.is_file():
            raise DataError(f"{key}.path={source.path!r}: there is no such file ({path.resolve()}).")
        return _from_files(READERS[path.suffix.lower()], {_split_name(split): str(path)}, split, key, source)
    if path.suffix and path.is_file():
        raise DataError(f"{key}.path={source.path!r}: cannot read {path.suffix} files, only {', '.join(READERS)}.")
    try:
        return datasets.load_dataset(source.path, source.name, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{key}.path={source.path!r}: no embedded data set of this name ({', '.join(EMBEDDED_DATA)}), no local "
            f"file, and no hub data set that can be loaded ({type(error).__name__}: {str(error).splitlines()[0]})."
            f"{did_you_mean(source.path, (*EMBEDDED_DATA, human_eval.NAME))}"
        ) from error


def _split_name(split: str) -> str:
    """The name that a file's one split goes by: whatever the user calls it."""
    return split.split("[")[0].strip() or "train"


def _json_rows(path: str) -> list[Any]:
    """The rows of a JSON list or of JSON lines, as they are written.

    The reader of `datasets` would turn texts that look like dates into dates and fill in missing keys.
    """
    content = Path(path).read_bytes()
    text = (gzip.decompress(content) if path.endswith(".gz") else content).decode("utf-8-sig")
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        if text.lstrip().startswith("["):
            raise
        return [_json_line(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    return whole if isinstance(whole, list) else [whole]


def _json_line(number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from None


def _from_json(files: dict[str, str], split: str) -> list[Any]:
    import datasets

    splits = {name: _json_rows(path) for name, path in files.items()}
    parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in splits.items()})
    return [row for part in parts for row in splits[part.splitname][part.from_ : part.to]]


def _from_files(reader: str, files: dict[str, str], split: str, key: str, source: Source) -> Any:
    """Read local files whole, without a cache, so that a changed file is read anew."""
    import tempfile

    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        if reader == "json":
            return _from_json(files, split)
        with tempfile.TemporaryDirectory() as cache:
            return datasets.load_dataset(reader, data_files=files, split=split, cache_dir=cache, keep_in_memory=True)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetGenerationError) as error:
        cause = error.__cause__ or error
        said = str(cause).splitlines()[0] if str(cause) else "no reason given"
        reason = said if type(cause) is ValueError else f"{type(cause).__name__}: {said}"
        splits = f" Splits: {', '.join(files)}." if source.split else ""
        raise DataError(f"{key}: {source.path} cannot be read: {reason.rstrip('.')}.{splits}") from error
    finally:
        if shown:
            datasets.enable_progress_bars()
