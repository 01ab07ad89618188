"""Agents of one base are sampled in one batch, and each says what it would say alone."""

import copy
import itertools

import pytest
import torch
from peft import PeftModelForCausalLM
from transformers import GenerationConfig

from mareinforce.agents.adapters import inner_model
from mareinforce.agents.mixed_rows import Mixture, side_by_side
from mareinforce.agents.team import Team
from mareinforce.rollout.engines import batches, decoding, generation
from mareinforce.rollout.engines import transformers as engine_module
from mareinforce.rollout.engines.transformers import TransformersEngine
from mareinforce.types import Request, Sampling, StreamKey
from tests.lora import logits, save_base, stir
from tests.models import gpt2_model, llama_model, table_tokenizer, word_tokenizer

SHORT, LONG = torch.tensor([4, 5]), torch.tensor([6, 7, 8, 9, 10, 11, 12])
RANKS = [{"r": 2}, {"r": 3, "lora_alpha": 6}, None, {"r": 1}]
"""Of agents; the third is the base itself."""
MODELS = pytest.mark.parametrize("model", [gpt2_model, llama_model], ids=["absolute positions", "rotary positions"])


def keys(count, agent, row=0):
    return tuple(StreamKey("train", 0, 0, row, (), agent, k) for k in range(count))


def requests(agents=range(4), rows=1):
    """Prompts of several lengths, agents in turn, with as many completions as differ from agent to agent."""
    prompts = (SHORT, LONG, torch.tensor([13]), LONG[:4])
    return [
        Request(agent, prompts[(agent + row) % 4], keys(3 + agent % 2, agent, row))
        for row in range(rows)
        for agent in agents
    ]


def build(folder, model, lora=RANKS, **options):
    team = Team.build(
        agents=[save_base(folder / "base", model)] * len(lora), lora=lora, max_new_tokens=8,
        trainable=[setting is not None for setting in lora], **options,
    )  # fmt: skip
    stir(team.network(0))
    return team


def said(answers):
    return [[one.ids.tolist() for one in completions] for completions in answers]


OWN_LOOP = pytest.mark.parametrize("own_loop", [True, False], ids=["own loop", "generate"])


@pytest.fixture
def calls(monkeypatch):
    """The number of rows in each batch."""
    rows, plain = [], engine_module.decode

    def decode(batch):
        rows.append(len(batch.sources))
        return plain(batch)

    monkeypatch.setattr(engine_module, "decode", decode)
    return rows


@MODELS
@pytest.mark.parametrize("sampling", [Sampling(6), Sampling(6, temperature=0.7, top_k=9, top_p=0.9)], ids=["1", "0.7"])
def test_one_call_gives_each_agent_what_it_says_alone(tmp_path, word_count, calls, model, sampling):
    team = build(tmp_path, model(word_count))
    asked = requests(rows=2)
    together = TransformersEngine(team).sample(asked, sampling)
    assert calls == [sum(len(request.keys) for request in asked)]
    for request, answers in zip(asked, together, strict=True):
        (alone,) = TransformersEngine(team).sample([request], sampling)
        assert said([answers]) == said([alone])
        behaviour = torch.cat([one.logprobs for one in answers])
        torch.testing.assert_close(behaviour, torch.cat([one.logprobs for one in alone]), atol=1e-4, rtol=0)
        scored = team.score(request.agent, request.prompt_ids, [one.ids for one in answers], sampling.temperature)
        torch.testing.assert_close(scored.logprobs[scored.counts], behaviour, atol=1e-4, rtol=0)
        other = team.score((request.agent + 1) % 4, request.prompt_ids, [one.ids for one in answers], 1.0)
        assert (other.logprobs[other.counts] - behaviour).abs().max() > 0.05  # another adapter would be noticed


