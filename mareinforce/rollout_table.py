"""`rollouts.jsonl`: what a line says about one agent's completion, and lines read back as a table."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mareinforce.errors import DataError
from mareinforce.rollout.tree import Node, nodes_by_level
from mareinforce.types import NodeSample

if TYPE_CHECKING:
    from datasets import Dataset

VERSION = 1
"""Of the schema; each line carries it."""
FILE_NAME = "rollouts.jsonl"
Record = dict[str, Any]
"""A line's fields."""
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=str)

COLUMNS: dict[str, Any] = {
    "version": "int64", "env_step": "int64", "epoch": "int64", "batch": "int64", "row": "int64", "path": "string",
    "turn": "int64", "agent": "int64", "k": "int64", "prompt": "string", "messages": "string", "completion": "string",
    "completion_ids": ["int64"], "ended": "bool", "tokens": "int64", "raw_reward": "float64", "reward": "float64",
    "joint_actions": ["int64"], "raw_rewards": ["float64"], "rewards": ["float64"], "components": None,
    "return": "float64", "kl": "float64", "kl_penalty": "float64", "advantage": "float64",
    "behaviour_logprob": "float64", "policy_version": "int64",
}  # fmt: skip
"""Column of the table -> type of its values; [type]: a list of them; None: decided by what is found."""


def completion_records(
    trees: Sequence[Node],
    samples: Iterable[NodeSample],
    *,
    joint_mode: Literal["aligned", "cross"],
    epoch: int,
    batch: int,
    ids: bool = False,
) -> Iterator[Record]:
    """One record a completion, in the order of the samples. ``ids``: with the completion's token ids."""
    nodes = {node.env_step: node for root in trees for node in nodes_by_level(root)}  # no two share a step
    for sample in samples:
        node = nodes[sample.env_step]
        answers = node.answers[sample.agent]
        assert answers is not None, "an idle agent has no sample"
        joint_of = _joint_actions_by_answer(node, sample.agent)
        returns, advantages = sample.returns.tolist(), sample.advantages.tolist()
        kl = None if sample.kl is None else sample.kl.k3.tolist()
        kl_penalty = None if sample.kl_penalty is None else sample.kl_penalty.tolist()
        for i, (k, completion) in enumerate(zip(sample.ks or count(), sample.completions, strict=False)):
            joint = joint_of[k]
            yield {
                "version": VERSION,
                "env_step": sample.env_step,
                "epoch": epoch,
                "batch": batch,
                "row": sample.row,
                "path": "/".join(map(str, sample.path)),
                "turn": sample.turn + 1,
                "agent": sample.agent,
                "k": k,
                "prompt": answers.prompt,
                "completion": completion.text,
                **({"completion_ids": completion.ids.tolist()} if ids else {}),
                "ended": completion.ended,
                "tokens": len(completion.ids),
                **(_earned_in_all(node, joint) if joint_mode == "cross" else _earned(node, joint[0])),
                "return": returns[i],
                "kl": None if kl is None else kl[i],
                "kl_penalty": None if kl_penalty is None else kl_penalty[i],
                "advantage": advantages[i],
                "behaviour_logprob": math.fsum(completion.logprobs.tolist()),
                "policy_version": sample.policy_version,
            }


def _joint_actions_by_answer(node: Node, agent: int) -> dict[int, list[int]]:
    """The index of an agent's answer -> those of the joint actions that it is in."""
    found: dict[int, list[int]] = {}
    for j, action in enumerate(node.joint_actions):
        k = action[agent]
        assert k is not None, "an idle agent has no sample"
        found.setdefault(k, []).append(j)
    return found


def _earned(node: Node, j: int) -> Record:
    components = {name: values[j] for name, values in node.components.items()}
    return {"raw_reward": node.raw_rewards[j], "reward": node.rewards[j], "components": components}


def _earned_in_all(node: Node, joint: list[int]) -> Record:
    return {
        "joint_actions": joint,
        "raw_rewards": [node.raw_rewards[j] for j in joint],
        "rewards": [node.rewards[j] for j in joint],
        "components": {name: [values[j] for j in joint] for name, values in node.components.items()},
    }


