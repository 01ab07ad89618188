"""What the real W&B client wrote offline, read back from its file: a log of protobuf records in 32 KiB blocks."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_BLOCK, _FILE_HEADER, _RECORD_HEADER = 32768, 7, 7
_WHOLE, _LAST = 1, 4


class OfflineRun:
    """One `wandb/offline-run-*` folder, once the client's own process has written all of it."""

    def __init__(self, folder: Path, patience: float = 30) -> None:
        (file,) = folder.glob("*.wandb")
        deadline = time.monotonic() + patience
        self.records = list(_records(file.read_bytes()))
        while not self._of("exit"):
            assert time.monotonic() < deadline, f"{file} has no end"
            time.sleep(0.05)
            self.records = list(_records(file.read_bytes()))

    @property
    def id(self) -> str:
        return self._of("run")[0].run_id

    @property
    def name(self) -> str:
        return self._of("run")[0].display_name

    @property
    def project(self) -> str:
        return self._of("run")[0].project

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rows, in order."""
        return [_items(record.item) for record in self._of("history")]

    @property
    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for record in self._of("config"):
            found |= _items(record.update)
        return found

    @property
    def step_metric(self) -> dict[str, str]:
        """Metrics -> the metric that is their x axis."""
        return {one.glob_name or one.name: one.step_metric for one in self._of("metric")}

    @property
    def artifacts(self) -> dict[str, list[str]]:
        """Name -> the files of every artifact that is a model."""
        return {
            one.name: sorted(entry.path for entry in one.manifest.contents)
            for one in self._of("artifact")
            if one.type == "model"
        }

    @property
    def exit_code(self) -> int:
        return self._of("exit")[0].exit_code

    def _of(self, kind: str) -> list[Any]:
        return [getattr(record, kind) for record in self.records if record.WhichOneof("record_type") == kind]


def offline_runs(folder: Path) -> list[OfflineRun]:
    """Every offline run below a run folder, oldest first."""
    found = sorted(folder.glob("wandb/offline-run-*"), key=lambda path: path.stat().st_ctime_ns)
    return [OfflineRun(path) for path in found]


def _records(content: bytes) -> Iterator[Any]:
    assert content[:4] == b":W&B"
    position, parts = _FILE_HEADER, b""
    while position + _RECORD_HEADER <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _RECORD_HEADER:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + _RECORD_HEADER])
        position += _RECORD_HEADER
        if position + length > len(content):
            return  # not written yet
        parts += content[position : position + length]
        position += length
        if kind in (_WHOLE, _LAST):
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


def _items(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
