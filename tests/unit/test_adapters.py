"""Several agents on one base: who shares what in memory, what each trains, and what is refused."""

import copy
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM

from mareinforce.agents.adapters import belongs_to, can_mix
from mareinforce.agents.team import Team
from mareinforce.errors import AgentError, ConfigError
from mareinforce.rollout.engines import transformers as engine_module
from mareinforce.rollout.engines.transformers import TransformersEngine
from mareinforce.types import Request, Sampling, StreamKey
from tests.lora import (
    IDS,
    LORA,
    PROMPT,
    adapter_of,
    base_weights,
    is_untouched,
    logits,
    same,
    save_base,
    sgd_step,
    stir,
    wrap_lora,
)
from tests.models import gpt2_model, llama_model


@pytest.fixture(params=[llama_model, gpt2_model], ids=["llama", "gpt2"])
def base(request, tmp_path, word_count):
    return save_base(tmp_path / "base", request.param(word_count))


def build(agents, tokenizer=None, **options):
    return Team.build(agents=agents, tokenizer=tokenizer, max_new_tokens=8, **options)


@pytest.mark.parametrize("how", ["agent_model", "agents"])
def test_agents_of_one_name_share_one_base_with_an_adapter_each(base, how):
    given = {"agent_model": base, "num_agents": 3} if how == "agent_model" else {"agents": [base] * 3}
    team = Team.build(**given, max_new_tokens=8, lora=[{"r": 1}, {"r": 2}, {"r": 4}])
    assert len(team.networks) == 1
    assert team.network(0) is team.network(1) is team.network(2)
    plain = len(list(AutoModelForCausalLM.from_pretrained(base).parameters()))
    assert len(base_weights(team.network(0))) == plain  # one set, not three
    for agent, rank in enumerate([1, 2, 4]):
        ranks = {min(weight.shape) for weight in adapter_of(team, agent).values()}
        assert ranks == {rank}
        assert torch.equal(logits(team, agent), AutoModelForCausalLM.from_pretrained(base)(IDS).logits)
    apart = Team.build(**given, max_new_tokens=8)
    assert len(apart.networks) == 3
    assert len({weight.data_ptr() for network in apart.networks for weight in network.parameters()}) == 3 * plain


def test_a_policy_is_its_adapter_and_nothing_else(base):
    team = build([base, base], lora=[LORA, {"r": 3}])
    stir(team.network(0))
    names = [set(team.weights(policy)) for policy in team.policies]
    assert not names[0] & names[1]
    assert all(f".agent_{agent}." in name and ".lora_" in name for agent in range(2) for name in names[agent])
    assert names[0] | names[1] == {name for name, _ in team.named_parameters() if belongs_to(name)}
    before = [adapter_of(team, agent) for agent in range(2)]
    sgd_step(team, 1)
    assert [same(before[agent], adapter_of(team, agent)) for agent in range(2)] == [True, False]
    assert is_untouched(team.network(0), base)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_adapters_are_float32_on_a_smaller_base(base, dtype):
    team = build([base, base], lora=[{"r": 2}, {"r": 3}], model_config={"dtype": dtype})
    assert {weight.dtype for weight in base_weights(team.network(0)).values()} == {getattr(torch, dtype)}
    assert {weight.dtype for agent in range(2) for weight in adapter_of(team, agent).values()} == {torch.float32}
    before = adapter_of(team, 1)
    sgd_step(team, 1, rate=1e-6)  # less than 16 bits could hold
    assert not same(before, adapter_of(team, 1))


class TestLayersTrainedWhole:
    def test_each_agent_has_its_own_copy(self, tmp_path, word_count):
        base = save_base(tmp_path / "base", llama_model(word_count))
        team = build([base, base], lora={**LORA, "modules_to_save": ["lm_head"]})
        names = [[name for name in team.weights(policy) if "modules_to_save" in name] for policy in team.policies]
        assert [len(own) for own in names] == [1, 1]
        before = logits(team, 0)
        sgd_step(team, 1)
        assert torch.equal(logits(team, 0), before)
        assert not torch.equal(logits(team, 1), before)
        assert is_untouched(team.network(0), base)

    @pytest.mark.parametrize("model", ["llama", "gpt2"])
    @pytest.mark.parametrize("which", ["head", "embedding"])
    def test_tied_embeddings_are_refused(self, tmp_path, word_count, model, which):
        names = {"llama": ("lm_head", "embed_tokens"), "gpt2": ("lm_head", "wte")}[model]
        name = names[0 if which == "head" else 1]
        made = llama_model(word_count, tied=True) if model == "llama" else gpt2_model(word_count)
        base = save_base(tmp_path / "base", made)
        for agents, lora in (
            ([base] * 2, {**LORA, "modules_to_save": [name]}),
            ([base] * 2, [LORA, {**LORA, "modules_to_save": [name]}]),
        ):
            with pytest.raises(AgentError, match=rf"modules_to_save names .*{name}, which is tied"):
                build(agents, lora=lora)

    def test_on_a_smaller_base_they_are_refused_with_the_reason(self, base):
        lora, config = {**LORA, "modules_to_save": ["lm_head"]}, {"dtype": "bfloat16"}
        with pytest.raises(
            ConfigError, match=r"dtype=bfloat16 with lora.modules_to_save=\['lm_head'\].*type of the base"
        ):
            build([base, base], lora=lora, model_config=config)


