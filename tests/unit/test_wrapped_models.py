"""Models that their user wrapped with peft: they end on one base, and stay what they are."""

import copy

import pytest
import torch
from peft import IA3Config, PeftModel, PromptTuningConfig

from mareinforce.agents.adapters import adapter_weights, inner_model
from mareinforce.agents.node_scoring import Told
from mareinforce.agents.team import Team
from mareinforce.errors import AgentError
from tests.lora import COMPLETIONS, IDS, PROMPT, adapter_of, base_weights, logits, sgd_step, stir, wrap, wrap_lora
from tests.models import gpt2_model, llama_model


def build(agents, tokenizer, **options):
    return Team.build(agents=agents, tokenizer=tokenizer, max_new_tokens=8, **options)


def storages(network):
    return {name: weight.data_ptr() for name, weight in base_weights(network).items()}


@pytest.fixture
def models(word_count):
    base = llama_model(word_count)
    return [wrap_lora(copy.deepcopy(base), seed) for seed in range(2)]


def test_equal_bases_become_one_and_the_users_objects_hold_what_is_trained(models, words):
    expected = [model(IDS).logits.detach() for model in models]
    assert not set(storages(models[0]).values()) & set(storages(models[1]).values())
    team = build(models, words)
    assert len(team.networks) == 1
    assert storages(models[0]) == storages(models[1])
    assert any("agent 1: its base equals another's" in note for note in team.notes)
    for agent in range(2):
        assert torch.equal(logits(team, agent), expected[agent])
    for agent in (1, 0):
        sgd_step(team, agent)
    for agent, model in enumerate(models):
        assert not torch.equal(model(IDS).logits, expected[agent])
        own = dict(adapter_weights(model, "default"))
        trained = adapter_of(team, agent)
        assert {weight.data_ptr() for weight in own.values()} == {
            weight.data_ptr() for weight in team.weights(team.policies[agent]).values()
        }
        assert len(own) == len(trained)
    said = [logits(team, agent) for agent in range(2)]
    assert torch.equal(models[0](IDS).logits, said[1])  # the network is still as the agent that spoke last
    team.rest()
    for agent, model in enumerate(models):
        assert torch.equal(model(IDS).logits, said[agent])


def test_the_same_objects_make_a_second_team(models, words):
    first = build(models, words)
    stir(first.network(0), seed=5)
    first.rest()
    expected = [model(IDS).logits.detach() for model in models]
    second = build(models, words, reference_kl=True)
    third = build(models, words, reference_kl=True)
    for team in (second, third):
        assert len({seat.adapter for seat in team.seats}) == 2
        assert all(team.weights(policy) for policy in team.policies)
        for agent in range(2):
            assert torch.equal(logits(team, agent), expected[agent])
        team.rest()
    assert second.seats == third.seats
    assert second.references != third.references  # each keeps a start of its own


def test_different_bases_stay_apart(models, words):
    with torch.no_grad():
        inner_model(models[1]).model.norm.weight[3] += 1e-3
    team = build(models, words)
    assert len(team.networks) == 2
    assert not set(storages(models[0]).values()) & set(storages(models[1]).values())
    assert team.notes == []


@pytest.mark.parametrize("setting", ["rope", "end"])
def test_equal_weights_under_another_config_stay_apart(words, word_count, setting):
    models = [llama_model(word_count) for _ in range(2)]
    if setting == "rope":
        config = copy.deepcopy(models[1].config)
        config.rope_parameters = {"rope_type": "default", "rope_theta": 50.0}
        state = models[1].state_dict()
        models[1] = type(models[1])(config).eval()
        models[1].load_state_dict(state)
    else:
        models[1].generation_config.eos_token_id = 7
    models = [wrap_lora(model) for model in models]
    expected = [model(IDS).logits.detach() for model in models]
    team = build(models, words)
    for agent in range(2):
        assert torch.equal(logits(team, agent), expected[agent])
    if setting == "rope":
        assert not torch.equal(*expected)
    else:
        assert [7 in team.end_ids(agent) for agent in range(2)] == [False, True]


