"""The lines of `rollouts.jsonl`, the two files they are kept in, and the table they are read into."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mareinforce.callbacks import RolloutLog
from mareinforce.callbacks.bounded_lines import BoundedLines

import mareinforce
from mareinforce.errors import ConfigError, DataError, MareinforceWarning
from mareinforce.rollout_table import VERSION, as_line, read_rollouts, whole_lines

ALIGNED = {
    "version": VERSION, "env_step": 2, "path": "0/2", "prompt": "go", "reward": 0.5, "components": {}, "kl": None,
}  # fmt: skip
CROSS = {
    "version": VERSION, "env_step": 4, "path": "", "prompt": "go", "joint_actions": [0, 2], "rewards": [1.0, 2.0],
    "components": {"first": [1.0, 0.0]}, "kl": 0.25,
}  # fmt: skip


def line(env_step: int, width: int = 0) -> bytes:
    return as_line({"version": VERSION, "env_step": env_step, "prompt": "x" * width})


def steps(path: Path) -> list[int] | None:
    return [record["env_step"] for _, record in whole_lines(path)] if path.exists() else None


class TestLine:
    def test_a_number_that_is_not_finite_is_null(self):
        record = {"kl": float("nan"), "prompt": [{"role": "user", "content": "a", "score": float("-inf")}]}
        assert "NaN" in json.dumps(record)
        assert json.loads(as_line(record)) == {"kl": None, "prompt": [{"role": "user", "content": "a", "score": None}]}

    @pytest.mark.parametrize("text", ["grün 火", 'a "b" \\ c', "a\nb\r\nc\u2028d\x85e\x00", "half a pair \ud83d", "😀"])
    def test_any_text_is_one_line_and_comes_back(self, text):
        whole = as_line({"prompt": text})
        assert (whole.count(b"\n"), whole[-1:]) == (1, b"\n")
        assert json.loads(whole) == {"prompt": text}
        whole.decode("utf-8")

    def test_what_json_does_not_know_is_text(self):
        message = {"role": "user", "content": ("a", Path("b")), 3: True}
        assert json.loads(as_line({"prompt": [message]})) == {
            "prompt": [{"role": "user", "content": ["a", "b"], "3": True}]
        }

    def test_floats_come_back_exactly(self):
        assert json.loads(as_line({"reward": 0.1 + 0.2}))["reward"] == 0.1 + 0.2 != 0.3


class TestBoundedLines:
    def test_lines_are_added_in_one_write(self, tmp_path, monkeypatch):
        written: list[bytes] = []
        lines = BoundedLines(tmp_path / "new" / "rollouts.jsonl", 1000, "RolloutLog")
        write = lines._write
        monkeypatch.setattr(lines, "_write", lambda block: written.append(block) or write(block))
        lines.append([line(1), line(2)])
        lines.append([line(3)])
        assert written == [line(1) + line(2), line(3)]
        assert steps(lines.path) == [1, 2, 3]

    def test_a_file_is_full_when_the_next_line_would_pass_the_bound(self, tmp_path):
        lines = BoundedLines(tmp_path / "rollouts.jsonl", 3 * len(line(1)), "RolloutLog")
        lines.append([line(1), line(2), line(3)])
        assert (steps(lines.older), steps(lines.path)) == (None, [1, 2, 3])
        lines.append([line(4)])
        assert (steps(lines.older), steps(lines.path)) == ([1, 2, 3], [4])
        lines.append([line(5), line(6), line(7), line(8)])  # more than fits: the newest stay
        assert (steps(lines.older), steps(lines.path)) == ([4, 5, 6], [7, 8])
        assert sorted(file.name for file in tmp_path.iterdir()) == ["rollouts.1.jsonl", "rollouts.jsonl"]

    def test_a_line_that_fits_nowhere_is_left_out_with_one_warning(self, tmp_path):
        lines = BoundedLines(tmp_path / "rollouts.jsonl", 100, "RolloutLog")
        with pytest.warns(MareinforceWarning, match=r"max_bytes=100: .* Set max_bytes above that") as said:
            lines.append([line(1), line(2, width=100), line(3, width=100), line(4)])
        assert len(said) == 1
        assert steps(lines.path) in ([1, 4], [4])
        assert lines.path.stat().st_size <= 100

    @pytest.mark.parametrize(("env_step", "kept"), [(1, [1]), (2, [1, 2]), (9, [1, 2, 3])])
    def test_going_on_takes_out_what_is_newer(self, tmp_path, env_step, kept):
        lines = BoundedLines(tmp_path / "rollouts.jsonl", 1000, "RolloutLog")
        lines.append([line(1), line(2), line(3)])
        lines.path.write_bytes(lines.path.read_bytes() + line(1)[:-1])  # never finished
        lines.go_on_from(env_step)
        assert steps(lines.path) == kept
        assert lines.path.read_bytes() == b"".join(map(line, kept))
        assert [file.name for file in tmp_path.iterdir()] == ["rollouts.jsonl"]

    @pytest.mark.parametrize("env_step", range(1, 10))
    def test_two_files_are_again_what_they_were_at_that_step(self, tmp_path, env_step):
        def after(folder: str, *batches: int) -> BoundedLines:
            lines = BoundedLines(tmp_path / folder / "rollouts.jsonl", 4 * len(line(1)), "RolloutLog")
            for batch in batches:
                lines.append([line(batch)])
            return lines

        killed, whole = after("killed", *range(1, 8)), after("whole", *range(1, env_step + 1))
        killed.go_on_from(env_step)
        for batch in range(min(env_step, 7) + 1, 10):
            killed.append([line(batch)])
        for batch in range(env_step + 1, 10):
            whole.append([line(batch)])
        for lines in (killed, whole):
            assert (steps(lines.older), steps(lines.path)) == ([5, 6, 7, 8], [9])

    def test_files_without_a_line_left_are_gone(self, tmp_path):
        lines = BoundedLines(tmp_path / "rollouts.jsonl", len(line(5)), "RolloutLog")
        lines.append([line(5), line(6)])
        lines.go_on_from(4)
        assert list(tmp_path.iterdir()) == []
        lines.go_on_from(4)  # nothing there is no trouble

    def test_a_cut_that_fails_leaves_the_file(self, tmp_path, monkeypatch):
        lines = BoundedLines(tmp_path / "rollouts.jsonl", 1000, "RolloutLog")
        lines.append([line(1), line(2)])

        def fails(*_: Any) -> None:
            raise OSError("killed")

        monkeypatch.setattr("mareinforce.callbacks.bounded_lines.os.replace", fails)
        with pytest.raises(OSError, match="killed"):
            lines.go_on_from(1)
        assert steps(lines.path) == [1, 2]

    def test_a_new_run_refuses_anothers_lines(self, tmp_path):
        lines = BoundedLines(tmp_path / "rollouts.jsonl", 1000, "RolloutLog")
        lines.go_on_from(0)
        lines.append([line(1)])
        with pytest.raises(ConfigError, match=r"rollouts.jsonl holds the lines of another run.*move it away"):
            lines.go_on_from(0)
        assert steps(lines.path) == [1]


class TestCallback:
    @pytest.mark.parametrize("name", ["every_n_batches", "max_bytes"])
    def test_numbers_below_one_are_refused(self, name):
        with pytest.raises(ConfigError, match=f"RolloutLog {name}=0: must be at least 1"):
            RolloutLog(**{name: 0})

    def test_a_module_that_returns_no_trees_is_refused(self, tmp_path):
        log, module = RolloutLog(), SimpleNamespace(env_step=0, batches=1)
        trainer: Any = SimpleNamespace(is_global_zero=True, log_dir=None, default_root_dir=tmp_path, current_epoch=0)
        log.on_train_start(trainer, module)
        with pytest.raises(ConfigError, match=r"training_step of SimpleNamespace returned None; it must return"):
            log.on_train_batch_end(trainer, module, None, None, 0)


class TestReader:
    def write(self, path: Path, *records: dict[str, Any], tail: bytes = b"") -> Path:
        path.write_bytes(b"".join(map(as_line, records)) + tail)
        return path

    def test_columns_are_the_fields_in_the_order_of_the_schema(self, tmp_path):
        table = read_rollouts(self.write(tmp_path / "rollouts.jsonl", {**ALIGNED, "reward": 0.1}, ALIGNED))
        assert table.column_names == ["version", "env_step", "path", "prompt", "reward", "kl"]
        assert table[0] == {"version": 1, "env_step": 2, "path": "0/2", "prompt": "go", "reward": 0.1, "kl": None}
        assert [str(table.features[name].dtype) for name in ("env_step", "kl")] == ["int64", "float64"]
        table.to_parquet(str(tmp_path / "table.parquet"))

    def test_components_become_lists_where_any_line_has_lists(self, tmp_path):
        scored = {**ALIGNED, "components": {"second": 3.0}}
        table = read_rollouts(self.write(tmp_path / "one.jsonl", scored))
        assert table["components"][:] == [{"second": 3.0}]
        table = read_rollouts(self.write(tmp_path / "both.jsonl", scored, CROSS))
        assert table["components"][:] == [{"second": [3.0], "first": None}, {"second": None, "first": [1.0, 0.0]}]
        assert table["joint_actions"][:] == [None, [0, 2]]

    def test_messages_have_a_column_of_their_own(self, tmp_path):
        messages = [{"role": "user", "content": "ä"}]
        table = read_rollouts(self.write(tmp_path / "rollouts.jsonl", ALIGNED, {**ALIGNED, "prompt": messages}))
        assert table["prompt"][:] == ["go", None]
        assert table["messages"][0] is None
        assert json.loads(table["messages"][1]) == messages

    def test_the_older_file_comes_first_if_it_is_asked_for(self, tmp_path):
        self.write(tmp_path / "rollouts.jsonl", {**ALIGNED, "env_step": 3})
        assert read_rollouts(tmp_path, older=True)["env_step"][:] == [3]
        self.write(tmp_path / "rollouts.1.jsonl", {**ALIGNED, "env_step": 1}, {**ALIGNED, "env_step": 2})
        assert read_rollouts(tmp_path, older=True)["env_step"][:] == [1, 2, 3]
        assert read_rollouts(str(tmp_path))["env_step"][:] == [3]

    def test_a_last_line_without_its_end_is_left_out_and_nothing_else(self, tmp_path):
        path = tmp_path / "rollouts.jsonl"
        assert len(read_rollouts(self.write(path, ALIGNED, ALIGNED, tail=as_line(ALIGNED)[:-1]))) == 2
        assert len(read_rollouts(self.write(path, ALIGNED, ALIGNED, tail=as_line(ALIGNED)))) == 3
        assert len(read_rollouts(self.write(path, tail=b'{"ver'))) == 0
        with pytest.raises(DataError, match=r"line 2: is not JSON .*take that line out"):
            read_rollouts(self.write(path, ALIGNED, tail=b'{"ver\n' + as_line(ALIGNED)))

    @pytest.mark.parametrize(
        ("text", "words"),
        [(b'{"version": 2}\n', "is of version 2, and only version 1 is known"), (b"[1]\n", "has no version"),
         (b'{"prompt": "go"}\n', "has no version"), (b'"\xff"\n', "is not JSON")],
    )  # fmt: skip
    def test_lines_of_something_else_are_refused(self, tmp_path, text, words):
        path = self.write(tmp_path / "rollouts.jsonl", ALIGNED, tail=text)
        with pytest.raises(DataError, match=f"rollouts.jsonl, line 2: {words}"):
            read_rollouts(path)
        with pytest.raises(DataError, match=words):
            BoundedLines(path, 1000, "RolloutLog").go_on_from(5)
        assert path.read_bytes().endswith(text)

    def test_a_file_that_is_not_there_is_said(self, tmp_path):
        with pytest.raises(DataError, match=r"there is no such file; it is written where RolloutLog is among"):
            read_rollouts(tmp_path)

    def test_it_is_a_public_name(self):
        assert mareinforce.read_rollouts is read_rollouts
