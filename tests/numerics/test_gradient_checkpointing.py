"""Gradient checkpointing costs time and changes nothing: not the gradients, and not what is trained."""

import contextlib
import copy

import pytest
import torch
from peft import LoraConfig
from torch.utils.checkpoint import CheckpointError
from transformers import OPTConfig, OPTForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from mareinforce.agents import bases, modes
from mareinforce.agents.adapters import belongs_to, inner_model
from mareinforce.agents.team import Team
from mareinforce.errors import AgentError, ConfigError
from mareinforce.rollout.engines.transformers import TransformersEngine
from mareinforce.types import Request, Sampling, StreamKey
from tests.lora import save_base, stir, wrap
from tests.models import gpt2_model, llama_model, table_model
from tests.system.runs import rank, train

PROMPT, SAID = torch.tensor([4, 5]), [torch.tensor([6, 7, 8]), torch.tensor([9, 10])]
CONFIGS = {"on": {"gradient_checkpointing": True}, "off": {"gradient_checkpointing": False}}
MODELS = pytest.mark.parametrize("model", ["gpt2", "llama"])


def make(name, word_count):
    """With dropout wherever the architecture has it."""
    if name == "gpt2":
        return gpt2_model(word_count, dropout=0.5)
    return llama_model(word_count)


def build(agents, switch, tokenizer=None, **options):
    return Team.build(agents=agents, tokenizer=tokenizer, model_config=CONFIGS[switch], max_new_tokens=8, **options)


def gradients(team, agent=0, training=True):
    """Of every weight the agent trains, at a score made while everything is in training mode."""
    team.zero_grad()
    team.train(training)
    policy = next(policy for policy in team.policies if agent in policy.agents)
    team.score(agent, PROMPT, SAID, 1.0).logprobs.sum().backward()
    return {name: weight.grad.clone() for name, weight in team.weights(policy).items() if weight.grad is not None}


def agree(one, other, atol=1e-6):
    return one.keys() == other.keys() and all(
        torch.allclose(one[name], other[name], atol=atol, rtol=1e-6) for name in one
    )


def opt_model(dropout, word_count):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "ffn_dim": 16, "word_embed_proj_dim": 16, "num_hidden_layers": 2}
    config = OPTConfig(
        vocab_size=word_count, num_attention_heads=2, max_position_embeddings=64, dropout=dropout,
        attention_dropout=0.0, eos_token_id=2, pad_token_id=0, bos_token_id=1, **sizes,
    )  # fmt: skip
    return OPTForCausalLM(config)


@MODELS
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("lora", [None, {"r": 2}, {"r": 2, "lora_dropout": 0.5}], ids=["whole", "adapter", "dropping"])
def test_gradients_are_the_same_on_and_off(tmp_path, word_count, model, training, lora):
    base = save_base(tmp_path / "base", make(model, word_count))
    found = {}
    for switch in CONFIGS:
        team = build([base, base], switch, lora=lora)
        for network in team.networks:
            stir(network)
        found[switch] = [gradients(team, agent, training) for agent in (0, 1, 0)]
    for on, off in zip(found["on"], found["off"], strict=True):
        assert agree(on, off)
        assert all(bool(gradient.any()) for gradient in on.values() if gradient.shape[0] != word_count)
    if lora is not None:
        trained = set(team.weights(team.policies[0]))
        assert set(found["on"][0]) == trained  # every matrix of the adapter
        assert not agree(found["on"][0], {name: gradient + 1e-5 for name, gradient in found["off"][0].items()})


@pytest.mark.parametrize("where", ["model", "adapter"])
def test_dropout_in_the_second_run_of_a_layer_would_be_noticed(tmp_path, word_count, monkeypatch, where):
    model = gpt2_model(word_count, dropout=0.5 if where == "model" else 0.0)
    lora = {"r": 2, "lora_dropout": 0.5 if where == "adapter" else 0.0}
    base, found = save_base(tmp_path / "base", model), {}
    for switch in CONFIGS:
        team = build([base], switch, lora=lora)
        stir(team.network(0))
        found[switch] = gradients(team)
    assert agree(found["on"], found["off"])
    monkeypatch.setattr(bases, "recompute_alike", lambda model: None)
    team = build([base], "on", lora=lora)
    stir(team.network(0))
    with contextlib.suppress(CheckpointError):
        assert not agree(gradients(team), found["off"])


