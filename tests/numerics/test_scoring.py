"""Log-probs of sampled ids: of what they depend, and of what they must not."""

import math

import pytest
import torch
from torch import nn

from mareinforce.agents import scoring
from mareinforce.agents.scoring import score_rows
from mareinforce.agents.team import Team
from mareinforce.algorithms.loss import node_loss
from mareinforce.rollout.engines.transformers import TransformersEngine
from mareinforce.types import Request, Sampling, StreamKey
from tests.models import (
    EOS,
    byte_tokenizer,
    gpt2_model,
    llama_model,
    table_model,
    table_tokenizer,
    word_tokenizer,
)

PROMPTS = (torch.tensor([4, 5]), torch.tensor([6, 7, 8, 9, 10, 11, 12]))
COMPLETIONS = (torch.tensor([13, 14, 15]), torch.tensor([16, 17, EOS]))
MODELS = {"absolute positions": gpt2_model, "rotary positions": llama_model}


def slow_logprobs(model, prompt, completion, temperature=1.0):
    """One forward a token, no batch, no mask."""
    values = []
    for position, token in enumerate(completion):
        ids = torch.cat([prompt, completion[:position]])[None]
        values.append(torch.log_softmax(model(ids).logits[0, -1] / temperature, -1)[token])
    return torch.stack(values)


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def model(request, word_count):
    return request.param(word_count)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_agrees_with_one_forward_a_token(model, words, temperature):
    completions = [torch.tensor([13]), torch.tensor([13, 14, 15, 16, EOS]), torch.tensor([EOS])]
    scored = Team([model], [words], 8).score(0, PROMPTS[1], completions, temperature)
    for row, completion in enumerate(completions):
        assert scored.counts[row].tolist() == [True] * len(completion) + [False] * (5 - len(completion))
        expected = slow_logprobs(model, PROMPTS[1], completion, temperature)
        torch.testing.assert_close(scored.logprobs[row, : len(completion)], expected, atol=1e-5, rtol=0)


def test_a_row_depends_on_no_other_row(model):
    together = score_rows(model, PROMPTS, COMPLETIONS, 1.0)
    for row in range(2):
        alone = score_rows(model, [PROMPTS[row]], [COMPLETIONS[row]], 1.0)
        torch.testing.assert_close(together.logprobs[row], alone.logprobs[0], atol=1e-5, rtol=0)


def test_positions_counted_from_the_fillers_are_another_score(monkeypatch, word_count):
    model = gpt2_model(word_count)
    right = score_rows(model, PROMPTS, COMPLETIONS, 1.0).logprobs[0]

    def without_positions(model, inputs, attended, width):
        return model(input_ids=inputs, attention_mask=attended, position_ids=None).logits[:, -width:]

    monkeypatch.setattr(scoring, "_logits", without_positions)
    assert (score_rows(model, PROMPTS, COMPLETIONS, 1.0).logprobs[0] - right).abs().max() > 0.1


def test_which_id_fills_does_not_matter(monkeypatch, model):
    expected = score_rows(model, PROMPTS, [COMPLETIONS[0], COMPLETIONS[1][:1]], 1.0)
    monkeypatch.setattr(scoring, "FILLER", EOS)
    again = score_rows(model, PROMPTS, [COMPLETIONS[0], COMPLETIONS[1][:1]], 1.0)
    torch.testing.assert_close(again.logprobs[expected.counts], expected.logprobs[expected.counts])


def test_a_tokenizer_saved_for_the_other_side_gives_the_same(model):
    scores = []
    for side in ("left", "right"):
        tokenizer = word_tokenizer()
        tokenizer.padding_side = side
        team = Team([model], [tokenizer], 8)
        scores.append(team.score(0, team.encode(0, "a b"), COMPLETIONS, 1.0).logprobs)
    assert torch.equal(*scores)


class TestFullLogitsFallback:
    class Bare(nn.Module):
        """A model whose forward knows neither positions nor how many logits are wanted."""

        def __init__(self, model):
            super().__init__()
            self.inner = model

        def forward(self, input_ids, attention_mask, use_cache):
            return self.inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)

    def test_models_that_return_all_logits_score_the_same(self, word_count):
        model = llama_model(word_count)
        prompts = [PROMPTS[1]] * 2
        expected = score_rows(model, prompts, COMPLETIONS, 1.0).logprobs
        torch.testing.assert_close(score_rows(self.Bare(model), prompts, COMPLETIONS, 1.0).logprobs, expected)


class TestDropout:
    @pytest.mark.parametrize("training", [True, False])
    def test_scoring_is_without_it_and_the_flags_come_back(self, words, word_count, training):
        model = gpt2_model(word_count, dropout=0.5).train(training)
        model.transformer.h[0].train(not training)
        flags = [module.training for module in model.modules()]
        team = Team([model], [words], 8)
        first, second = (team.score(0, PROMPTS[0], COMPLETIONS, 1.0).logprobs for _ in range(2))
        assert torch.equal(first, second)
        assert [module.training for module in model.modules()] == flags

    def test_flags_come_back_after_an_error(self, words, word_count):
        model = gpt2_model(word_count, dropout=0.5).train()
        with pytest.raises(IndexError):
            Team([model], [words], 8).score(0, torch.tensor([10_000]), COMPLETIONS, 1.0)
        assert all(module.training for module in model.modules())

    def test_dropout_would_show(self, word_count):
        model = gpt2_model(word_count, dropout=0.5).train()
        ids = torch.cat([PROMPTS[0], COMPLETIONS[0]])[None]
        assert not torch.equal(model(ids).logits, model(ids).logits)


