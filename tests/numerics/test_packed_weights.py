"""Sampling from weights laid out for a few rows is sampling from the weights."""

import itertools

import pytest
import torch
from torch import nn

from mareinforce.agents import linear_products, packed_weights
from mareinforce.agents.packed_weights import PackedWeights
from mareinforce.agents.team import Team
from mareinforce.rollout.engines.transformers import TransformersEngine
from mareinforce.types import Request, Sampling, StreamKey
from tests.lora import save_base, stir
from tests.models import EOS, gpt2_model, llama_model, qwen2_model

pytestmark = pytest.mark.skipif(
    not (packed_weights.available() and linear_products._has_onednn()), reason="a torch without MKL or oneDNN"
)
ENDS = [EOS, 20, 21, 22, 23]


@pytest.fixture(params=[False, True], ids=["mkl", "onednn"])
def packed(request, monkeypatch):
    """Small weights are packed too, by either library; lists the rows that weights were laid out for."""
    for module in (packed_weights, linear_products):
        monkeypatch.setattr(module, "onednn_is_faster", lambda: request.param)
    monkeypatch.setattr(linear_products, "FEWEST_MULTIPLICATIONS", 0)
    monkeypatch.setattr(packed_weights, "SMALL_WEIGHT", 0)
    monkeypatch.setattr(packed_weights, "FEWEST_TOKENS", 2)
    laid_out, product = [], packed_weights._product

    def watched(layer, rows):
        laid_out.append(rows)
        return product(layer, rows)

    monkeypatch.setattr(packed_weights, "_product", watched)
    return laid_out


def requests(agents, count):
    prompt = torch.tensor([6, 7, 8, 9, 10])
    return [
        Request(agent, prompt[agent:], tuple(StreamKey("train", 0, 0, 0, (), agent, k) for k in range(count)))
        for agent in range(agents)
    ]


def sampled(team, asked, sampling):
    return [one for answers in TransformersEngine(team).sample(asked, sampling) for one in answers]


def agree(found, expected):
    assert [one.ids.tolist() for one in found] == [one.ids.tolist() for one in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-5, rtol=0)


def without(monkeypatch, team, asked, sampling):
    with monkeypatch.context() as patch:
        patch.setattr(packed_weights, "available", lambda: False)
        return sampled(team, asked, sampling)


def untouched(network):
    return not [module for module in network.modules() if "forward" in vars(module)]


@pytest.mark.parametrize("make", [llama_model, qwen2_model], ids=["llama", "qwen2 with biases"])
def test_the_same_samples(packed, monkeypatch, make, words, word_count):
    team = Team([make(word_count)], [words], 12)
    asked, sampling = requests(1, 6), Sampling(12, min_new_tokens=12, temperature=0.8, top_k=20)
    expected = without(monkeypatch, team, asked, sampling)
    assert not packed
    agree(sampled(team, asked, sampling), expected)
    assert set(packed) == {6}
    assert untouched(team.network(0))


def test_rows_that_leave_are_filled_up_until_half_are_gone(packed, monkeypatch, words, word_count):
    team = Team([llama_model(word_count, eos=ENDS)], [words], 12)
    asked, sampling = requests(1, 16), Sampling(12)
    expected = without(monkeypatch, team, asked, sampling)
    agree(sampled(team, asked, sampling), expected)
    rows = list(dict.fromkeys(packed))
    assert (len(rows) == 1) == linear_products.onednn_is_faster()  # whose layout is for any number of rows
    assert all(later * 2 <= earlier for earlier, later in itertools.pairwise(rows))


def test_adapters_side_by_side(packed, monkeypatch, tmp_path):
    lora = [{"r": 2}, {"r": 3}]
    team = Team.build(agents=[save_base(tmp_path / "base")] * 2, lora=lora, max_new_tokens=8)
    stir(team.network(0))
    asked, sampling = requests(2, 4), Sampling(8, min_new_tokens=8)
    expected = without(monkeypatch, team, asked, sampling)
    agree(sampled(team, asked, sampling), expected)
    assert set(packed) == {8}
    assert untouched(team.network(0))


def test_new_weights_are_sampled_from(packed, words, word_count):
    team = Team([llama_model(word_count)], [words], 12)
    asked, sampling = requests(1, 4), Sampling(8, min_new_tokens=8)
    before = sampled(team, asked, sampling)
    with torch.no_grad():
        for weight in team.network(0).parameters():
            weight.add_(torch.randn_like(weight), alpha=0.2)
    assert [one.ids.tolist() for one in sampled(team, asked, sampling)] != [one.ids.tolist() for one in before]


def test_layers_that_are_no_plain_ones_are_left_alone(packed, words, word_count):
    network = nn.ModuleDict(
        {
            "halved": nn.Linear(4, 4, dtype=torch.float16),
            "changed": nn.Linear(4, 4),
            "special": type("Special", (nn.Linear,), {})(4, 4),
            "plain": nn.Linear(4, 4),
        }
    )
    network["changed"].forward = own = lambda x: x
    with PackedWeights(network, 64) as weights:
        weights.pack(8)
        assert [name for name, layer in network.items() if "forward" in vars(layer)] == ["changed", "plain"]
    assert network["changed"].forward is own
    gpt2 = Team([gpt2_model(word_count)], [words], 12)
    sampled(gpt2, requests(1, 4), Sampling(4, min_new_tokens=4))
    assert len(packed) == 2  # the plain one, and GPT-2's head: its other layers are of another kind


def test_more_rows_than_laid_out_for(packed):
    layer = nn.Linear(5, 7)
    for shape in [(3, 1, 5), (2, 1, 5), (1, 1, 5), (3, 5), (2, 9, 5), (4, 5)]:
        x = torch.randn(shape)
        expected = layer(x).detach()
        with PackedWeights(layer, 64) as weights, torch.no_grad():
            weights.pack(3)
            found = layer(x)
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.skipif(not linear_products.onednn_knows(torch.bfloat16), reason="a processor without bfloat16")
def test_copies_in_bfloat16_are_laid_out_too(packed):
    layer = nn.Linear(64, 48, dtype=torch.bfloat16)
    x = torch.randn(5, 1, 64, dtype=torch.bfloat16)
    with PackedWeights(layer, 64) as weights, torch.no_grad():
        expected = layer(x)
        weights.pack(5)
        assert packed == [5]
        torch.testing.assert_close(layer(x), expected, atol=0.02, rtol=0.01)  # two of its steps


def test_nothing_stays_after_an_error(packed):
    layer = nn.Linear(5, 7)
    weights = PackedWeights(layer, 64)
    weights.pack(4)
    assert "forward" in vars(layer)
    with pytest.raises(ZeroDivisionError), weights:
        raise ZeroDivisionError
    assert "forward" not in vars(layer)


@pytest.mark.parametrize(("rows", "new_tokens"), [(1, 64), (1000, 64), (8, 1)])
def test_where_it_does_not_pay_nothing_is_laid_out(packed, rows, new_tokens):
    with PackedWeights(nn.Linear(5, 7), new_tokens) as weights:
        weights.pack(rows)
    assert not packed


def test_no_rows_at_all_are_multiplied_too(packed):
    layer = nn.Linear(8, 4)
    for product in (packed_weights._onednn_product, packed_weights._mkl_product):
        assert product(layer, 4)(torch.empty(0, 8)).shape == (0, 4)
