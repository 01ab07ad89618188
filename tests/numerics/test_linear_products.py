"""Layers that multiply with another library say and teach what they did before."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from mareinforce.agents import linear_products, node_scoring, scoring
from mareinforce.agents.linear_products import fast_products, is_plain, product
from mareinforce.agents.node_scoring import Told, score_nodes
from mareinforce.agents.team import Team
from tests.lora import save_base
from tests.models import EOS, gpt2_model, llama_model, qwen2_model

pytestmark = pytest.mark.skipif(not linear_products._has_onednn(), reason="a torch without oneDNN")
NODES = [
    Told(torch.tensor([4, 5]), [torch.tensor([13, 14, 15]), torch.tensor([EOS]), torch.tensor([16, 17, 18, 19, EOS])]),
    Told(torch.tensor([6, 7, 8, 9, 10, 11, 12]), [torch.tensor([20, 21]), torch.tensor([20, 21, 22, EOS])]),
]


@pytest.fixture
def asked(monkeypatch):
    """oneDNN is asked for every product, whatever the processor; lists the shapes of what it multiplied."""
    shapes, plain = [], linear_products.product

    def watched(x, weight, bias=None):
        shapes.append((tuple(x.shape), tuple(weight.shape)))
        return plain(x, weight, bias)

    monkeypatch.setattr(linear_products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(linear_products, "FEWEST_MULTIPLICATIONS", 0)
    monkeypatch.setattr(linear_products, "product", watched)
    return shapes


def scored(model, monkeypatch=None, **options):
    """Log-probs and gradient; with torch's own layers if ``monkeypatch`` is given."""
    model.zero_grad()
    with contextlib.ExitStack() as stack:
        if monkeypatch is not None:
            patch = stack.enter_context(monkeypatch.context())
            for module in (node_scoring, scoring):
                patch.setattr(module, "fast_products", contextlib.nullcontext)
        scores = score_nodes(model, NODES, 0.7, **options)
        chosen = torch.cat([one.logprobs[one.counts] for one in scores])
        (chosen * torch.randn(len(chosen), generator=torch.Generator().manual_seed(0))).sum().backward()
    learning = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return chosen.detach(), torch.cat([grad.flatten() for grad in learning])


def agree(found, expected):
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=0)
    assert (found[1] - expected[1]).norm() <= 1e-5 * expected[1].norm()
    assert expected[1].norm() > 1e-3


@pytest.mark.parametrize("once", [True, False], ids=["once", "again"])
@pytest.mark.parametrize("share", [True, False], ids=["behind a prefix", "a row each"])
@pytest.mark.parametrize("make", [llama_model, qwen2_model, gpt2_model])
def test_whole_models_say_and_learn_the_same(asked, word_count, monkeypatch, make, share, once):
    model = make(word_count)
    expected = scored(model, monkeypatch, share_prefixes=share)
    assert not asked
    agree(scored(model, share_prefixes=share, once=once), expected)
    assert len(asked) >= 3  # of GPT-2 the head alone: its other layers are of another kind
    assert not [layer for layer in model.modules() if "forward" in vars(layer)]


def test_adapters_say_and_learn_the_same(asked, tmp_path, word_count, monkeypatch):
    base = save_base(tmp_path / "base", qwen2_model(word_count))
    team = Team.build(agents=[base] * 2, lora=[{"r": 2}, {"r": 3}], max_new_tokens=8)
    for agent in (0, 1):
        with team.speaking(agent) as model:
            expected = scored(model, monkeypatch)
            assert not asked
            agree(scored(model), expected)
            assert asked
            asked.clear()


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5), (0, 5), (1, 1, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_the_layer(asked, shape, bias):
    torch.manual_seed(0)
    layer = nn.Linear(5, 4, bias=bias)
    x, twin = torch.randn(shape, requires_grad=True), copy.deepcopy(layer)
    y = torch.randn(*shape[:-1], 4)
    with fast_products(layer):
        found = layer(x)
    expected = twin(x)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    for mine, other in [(y, y), (y.mean() * torch.ones_like(y), y.mean().expand_as(y))]:  # a gradient may be a view
        grads = torch.autograd.grad(found, [x, *layer.parameters()], other, retain_graph=True)
        theirs = torch.autograd.grad(expected, [x, *twin.parameters()], mine, retain_graph=True)
        torch.testing.assert_close(grads, theirs, atol=1e-6, rtol=0)


def test_a_frozen_layer_gets_no_gradient_and_hands_on_its_own(asked):
    layer = nn.Linear(5, 4).requires_grad_(False)
    x = torch.randn(3, 5, requires_grad=True)
    with fast_products(layer):
        found = layer(x)
    found.sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, layer.weight.sum(dim=0).expand(3, 5), atol=1e-6, rtol=0)
    assert asked == [((3, 5), (4, 5)), ((3, 4), (5, 4))]


