"""Special tokens that a user adds: whose tokenizer knows them, and which rows the embeddings get."""

import copy

import pytest
import torch

from mareinforce.agents.team import Team
from mareinforce.errors import AgentError, ConfigError
from tests.lora import save_base
from tests.models import EOS, gpt2_model, llama_model, table_model, word_tokenizer

NEW = ["<think>", "<answer>"]


@pytest.fixture(params=["llama", "llama, tied", "gpt2"])
def model(request, word_count):
    if request.param == "gpt2":
        return gpt2_model(word_count)
    return llama_model(word_count, tied="tied" in request.param)


def build(agents, tokenizer=None, tokens=NEW, **options):
    return Team.build(
        agents=agents, tokenizer=tokenizer, max_new_tokens=8, model_config={"special_tokens": tokens}, **options
    )


def embeddings(model):
    return [model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()]


def test_new_rows_are_the_mean_of_the_old_ones_and_it_is_said(model, words, word_count):
    before = [table.clone() for table in embeddings(model)]
    assert not torch.allclose(before[0][0], before[0].mean(dim=0), atol=1e-2)
    team = build([model], words)
    assert team.model(0) is model
    for old, new in zip(before, embeddings(model), strict=True):
        assert new.shape == (word_count + 2, old.shape[1])
        assert torch.equal(new[:word_count], old)
        for row in new[word_count:]:
            torch.testing.assert_close(row, old.mean(dim=0))
    assert model.config.vocab_size == team.tokenizations[0].vocabulary == word_count + 2
    assert team.notes == [
        f"agent 0: special_tokens added 2 tokens to its tokenizer, which now has {word_count + 2}.",
        f"agent 0: special_tokens resized its embeddings from {word_count} to {word_count + 2} rows.",
    ]
    assert team.encode(0, "a <think> b").tolist()[1] == word_count
    scored = team.score(0, torch.tensor([4]), [torch.tensor([word_count + 1, EOS])], 1.0)
    scored.logprobs.sum().backward()
    assert bool(model.get_output_embeddings().weight.grad[word_count + 1].any())  # they are trained


def test_without_them_nothing_is_changed_or_said(model, words, word_count):
    for tokens in (None, [], {}):
        team = build([model], words, tokens)
        assert team.tokenizations[0].tokenizer is words
        assert team.notes == []
    assert len(embeddings(model)[0]) == word_count


def test_a_table_with_rows_to_spare_is_left_alone(words, word_count):
    model = llama_model(word_count + 10)
    before = copy.deepcopy(model.state_dict())
    team = build([model], words)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert [note for note in team.notes if "resized" in note] == []
    assert len(team.notes) == 1
    assert team.encode(0, "<answer>").tolist() == [word_count + 1]
    many = [f"<{number}>" for number in range(11)]  # one more than there is room for
    assert "from 40 to 41 rows" in build([llama_model(40)], words, many).notes[1]


def test_the_users_tokenizer_stays_as_it_is_and_the_saved_one_knows_them(tmp_path, words, word_count):
    team = build([llama_model(word_count), llama_model(word_count)], words)
    assert len(words) == word_count
    assert words("<think>")["input_ids"] == [words.unk_token_id]
    assert [len(one.tokenizer) for one in team.tokenizations] == [word_count + 2] * 2
    team.save(tmp_path)
    again = Team.build(agents=[str(tmp_path / "agent_1")], max_new_tokens=8)
    assert again.encode(0, "<think> a").tolist() == team.encode(1, "<think> a").tolist() == [word_count, 4]
    assert again.notes == []


@pytest.mark.parametrize("how", [{}, {"trainable": [True, False]}], ids=["copies", "frozen partner"])
def test_agents_of_one_folder_each_get_the_rows_or_are_refused(tmp_path, word_count, how):
    base = save_base(tmp_path / "base")
    if how:
        with pytest.raises(AgentError, match="would never be trained"):
            build([base, base], **how)
        return
    team = build([base, base], **how)
    assert [len(embeddings(team.model(agent))[0]) for agent in range(2)] == [word_count + 2] * 2
    assert team.model(0) is not team.model(1)


@pytest.mark.parametrize("loaded", [True, False])
def test_adapters_are_refused_where_rows_are_needed_and_only_there(tmp_path, words, word_count, loaded):
    models = [llama_model(word_count), llama_model(word_count + 2)]
    small, large = models if loaded else [save_base(tmp_path / str(i), one) for i, one in enumerate(models)]
    tokenizer = words if loaded else None
    with pytest.raises(AgentError, match=rf"agent 0: special_tokens needs {word_count + 2} .* never be trained"):
        build([small], tokenizer, lora={"r": 2})
    assert len(models[0].get_input_embeddings().weight) == word_count
    team = build([large], tokenizer, lora={"r": 2})
    assert team.encode(0, "<think>").tolist() == [word_count]


def test_roles_are_set_and_unknown_ones_are_refused(words, word_count):
    team = build([llama_model(word_count)], words, {"pad_token": "<fill>", "additional_special_tokens": NEW})
    assert team.tokenizations[0].tokenizer.pad_token == "<fill>"
    assert (words.pad_token, len(team.tokenizations[0].tokenizer)) == ("<pad>", word_count + 3)
    with pytest.raises(ConfigError, match=r"model_config\.special_tokens=\{'padding_token': '<fill>'\}"):
        build([llama_model(word_count)], words, {"padding_token": "<fill>"})
    with pytest.raises(ConfigError, match=r"special_tokens='<think>': must be a list"):
        build([llama_model(word_count)], words, "<think>")


def test_a_model_that_cannot_be_given_rows_is_refused(words, word_count):
    model = table_model(word_count, EOS)
    with pytest.raises(AgentError, match=f"agent 0: special_tokens needs {word_count + 2} .* takes no more"):
        build([model], words)
    assert len(build([table_model(word_count + 2, EOS)], words)) == 1


def test_their_text_is_left_out_of_what_rewards_read(words, word_count):
    team = build([llama_model(word_count)], words)
    ids = team.encode(0, "a <think> b")
    assert team.decode(0, ids) == "a b"
    assert word_tokenizer().decode(ids[[0, 2]]) == "a b"