@MODELS
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("switch", CONFIGS)
def test_layers_are_run_again_in_the_backward_pass_only_if_asked(word_count, words, model, adapted, switch):
    made = make(model, word_count)
    if adapted:
        made = wrap(
            made, LoraConfig(r=2, target_modules="all-linear", fan_in_fan_out=model == "gpt2", task_type="CAUSAL_LM")
        )
    team = build([made], switch, words)
    layers = [layer for layer in inner_model(made).modules() if isinstance(layer, GradientCheckpointingLayer)]
    runs = []
    for layer in layers:
        first = next(child for child in layer.modules() if "Norm" in type(child).__name__)
        first.register_forward_hook(lambda *_, layer=layer: runs.append(layer))
    team.train()
    logprobs = team.score(0, PROMPT, SAID, 1.0).logprobs
    assert runs == layers
    logprobs.sum().backward()
    assert len(runs) == len(layers) * (2 if switch == "on" else 1)
    TransformersEngine(team).sample(
        [Request(0, PROMPT, (StreamKey("train", 0, 0, 0, (), 0, 0),))], Sampling(3, min_new_tokens=3)
    )
    before = len(runs)
    team.zero_grad()
    with torch.no_grad():
        team.score(0, PROMPT, SAID, 1.0)
    assert len(runs) == before + len(layers)


def test_a_user_may_have_switched_it_on(word_count, words):
    model = gpt2_model(word_count, dropout=0.5)
    expected = gradients(build([copy.deepcopy(model)], "off", words))
    model.activation_checkpointing_enable()
    for _ in range(2):  # and give the model to two teams
        found = gradients(build([model], "off", words))
        assert model.is_activation_checkpointing
        assert agree(found, expected)


def test_a_wrapped_model_with_dropout_of_its_own_is_the_same_on_and_off(word_count, words):
    config = LoraConfig(r=2, lora_dropout=0.5, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    wrapped = wrap(gpt2_model(word_count, dropout=0.5), config)
    stir(wrapped)
    twins = [copy.deepcopy(wrapped).train() for _ in range(4)]
    on, off = build(twins[:2], "on", words), build(twins[2:], "off", words)
    for agent in range(2):
        assert agree(gradients(on, agent), gradients(off, agent))


@MODELS
def test_training_learns_the_same(tmp_path, word_count, model):
    base = save_base(tmp_path / "base", make(model, word_count))
    learned = []
    for switch in CONFIGS:
        made = train(
            tmp_path, rank, ([base, base], None), ["a", "b c"], max_new_tokens=4, num_generations=4,
            agent_learning_rate=0.01, reference_kl_enabled=True,
            model_config={**CONFIGS[switch], "lora": {"r": 2, "lora_dropout": 0.5}},
        )  # fmt: skip
        learned.append({name: w for name, w in made.module.team.state_dict().items() if belongs_to(name)})
    assert agree(*learned, atol=1e-4)
    assert max(float(w.abs().max()) for name, w in learned[0].items() if "lora_B" in name) > 1e-3


class TestRefusals:
    def test_a_layer_that_drops_by_itself(self, word_count, words):
        with pytest.raises(
            AgentError, match=r"agent 1: a loaded OPTForCausalLM applies dropout in its layer .* itself"
        ):
            build([llama_model(word_count), opt_model(0.1, word_count)], "on", words)
        assert len(build([opt_model(0.1, word_count)], "off", words)) == 1

    def test_that_layer_could_not_have_been_told_to_stop(self, word_count, words, monkeypatch):
        found = {}
        for dropout in (0.0, 0.5):
            monkeypatch.setattr("mareinforce.agents.bases.drops_by_itself", lambda model: None)
            found[dropout] = gradients(build([opt_model(dropout, word_count)], "on", words))
            assert agree(found[0.0], gradients(build([opt_model(dropout, word_count)], "off", words)))
        assert not agree(found[0.0], found[0.5])
        for dropout, layer in ((0.5, "model.decoder.layers.0"), (0.0, None)):
            model = opt_model(dropout, word_count)
            assert modes.drops_by_itself(model) is None
            model.activation_checkpointing_enable()
            assert modes.drops_by_itself(model) == layer

    def test_a_model_without_it(self, words, word_count):
        with pytest.raises(AgentError, match="agent 0: a loaded TableModel has no gradient checkpointing"):
            build([table_model(word_count, 2)], "on", words)

    def test_another_value(self, llama, words):
        with pytest.raises(ConfigError, match=r"gradient_checkpointing='yes': must be true or false"):
            Team.build(
                agents=[llama], tokenizer=words, max_new_tokens=8, model_config={"gradient_checkpointing": "yes"}
            )
