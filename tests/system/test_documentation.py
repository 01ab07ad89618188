"""Every snippet of README, CONTRIBUTING and docs is run, or parsed by what would run it, on the embedded model."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import lightning as L
import pytest

from mareinforce import MAGRPOConfig, MAGRPOTrainer, fit
from mareinforce.tasks.story import length_ratio_reward
from tests.documentation import NEEDS, PAGES, QUICKSTART, ROOT, Python, blocks, problems

CANNOT_RUN_HERE = [
    ("coming_from_comlrl.md", "# needs comlrl 1.4.3"),
    ("tracking.md", "# needs tensorboard (pip install tensorboard)"),
]
"""(page, first line) of the blocks that need what not every machine has."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders as the pages name them, with agents, metrics and a checkpoint of a short run."""
    folder = tmp_path_factory.mktemp("shown") / "runs"
    changes = {
        "model.config.num_generations": 2, "model.config.max_new_tokens": 4, "model.config.eval_interval": 0,
        "data.train.split": "train[:2]", "trainer.accelerator": "cpu", "trainer.default_root_dir": folder,
        "trainer.enable_progress_bar": "false", "trainer.callbacks": "null",
    }  # fmt: skip
    arguments = [f"--config={QUICKSTART}", *(f"--{key}={value}" for key, value in changes.items())]
    with contextlib.redirect_stdout(None):
        assert fit.main(arguments) == 0
    first = folder / "run_0001"
    for name in ("run_0002", "run_0003"):
        shutil.copytree(first, folder / name)
    (checkpoint,) = (folder / "run_0003" / "checkpoints").glob("*.ckpt")
    checkpoint.rename(checkpoint.with_name("batch=40-updates=40.ckpt"))
    return folder