def test_dora_agents_are_sampled_an_adapter_at_a_time_and_equal_each_alone(tmp_path, word_count, monkeypatch):
    base = save_base(tmp_path / "base", llama_model(word_count))
    team = build([base, base], lora={**LORA, "use_dora": True})
    stir(team.network(0))
    calls, plain = [], engine_module.decode
    monkeypatch.setattr(engine_module, "decode", lambda batch: calls.append(batch) or plain(batch))
    requests = [Request(a, PROMPT, tuple(StreamKey("train", 0, 0, 0, (), a, k) for k in range(4))) for a in (1, 0)]
    together = TransformersEngine(team).sample(requests, Sampling(5))
    assert len(calls) == 2
    for request, answers in zip(requests, together, strict=True):
        (alone,) = TransformersEngine(team).sample([request], Sampling(5))
        assert [one.ids.tolist() for one in answers] == [one.ids.tolist() for one in alone]
        scored = team.score(request.agent, PROMPT, [one.ids for one in answers], 1.0)
        torch.testing.assert_close(
            scored.logprobs[scored.counts], torch.cat([one.logprobs for one in answers]), atol=1e-4, rtol=0
        )
    assert not can_mix(team.network(0), ["agent_0", "agent_1"])


def test_one_adapted_and_one_whole_agent_of_one_name_do_not_touch_each_other(base):
    team = build([base, base], lora=[LORA, None])
    assert len(team.networks) == 2
    assert [policy.seat.adapter for policy in team.policies] == ["agent_0", None]
    assert not any(belongs_to(name) for name in team.weights(team.policies[1]))
    before = [logits(team, agent) for agent in range(2)]
    sgd_step(team, 1)
    assert [torch.equal(logits(team, agent), before[agent]) for agent in range(2)] == [True, False]
    assert is_untouched(team.network(0), base)
    assert not is_untouched(team.network(1), base)


def test_a_frozen_partner_shares_the_base_and_is_saved_as_a_plain_model(base, tmp_path):
    team = build([base, base], lora=[LORA, None], trainable=[True, False])
    assert len(team.networks) == 1
    assert [policy.agents for policy in team.policies] == [(0,)]
    stir(team.network(0))
    original = AutoModelForCausalLM.from_pretrained(base)(IDS).logits
    assert torch.equal(logits(team, 1), original)
    assert not torch.equal(logits(team, 0), original)
    team.save(tmp_path / "saved")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "agent_1", output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(loaded(IDS).logits, original)
    assert not (tmp_path / "saved" / "agent_1" / "adapter_config.json").exists()
    assert (tmp_path / "saved" / "agent_0" / "adapter_config.json").exists()


@pytest.mark.parametrize("adapted", [False, True])
def test_one_object_twice_is_refused_naming_both_but_may_be_one_policy(words, word_count, adapted):
    model = wrap_lora(llama_model(word_count)) if adapted else llama_model(word_count)
    before = copy.deepcopy(model.state_dict())
    for lora in (None,) if adapted else (None, LORA, [LORA, None]):
        with pytest.raises(AgentError, match="agents 0 and 1 are the same model object"):
            build([model, model], words, lora=lora)
    assert same(before, model.state_dict())
    team = build([model, model], words, share_policy=True)
    assert [policy.agents for policy in team.policies] == [(0, 1)]
    sgd_step(team, 1)
    assert torch.equal(logits(team, 0), logits(team, 1))
    assert not same(before, model.state_dict())
    assert len(build([model, copy.deepcopy(model)], words).policies) == 2
