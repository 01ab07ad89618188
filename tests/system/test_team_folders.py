"""What is saved of a team: folders that plain transformers and peft read, checkpoints, and whom they fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mareinforce.errors import AgentError, ConfigError
from tests.lora import IDS, LORA, adapter_of, is_untouched, logits, same, save_base
from tests.models import gpt2_model, llama_model, word_tokenizer
from tests.system.runs import rank, train, trainer

FIELDS = {"max_new_tokens": 4, "num_generations": 4, "agent_learning_rate": 0.05, "rows": ("a", "b c")}

KINDS = {
    "adapters": {"model_config": {"lora": LORA}},
    "different ranks": {"model_config": {"lora": [{"r": 1}, {"r": 3}]}},
    "adapter and whole": {"model_config": {"lora": [LORA, None]}},
    "one adapter for both": {"model_config": {"lora": LORA}, "share_policy": True},
    "one model for both": {"share_policy": True},
    "frozen base": {"model_config": {"lora": [LORA, None]}, "trainable": [True, False]},
    "frozen adapter": {"model_config": {"lora": LORA}, "trainable": [True, False]},
    "layers trained whole": {"model_config": {"lora": [{**LORA, "modules_to_save": ["lm_head"]}, LORA]}},
    "decomposed": {"model_config": {"lora": {**LORA, "use_dora": True}}},
    "whole": {},
}

MODELS = {"llama": llama_model, "gpt2": gpt2_model}
TIED = ("gpt2", "layers trained whole")
TEAMS = [(model, kind) for model in MODELS for kind in KINDS if (model, kind) != TIED]

READ = """
import json, os, sys, warnings, torch
with warnings.catch_warnings():
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    from peft import PeftConfig, PeftModel
    from transformers import AutoModelForCausalLM
    for folder in sys.argv[1:]:
        if os.path.exists(os.path.join(folder, "adapter_config.json")):
            base = AutoModelForCausalLM.from_pretrained(PeftConfig.from_pretrained(folder).base_model_name_or_path)
            model = PeftModel.from_pretrained(base, folder)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            torch.save(model.eval()(torch.tensor([[5, 6, 7, 8]])).logits, os.path.join(folder, "logits.pt"))
assert "mareinforce" not in sys.modules
"""


def lora_run(folder, base, how=train, count=2, **options):
    return how(folder, rank, ([base] * count, None), **{**FIELDS, "model_config": {"lora": LORA}, **options})


def checkpoint_of(made):
    (path,) = (made.run_folder / "checkpoints").iterdir()
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A trained and saved team of every kind: (folder, team, base), read again by a process without us."""
    root = tmp_path_factory.mktemp("teams")
    words = word_tokenizer()
    bases = {name: save_base(root / name, model(len(words))) for name, model in MODELS.items()}
    teams, folders = {}, []
    for name, kind in TEAMS:
        made = train(root / "runs", rank, ([bases[name]] * 2, None), **FIELDS, **KINDS[kind])
        folder = root / f"{name} {kind}"
        made.save_model(folder)
        teams[name, kind] = folder, made.module.team, bases[name]
        folders += [str(folder / f"agent_{agent}") for agent in range(2)]
    (root / "read.py").write_text(READ)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, root / "read.py", *folders], check=True, env=environment, cwd=root, timeout=200)
    return teams


