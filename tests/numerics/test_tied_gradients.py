"""Embeddings that are the head's weights too: their gradient is one dense tensor, with no second one beside it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mareinforce.agents import modes, node_scoring, scoring
from mareinforce.agents.modes import sparse_lookups
from mareinforce.agents.node_scoring import Told, score_nodes
from tests.models import gpt2_model, llama_model

NODES = [
    Told(torch.tensor([4, 5, 4, 4]), [torch.tensor([6, 7, 6]), torch.tensor([6, 8])]),
    Told(torch.tensor([9, 10]), [torch.tensor([6, 7, 4, 11]), torch.tensor([12])]),
]
SHARED = pytest.mark.parametrize("share_prefixes", [True, False], ids=["behind prefixes", "row by row"])


class Operations(TorchDispatchMode):
    """Names of what is computed inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def tied(word_count):
    return llama_model(word_count, tied=True)


def gradients(model, share_prefixes, times=1):
    model.zero_grad()
    for _ in range(times):
        scored = score_nodes(model, NODES, 0.8, share_prefixes=share_prefixes)
        sum((one.logprobs * one.counts).sum() for one in scored).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


@SHARED
@pytest.mark.parametrize("make", [tied, gpt2_model], ids=["llama", "gpt2"])
def test_the_gradient_is_dense_and_that_of_dense_lookups(make, share_prefixes, word_count, monkeypatch):
    model = make(word_count)
    found = gradients(model, share_prefixes, times=2)
    with monkeypatch.context() as patch:
        for module in (node_scoring, scoring):
            patch.setattr(module, "sparse_lookups", modes.dropout_off)
        expected = gradients(model, share_prefixes, times=2)
    for name, gradient in expected.items():
        assert not found[name].is_sparse
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)


@SHARED
def test_no_second_gradient_of_the_vocabularys_size_is_made(share_prefixes, word_count, monkeypatch):
    model = tied(word_count)
    with Operations() as operations:
        gradients(model, share_prefixes)
    assert "aten::embedding_dense_backward" not in operations.names
    for module in (node_scoring, scoring):
        monkeypatch.setattr(module, "sparse_lookups", modes.dropout_off)
    with Operations() as operations:
        gradients(model, share_prefixes)
    assert "aten::embedding_dense_backward" in operations.names


def test_embeddings_of_their_own_are_left_alone(word_count):
    model = llama_model(word_count)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with sparse_lookups(model):
        assert not model.get_input_embeddings().sparse


def test_embeddings_are_as_before_after_an_error(word_count):
    model = tied(word_count)
    with pytest.raises(ZeroDivisionError), sparse_lookups(model):
        raise ZeroDivisionError
    assert not model.get_input_embeddings().sparse
