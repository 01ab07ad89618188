"""The loop of our own samples what the models' generate samples, reads each prompt once, and lets ended rows go."""

import inspect
import itertools

import pytest
import torch
from transformers import FalconMambaConfig, FalconMambaForCausalLM, MambaConfig, MambaForCausalLM

from mareinforce.agents.rendering import Rendering
from mareinforce.agents.team import Team
from mareinforce.rollout.engines import decoding
from mareinforce.rollout.engines.decoding import RoomyLayer, fits
from mareinforce.rollout.engines.transformers import TransformersEngine
from mareinforce.types import Request, Sampling, StreamKey
from tests.models import EOS, gpt2_model, llama_model, qwen2_model, table_model

PROMPTS = [torch.tensor([4, 5]), torch.tensor([6, 7, 8, 9, 10, 11, 12]), torch.tensor([13, 14, 15])]

ENDS = [EOS, 20, 21, 22, 23]


def asked(count=5, prompts=PROMPTS):
    keys = [tuple(StreamKey("train", 0, 0, row, (), 0, k) for k in range(count)) for row in range(len(prompts))]
    return [Request(0, prompt, own) for prompt, own in zip(prompts, keys, strict=True)]


def both_ways(team, sampling, requests=None):
    ours, theirs = (
        [
            one
            for answers in TransformersEngine(team, own_loop=own).sample(requests or asked(), sampling)
            for one in answers
        ]
        for own in (True, False)
    )
    return ours, theirs


def agree(ours, theirs):
    assert [one.ids.tolist() for one in ours] == [one.ids.tolist() for one in theirs]
    assert [(one.ended, one.text) for one in ours] == [(one.ended, one.text) for one in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.logprobs, other.logprobs, atol=1e-5, rtol=0)


@pytest.fixture(params=[gpt2_model, llama_model, qwen2_model], ids=["gpt2", "llama", "qwen2"])
def team(request, words, word_count):
    return Team([request.param(word_count, eos=ENDS)], [words], 12)


class TestSameSamples:
    @pytest.mark.parametrize(
        "sampling",
        [
            Sampling(12),
            Sampling(12, min_new_tokens=6, temperature=0.6, top_p=0.6, top_k=10),
            Sampling(5, temperature=0.0),
        ],
        ids=["plain", "warped", "greedy"],
    )
    def test_as_generate(self, team, sampling):
        assert fits(team.network(0))
        ours, theirs = both_ways(team, sampling)
        agree(ours, theirs)
        if sampling == Sampling(12):
            assert len({len(one.ids) for one in ours}) > 3  # rows ended at different times, and left

    def test_with_prompts_of_one_length_no_mask_is_made(self, team, monkeypatch):
        masks = []
        forward = type(team.network(0)).forward

        def watched(model, *args, attention_mask=None, **kwargs):
            masks.append(attention_mask)
            return forward(model, *args, attention_mask=attention_mask, **kwargs)

        watched.__signature__ = inspect.signature(forward)
        requests = asked(prompts=[torch.tensor([4, 5, 6]), torch.tensor([7, 8, 9])])
        _, theirs = both_ways(team, Sampling(8), requests)
        monkeypatch.setattr(type(team.network(0)), "forward", watched)
        ours = list(itertools.chain(*TransformersEngine(team).sample(requests, Sampling(8))))
        agree(ours, theirs)
        assert masks
        assert all(mask is None for mask in masks)

    def test_at_stop_strings(self, words, word_count):
        team = Team([llama_model(word_count)], [words], 12, renderings=[Rendering(stop=("c", "h"))])
        ours, theirs = both_ways(team, Sampling(12))
        agree(ours, theirs)
        assert any(one.ended and words.eos_token_id not in one.ids.tolist() for one in ours)

    def test_a_row_that_takes_up_anothers_memory_says_something_else(self, team, monkeypatch):
        keep = decoding._Reader.keep
        monkeypatch.setattr(decoding._Reader, "keep", lambda self, places: keep(self, list(reversed(places))))
        ours, theirs = both_ways(team, Sampling(12))
        assert [one.ids.tolist() for one in ours] != [one.ids.tolist() for one in theirs]


class TestWork:
    @pytest.fixture
    def reads(self, team, monkeypatch):
        shapes = []
        forward = decoding._Reader._forward

        def watched(reader, ids, positions, rows):
            shapes.append(tuple(ids.shape))
            return forward(reader, ids, positions, rows)

        monkeypatch.setattr(decoding._Reader, "_forward", watched)
        return shapes

    def test_a_prompt_is_read_once_for_all_its_samples(self, team, reads):
        TransformersEngine(team).sample(asked(count=6), Sampling(4, min_new_tokens=4))
        assert reads == [(3, 7), (18, 1), (18, 1), (18, 1)]

    def test_rows_that_ended_leave_the_batch(self, team, reads):
        (answers,) = TransformersEngine(team).sample(asked(count=8)[:1], Sampling(12))
        lengths = [len(one.ids) for one in answers]
        open_rows = [(sum(length > position for length in lengths), 1) for position in range(1, 12)]
        assert len(set(open_rows)) >= 3
        assert reads == [(1, 2), *(shape for shape in open_rows if shape[0])]

    def test_in_a_wide_batch_they_wait_until_it_is_worth_the_copying(self, team, reads):
        TransformersEngine(team).sample(asked(count=64)[:1], Sampling(12))
        widths = [rows for rows, _ in reads[1:]]
        assert widths == sorted(widths, reverse=True)
        assert all(after == before or after <= before * 7 / 8 for before, after in itertools.pairwise(widths))


class TestFits:
    def test_also_where_layers_look_through_a_window(self, words, word_count):
        team, whole = (Team([qwen2_model(word_count, window=window)], [words], 12) for window in (4, None))
        assert fits(team.network(0))
        ours, theirs = both_ways(team, Sampling(8))
        agree(ours, theirs)
        assert [one.ids.tolist() for one in ours] != [one.ids.tolist() for one in both_ways(whole, Sampling(8))[0]]

    @pytest.mark.parametrize(
        ("config", "model"),
        [(MambaConfig, MambaForCausalLM), (FalconMambaConfig, FalconMambaForCausalLM)],
    )
    def test_not_a_recurrent_network(self, config, model):
        assert not fits(model(config(vocab_size=30, hidden_size=16, num_hidden_layers=1, state_size=4)))

    def test_not_a_users_own_architecture(self):
        assert not fits(table_model(4))


def test_a_roomy_layer_holds_what_it_was_given():
    layer, first = RoomyLayer(6), torch.randn(2, 1, 3, 4)
    layer.update(first, -first)
    layer.batch_select_indices(torch.tensor([1, 1, 0]))
    more = torch.randn(3, 1, 1, 4)
    keys, values = layer.update(more, -more)
    torch.testing.assert_close(keys, torch.cat([first[[1, 1, 0]], more], dim=2))
    torch.testing.assert_close(values, -keys)
    assert layer.get_seq_length() == 4
    layer.batch_select_indices(torch.tensor([2]))
    keys, _ = layer.update(more[:1], more[:1])
    torch.testing.assert_close(keys, torch.cat([first[[0]], more[[2]], more[:1]], dim=2))
    layer.update(more[:1], more[:1])
    with pytest.raises(RuntimeError, match="a cache of 6 positions cannot take 7"):
        layer.update(more[:1], more[:1])
