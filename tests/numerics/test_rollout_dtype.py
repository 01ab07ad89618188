"""Samples in another precision: from copies of the weights as they are now, whose gap is seen and can be corrected."""

import copy

import pytest
import torch

from mareinforce.agents.rollout_weights import RolloutNetworks
from mareinforce.agents.team import Team
from mareinforce.config import MAGRPOConfig
from mareinforce.errors import ConfigError
from mareinforce.optim import apply_gradient, build_optimizer, compute_gradient
from mareinforce.rollout.engines import decoding, generation
from mareinforce.rollout.engines.transformers import TransformersEngine
from mareinforce.rollout.sampling import draw
from mareinforce.types import NodeSample, Request, Sampling, StreamKey
from tests.lora import LORA, save_base, stir
from tests.models import llama_model

PROMPT = torch.tensor([4, 5, 6])


def request(agent=0, count=6):
    return Request(agent, PROMPT, tuple(StreamKey("train", 0, 0, 0, (), agent, k) for k in range(count)))


def ids(answers):
    return [one.ids.tolist() for one in answers]


@pytest.fixture
def team(words, word_count):
    return Team([llama_model(word_count, tied=True)], [words], 8)


@pytest.fixture
def lora_team(tmp_path, word_count):
    base = save_base(tmp_path / "base", llama_model(word_count))
    made = Team.build(base, num_agents=2, lora=LORA, max_new_tokens=8)
    stir(made.network(0))
    return made


def test_weights_are_cast_and_positions_are_not(team):
    twin = RolloutNetworks(team, torch.bfloat16).network(0)
    assert {weight.dtype for weight in twin.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in twin.buffers()} == {torch.float32}
    assert twin.lm_head.weight is twin.model.embed_tokens.weight  # what is tied stays tied
    assert {weight.dtype for weight in team.parameters()} == {torch.float32}
    assert not any(weight.requires_grad for weight in twin.parameters())


def test_without_another_precision_nothing_is_copied(team):
    assert RolloutNetworks(team).network(0) is team.network(0)


def test_in_the_same_precision_the_samples_are_the_same(team, lora_team):
    for each in (team, lora_team):
        for agent in range(len(each)):
            plain = TransformersEngine(each).sample([request(agent)], Sampling(8))[0]
            copied = TransformersEngine(each, rollout_dtype=torch.float32).sample([request(agent)], Sampling(8))[0]
            assert ids(plain) == ids(copied)


def test_agents_of_one_base_share_a_copy_and_keep_their_adapters(lora_team):
    engine = TransformersEngine(lora_team, rollout_dtype=torch.bfloat16)
    together = engine.sample([request(0), request(1)], Sampling(8))
    assert engine.networks.network(0) is engine.networks.network(1)
    for agent in range(2):
        (alone,) = TransformersEngine(lora_team, rollout_dtype=torch.bfloat16).sample([request(agent)], Sampling(8))
        assert ids(together[agent]) == ids(alone)
        gaps = []
        for scorer in (agent, 1 - agent):
            scored = lora_team.score(scorer, PROMPT, [one.ids for one in together[agent]], 1.0)
            gap = scored.logprobs[scored.counts] - torch.cat([one.logprobs for one in together[agent]])
            gaps.append(float(gap.detach().abs().mean()))
        assert 1e-4 < gaps[0] < 0.1 < 3 * gaps[0] < gaps[1]  # rounding; another adapter would be more


def step(team, config, **given):
    (answers,) = TransformersEngine(team, rollout_dtype=torch.bfloat16).sample([request()], Sampling(8))
    worth = torch.arange(6, dtype=torch.float64) - 2.5
    sample = NodeSample(
        agent=0, turn=0, row=0, path=(), prompt_ids=PROMPT, completions=tuple(answers), returns=worth, advantages=worth,
        zero_signal=False, weight=1.0, env_step=6, policy_version=0, **given,
    )  # fmt: skip
    optimizer = build_optimizer(team.parameters(), 0.05, config)
    update = compute_gradient(team, optimizer, [sample], config, 0)
    apply_gradient(team, optimizer, update)
    return update


def test_copies_are_renewed_when_the_weights_have_changed(team, monkeypatch):
    engine = TransformersEngine(team, rollout_dtype=torch.bfloat16)
    before = ids(engine.sample([request()], Sampling(8))[0])
    step(team, MAGRPOConfig(num_turns=1))
    stale = copy.copy(engine)
    stale.networks = copy.copy(engine.networks)
    monkeypatch.setattr(stale.networks, "_renew", lambda *networks: None)
    assert ids(stale.sample([request()], Sampling(8))[0]) == before
    renewed = ids(engine.sample([request()], Sampling(8))[0])
    assert renewed != before
    fresh = TransformersEngine(team, rollout_dtype=torch.bfloat16)
    assert renewed == ids(fresh.sample([request()], Sampling(8))[0])


def test_the_gap_is_logged_and_importance_weights_correct_it(team):
    update = step(copy.deepcopy(team), MAGRPOConfig(num_turns=1, rollout_dtype="bfloat16", importance_sampling="token"))
    assert 1e-4 < update.metrics[0]["sampling_gap"] < 0.5
    assert update.metrics[0]["importance_ratio_max"] > 1.0001
    plain = step(copy.deepcopy(team), MAGRPOConfig(num_turns=1, importance_sampling="token"))
    assert plain.metrics[0]["importance_ratio_max"] == 1.0  # an age of 0 is taken for no gap


def test_another_word_is_refused():
    with pytest.raises(ConfigError, match="rollout_dtype='half'"):
        MAGRPOConfig(rollout_dtype="half")


@pytest.mark.parametrize("own_loop", [True, False])
def test_tokens_are_drawn_in_full_precision(team, monkeypatch, own_loop):
    """From weights of any precision; else two tokens of nearly equal probability would be equally probable."""
    seen = []
    for module in (decoding, generation):
        monkeypatch.setattr(module, "draw", lambda logits, *rest: seen.append(logits.dtype) or draw(logits, *rest))
    TransformersEngine(team, own_loop=own_loop, rollout_dtype=torch.bfloat16).sample([request()], Sampling(3))
    assert set(seen) == {torch.float32}
