"""The task that the documentation shows is small, and runs as it stands there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "your_own_task.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return found


def test_it_runs_as_it_is_shown(tmp_path):
    code, config = block("python"), block("yaml")
    assert len(code.splitlines()) <= 60
    assert len(config.splitlines()) <= 25
    (tmp_path / "heroes.py").write_text(code, encoding="utf-8")
    (tmp_path / "heroes.yaml").write_text(config, encoding="utf-8")
    for line in block("bash").splitlines():
        command = [
            sys.executable,
            *line.split()[1:],
            "--trainer.accelerator=cpu",
            "--trainer.enable_progress_bar=false",
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "run_0001"
    assert {"metrics.csv", "eval.jsonl", "eval_summary.json", "agents"} <= {path.name for path in run.iterdir()}
    header = (run / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"turn_1/reward_mean", "turn_2/reward_mean", "turn_1/named_mean", "turn_2/different_mean"} <= set(header)
    summary = json.loads((run / "eval_summary.json").read_text())
    assert {"pass@1", "pass@4", "avg@4"} <= summary["end"]["final"].keys()
    assert "gain_turn_2_over_turn_1" in summary["end"]
