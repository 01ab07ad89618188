"""Keyed uniform numbers, the distribution tokens are drawn from, and the draw itself."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mareinforce.rollout import sampling as sampling_module
from mareinforce.rollout.sampling import draw, truncated_probabilities, uniforms
from mareinforce.types import Sampling, StreamKey

KEY = StreamKey("train", 0, 1, 2, (3, 4), 0, 5)
LAST = 1.0 - 2.0**-53  # the largest number a stream can give


def settings(temperature=1.0, top_k=None, top_p=1.0):
    return Sampling(max_new_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p)


def warped(logits, temperature, top_k, top_p):
    """What transformers' own warpers leave, in generate's order."""
    scores = logits if temperature == 1.0 else TemperatureLogitsWarper(temperature)(None, logits)
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1.0 else scores
    return torch.softmax(scores, dim=-1)


class TestUniforms:
    def test_a_longer_stream_begins_with_the_shorter_one(self):
        assert np.array_equal(uniforms(KEY, 100)[:7], uniforms(KEY, 7))

    @pytest.mark.parametrize(
        "other",
        [
            KEY._replace(purpose="eval"),
            KEY._replace(seed=1),
            KEY._replace(epoch=0),
            KEY._replace(row=3),
            KEY._replace(path=(34,)),
            KEY._replace(path=()),
            KEY._replace(path=(4, 3)),
            KEY._replace(agent=1),
            KEY._replace(k=4),
            KEY._replace(epoch=2, row=1),
        ],
    )
    def test_every_part_of_the_key_makes_another_stream(self, other):
        assert not np.isin(uniforms(other, 50), uniforms(KEY, 50)).any()

    def test_the_stream_stays_what_it_was(self):
        # Written down once: another process, platform or version that gave other numbers would change every run.
        known = [float.fromhex(x) for x in ("0x1.e7fa6b076c38bp-1", "0x1.ddf5cb710ff84p-3", "0x1.3203c4323395fp-1")]
        assert uniforms(KEY, 3).tolist() == known

    def test_numpy_integers_in_a_key_name_the_same_stream(self):
        same = StreamKey("train", np.int64(0), 1, np.int32(2), (np.int64(3), 4), 0, 5)
        assert np.array_equal(uniforms(same, 5), uniforms(KEY, 5))

    def test_numbers_are_uniform_within_and_across_streams(self):
        within = uniforms(KEY, 20000)
        across = np.array([uniforms(KEY._replace(k=k), 1)[0] for k in range(2000)])
        for numbers in (within, across):
            assert numbers.min() >= 0.0
            assert numbers.max() < 1.0
            counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
            expected = len(numbers) / 20
            assert ((counts - expected) ** 2 / expected).sum() < 45.0  # chi-square with 19 degrees: p = 0.0007
        assert abs(np.corrcoef(within[:-1], within[1:])[0, 1]) < 0.03


class TestDistribution:
    @pytest.mark.parametrize("vocabulary", [1, 2, 7, 300, 2500])
    @pytest.mark.parametrize("scale", [0.3, 2.0, 8.0])
    @pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
    def test_it_is_exactly_that_of_the_warpers(self, vocabulary, scale, temperature):
        logits = torch.randn(3, vocabulary) * scale
        for top_k in (None, 1, 2, 50, 5000):
            for top_p in (1e-6, 0.1, 0.5, 0.9, 0.99, 1.0):
                expected = warped(logits, temperature, top_k, top_p)
                found = truncated_probabilities(logits, settings(temperature, top_k, top_p))
                assert torch.equal(found > 0, expected > 0)
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)  # sums over fewer tokens round anew

    def test_another_order_of_the_warpers_is_another_distribution(self):
        logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
        top_p_first = TopKLogitsWarper(2)(None, TopPLogitsWarper(0.6)(None, logits / 2.0)).softmax(-1)
        assert not torch.equal(truncated_probabilities(logits, settings(2.0, 2, 0.6)), top_p_first)

    def test_ties_with_the_kth_are_kept(self):
        logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0]])
        probabilities = truncated_probabilities(logits, settings(top_k=2))
        torch.testing.assert_close(probabilities, warped(logits, 1.0, 2, 1.0), rtol=1e-6, atol=0.0)
        assert (probabilities > 0).tolist() == [[True, True, True, True, False]]

    @given(st.integers(1, 40), st.integers(0, 2**31), st.sampled_from([None, 1, 3, 10]), st.floats(0.01, 1.0))
    def test_with_ties_as_many_tokens_of_the_same_probabilities_are_kept(self, vocabulary, seed, top_k, top_p):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randint(-2, 3, (2, vocabulary), generator=generator).float()
        ours = truncated_probabilities(logits, settings(1.0, top_k, top_p)).sort(-1).values
        theirs = warped(logits, 1.0, top_k, top_p).sort(-1).values
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)

    @pytest.mark.parametrize("top_p", [0.02, 0.5, 0.9])
    def test_few_candidates_and_the_whole_vocabulary_give_the_same(self, monkeypatch, top_p):
        logits = torch.cat([torch.randn(2, 3000) * 3, torch.zeros(1, 3000)])
        expected = truncated_probabilities(logits, settings(top_p=top_p))
        for first in (1, 10, 5000):
            monkeypatch.setattr(sampling_module, "FIRST_CANDIDATES", first)
            assert torch.equal(truncated_probabilities(logits, settings(top_p=top_p)), expected)

    def test_at_least_one_token_is_kept(self):
        probabilities = truncated_probabilities(torch.randn(4, 30), settings(top_p=1e-9))
        assert (probabilities > 0).sum(-1).tolist() == [1, 1, 1, 1]


class TestDraw:
    def test_tokens_lie_in_id_order_on_the_unit_interval(self):
        probabilities = torch.tensor([0.1, 0.4, 0.0, 0.3, 0.2])
        edges = {0.0: 0, 0.099: 0, 0.101: 1, 0.499: 1, 0.501: 3, 0.799: 3, 0.801: 4, LAST: 4}
        logits = probabilities.log().expand(len(edges), -1)
        ids, logprobs = draw(logits, torch.tensor(list(edges), dtype=torch.float64), settings())
        assert ids.tolist() == list(edges.values())
        torch.testing.assert_close(logprobs, probabilities[ids].log())

    @pytest.mark.parametrize("vocabulary", [1, 2, 255, 256, 257, 1000])
    def test_a_token_of_probability_zero_is_never_drawn(self, vocabulary):
        numbers = torch.tensor([0.0, 2.0**-53, 0.5, LAST], dtype=torch.float64)
        for alone in {0, vocabulary // 2, vocabulary - 1}:
            logits = torch.full((4, vocabulary), -torch.inf)
            logits[:, alone] = 0.0
            assert draw(logits, numbers, settings())[0].tolist() == [alone] * 4

    @given(st.integers(1, 600), st.integers(0, 2**31), st.floats(0.0, 60.0))
    def test_the_draw_inverts_the_cumulative_distribution(self, vocabulary, seed, scale):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(8, vocabulary, generator=generator) * scale
        numbers = torch.rand(8, generator=generator, dtype=torch.float64)
        numbers[0], numbers[1] = 0.0, LAST
        chosen = settings(0.8, 20, 0.95)
        ids, _ = draw(logits, numbers, chosen)
        probabilities = truncated_probabilities(logits, chosen).double()
        assert (probabilities.gather(1, ids[:, None]) > 0).all()
        cumulative = probabilities.cumsum(-1) / probabilities.sum(-1, keepdim=True)
        upper = cumulative.gather(1, ids[:, None])[:, 0]
        lower = upper - probabilities.gather(1, ids[:, None])[:, 0]
        assert (numbers <= upper + 1e-9).all()
        assert (numbers >= lower - 1e-6).all()

    @pytest.mark.parametrize("chosen", [settings(), settings(0.7), settings(1.3, 5), settings(1.0, None, 0.8)])
    def test_frequencies_fit_the_distribution(self, chosen):
        row = torch.randn(1, 12)
        numbers = torch.from_numpy(uniforms(KEY, 20000))
        ids, _ = draw(row.expand(20000, -1), numbers, chosen)
        expected = truncated_probabilities(row, chosen)[0].double() * 20000
        observed = torch.bincount(ids, minlength=12).double()
        kept = expected > 0
        assert observed[~kept].sum() == 0
        assert ((observed - expected)[kept] ** 2 / expected[kept]).sum() < 35.0  # 11 degrees: p = 0.0003

    def test_log_probs_are_tempered_and_not_truncated(self):
        logits = torch.randn(5, 9)
        numbers = torch.rand(5, dtype=torch.float64)
        ids, logprobs = draw(logits, numbers, settings(0.5, 2, 0.9))
        expected = torch.log_softmax(logits / 0.5, -1).gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(logprobs, expected)
        renormalised = truncated_probabilities(logits, settings(0.5, 2, 0.9)).gather(1, ids[:, None])[:, 0].log()
        assert not torch.allclose(logprobs, renormalised)

    def test_temperature_zero_takes_the_most_probable_token(self):
        logits = torch.tensor([[0.0, 3.0, 1.0]]).expand(3, -1)
        ids, logprobs = draw(logits, torch.tensor([0.0, 0.5, LAST], dtype=torch.float64), settings(0.0))
        assert ids.tolist() == [1, 1, 1]
        torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[:, 1])

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_forbidden_tokens_are_never_drawn_and_log_probs_stay_those_of_the_policy(self, temperature):
        logits = torch.tensor([[9.0, 1.0, 0.0]]).expand(50, -1)
        numbers = torch.from_numpy(uniforms(KEY, 50))
        ids, logprobs = draw(logits, numbers, settings(temperature), forbidden=(0,))
        assert 0 not in ids.tolist()
        assert 0 in draw(logits, numbers, settings(temperature))[0].tolist()
        torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0])

    def test_rounding_noise_in_the_logits_moves_no_other_token(self):
        logits = torch.zeros(200, 500)
        numbers = torch.from_numpy(uniforms(KEY, 200))
        noisy = logits + 1e-6 * torch.randn(200, 500)
        assert torch.equal(draw(logits, numbers, settings())[0], draw(noisy, numbers, settings())[0])
        # Walked in the order of probability the same noise picks entirely other tokens.
        order = noisy.argsort(-1, descending=True)
        by_probability = order.gather(1, draw(noisy.gather(1, order), numbers, settings())[0][:, None])[:, 0]
        assert not torch.equal(by_probability, draw(logits, numbers, settings())[0])

    def test_a_row_is_drawn_alone_as_in_a_batch(self):
        logits = torch.randn(6, 700)
        numbers = torch.rand(6, dtype=torch.float64)
        for chosen in (settings(), settings(0.7, 30, 0.9), settings(1.0, None, 0.7)):
            together = draw(logits, numbers, chosen)[0].tolist()
            assert together == [int(draw(logits[r : r + 1], numbers[r : r + 1], chosen)[0]) for r in range(6)]

    @pytest.mark.parametrize("chosen", [settings(), settings(0.7, 2), settings(0.7, 2, 0.5), settings(1.0, None, 0.5)])
    def test_logits_that_are_no_numbers_show_in_the_log_prob(self, chosen):
        for logits in (torch.full((2, 5), torch.nan), torch.tensor([[1.0, 2, 3, 4, 5], [torch.nan, 2, 3, 4, 5]])):
            ids, logprobs = draw(logits, torch.tensor([0.5, 0.5], dtype=torch.float64), chosen)
            assert logprobs[1].isnan()
            assert ids.max() < 5