class TestLoss:
    """Values of the plain loss: mean over K of -(return) x (sum of the completion's log-probs)."""

    @staticmethod
    def loss(model, tokenizer, prompt, completions, temperature=1.0):
        scored = Team([model], [tokenizer], 8).score(0, prompt, completions, temperature)
        returns = torch.ones(len(completions), dtype=torch.float64)
        return node_loss(scored.logprobs, scored.counts, returns), scored

    def test_the_end_token_counts_and_a_filler_that_looks_like_it_does_not(self):
        tokenizer = table_tokenizer(["<eos>", "a", "b", "c"], pad="<eos>")
        completions = [torch.tensor([1, 2, 0]), torch.tensor([1, 0])]
        loss, scored = self.loss(table_model(4, 0), tokenizer, torch.tensor([3]), completions)
        assert scored.counts.sum(-1).tolist() == [3, 2]
        assert loss.item() == pytest.approx(5 * math.log(4) / 2, abs=1e-6)
        filled = [torch.tensor([1, 2, 0]), torch.tensor([1, 0, 0])]  # had the filler been kept
        assert self.loss(table_model(4, 0), tokenizer, torch.tensor([3]), filled)[0].item() > 4.1

    @pytest.mark.parametrize("empties", [1, 4])
    def test_an_empty_completion_scores_its_end_token(self, empties):
        table = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
        model = table_model(table, 0)
        tokenizer = table_tokenizer(["<eos>", "a"])
        loss, scored = self.loss(model, tokenizer, torch.tensor([1]), [torch.tensor([0])] * empties)
        loss.backward()
        assert scored.counts.sum(-1).tolist() == [1] * empties
        assert loss.item() == pytest.approx(0.693147, abs=1e-6)
        assert model.table.weight.grad[1, 0].item() == pytest.approx(-0.5, abs=1e-6)
        assert torch.isfinite(model.table.weight.grad).all()
        assert tokenizer.decode([0], skip_special_tokens=True) == ""

    @pytest.mark.parametrize(
        ("temperature", "loss", "gradient"), [(0.5, 0.142932, -0.266373), (1.0, 0.407606, -0.334759)]
    )
    def test_the_loss_is_of_the_policy_at_the_sampling_temperature(self, temperature, loss, gradient):
        model = table_model(torch.tensor([[2.0, 1.0, 0.0]] * 3), 2)
        tokenizer = table_tokenizer(["a", "b", "<eos>"])
        value, scored = self.loss(model, tokenizer, torch.tensor([1]), [torch.tensor([0])], temperature)
        value.backward()
        assert value.item() == pytest.approx(loss, abs=1e-6)
        # The row of the prompt's last token: d loss / d logit 0.
        assert model.table.weight.grad[1, 0].item() == pytest.approx(gradient, abs=1e-6)
        probabilities = torch.softmax(torch.tensor([2.0, 1.0, 0.0]) / temperature, -1)
        entropy = -(probabilities * probabilities.log()).sum()
        assert scored.entropy.item() == pytest.approx(entropy.item(), abs=1e-6)
        assert not scored.entropy.requires_grad


def test_the_ids_scored_are_the_ids_sampled():
    tokenizer = byte_tokenizer()
    a, b, merged = (tokenizer.convert_tokens_to_ids(t) for t in ("a", "b", "ab"))
    table = torch.full((258, 258), -30.0)
    table[a, b], table[b, tokenizer.eos_token_id] = 30.0, 30.0
    team = Team([table_model(table)], [tokenizer], 4)
    key = StreamKey("train", 0, 0, 0, (), 0, 0)
    (completion,) = TransformersEngine(team).sample(
        [Request(0, torch.tensor([a]), (key,))], Sampling(max_new_tokens=1)
    )[0]
    said = torch.cat([torch.tensor([a]), completion.ids])
    assert team.decode(0, said) == "ab"
    assert said.tolist() == [a, b] != [merged]
    scored = team.score(0, torch.tensor([a]), [completion.ids], 1.0)
    assert scored.counts.sum().item() == 1
    torch.testing.assert_close(scored.logprobs[0], completion.logprobs)
    assert team.encode(0, "ab").tolist() == [merged]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(6),
        Sampling(6, temperature=0.6),
        Sampling(6, temperature=1.5, top_k=5, top_p=0.8),
        Sampling(6, min_new_tokens=4),
    ],
)
def test_behaviour_log_probs_are_those_of_scoring_again(model, words, sampling):
    team = Team([model], [words], 8)
    keys = tuple(StreamKey("train", 0, 0, 0, (), 0, k) for k in range(6))
    for prompt, completions in zip(
        PROMPTS, TransformersEngine(team).sample([Request(0, p, keys) for p in PROMPTS], sampling), strict=True
    ):
        scored = team.score(0, prompt, [c.ids for c in completions], sampling.temperature)
        behaviour = torch.cat([c.logprobs for c in completions])
        torch.testing.assert_close(scored.logprobs[scored.counts], behaviour, atol=1e-4, rtol=0)
        other = team.score(0, prompt, [c.ids for c in completions], sampling.temperature + 0.1)
        assert (other.logprobs[scored.counts] - behaviour).abs().max() > 1e-2
