"""Completions behind one copy of their prompt are scored as they are in a row each, and teach the same."""

import copy

import pytest
import torch

from mareinforce.agents import node_scoring
from mareinforce.agents.micro_batches import Piece, micro_batches
from mareinforce.agents.node_scoring import Told, can_share_prefixes, own_work, score_nodes, shared_work
from mareinforce.agents.team import Team
from mareinforce.config import MAGRPOConfig
from mareinforce.optim import apply_gradient, compute_gradient, sample_loss
from mareinforce.types import Completion, NodeSample
from tests.models import EOS, gpt2_model, llama_model, qwen2_model, table_model

NODES = [
    Told(torch.tensor([4, 5]), [torch.tensor([13, 14, 15]), torch.tensor([EOS]), torch.tensor([16, 17, 18, 19, EOS])]),
    Told(torch.tensor([6, 7, 8, 9, 10, 11, 12]), [torch.tensor([20, 21]), torch.tensor([20, 21, 22, EOS])]),
]


@pytest.fixture(
    params=[(gpt2_model, "sdpa"), (llama_model, "sdpa"), (llama_model, "eager"), (qwen2_model, "sdpa")],
    ids=["gpt2", "llama", "llama eager", "qwen2"],
)
def model(request, word_count):
    make, attention = request.param
    made = make(word_count)
    made.set_attn_implementation(attention)
    return made


def loss_of(scores):
    weights = torch.Generator().manual_seed(0)
    chosen = torch.cat([scored.logprobs[scored.counts] for scored in scores])
    return (chosen * torch.randn(len(chosen), generator=weights)).sum()


class TestSharedPrefixes:
    def test_give_the_same_log_probs_and_entropies(self, model):
        assert can_share_prefixes(model)
        shared, own = (score_nodes(model, NODES, 0.7, share_prefixes=share) for share in (True, False))
        for mine, other in zip(shared, own, strict=True):
            assert torch.equal(mine.counts, other.counts)
            torch.testing.assert_close(mine.logprobs[mine.counts], other.logprobs[mine.counts], atol=1e-5, rtol=0)
            torch.testing.assert_close(mine.entropy[mine.counts], other.entropy[mine.counts], atol=1e-5, rtol=0)
            assert not mine.entropy.requires_grad

    def test_give_the_same_gradients(self, model):
        found = []
        for share in (True, False):
            model.zero_grad()
            loss_of(score_nodes(model, NODES, 0.7, share_prefixes=share)).backward()
            found.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
        shared, own = found
        assert (shared - own).norm() <= 1e-5 * own.norm()
        assert own.norm() > 1e-3

    @pytest.mark.parametrize("wrong", ["all earlier columns", "positions that run on"])
    def test_notice_what_a_completion_must_not_see(self, model, monkeypatch, wrong):
        right = score_nodes(model, NODES, 0.7, share_prefixes=True)
        layout = node_scoring._layout

        def broken(nodes, attended, width):
            owners, positions = layout(nodes, attended, width)
            if wrong == "all earlier columns":
                return torch.where(owners > 0, 0, owners), positions
            return owners, torch.arange(width).expand_as(positions)

        monkeypatch.setattr(node_scoring, "_layout", broken)
        others = score_nodes(model, NODES, 0.7, share_prefixes=True)
        gap = max(
            float((a.logprobs - b.logprobs).detach()[a.counts].abs().max()) for a, b in zip(right, others, strict=True)
        )
        assert gap > 0.01

    def test_are_used_where_they_save_arithmetic(self, monkeypatch, word_count):
        model, used = llama_model(word_count), []
        behind = node_scoring._behind_prefixes
        monkeypatch.setattr(node_scoring, "_behind_prefixes", lambda *given: used.append(1) or behind(*given))
        long, short = torch.arange(4, 24), torch.tensor([4])
        said = [torch.tensor([5, 6, 7])] * 4
        score_nodes(model, [Told(short, said[:1])], 1.0)
        assert not used
        score_nodes(model, [Told(long, said)], 1.0)
        assert used
        assert shared_work(model, [Told(long, said)]) < 0.5 * own_work(model, [Told(long, said)])

    def test_are_not_used_where_layers_look_through_a_window_or_are_a_users_own(self, word_count):
        assert not can_share_prefixes(qwen2_model(word_count, window=4))
        assert not can_share_prefixes(table_model(4))