def as_line(record: Record) -> bytes:
    """A record as one line of strict JSON in UTF-8, its newline included."""
    try:
        text = _JSON.encode(record)
    except (TypeError, ValueError):  # what JSON cannot hold is looked for where there is some
        text = _JSON.encode(_json_value(record))
    # half of a surrogate pair has no UTF-8; as the escape \udXXX it is JSON
    return (text + "\n").encode("utf-8", "backslashreplace")


def _json_value(value: Any) -> Any:
    """What JSON can hold of it: null for a number that is not finite, text for any other object in a message."""
    if isinstance(value, dict):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def whole_lines(path: Path) -> Iterator[tuple[bytes, Record]]:
    """Each line of a file and its record; a last line without its newline, which was never finished, is left out.

    Raises:
        DataError: a line is not JSON, or of another version.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield line, _record(line, f"{path}, line {number}")


def _record(line: bytes, where: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: is not JSON ({error}). The file was changed since; take that line out.") from error
    if not isinstance(record, dict) or "version" not in record:
        raise DataError(f"{where}: has no version, so it is no line of a {FILE_NAME}; give a file that a run wrote.")
    if record["version"] != VERSION:
        raise DataError(
            f"{where}: is of version {record['version']!r}, and only version {VERSION} is known here. Use the release "
            f"of mareinforce that wrote it."
        )
    return record


def older_file(path: Path) -> Path:
    """Where a full file goes: `rollouts.1.jsonl` for `rollouts.jsonl`."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def read_rollouts(path: str | os.PathLike[str], *, older: bool = False) -> Dataset:
    """Read what `mareinforce.callbacks.RolloutLog` wrote as a table in memory, one row a completion, oldest first.

    Columns are the fields of the lines; one that no line has is left out. Prompts that are message lists are in the
    column `messages`, as JSON text, and their `prompt` is None. A last line that is not finished is left out.

    Args:
        path: a `rollouts.jsonl`, or the run folder that it lies in.
        older: with the lines of `rollouts.1.jsonl` before it, if it is there.

    Raises:
        DataError: there is no such file, a line is not JSON, or of another version.
    """
    from datasets import Dataset, Features

    file = Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise DataError(f"{file}: there is no such file; it is written where RolloutLog is among a run's callbacks.")
    files = [older_file(file), file] if older and older_file(file).is_file() else [file]
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    present: set[str] = set()
    for _, record in (line for each in files for line in whole_lines(each)):
        row = _row(record)
        present.update(row)
        for name, values in columns.items():
            values.append(row.get(name))
    columns = {name: values for name, values in columns.items() if name in present}
    types = {name: _feature(COLUMNS[name]) for name in columns if name != "components"}
    if "components" in columns:
        columns["components"], types["components"] = _one_type(columns["components"])
        if not types["components"]:  # no file format holds a column of nothing
            del columns["components"], types["components"]
    return Dataset.from_dict(columns, features=Features(types))


def _row(record: Record) -> Record:
    """A record whose prompt is text whatever it was, since the values of a column are of one type."""
    if isinstance(record["prompt"], str):
        return record
    return {**record, "prompt": None, "messages": json.dumps(record["prompt"], ensure_ascii=False)}


def _feature(kind: Any) -> Any:
    from datasets import List, Value

    return List(Value(kind[0])) if isinstance(kind, list) else Value(kind)


def _one_type(column: Sequence[Record | None]) -> tuple[list[Record], dict[str, Any]]:
    """Components and their types: numbers, or lists if any line has lists (a run may be resumed in another mode)."""
    rows = [row or {} for row in column]
    names = dict.fromkeys(name for row in rows for name in row)
    if any(isinstance(value, list) for row in rows for value in row.values()):
        rows = [{name: value if isinstance(value, list) else [value] for name, value in row.items()} for row in rows]
        return rows, {name: _feature(["float64"]) for name in names}
    return rows, {name: _feature("float64") for name in names}
