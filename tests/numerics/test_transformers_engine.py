"""Sampling with a model's own generate: what decides a sample, and what must not."""

import contextlib
import copy
import itertools
import logging

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from mareinforce.agents.team import Team
from mareinforce.errors import NonFiniteError
from mareinforce.rollout.engines import decoding, generation
from mareinforce.rollout.engines.transformers import TransformersEngine
from mareinforce.types import Request, Sampling, StreamKey
from tests.models import (
    EOS,
    gpt2_model,
    llama_model,
    table_model,
    table_tokenizer,
    word_tokenizer,
)

SHORT, LONG = torch.tensor([4, 5]), torch.tensor([6, 7, 8, 9, 10, 11, 12])


def keys(count, row=0, agent=0):
    return tuple(StreamKey("train", 0, 0, row, (), agent, k) for k in range(count))


def said(answers):
    return [[completion.ids.tolist() for completion in completions] for completions in answers]


@pytest.fixture(params=[gpt2_model, llama_model], ids=["absolute positions", "rotary positions"])
def team(request, words, word_count):
    return Team([request.param(word_count)], [words], 8)


class TestBatches:
    @pytest.mark.parametrize("budget", [1, 40, 100, 32768])
    def test_samples_do_not_depend_on_what_is_batched_with_them(self, team, budget):
        requests = [Request(0, SHORT, keys(3, row=0)), Request(0, LONG, keys(4, row=1)), Request(0, SHORT, keys(2, 2))]
        alone = [TransformersEngine(team).sample([request], Sampling(8))[0] for request in requests]
        together = TransformersEngine(team, token_budget=budget).sample(requests, Sampling(8))
        assert said(together) == said(alone)
        assert said([together[0]]) != said([together[2]])  # other streams, other samples
        for one, other in zip(itertools.chain(*together), itertools.chain(*alone), strict=True):
            torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("way", [decoding, generation])
    def test_a_row_without_its_own_positions_says_something_else(self, monkeypatch, words, word_count, way):
        team = Team([gpt2_model(word_count)], [words], 8)
        requests = [Request(0, SHORT, keys(6)), Request(0, LONG, keys(1, row=1))]
        engine = TransformersEngine(team, own_loop=way is decoding)
        expected = said(engine.sample(requests, Sampling(8)))
        plain = way.aligned_right

        def attending_to_fillers(prompts):
            ids, attended = plain(prompts)
            return ids, torch.ones_like(attended)

        monkeypatch.setattr(way, "aligned_right", attending_to_fillers)
        assert said(engine.sample(requests, Sampling(8))) != expected

    def test_greedy_text_of_a_short_row_is_that_of_the_row_alone(self, team):
        chosen = Sampling(8, temperature=0.0)
        together = TransformersEngine(team).sample([Request(0, SHORT, keys(1)), Request(0, LONG, keys(1))], chosen)
        alone = TransformersEngine(team).sample([Request(0, SHORT, keys(2))], chosen)
        assert said(together)[0][0] == said(alone)[0][0] == said(alone)[0][1]
        ids = SHORT.tolist()
        while len(ids) < 10 and (len(ids) == 2 or ids[-1] != EOS):
            ids.append(int(team.model(0)(torch.tensor([ids])).logits[0, -1].argmax()))
        assert said(alone)[0][0] == ids[2:]

    def test_a_longer_limit_goes_on_where_the_shorter_one_stopped(self, team):
        short = TransformersEngine(team).sample([Request(0, SHORT, keys(4))], Sampling(3))
        longer = TransformersEngine(team).sample([Request(0, SHORT, keys(4))], Sampling(8))
        assert [ids[:3] for ids in said(longer)[0]] == said(short)[0]

    def test_agents_answer_in_the_order_of_the_requests(self, words, word_count):
        other = word_tokenizer(["z", "y", "x"])
        team = Team([gpt2_model(word_count), llama_model(len(other))], [words, other], 8)
        requests = [Request(1, torch.tensor([4]), keys(2, agent=1)), Request(0, SHORT, keys(3)), Request(1, SHORT, ())]
        answers = TransformersEngine(team).sample(requests, Sampling(5))
        assert [len(completions) for completions in answers] == [2, 3, 0]
        assert max(max(ids) for ids in said(answers)[0]) < len(other)
        assert {word for completion in answers[0] for word in completion.text.split()} <= {"z", "y", "x"}
        assert said(answers)[1] == said(TransformersEngine(team).sample(requests[1:2], Sampling(5)))[0]