@pytest.mark.parametrize("which", TEAMS, ids=", ".join)
class TestFolders:
    def test_plain_libraries_read_what_was_in_memory(self, saved, which):
        folder, team, base = saved[which]
        untouched = AutoModelForCausalLM.from_pretrained(base)(IDS).logits
        read = [torch.load(folder / f"agent_{agent}" / "logits.pt") for agent in range(2)]
        assert [torch.equal(read[agent], logits(team, agent)) for agent in range(2)] == [True, True]
        assert torch.equal(*read) == ("both" in which[1])
        learned = [not torch.equal(one, untouched) for one in read]
        assert learned == [True, "frozen" not in which[1]]

    def test_a_folder_holds_its_own_agent_and_its_tokenizer(self, saved, which):
        folder, team, base = saved[which]
        assert sorted(path.name for path in folder.iterdir()) == ["agent_0", "agent_1"]
        for agent in range(2):
            inside = folder / f"agent_{agent}"
            assert AutoTokenizer.from_pretrained(inside)("a b")["input_ids"] == team.encode(agent, "a b").tolist()
            assert not [path.name for path in inside.iterdir() if path.is_dir()]
            if team.seats[agent].adapter is None:
                continue
            weights = load_file(inside / "adapter_model.safetensors")
            own = adapter_of(team, agent)
            plain = {name.replace(f".{team.seats[agent].adapter}", "").replace(".modules_to_save", "") for name in own}
            assert set(weights) == {
                name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector") for name in plain
            }
            assert sum(weight.numel() for weight in weights.values()) == sum(weight.numel() for weight in own.values())
            assert json.loads((inside / "adapter_config.json").read_text())["base_model_name_or_path"] == base

    def test_folders_start_a_new_team_that_goes_on(self, saved, which, tmp_path):
        folder, team, base = saved[which]
        folders = [str(folder / f"agent_{agent}") for agent in range(2)]
        options = {} if "both" not in which[1] else {"share_policy": True}
        agents = [folders[0]] * 2 if options else folders
        made = trainer(tmp_path, rank, (agents, None), **FIELDS, **options)
        made.module.configure_model()
        fresh = made.module.team
        before = [logits(fresh, agent) for agent in range(2)]
        assert [torch.equal(before[agent], logits(team, agent)) for agent in range(2)] == [True, True]
        shared = {agent for agent in range(2) if fresh.seats[agent].adapter is not None}
        if shared and "base" not in which[1] and "and whole" not in which[1]:
            assert len(fresh.networks) == 1
        made.train()
        assert [torch.equal(logits(fresh, agent), before[agent]) for agent in range(2)] == [False, False]
        for agent in shared:
            assert is_untouched(fresh.network(agent), base)


@pytest.fixture
def base(tmp_path):
    return save_base(tmp_path / "base", llama_model(len(word_tokenizer())))


def test_a_damaged_adapter_or_another_base_is_refused_in_words(tmp_path, base):
    made = lora_run(tmp_path, base)
    made.save_model(tmp_path / "saved")
    folder = tmp_path / "saved" / "agent_0"
    file = folder / "adapter_model.safetensors"
    whole = load_file(file)
    save_file(dict(list(whole.items())[1:]), file)
    with pytest.raises(AgentError, match=r"agent 0: the adapter in .* does not fit its base: it lacks \['base_model"):
        lora_run(tmp_path, str(folder), trainer, 1, model_config=None).module.configure_model()
    save_file(whole, file)
    words = word_tokenizer()
    other = llama_model(len(words))
    other.model.layers = other.model.layers[:1]
    other.config.num_hidden_layers = 1
    save_base(Path(base), other)
    with pytest.raises(AgentError, match=r"agent 0: the adapter in .* does not fit its base"):
        lora_run(tmp_path, str(folder), trainer, 1, model_config=None).module.configure_model()


