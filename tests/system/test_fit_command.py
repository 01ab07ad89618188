"""`python -m mareinforce.fit` and `python -m mareinforce.evaluate`, as a user runs them, on models of a few weights."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import mareinforce.cli  # noqa: F401 (Lightning keeps the stderr it is imported with)
from mareinforce import evaluate, fit
from tests.models import llama_model, word_tokenizer

MY_TASK = """
def reward(first, second):
    return [float(len(a) <= len(b)) for a, b in zip(first, second)]

def failing(first, second):
    return [1 / 0 for _ in first]

def wrong_length(first, second):
    return [1.0]
"""
ROWS = [{"prompt": "a b"}, {"prompt": "c d e"}, {"prompt": "f"}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """A user's folder: a recipe, a task and a model."""
    tokenizer = word_tokenizer()
    llama_model(len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "my_task.py").write_text(MY_TASK)
    recipe = {
        "seed_everything": 1,
        "model": {
            "agent_model": "model",
            "reward_func": "my_task.reward",
            "config": {"num_turns": 1, "num_train_epochs": 2, "num_generations": 4, "max_new_tokens": 3,
                       "agent_learning_rate": 1e-3, "rollout_buffer_size": 1, "logging_steps": 1, "eval_interval": 2,
                       "eval_num_samples": 2},
        },
        "data": {"train": ROWS, "eval": ROWS},
        "trainer": {"accelerator": "cpu"},
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def command(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-W", "always::UserWarning", "-m", f"mareinforce.{name}", *arguments],
        capture_output=True, text=True, timeout=300, env={"PYTHONPATH": str(root), "PATH": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_run_from_the_command_line(folder: Path) -> None:
    done = command("fit", "--config", "recipe.yaml", "--model.algorithm", "marloo")
    assert done.returncode == 0, done.stderr
    assert re.search(r"Warning|\.py:\d+: ", done.stderr) is None, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "agents", "parameters", "rollouts", "memory", "run", "turn", "100%", "run"
    ]  # fmt: skip
    assert sum(line.startswith(("epoch ", "evaluation, epoch ")) for line in done.stderr.splitlines()) == 10
    turn, _, place = done.stdout.splitlines()[-3:]
    assert turn.startswith("turn 1 reward: ")
    assert turn.endswith("(first and last 3 of 6 rows of metrics)")
    assert place == "run folder: runs/run_0001"
    run = folder / "runs" / "run_0001"
    trained = [row for row in rows(run) if row["turn_1/reward_mean"]]
    assert list(trained[0])[:3] == ["step", "turn_1/reward_mean", "turn_1/expected_return"]
    assert [int(row["step"]) for row in trained] == [4, 8, 12, 16, 20, 24]
    assert [float(row["batch"]) for row in trained] == [1, 2, 3, 4, 5, 6]
    assert [float(row["updates"]) for row in trained] == [1, 2, 3, 4, 5, 6]
    assert [int(row["step"]) for row in rows(run) if row["eval/turn_1/reward_mean"]] == [0, 8, 12, 20]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["batch=6-updates=6.ckpt"]
    for agent in ("agent_0", "agent_1"):
        AutoModelForCausalLM.from_pretrained(run / "agents" / agent)
        AutoTokenizer.from_pretrained(run / "agents" / agent)
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert (saved["model"]["algorithm"], saved["seed_everything"]) == ("marloo", 1)


def test_the_saved_config_gives_the_same_run(folder: Path, capsys) -> None:
    assert fit.main(["--config", "recipe.yaml", "--trainer.enable_progress_bar", "false"]) == 0
    assert fit.main(["--config", "runs/run_0001/config.yaml"]) == 0
    assert fit.main(["--config", "runs/run_0001/config.yaml", "--seed_everything", "2"]) == 0
    first, second, third = ((folder / f"runs/run_000{n}/metrics.csv").read_text() for n in (1, 2, 3))
    assert first == second != third


def test_evaluation_prints_metrics_and_writes_nothing(folder: Path, capsys) -> None:
    assert fit.main(["--config", "recipe.yaml", "--trainer.enable_progress_bar", "false"]) == 0
    before = sorted(folder.rglob("*"))
    printed = []
    for arguments in (["recipe.yaml"], ["recipe.yaml", "--ckpt_path", "last"], ["runs/run_0001/config.yaml"]):
        capsys.readouterr()
        assert evaluate.main(["--config", *arguments, "--trainer.enable_progress_bar", "false"]) == 0
        printed.append(json.loads(capsys.readouterr().out))
    assert set(printed[0]) >= {"eval/turn_1/reward_mean", "eval/turn_1/expected_return"}
    assert printed[0] == printed[2]
    assert 0 <= printed[1]["eval/turn_1/reward_mean"] <= 1
    assert [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts] == [
        path for path in before if "__pycache__" not in path.parts
    ]


class TestEvaluatedRows:
    @pytest.fixture
    def evaluated(self, folder, capfd):
        """Evaluate six rows as the recipe says, which has another number, and return what stdout was, parsed."""
        six = "".join(json.dumps({"prompt": f"row {number}"}) + "\n" for number in range(6))
        (folder / "six.jsonl").write_text(six)
        task = MY_TASK + "\n\ndef talks(a, b):\n    print('talking')\n    return [1.0] * len(a)\n"
        (folder / "my_task.py").write_text(task)

        def command(*arguments):
            fixed = ["--config", "recipe.yaml", "--data.eval", "null", "--data.eval.path", "six.jsonl"]
            assert evaluate.main([*fixed, "--model.reward_func", "my_task.talks", *arguments]) == 0
            out, err = capfd.readouterr()
            assert "talking" in err
            return json.loads(out)

        return command

    def test_all_rows_are_played_whatever_the_file_says_and_stdout_is_one_object(self, evaluated):
        found = evaluated()
        assert (found["rows"], found["rows_available"]) == (6, 6)
        assert found["eval/turn_1/reward_mean"] == 1.0
        assert not {"eval_summary", "evaluation_folder"} & set(found)

    @pytest.mark.parametrize(
        "arguments",
        [("--model.config.eval_num_samples", "4"), ("--model.config.eval_num_samples=4",),
         ("--model.config", "{eval_num_samples: 4}")],
    )  # fmt: skip
    def test_the_command_line_has_the_last_word(self, evaluated, arguments):
        found = evaluated(*arguments)
        assert (found["rows"], found["rows_available"]) == (4, 6)

    def test_the_summary_of_a_protocol_is_in_the_object(self, evaluated, folder):
        found = evaluated("--eval.samples_per_row", "2")
        assert (found["rows"], found["eval_summary"]["rows"], found["eval_summary"]["samples_per_row"]) == (6, 6, 2)
        written = json.loads((folder / found["evaluation_folder"] / "eval_summary.json").read_text())
        assert written == {"evaluation": found["eval_summary"]}


def test_a_warning_is_one_plain_line(folder: Path) -> None:
    (folder / "my_task.py").write_text(MY_TASK + "\n\ndef again(prompt):\n    return [prompt, prompt]\n")
    turns = ["--model.config.num_turns", "2", "--model.external_transition", "my_task.again"]
    ones = ["--model.config.early_termination_threshold", "-9", "--model.config.eval_interval", "0"]
    done = command("fit", "--config", "recipe.yaml", *turns, *ones)
    assert done.returncode == 0, done.stderr
    sentence = "early_termination_threshold=-9.0 stops every branch after turn 1"
    (line,) = [line for line in done.stderr.splitlines() if sentence in line]
    assert line.startswith(f"warning: {sentence}")
    assert "rank_zero" not in done.stderr


def test_a_run_with_callbacks_of_its_own_can_be_evaluated(folder: Path, capsys) -> None:
    every_batch = '[{"class_path": "mareinforce.checkpoint.TeamCheckpoint", "init_args": {"every_n_batches": 1}}]'
    quiet = ["--trainer.enable_progress_bar", "false"]
    assert fit.main(["--config", "recipe.yaml", *quiet, f"--trainer.callbacks={every_batch}"]) == 0
    for arguments in (["--run", "runs/run_0001"], ["--config", "runs/run_0001/config.yaml", "--ckpt_path", "last"]):
        capsys.readouterr()
        assert evaluate.main([*arguments, *quiet]) == 0
        assert "eval/turn_1/reward_mean" in json.loads(capsys.readouterr().out)


def test_a_users_bug_shows_the_users_traceback(folder: Path, capsys) -> None:
    assert fit.main(["--config", "recipe.yaml", "--model.reward_func", "my_task.failing"]) == 1
    said = capsys.readouterr().err
    assert 'my_task.py", line 6, in' in said
    assert "ZeroDivisionError" in said
    assert "mareinforce/" not in said
    assert said.splitlines()[-1].startswith("error: reward_func my_task.failing raised ZeroDivisionError")
    assert list((folder / "runs").iterdir()) == []  # nothing came of it


def test_a_reward_of_wrong_length_stops_with_a_sentence(folder: Path, capsys) -> None:
    assert fit.main(["--config", "recipe.yaml", "--model.reward_func", "my_task.wrong_length"]) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said.splitlines()[-1].startswith("error: reward_func my_task.wrong_length")


def test_a_missing_model_and_a_missing_column_stop_with_a_sentence(folder: Path, capsys) -> None:
    for arguments, words in [
        (["--model.agent_model", "./no_model"], "no_model"),
        (["--data.prompt_column", "question"], "'question'"),
    ]:
        assert fit.main(["--config", "recipe.yaml", *arguments]) == 1
        said = capsys.readouterr().err
        assert "Traceback" not in said
        assert said.splitlines()[-1].startswith("error: ")
        assert words in said.splitlines()[-1]
        assert list(folder.glob("runs/*")) == []


def test_a_run_that_fails_later_keeps_what_it_has(folder: Path, capsys) -> None:
    later = "\ncalls = []\n\ndef later(a, b):\n    calls.append(1)\n    return [0.0, 1.0, 2.0, 1 / (4 - len(calls))]\n"
    (folder / "my_task.py").write_text(MY_TASK + later)
    arguments = ["--model.reward_func", "my_task.later", "--model.config.eval_interval", "0"]
    assert fit.main(["--config", "recipe.yaml", *arguments]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert len(rows(folder / "runs" / "run_0001")) == 3


def test_training_ends_after_max_updates_and_is_saved_there(folder: Path, capsys) -> None:
    assert fit.main(["--config", "recipe.yaml", "--model.config.max_updates", "2"]) == 0
    assert [path.name for path in folder.rglob("*.ckpt")] == ["batch=2-updates=2.ckpt"]
    assert [float(row["updates"]) for row in rows(folder / "runs/run_0001") if row["turn_1/reward_mean"]] == [1, 2]


BEST = """
trainer:
  callbacks:
    - class_path: mareinforce.checkpoint.TeamCheckpoint
      init_args: {every_n_env_steps: 8, every_n_minutes: 60, keep_last: 2, monitor: METRIC, mode: min, keep_best: 1}
"""


def test_checkpoints_are_configured_in_yaml(folder: Path, capsys) -> None:
    (folder / "best.yaml").write_text(BEST.replace("METRIC", "agent_0/completion_length"))
    quiet = ["--config", "recipe.yaml", "--config", "best.yaml", "--trainer.enable_progress_bar", "false"]
    assert fit.main(quiet) == 0
    checkpoints = folder / "runs" / "run_0001" / "checkpoints"
    scores = json.loads((checkpoints / "scores.json").read_text())
    assert {path.name for path in checkpoints.glob("*.ckpt")} == scores["scores"].keys()
    assert {"batch=4-updates=4.ckpt", "batch=6-updates=6.ckpt"} <= scores["scores"].keys()
    assert scores["scores"][scores["best"][0]] == min(scores["scores"].values())
    (folder / "best.yaml").write_text(BEST.replace("METRIC", "agent_0/completion_lenght"))
    assert fit.main(quiet) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(
        "error: TeamCheckpoint monitor='agent_0/completion_lenght': there is no such metric. Did you"
    )


def test_folders_that_cannot_be_written_to_are_refused_before_a_model_loads(folder: Path, capsys) -> None:
    (folder / "file").touch()
    quiet = ["--config", "recipe.yaml", "--model.agent_model", "no_model", "--trainer.enable_progress_bar", "false"]
    elsewhere = BEST.replace("METRIC", "updates").replace("keep_best", "dirpath: file, keep_best")
    (folder / "elsewhere.yaml").write_text(elsewhere)
    for arguments, words in [
        (["--trainer.default_root_dir", "file"], "default_root_dir='file': no folder for a run can be made there"),
        (["--config", "elsewhere.yaml"], "checkpoints cannot be written to 'file' (File exists)"),
    ]:
        assert fit.main([*quiet, *arguments]) == 1
        said = capsys.readouterr().err
        assert "Traceback" not in said
        assert words in said.splitlines()[-1]