@pytest.fixture
def desk(runs, tmp_path) -> Path:
    """A folder like a clone in which README's task is, and something has been trained."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    shutil.copytree(runs, tmp_path / "runs")
    for block in blocks("README.md", (ROOT / "README.md").read_text(encoding="utf-8")):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.code, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_snippet_of_a_page_holds(page, desk):
    assert problems(page.name, page.read_text(encoding="utf-8"), desk) == []


def test_what_cannot_run_here_is_listed():
    found = [
        (page.name, block.code.splitlines()[0])
        for page in PAGES
        for block in blocks(page.name, page.read_text(encoding="utf-8"))
        if block.code.startswith(NEEDS)
    ]
    assert found == CANNOT_RUN_HERE


def test_every_fence_of_every_page_is_seen():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert 2 * len(blocks(page.name, text)) == sum(line.lstrip().startswith("```") for line in text.splitlines())


def test_callbacks_that_a_page_defines_work_in_a_run(tmp_path, capsys):
    page = ROOT / "docs" / "callbacks.md"
    python = Python(tmp_path)
    for block in blocks(page.name, page.read_text(encoding="utf-8")):
        assert block.language != "python" or python.problems(block) == []
    kinds = [
        kind
        for namespace in python.namespaces
        for kind in namespace.values()
        if isinstance(kind, type) and issubclass(kind, L.Callback) and kind.__module__ == "example"
    ]
    assert len(kinds) == 2
    trainer = MAGRPOTrainer(
        agent_model="tiny-story",
        reward_func=length_ratio_reward,
        train_dataset=["Tell a story about a lazy fox and a red kite."],
        args=MAGRPOConfig(num_turns=1, num_train_epochs=1, num_generations=2, max_new_tokens=4, logging_steps=1),
        default_root_dir=tmp_path,
        accelerator="cpu",
        callbacks=[kind() for kind in kinds],
        enable_progress_bar=False,
    )
    trainer.train()
    assert "longest_answer" in (trainer.run_folder / "metrics.csv").read_text()
    assert "Rollout tree of row 0" in capsys.readouterr().out


BROKEN = {
    # Python
    "```python\nx = 1\nassert x ==\n```": (3, "invalid syntax"),
    "```python\nfrom mareinforce import MAGRPOConfig\n\nMAGRPOConfig(num_turnz=1)\n```": (4, "num_turnz"),
    "```python\nx = 1\n```\n\n```python\nprint(x)\n```": (6, "'x' is not defined"),
    "```python\ndef wrong():\n    return {}['key']\n\n\nwrong()\n```": (3, "KeyError"),
    "```python\n# needs a hub\nfrom mareinforce import MAGRPOTrainerz\n```": (3, "MAGRPOTrainerz"),
    "```python\n# needs a hub\nMAGRPOConfig(\n    num_turnz=2)\n```": (4, "num_turnz"),
    # YAML
    "```yaml\nmodel: [\n```": (3, "expected the node content"),
    "```yaml\nmodel:\n  config:\n    num_generationz: 4\n```": (4, "Did you mean"),
    "```yaml\nmodel: {config: {num_turns: 0}}\n```": (2, "at least 1"),
    "```yaml\nexternal_transitoin: my.function\n```": (2, "there is no such key"),
    "```yaml\n- class_path: mareinforce.callbacks.TreeView\n  init_args: {keep_lost: 1}\n```": (3, "keep_lost"),
    "```yaml\n- class_path: mareinforce.callbacks.TreeVue\n```": (2, "TreeVue"),
    "```yaml\neval: {samples: 3}\n```": (2, "eval.samples"),
    "```yaml\nmodel: {reward_func: no_such_task.reward}\ndata: {train: [a]}\n```": (2, "no_such_task"),
    # bash
    "```bash\npython -m mareinforce.fit --config configs/no_such.yaml\n```": (2, "there is no configs/no_such.yaml"),
    "```bash\npip install -e .\npython -m mareinforce.fit \\\n  --model.num_agentz 2\n```": (3, "num_agentz"),
    "```bash\npython -m mareinforce.evaluate --run runs/run_0099\n```": (2, "no config.yaml"),
    "```bash\npython -m mareinforce.evaluate --run runs/run_0001 --eval.row all\n```": (2, "eval.row"),
    "```bash\npython -m mareinforce.plot runs/run_0099\n```": (2, "metrics.csv"),
    "```bash\npip install -e \".[tests]\" -c constraints.txt\n```": (2, "there is no extra tests"),
    "```bash\npip install -e . -c constraint.txt\n```": (2, "constraints"),
    "```bash\npip install some-package\n```": (2, "some-package"),
    "```bash\npip install human-eva\n```": (2, "human-eva"),
    "```bash\npytest -m learnin\n```": (2, "there is no marker learnin"),
    "```bash\npytest tests/unit/test_nothing.py\n```": (2, "test_nothing.py"),
    "```bash\npython -m tests.no_such\n```": (2, "there is no module tests.no_such"),
    "```bash\npython -m tests.benchmarks W9 --model FOLDER\n```": (2, "invalid choice: 'W9'"),
    "```bash\npython -m tests.campaigns.fault --seed 1 --run 3\n```": (2, "unrecognized arguments: --run 3"),
    "```bash\ntorchrun --nnodes 2 --procs 1 -m mareinforce.fit --config configs/quickstart.yaml\n```": (2, "--procs"),
    "```bash\nmake everything\n```": (2, "make"),
    # others
    "```\npython -m tests.benchmarks W1\n```": (2, "not bash"),
    "```toml\nx = 1\n```": (1, "language"),
}  # fmt: skip


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: text.splitlines()[1][:60])
def test_what_does_not_hold_is_reported_at_its_page_and_line(text, desk):
    line, said = BROKEN[text]
    (problem,) = problems("page.md", f"One.\n\n{text}\n", desk)
    assert problem.startswith(f"page.md:{line + 2}: ")
    assert said in problem.rsplit(" (", 1)[0]  # without the command itself


def test_what_holds_is_not_reported(desk):
    text = (
        "`shown.py`:\n\n```python\nx = 1\n```\n\n```python\n# continues\nfrom shown import x as y\n\nassert x == y\n"
        "```\n\n```yaml\nnum_generations: 8\n```\n\n```bash\nfor i in 0 1; do\n  python -m mareinforce.fit --ckpt_path "
        "last --config configs/quickstart.yaml &  # comment\ndone; wait\n```\n\n```\nreward 0.5\n```\n"
    )
    assert problems("page.md", text, desk) == []