def completion(*ids):
    return Completion(torch.tensor(ids), torch.full((len(ids),), -1.0), ids[-1] == EOS, "")


def sample(told, advantages, **given):
    completions = tuple(completion(*ids.tolist()) for ids in told.completion_ids)
    worth = torch.tensor(advantages, dtype=torch.float64)
    return NodeSample(
        **{
            "agent": 0, "turn": 0, "row": 0, "path": (), "prompt_ids": told.prompt_ids, "completions": completions,
            "returns": worth, "advantages": worth, "zero_signal": False, "weight": 1.0, "env_step": 1,
            "policy_version": 0, **given,
        }
    )  # fmt: skip


class TestMicroBatches:
    def test_nodes_stay_whole_where_they_fit(self):
        assert list(micro_batches(NODES, 100)) == [[Piece(0, range(3)), Piece(1, range(2))]]
        assert list(micro_batches(NODES, 14)) == [[Piece(0, range(3))], [Piece(1, range(2))]]

    def test_a_node_above_the_budget_is_cut_and_reads_its_prompt_again(self):
        assert list(micro_batches(NODES, 8)) == [
            [Piece(0, range(2))], [Piece(0, range(2, 3))], [Piece(1, range(1))], [Piece(1, range(1, 2))]
        ]  # fmt: skip
        assert Piece(0, range(2, 3)).of(NODES).completion_ids[0].tolist() == [16, 17, 18, 19, EOS]

    @pytest.mark.parametrize("budget", [1, 5, 9, 14, 25])
    def test_every_completion_is_in_one_piece(self, budget):
        pieces = [piece for part in micro_batches(NODES, budget) for piece in part]
        found = [(piece.node, k) for piece in pieces for k in piece.completions]
        assert found == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]

    @pytest.mark.parametrize(
        "fields",
        [
            {}, {"loss_aggregation": "token_mean"}, {"loss_aggregation": "token_mean", "exclude_final_token": True},
            {"loss_aggregation": "constant", "mask_truncated": True}, {"importance_sampling": "sequence"},
            {"importance_sampling": "token", "mask_truncated": True, "loss_aggregation": "token_mean"},
        ],
        ids=str,
    )  # fmt: skip
    def test_how_an_update_is_cut_changes_neither_its_loss_nor_its_gradient(self, words, word_count, fields):
        start = llama_model(word_count)
        batch = [sample(NODES[0], [1.0, -2.0, 0.5]), sample(NODES[1], [0.7, -0.7], policy_version=-1)]
        found = []
        for budget in (1, 9, 1000):
            config = MAGRPOConfig(num_turns=1, max_new_tokens=8, update_token_budget=budget, **fields)
            team = Team([copy.deepcopy(start)], [words], 8)
            team.networks.double()  # float32 rounds by more than is allowed, on some processors
            optimizer = torch.optim.SGD(team.parameters(), lr=1.0)
            update = compute_gradient(team, optimizer, batch, config, 0)
            apply_gradient(team, optimizer, update)
            found.append((update, torch.cat([weight.detach().flatten() for weight in team.parameters()])))
        before = torch.cat([weight.detach().flatten() for weight in start.parameters()])
        whole, weights = found[-1]
        assert (weights - before).norm() > 1e-3
        for update, others in found[:-1]:
            assert update.losses[0] == pytest.approx(whole.losses[0], rel=1e-6)
            assert (others - weights).norm() <= 1e-6 * (weights - before).norm()
            assert update.metrics[0].keys() == whole.metrics[0].keys()
            for name, value in update.metrics[0].items():
                assert value == pytest.approx(whole.metrics[0][name], rel=1e-6, abs=1e-6)

    def test_a_cut_node_that_forgot_its_size_would_be_noticed(self, words, word_count, monkeypatch):
        team, config = Team([llama_model(word_count)], [words], 8), MAGRPOConfig(num_turns=1, max_new_tokens=8)
        whole, _ = sample_loss(team, sample(NODES[0], [1.0, -2.0, 0.5]), config, 0)
        alone = [Told(NODES[0].prompt_ids, [ids]) for ids in NODES[0].completion_ids]
        parts = [sample(told, [worth]) for told, worth in zip(alone, [1.0, -2.0, 0.5], strict=True)]
        assert (
            abs(sum(float(sample_loss(team, part, config, 0)[0].detach()) for part in parts) - float(whole.detach()))
            > 0.1
        )