class TestCheckpoints:
    @pytest.mark.parametrize("kind", KINDS)
    def test_only_what_is_trained_is_inside(self, tmp_path, base, kind):
        made = train(tmp_path, rank, ([base] * 2, None), **FIELDS, **KINDS[kind])
        content = torch.load(checkpoint_of(made), weights_only=True)
        team = made.module.team
        trained = {name: weight for policy in team.policies for name, weight in team.weights(policy).items()}
        assert set(content["state_dict"]) == {f"team.{name}" for name in trained}
        moments = [state for one in content["optimizer_states"] for state in one["state"].values()]
        assert sum(state["exp_avg"].numel() for state in moments) == sum(weight.numel() for weight in trained.values())
        if team.policies[0].seat.adapter is not None:
            assert not any("base_layer" in name or "original_module" in name for name in content["state_dict"])

    def test_a_large_base_is_nowhere_in_it(self, tmp_path):
        words = word_tokenizer()
        big = gpt2_model(len(words), positions=40_000)
        base = save_base(tmp_path / "big", big)
        made = lora_run(tmp_path, base)
        team = made.module.team
        trained = sum(weight.numel() for policy in team.policies for weight in team.weights(policy).values())
        size = checkpoint_of(made).stat().st_size
        assert size < 2 * trained * 4 * 3 + 40_000
        assert size < sum(weight.numel() * 4 for weight in big.parameters()) / 10

    @pytest.mark.parametrize(
        "kind", ["different ranks", "adapter and whole", "one adapter for both", "frozen base", "layers trained whole"]
    )
    def test_going_on_equals_not_stopping(self, tmp_path, base, kind):
        options = {**FIELDS, **KINDS[kind], "reference_kl_enabled": True}
        half = train(tmp_path, rank, ([base] * 2, None), **options)
        whole = train(tmp_path, rank, ([base] * 2, None), num_train_epochs=2, **options)
        resumed = trainer(tmp_path, rank, ([base] * 2, None), num_train_epochs=2, **options)
        resumed.train(resume_from_checkpoint=checkpoint_of(half))
        assert same(resumed.module.team.state_dict(), whole.module.team.state_dict())
        assert not same(half.module.team.state_dict(), whole.module.team.state_dict())
        assert resumed.module.updates == whole.module.updates

    @pytest.mark.parametrize(
        ("options", "count", "message"),
        [
            ({"model_config": {"lora": [{"r": 3}, {"r": 1}]}}, 2, "agent 0 had adapter 'r=1 .*here has 'r=3"),
            ({"model_config": {"lora": [{"r": 1, "lora_alpha": 8}, {"r": 3}]}}, 2, "agent 0 had adapter 'r=1"),
            ({"model_config": {"lora": {"r": 1}}}, 3, "checkpoint is of 2 agents, but this team has 3"),
            ({"model_config": {"lora": [{"r": 1}, None]}}, 2, "agent 1 had adapter 'r=3.*here has None"),
            ({"trainable": [True, False]}, 2, "agent 1 had frozen adapter None|agent 1 had training 'adapter'"),
            ({"model_config": None}, 2, "agent 0 had adapter 'r=1"),
            ({"share_policy": True, "model_config": {"lora": {"r": 1}}}, 2, "agent 1 had adapter 'r=3"),
            (
                {"model_config": {"lora": [{"r": 1, "target_modules": ["q_proj"]}, {"r": 3}]}}, 2,
                "holds weights that this team does not train",
            ),
            (
                {"model_config": {"lora": [{"r": 1, "modules_to_save": ["lm_head"]}, {"r": 3}]}}, 2,
                "not whole: .*lm_head.* is not there",
            ),
        ],
        ids=["order", "scale", "number", "whole", "frozen", "no adapters", "one policy", "layers", "whole layers"],
    )  # fmt: skip
    def test_that_of_another_team_is_refused_naming_what_differs(self, tmp_path, base, options, count, message):
        ranks = {"model_config": {"lora": [{"r": 1}, {"r": 3}]}}
        path = checkpoint_of(lora_run(tmp_path, base, **ranks))
        other = lora_run(tmp_path, base, trainer, count, **{**ranks, **options})
        with pytest.raises(ConfigError, match=message):
            other.train(resume_from_checkpoint=path)
        again = lora_run(tmp_path, base, trainer, num_train_epochs=2, **ranks)
        again.train(resume_from_checkpoint=path)
        assert again.module.updates == [4, 4]

    @pytest.mark.parametrize("kind", ["adapters", "frozen base", "one adapter for both"])
    def test_that_on_a_changed_base_is_refused(self, tmp_path, base, kind):
        path = checkpoint_of(lora_run(tmp_path, base, **KINDS[kind]))
        save_base(Path(base), llama_model(len(word_tokenizer()), seed=1))
        other = lora_run(tmp_path, base, trainer, num_train_epochs=2, **KINDS[kind])
        with pytest.raises(ConfigError, match=r"checkpoint is of another team: agent 0 had base '\w+', and here has"):
            other.train(resume_from_checkpoint=path)
