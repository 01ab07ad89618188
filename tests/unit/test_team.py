"""A team's models: whose weights they are, and what is saved of them."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mareinforce.agents.team import Team
from mareinforce.errors import AgentError
from tests.models import gpt2_model, llama_model, table_model, word_tokenizer


@pytest.fixture
def folder(tmp_path, gpt2, words):
    gpt2.save_pretrained(tmp_path / "base")
    words.save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def storages(model):
    return {parameter.data_ptr() for parameter in model.parameters()}


@pytest.mark.parametrize("how", ["agent_model", "agents"])
def test_one_name_for_two_agents_gives_independent_copies(folder, how):
    given = {"agent_model": folder, "num_agents": 2} if how == "agent_model" else {"agents": [folder, folder]}
    team = Team.build(**given, max_new_tokens=8)
    assert len(team) == 2
    assert not storages(team.model(0)) & storages(team.model(1))
    before = copy.deepcopy(team.model(1).state_dict())
    optimizer = torch.optim.SGD(team.model(0).parameters(), lr=0.1)
    team.score(0, torch.tensor([4]), [torch.tensor([5])], 1.0).logprobs.sum().backward()
    optimizer.step()
    for name, weight in team.model(1).state_dict().items():
        assert torch.equal(weight, before[name])
    assert any(not torch.equal(weight, before[name]) for name, weight in team.model(0).state_dict().items())


def test_one_object_for_two_agents_is_refused_naming_both(gpt2, llama, words):
    with pytest.raises(AgentError, match=r"agents 0 and 2 are the same model object.*copy\.deepcopy"):
        Team.build(agents=[gpt2, llama, gpt2], tokenizer=words, max_new_tokens=8)
    with pytest.raises(AgentError, match="agents 0 and 1 share the weight"):
        Team([gpt2, gpt2], [words, words], 8)
    assert len(Team.build(agents=[gpt2, copy.deepcopy(gpt2)], tokenizer=words, max_new_tokens=8)) == 2


def test_two_objects_that_share_one_weight_are_refused(words, word_count):
    first, second = llama_model(word_count), llama_model(word_count)
    second.lm_head.weight = first.lm_head.weight
    with pytest.raises(AgentError, match=r"agents 0 and 1 share the weight lm_head\.weight"):
        Team([first, second], [words, words], 8)


def test_weights_tied_within_one_agent_are_its_own(words, word_count):
    assert len(Team([llama_model(word_count, tied=True), llama_model(word_count, tied=True)], [words, words], 8)) == 2


def test_mixed_bases_have_their_own_tokenizers(folder, words):
    other = word_tokenizer(["z", "y", "x"])
    loaded = llama_model(len(other))
    team = Team.build(agents=[folder, loaded], tokenizer=[None, other], max_new_tokens=8)
    assert team.model(1) is loaded
    assert (team.encode(0, "z").tolist(), team.encode(1, "z").tolist()) == (words("z")["input_ids"], [4])


def test_a_loaded_model_in_half_precision_is_refused_with_the_reason(gpt2, words):
    with pytest.raises(
        AgentError, match=r"agent 0: its weight .* is torch\.bfloat16, but trainable weights must be float32"
    ):
        Team.build(agents=[gpt2.bfloat16()], tokenizer=words, max_new_tokens=8)


def test_saved_folders_load_plainly_with_their_tokenizers(tmp_path, gpt2, words, word_count):
    other = word_tokenizer(["z", "y", "x"], pad="<eos>")
    team = Team([gpt2, llama_model(len(other), tied=True)], [words, other], 8)
    team.save(tmp_path / "run" / "agents")
    team.save(tmp_path / "run" / "agents")  # over the first one
    assert sorted(path.name for path in (tmp_path / "run" / "agents").iterdir()) == ["agent_0", "agent_1"]
    for agent in range(2):
        saved = tmp_path / "run" / "agents" / f"agent_{agent}"
        model = AutoModelForCausalLM.from_pretrained(saved)
        for name, weight in team.model(agent).state_dict().items():
            assert torch.equal(model.state_dict()[name], weight)
        tokenizer = AutoTokenizer.from_pretrained(saved)
        assert tokenizer("z a").input_ids == team.encode(agent, "z a").tolist()


def test_a_folder_that_could_not_be_written_does_not_replace_the_old_one(tmp_path, monkeypatch, words, word_count):
    team = Team([gpt2_model(word_count)], [words], 8)
    team.save(tmp_path)
    old = (tmp_path / "agent_0" / "model.safetensors").read_bytes()

    def fails(*_, **__):
        raise OSError("disk full")

    with torch.no_grad():
        team.model(0).lm_head.weight.add_(1.0)
    monkeypatch.setattr(type(words), "save_pretrained", fails)
    with pytest.raises(OSError, match="disk full"):
        team.save(tmp_path)
    assert (tmp_path / "agent_0" / "model.safetensors").read_bytes() == old
    monkeypatch.undo()
    team.save(tmp_path)
    assert (tmp_path / "agent_0" / "model.safetensors").read_bytes() != old
    assert [path.name for path in tmp_path.iterdir()] == ["agent_0"]


def test_a_table_model_trains_and_reloads_too(tmp_path, words, word_count):
    model = table_model(torch.randn(word_count, word_count), 2)
    Team([model], [words], 8).save(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "agent_0").table.weight, model.table.weight)