class TestShippedSettings:
    """What lies in a model's folder must not decide how its policy is sampled."""

    @pytest.fixture
    def distorting(self, tmp_path, word_count):
        model = llama_model(word_count)
        model.generation_config = GenerationConfig(
            do_sample=True,
            top_k=1,
            temperature=0.01,
            repetition_penalty=1.3,
            max_length=5,
            suppress_tokens=[7, 8],
            forced_eos_token_id=9,
            no_repeat_ngram_size=1,
            eos_token_id=EOS,
        )
        model.save_pretrained(tmp_path)
        return AutoModelForCausalLM.from_pretrained(tmp_path)

    @pytest.mark.parametrize("own_loop", [True, False])
    def test_they_are_not_used(self, distorting, words, caplog, own_loop):
        logging.getLogger("transformers").addHandler(caplog.handler)
        team = Team([distorting], [words], 8)
        before = distorting.generation_config.to_dict()
        engine = TransformersEngine(team, own_loop=own_loop)
        (completions,) = engine.sample([Request(0, SHORT, keys(64))], Sampling(8))
        assert len({tuple(completion.ids.tolist()) for completion in completions}) >= 60
        assert max(len(completion.ids) for completion in completions) == 8
        assert distorting.generation_config.to_dict() == before
        logging.getLogger("transformers").removeHandler(caplog.handler)
        assert [record.message for record in caplog.records] == []

    def test_first_tokens_fit_the_models_own_softmax(self, distorting, words):
        team = Team([distorting], [words], 8)
        (completions,) = TransformersEngine(team).sample([Request(0, SHORT, keys(4000))], Sampling(1))
        observed = np.bincount([int(completion.ids[0]) for completion in completions], minlength=len(words))
        with torch.no_grad():
            expected = torch.softmax(distorting(SHORT[None]).logits[0, -1].double(), -1).numpy() * 4000
        assert ((observed - expected) ** 2 / expected).sum() < 60.0  # chi-square with 29 degrees: p = 0.0006

    def test_left_in_place_they_would_distort(self, distorting, words, monkeypatch):
        monkeypatch.setattr(generation, "_neutral_generation_config", lambda model: contextlib.nullcontext())
        team, plain = Team([distorting], [words], 8), Team([llama_model(len(words))], [words], 8)
        expected = said(TransformersEngine(plain, own_loop=False).sample(*self.asked()))
        assert said(TransformersEngine(team, own_loop=False).sample(*self.asked())) != expected

    @staticmethod
    def asked():
        return [Request(0, SHORT, keys(16))], Sampling(8)

    def test_all_their_end_ids_end_a_completion(self, word_count, words):
        model = llama_model(word_count)
        model.generation_config.eos_token_id = [EOS, *range(4, 17)]
        (completions,) = TransformersEngine(Team([model], [words], 8)).sample(
            [Request(0, SHORT, keys(40))], Sampling(8)
        )
        ends = {EOS, *range(4, 17)}
        for completion in completions:
            inside = [token in ends for token in completion.ids.tolist()]
            assert inside[:-1] == [False] * (len(inside) - 1)
            assert completion.ended == inside[-1]
        assert len({int(completion.ids[-1]) for completion in completions if completion.ended}) > 3


class TestEnds:
    def test_nothing_counts_after_the_end_even_where_it_is_the_filler(self):
        tokenizer = table_tokenizer(["<eos>", "a", "b"], pad="<eos>")
        team = Team([table_model(3, 0)], [tokenizer], 8)
        (completions,) = TransformersEngine(team).sample([Request(0, torch.tensor([1]), keys(60))], Sampling(6))
        for completion in completions:
            ids = completion.ids.tolist()
            assert 0 not in ids[:-1]
            assert completion.ended == (ids[-1] == 0)
            assert completion.ended or len(ids) == 6
            assert completion.logprobs.shape == completion.ids.shape
        assert {completion.ended for completion in completions} == {True, False}
        assert any(len(completion.ids) == 1 and completion.text == "" for completion in completions)

    def test_none_is_drawn_before_min_new_tokens(self):
        tokenizer = table_tokenizer(["<eos>", "a", "<stop>"])
        model = table_model(torch.tensor([[3.0, 0.0, 3.0]] * 3), [0, 2])
        engine = TransformersEngine(Team([model], [tokenizer], 8))
        request = Request(0, torch.tensor([1]), keys(40))
        lengths = [len(one.ids) for one in engine.sample([request], Sampling(6, min_new_tokens=3))[0]]
        assert min(lengths) == 4  # three tokens, then an end
        assert min(len(one.ids) for one in engine.sample([request], Sampling(6))[0]) == 1

    def test_texts_leave_the_end_token_out_and_tensors_are_ordinary(self, team):
        (completions,) = TransformersEngine(team).sample([Request(0, SHORT, keys(30))], Sampling(8))
        for completion in completions:
            assert "<eos>" not in completion.text
            assert not completion.logprobs.requires_grad
            assert not completion.ids.is_inference()
            assert (completion.ids.dtype, completion.logprobs.dtype) == (torch.int64, torch.float32)


def test_dropout_is_off_and_flags_come_back(words, word_count):
    model = gpt2_model(word_count, dropout=0.5)
    still = copy.deepcopy(model)
    model.train()
    model.transformer.h[1].eval()
    flags = [module.training for module in model.modules()]
    samples = [
        said(TransformersEngine(Team([m], [words], 8)).sample([Request(0, SHORT, keys(8))], Sampling(8)))
        for m in (model, model, still)
    ]
    assert samples[0] == samples[1] == samples[2]
    assert [module.training for module in model.modules()] == flags


def test_sampling_leaves_the_global_random_state_alone(team):
    state = torch.get_rng_state()
    TransformersEngine(team).sample([Request(0, SHORT, keys(3))], Sampling(4))
    assert torch.equal(torch.get_rng_state(), state)


def test_logits_that_are_no_numbers_stop_the_run(words, word_count):
    model = llama_model(word_count)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="agent 0: the logits of its model are no numbers"):
        TransformersEngine(Team([model], [words], 8)).sample([Request(0, SHORT, keys(2))], Sampling(4))