def test_other_layers_and_layers_trained_whole_move_along(words, word_count):
    base = llama_model(word_count)
    settings = [{}, {"r": 5, "target_modules": ["k_proj", "down_proj"], "modules_to_save": ["lm_head"]}]
    models = [wrap_lora(copy.deepcopy(base), seed, **one) for seed, one in enumerate(settings)]
    expected = [model(IDS).logits.detach() for model in models]
    team = build(models, words)
    assert len(team.networks) == 1
    for agent in (0, 1, 0):
        assert torch.equal(logits(team, agent), expected[agent])
    sgd_step(team, 1)
    assert not torch.equal(models[1](IDS).logits, expected[1])
    assert torch.equal(logits(team, 0), expected[0])
    assert any("modules_to_save" in name for name in team.weights(team.policies[1]))


def test_a_mix_of_names_and_a_reference_of_each_start(word_count, words):
    base = llama_model(word_count)
    models = [wrap_lora(copy.deepcopy(base), seed, name) for seed, name in enumerate(["agent_1", "mine"])]
    team = build(models, words, reference_kl=True)
    assert len(team.networks) == 1
    for agent in range(2):
        sgd_step(team, agent)
        reference = team.score_reference(agent, [Told(PROMPT, COMPLETIONS)], 1.0)[0].logprobs
        assert not torch.equal(reference, team.score(agent, PROMPT, COMPLETIONS, 1.0).logprobs)
    again = build([wrap_lora(copy.deepcopy(base), seed) for seed in range(2)], words)
    for agent in range(2):
        reference = team.score_reference(agent, [Told(PROMPT, COMPLETIONS)], 1.0)[0].logprobs
        assert torch.equal(reference, again.score(agent, PROMPT, COMPLETIONS, 1.0).logprobs)


@pytest.mark.parametrize(
    "config",
    [IA3Config(target_modules=["k_proj"], feedforward_modules=[]), PromptTuningConfig(num_virtual_tokens=2)],
)
def test_other_kinds_than_lora_are_refused(words, word_count, config):
    config = copy.deepcopy(config)
    config.task_type = "CAUSAL_LM"
    with pytest.raises(AgentError, match=r"agent 1: its adapter is .*agents train LoRA or whole models"):
        build([llama_model(word_count), wrap(llama_model(word_count, seed=1), config)], words)


def test_trained_biases_are_refused(words, word_count):
    with pytest.raises(AgentError, match=r"agent 0: its adapter trains biases \(bias='all'\)"):
        build([wrap_lora(gpt2_model(word_count), bias="all")], words)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_adapters_loaded_for_inference_are_trained_if_they_are_to_learn(tmp_path, words, word_count):
    base = llama_model(word_count)
    for seed in range(2):
        wrap_lora(copy.deepcopy(base), seed).save_pretrained(tmp_path / str(seed))
    models = [PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / str(seed)) for seed in range(2)]
    assert not any(weight.requires_grad for model in models for weight in model.parameters())
    team = build(models, words, trainable=[True, False])
    before = [model(IDS).logits for model in models]
    sgd_step(team, 0)
    assert [torch.equal(logits(team, agent), before[agent]) for agent in range(2)] == [False, True]


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
@pytest.mark.parametrize("order", [1, -1])
def test_a_base_beside_the_model_that_wraps_it_is_refused(words, word_count, order):
    base = llama_model(word_count)
    apart = copy.deepcopy(base)
    wrapped = wrap_lora(base)
    for agents in ([wrapped, base][::order], [wrapped, wrap_lora(base, name="other")][::order]):
        with pytest.raises(AgentError, match="agents 0 and 1 are the same model object"):
            build(agents, words)
    team = build([wrapped, apart], words, trainable=[True, False])
    assert not torch.equal(logits(team, 0), logits(team, 1))


def test_adapters_without_a_peft_model_around_them_are_refused(words, word_count):
    model = wrap_lora(llama_model(word_count)).get_base_model()
    with pytest.raises(AgentError, match="agent 1: its model has adapters in its layers but is no peft model"):
        build([llama_model(word_count), model], words)


def test_a_model_that_takes_no_gradient_is_refused(words, word_count):
    with pytest.raises(AgentError, match=r"agent 1: none of its weights takes a gradient; call requires_grad_\(\)"):
        build([llama_model(word_count), llama_model(word_count).requires_grad_(False)], words)
