"""The generation config that lies beside a model: it does not decide how a policy is sampled, and this is said."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from mareinforce.agents.team import Team
from mareinforce.rollout.engines.transformers import TransformersEngine
from mareinforce.types import Request, Sampling, StreamKey
from tests.models import EOS, llama_model, word_tokenizer
from tests.system.runs import rank, train

PROMPT = torch.tensor([4, 5])
DISTORTING = {"do_sample": True, "top_k": 1, "temperature": 0.01, "repetition_penalty": 1.3, "max_length": 5}


def shipped(folder, **settings):
    """A folder whose model comes with settings."""
    words = word_tokenizer()
    model = llama_model(len(words))
    model.generation_config = GenerationConfig(eos_token_id=EOS, bos_token_id=1, **settings)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)


def keys(count):
    return tuple(StreamKey("train", 0, 0, 0, (), 0, k) for k in range(count))


def sample(team, agent, count, length):
    (completions,) = TransformersEngine(team).sample([Request(agent, PROMPT, keys(count))], Sampling(length))
    return [one.ids.tolist() for one in completions]


@pytest.fixture(params=[None, {"r": 2}], ids=["whole", "adapter"])
def team(request, tmp_path):
    folder = shipped(tmp_path / "base", **DISTORTING)
    return Team.build(agents=[folder, folder], max_new_tokens=8, lora=request.param)


def test_many_samples_of_one_prompt_differ_and_are_as_long_as_asked(team):
    for agent in range(2):
        said = sample(team, agent, 64, 8)
        assert len({tuple(ids) for ids in said}) >= 60
        assert max(len(ids) for ids in said) == 8
    with torch.no_grad(), team.speaking(0) as model:  # what the folder alone gives
        alone = [model.generate(PROMPT[None], pad_token_id=0)[0].tolist() for _ in range(8)]
    assert len({tuple(ids) for ids in alone}) == 1
    assert len(alone[0]) <= 5


def test_first_tokens_fit_the_models_own_softmax(team):
    observed = np.bincount([ids[0] for ids in sample(team, 1, 4000, 1)], minlength=30)
    with torch.no_grad(), team.speaking(1) as model:
        logits = model(PROMPT[None]).logits[0, -1].double()
    expected = torch.softmax(logits, -1).numpy() * 4000
    assert ((observed - expected) ** 2 / expected).sum() < 60.0  # chi-square with 29 degrees: p = 0.0006
    penalised = logits.clone()
    for token in PROMPT.tolist():
        penalised[token] = logits[token] / 1.3 if logits[token] > 0 else logits[token] * 1.3
    distorted = torch.softmax(penalised / 0.7, -1).numpy() * 4000
    assert ((observed - distorted) ** 2 / distorted).sum() > 60.0


def test_what_is_ignored_is_named_once_a_base(team, tmp_path):
    apart = {team.seats[agent].network for agent in range(2)}
    notes = [note for note in team.notes if "generation config" in note]
    assert len(notes) == 1 <= len(apart)
    for key, value in DISTORTING.items():
        assert f"{key}={value}" in notes[0]
    assert "_token_id" not in notes[0]
    assert "is ignored" in notes[0]
    assert str(tmp_path / "base") in notes[0]
    assert Team.build(agents=[shipped(tmp_path / "plain")], max_new_tokens=8).notes == []


def test_it_is_told_when_training_starts(tmp_path, caplog):
    folder = shipped(tmp_path / "base", **DISTORTING)
    with caplog.at_level("INFO"):
        train(tmp_path, rank, ([folder, folder], None), ["a"], max_new_tokens=4)
    assert [m for m in caplog.messages if "repetition_penalty=1.3" in m and "agent 0" in m]


def test_its_end_tokens_count(tmp_path):
    folder = shipped(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.eos_token_id = [EOS, 9, 10]
    model.save_pretrained(folder)
    team = Team.build(agents=[folder, folder], max_new_tokens=8, lora={"r": 2})
    assert team.end_ids(0) == team.end_ids(1) == (EOS, 9, 10)
    assert not any({9, 10} & set(ids[:-1]) for ids in sample(team, 0, 64, 8))
    plain = Team.build(agents=[shipped(tmp_path / "plain")], max_new_tokens=8)
    assert any({9, 10} & set(ids[:-1]) for ids in sample(plain, 0, 64, 8))


def test_it_is_saved_as_it_came(team, tmp_path):
    team.save(tmp_path / "saved")
    if team.seats[0].adapter is None:
        saved = GenerationConfig.from_pretrained(tmp_path / "saved" / "agent_0")
        assert {key: getattr(saved, key) for key in DISTORTING} == DISTORTING
    else:
        assert not (tmp_path / "saved" / "agent_0" / "generation_config.json").exists()