@MODELS
def test_each_alone_is_a_network_of_its_own(tmp_path, word_count, model):
    """Against a merged copy of base and adapter, with no peft in it."""
    team = build(tmp_path, model(word_count))
    asked = requests()
    together = TransformersEngine(team).sample(asked, Sampling(6))
    for agent in range(4):
        twin = copy.deepcopy(team.network(agent))
        if team.seats[agent].adapter is None:
            merged = twin.unload()
        else:
            twin.set_adapter(team.seats[agent].adapter)
            merged = twin.merge_and_unload()
        single = Team([merged.requires_grad_(True)], [word_tokenizer()], 8)
        request = Request(0, asked[agent].prompt_ids, asked[agent].keys)
        (alone,) = TransformersEngine(single).sample([request], Sampling(6))
        assert said([together[agent]]) == said([alone])
        torch.testing.assert_close(logits(team, agent), merged(torch.tensor([[5, 6, 7, 8]])).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("lora", "batches"),
    [
        ([{"r": 2, "target_modules": ["q_proj", "up_proj"]}, {"r": 3, "target_modules": ["k_proj"]}, None], 1),
        ([{"r": 2, "target_modules": ["embed_tokens", "lm_head"]}, {"r": 2, "use_rslora": True}, None], 1),
        ([{"r": 2, "modules_to_save": ["lm_head"]}, {"r": 3, "modules_to_save": ["lm_head"]}, None], 1),
        ([{"r": 2, "modules_to_save": ["lm_head"]}, {"r": 3}, None], 3),
        ([{"r": 2}, {"r": 3, "modules_to_save": ["lm_head"]}, None], 3),
        ([{"r": 2}, {"r": 3, "use_dora": True}, None], 3),
    ],
    ids=["layers", "embeddings", "whole", "the first whole", "the second whole", "decomposed"],
)
def test_adapters_of_different_shapes_are_mixed_where_peft_can(tmp_path, word_count, calls, lora, batches):
    team = build(tmp_path, llama_model(word_count), lora)
    together = TransformersEngine(team).sample(requests(range(3)), Sampling(6))
    assert len(calls) == batches
    for request, answers in zip(requests(range(3)), together, strict=True):
        assert said([answers]) == said(TransformersEngine(team).sample([request], Sampling(6)))
        scored = team.score(request.agent, request.prompt_ids, [one.ids for one in answers], 1.0)
        behaviour = torch.cat([one.logprobs for one in answers])
        torch.testing.assert_close(scored.logprobs[scored.counts], behaviour, atol=1e-4, rtol=0)
        assert not torch.equal(logits(team, request.agent), logits(team, (request.agent + 1) % 3))


@OWN_LOOP
def test_rows_given_to_the_wrong_adapter_say_something_else(tmp_path, word_count, monkeypatch, own_loop):
    team = build(tmp_path, llama_model(word_count))
    engine = TransformersEngine(team, own_loop=own_loop)
    right = said(engine.sample(requests(), Sampling(6)))
    plain = Mixture.tell
    monkeypatch.setattr(Mixture, "tell", lambda self, adapters: plain(self, adapters[::-1]))
    assert said(engine.sample(requests(), Sampling(6))) != right


@MODELS
@OWN_LOOP
def test_rows_worked_on_apart_are_what_peft_makes_of_them(tmp_path, word_count, monkeypatch, model, own_loop):
    team = build(tmp_path, model(word_count))
    engine, handed = TransformersEngine(team, own_loop=own_loop), []
    ours = engine.sample(requests(rows=2), Sampling(8))
    plain = PeftModelForCausalLM._enable_peft_forward_hooks
    monkeypatch.setattr(batches, "fit_side_by_side", lambda network: False)
    monkeypatch.setattr(
        PeftModelForCausalLM,
        "_enable_peft_forward_hooks",
        lambda self, *args, **kwargs: handed.append(kwargs) or plain(self, *args, **kwargs),
    )
    theirs = engine.sample(requests(rows=2), Sampling(8))
    assert any("adapter_names" in kwargs for kwargs in handed)
    assert said(ours) == said(theirs)
    for one, other in zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-5, rtol=1e-5)


def test_the_network_is_left_as_it_was_also_after_an_error(tmp_path, word_count):
    network = build(tmp_path, llama_model(word_count)).network(0)
    with pytest.raises(ZeroDivisionError), side_by_side(network, Mixture()):
        1 / 0  # noqa: B018
    assert not [name for name, module in network.named_modules() if "forward" in vars(module)]


def test_both_ways_of_sampling_mix_adapters_alike(tmp_path, word_count):
    team = build(tmp_path, llama_model(word_count))
    ours, theirs = (TransformersEngine(team, own_loop=own).sample(requests(), Sampling(8)) for own in (True, False))
    assert said(ours) == said(theirs)
    assert len({tuple(ids) for answers in said(ours) for ids in answers}) > 4


@pytest.mark.parametrize("budget", [1, 60, 10**6])
def test_how_rows_are_cut_into_batches_changes_nothing(tmp_path, word_count, calls, budget):
    team = build(tmp_path, llama_model(word_count))
    expected = said(TransformersEngine(team).sample(requests(rows=2), Sampling(6)))
    calls.clear()
    assert said(TransformersEngine(team, token_budget=budget).sample(requests(rows=2), Sampling(6))) == expected
    assert len(calls) == {1: 28, 60: len(calls), 10**6: 1}[budget]
    assert budget != 60 or 1 < len(calls) < 28