def test_layers_that_are_no_plain_ones_are_left_alone(asked):
    changed = nn.Linear(4, 4)
    changed.forward = own = lambda x: x
    network = nn.ModuleList([changed, nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4, device="meta")])
    network.append(type("Special", (nn.Linear,), {})(4, 4))
    with fast_products(network):
        assert [layer for layer in network if "forward" in vars(layer)] == [changed]
    assert changed.forward is own
    assert not is_plain(changed)


def test_under_autocast_and_for_other_inputs_torch_decides(asked):
    layer = nn.Linear(4, 4)
    with fast_products(layer):
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.randn(3, 4)).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="dtype"):
            layer(torch.randn(3, 4, dtype=torch.float64))
    assert not asked


def test_small_products_stay_where_they_are(monkeypatch):
    monkeypatch.setattr(linear_products, "onednn_is_faster", lambda: True)
    called = []
    monkeypatch.setattr(linear_products, "product", lambda *given: called.append(given) or product(*given))
    layer = nn.Linear(64, 64)
    with fast_products(layer), torch.no_grad():
        for rows, big in [(1, False), (2**21 // 64 // 64 - 1, False), (2**21 // 64 // 64, True)]:
            layer(torch.randn(rows, 64))
            assert bool(called) == big


def test_a_model_that_recomputes_its_layers_is_left_as_it_is(asked, word_count, monkeypatch):
    model = llama_model(word_count)
    model.activation_checkpointing_enable()
    expected = scored(model, monkeypatch)
    found = scored(model)
    assert not asked
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize(("told", "faster"), [("vendor_id : AuthenticAMD", True), ("vendor_id\t: GenuineIntel", False)])
def test_intels_processors_keep_intels_library(monkeypatch, told, faster):
    monkeypatch.setattr(linear_products, "_processor", lambda: told)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert linear_products.onednn_is_faster.__wrapped__() == faster
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not linear_products.onednn_is_faster.__wrapped__()  # then torch does not multiply with it


@pytest.mark.parametrize("change", [nn.utils.weight_norm, nn.utils.spectral_norm], ids=["weight_norm", "spectral_norm"])
@pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")
def test_a_layer_whose_weight_is_made_anew_by_a_hook_is_left_alone(asked, change):
    layer = change(nn.Linear(6, 4))
    with fast_products(layer):
        layer(torch.randn(3, 6)).sum().backward()
    assert not asked
    assert all(weight.grad is not None for weight in layer.parameters() if weight.requires_grad)


def test_what_comes_out_may_be_changed_in_place(asked):
    layer, x = nn.Linear(6, 4), torch.randn(2, 3, 6)
    with fast_products(layer):
        found = layer(x)
        found += 1
        found.relu_().sum().backward()
    expected = (functional.linear(x, layer.weight, layer.bias) + 1).relu()
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(expected.sum(), [layer.weight])
    torch.testing.assert_close(layer.weight.grad, gradient)
    assert asked


def test_a_bias_with_gaps_is_read_as_it_is(asked):
    layer, x = nn.Linear(6, 4), torch.randn(3, 6)
    layer.bias = nn.Parameter(torch.randn(8)[::2])
    with fast_products(layer):
        torch.testing.assert_close(layer(x), functional.linear(x, layer.weight, layer.bias))
    assert asked
