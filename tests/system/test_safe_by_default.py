"""Nothing that is read runs code, and nothing that is written holds a secret."""

from __future__ import annotations

import ast
import copy
import os
from pathlib import Path

import pytest
import torch
import wandb
import yaml

from mareinforce import fit
from mareinforce.errors import ConfigError
from tests.models import llama_model, word_tokenizer
from tests.system.runs import train, trainer

ROOT = Path(__file__).parents[2]
SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_planted0secret0planted0secret",
    "HUGGING_FACE_HUB_TOKEN": "hf_another0planted0secret0another",
    "MY_REWARD_SERVICE_PASSWORD": "planted-password-of-a-reward-service",
}
RECIPE = {
    "model": {
        "agent_model": "model",
        "reward_func": "tests.system.runs.rank",
        "config": {"num_turns": 1, "num_train_epochs": 1, "num_generations": 2, "max_new_tokens": 1},
    },
    "data": {"train": [{"prompt": "a"}], "eval": [{"prompt": "b"}]},
    "trainer": {
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "callbacks": [{"class_path": "mareinforce.callbacks.RolloutLog"}],
        "logger": {
            "class_path": "lightning.pytorch.loggers.WandbLogger",
            "init_args": {"project": "a_project", "offline": True, "save_dir": "runs"},
        },
    },
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder, in an environment that holds secrets."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_SILENT", "true")
    llama_model(len(word_tokenizer())).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    monkeypatch.chdir(tmp_path)
    wandb.teardown()  # which keeps what the environment was when it was first asked
    yield tmp_path
    wandb.teardown()


def holding(folder: Path, text: str) -> list[str]:
    """Files below a folder that hold a text, as it is or as UTF-16."""
    wanted = (text.encode(), text.encode("utf-16-le"))
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [str(path.relative_to(folder)) for path in files if any(one in path.read_bytes() for one in wanted)]


def test_no_secret_of_the_environment_is_in_any_file_of_a_run(folder):
    assert fit.main(["--config", "recipe.yaml"]) == 0
    wandb.finish()
    written = {path.name for path in (folder / "runs").rglob("*") if path.is_file()}
    assert {"config.yaml", "metrics.csv", "rollouts.jsonl"} <= written
    assert any(name.endswith(".wandb") for name in written)
    assert any(name.endswith(".ckpt") for name in written)
    for name, value in SECRETS.items():
        assert holding(folder, value) == [], name
    assert "recipe.yaml" in holding(folder, "a_project")  # it would be seen
    assert len(holding(folder / "runs", "a_project")) > 1


@pytest.mark.parametrize("several", [False, True])
def test_a_secret_in_the_configuration_is_refused_before_it_is_written(folder, several, capsys):
    recipe = copy.deepcopy(RECIPE)
    logger = recipe["trainer"]["logger"]
    logger["init_args"]["settings"] = {"api_key": "X"}
    recipe["trainer"]["logger"] = [logger] if several else logger
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe).replace("X", "planted0in0yaml"))
    assert fit.main(["--config", "recipe.yaml"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: trainer.logger")
    assert "WANDB_API_KEY" in said
    assert "planted0in0yaml" not in said
    assert holding(folder, "planted0in0yaml") == ["recipe.yaml"]


@pytest.mark.parametrize("place", [{"api_key": "s"}, {"settings": {"api_key": "s"}}, {"password": "s"}])
def test_a_secret_given_from_python_is_refused_too(tmp_path, place):
    with pytest.raises(ConfigError, match=r"wandb_config\.\S+: a secret given here"):
        trainer(tmp_path, wandb_config={"project": "p", **place})
    trainer(tmp_path, wandb_config={"project": "p", "name": "key", "tags": ["token"]})


class Malicious:
    """Makes a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize("last", [False, True])
def test_a_checkpoint_with_code_in_it_is_refused_and_not_run(tmp_path, monkeypatch, last):
    monkeypatch.chdir(tmp_path)
    made = train(tmp_path)
    (checkpoint,) = (made.run_folder / "checkpoints").glob("*.ckpt")
    content = torch.load(checkpoint, weights_only=True)
    torch.save({**content, "callbacks": Malicious()}, checkpoint)
    with pytest.raises(ConfigError, match="cannot be read as a checkpoint"):
        trainer(tmp_path).train(resume_from_checkpoint="last" if last else checkpoint)
    assert not Path("pwned").exists()
    torch.load(checkpoint, weights_only=False)
    assert Path("pwned").exists()  # it would have been


def test_yaml_with_code_in_it_is_refused_and_not_run(folder, capsys):
    (folder / "code.yaml").write_text("seed_everything: !!python/object/apply:os.mkdir [pwned]\n")
    assert fit.main(["--config", "recipe.yaml", "--config", "code.yaml"]) == 1
    assert not Path("pwned").exists()
    yaml.unsafe_load((folder / "code.yaml").read_text())
    assert Path("pwned").exists()


def unsafe(source: str) -> list[str]:
    """Calls in a file that could run code out of what they read."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name, given = ast.unparse(node.func), {one.arg: ast.unparse(one.value) for one in node.keywords}
            if name == "torch.load" and given.get("weights_only") != "True":
                found.append(name)
            if name in ("pickle.load", "pickle.loads", "yaml.load", "yaml.unsafe_load", "eval", "exec", "joblib.load"):
                found.append(name)
            if name.endswith(("np.load", "numpy.load")) and given.get("allow_pickle") == "True":
                found.append(name)
            if given.get("trust_remote_code") == "True":
                found.append(f"{name} with trust_remote_code")
    return found


def test_nothing_of_ours_loads_what_could_run():
    files = [*(ROOT / "mareinforce").rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")]
    found = {file.name: unsafe(file.read_text()) for file in files}
    assert found.pop("sandbox_child.py") == ["exec"]  # which is what a sandbox is for
    for name in ("call_child.py", "call_process.py"):  # a run and its own worker processes, over a pipe
        assert set(found.pop(name)) == {"pickle.loads"}
    assert {name: calls for name, calls in found.items() if calls} == {}
    assert len(found) > 40
    assert unsafe("torch.load(path)\ntorch.load(path, weights_only=False)\nyaml.load(text, Loader=yaml.Loader)") != []
    assert unsafe("AutoModel.from_pretrained(name, trust_remote_code=True)") != []