def test_agents_on_different_bases_are_sampled_apart(tmp_path, word_count, calls):
    folders = [save_base(tmp_path / str(seed), llama_model(word_count, seed=seed)) for seed in range(2)]
    team = Team.build(agents=[folders[0], folders[1], folders[0]], lora={"r": 2}, max_new_tokens=8)
    TransformersEngine(team).sample(requests(agents=range(3)), Sampling(4))
    assert sorted(calls) == [4, 6]


def test_end_ids_of_one_agent_do_not_stop_another(tmp_path, word_count, calls):
    words = word_tokenizer()
    ending = word_tokenizer()
    ending.eos_token = "a"
    team = build(tmp_path, llama_model(word_count), [{"r": 2}, {"r": 2}], tokenizer=[words, ending])
    stop = words.convert_tokens_to_ids("a")
    assert [stop in team.end_ids(agent) for agent in range(2)] == [False, True]
    with torch.no_grad():  # "a" is what both say most
        inner_model(team.network(0)).lm_head.weight[stop] *= 3
    asked = [Request(agent, SHORT, keys(40, agent)) for agent in range(2)]
    first, second = TransformersEngine(team).sample(asked, Sampling(6))
    assert calls == [40, 40]
    assert any(stop in one.ids[:-1].tolist() for one in first)
    assert not any(stop in one.ids[:-1].tolist() for one in second)
    assert any(one.ended and int(one.ids[-1]) == stop for one in second)
    assert not any(one.ended and int(one.ids[-1]) == stop for one in first)
    careless = TransformersEngine(team)
    careless._batch = lambda agent: (0, team.end_ids(1))  # what one batch for all would do
    calls.clear()
    _, mixed = careless.sample(asked[::-1], Sampling(6))
    assert calls == [80]
    assert said([mixed]) != said([first])


@pytest.mark.parametrize("training", [True, False])
def test_flags_and_settings_of_the_user_come_back(tmp_path, word_count, training):
    model = gpt2_model(word_count, dropout=0.5)
    model.generation_config = GenerationConfig(do_sample=True, top_k=1, temperature=0.01, eos_token_id=2)
    team = build(tmp_path, model, [{"r": 2, "lora_dropout": 0.5}, {"r": 2, "lora_dropout": 0.5}, None])
    network = team.network(0)
    network.train(training)
    inner_model(network).transformer.h[1].train(not training)
    holders = [network, inner_model(network)]
    network.generation_config = GenerationConfig(top_k=2)
    flags = [module.training for module in network.modules()]
    shipped = [holder.generation_config for holder in holders]
    contents = [config.to_dict() for config in shipped]
    preparing = inner_model(network).prepare_inputs_for_generation
    samples = [said(TransformersEngine(team).sample(requests(range(3)), Sampling(6))) for _ in range(2)]
    assert samples[0] == samples[1]  # dropout was off
    assert len({tuple(one) for one in samples[0][0]}) > 1  # top_k was not 1
    assert [module.training for module in network.modules()] == flags
    assert all(holder.generation_config is config for holder, config in zip(holders, shipped, strict=True))
    assert [config.to_dict() for config in shipped] == contents
    assert inner_model(network).prepare_inputs_for_generation == preparing


@OWN_LOOP
def test_settings_come_back_after_an_error_too(tmp_path, word_count, monkeypatch, own_loop):
    team = build(tmp_path, llama_model(word_count))
    network = team.network(0).train()
    shipped = [network.generation_config, inner_model(network).generation_config]
    monkeypatch.setattr(decoding if own_loop else generation, "draw", lambda *_: 1 / 0)
    for agents in ([0, 1], [0], [2]):
        with pytest.raises(ZeroDivisionError):
            TransformersEngine(team, own_loop=own_loop).sample(requests(agents), Sampling(6))
        assert network.generation_config is shipped[0]
        assert inner_model(network).generation_config is shipped[1]
        assert all(module.training for module in network.modules())
    monkeypatch.undo()
    with team.speaking(1):
        pass
    assert not torch.equal(network.eval()(LONG[None]).logits, logits(team, 2, LONG[None]))  # adapters are on


def test_a_tokenizer_of_few_words_can_sit_on_the_same_base(tmp_path, calls):
    few = table_tokenizer(["<eos>", "a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m"])
    team = build(tmp_path, llama_model(14, eos=0), [{"r": 2}, {"r": 2}], tokenizer=few)
    answers = TransformersEngine(team).sample(requests(range(2)), Sampling(4))
    assert calls == [7]
    assert {word for one in answers[0] for word in one.text.split()} <= set(few.get_vocab())
