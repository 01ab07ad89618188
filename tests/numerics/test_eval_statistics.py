"""pass@k against every way of choosing, and bootstrap intervals against what they promise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mareinforce.eval_statistics import bootstrap_interval, pass_at_k


@pytest.mark.parametrize(("samples", "passed", "k"), [(n, c, k) for n in (1, 6) for c in range(n + 1) for k in (1, n)])
def test_pass_at_k_is_the_share_of_choices_in_which_one_passes(samples, passed, k):
    verdicts = [True] * passed + [False] * (samples - passed)
    choices = list(itertools.combinations(verdicts, k))
    assert pass_at_k(samples, passed, k) == pytest.approx(sum(any(choice) for choice in choices) / len(choices))


def test_pass_at_k_is_not_the_biased_estimate():
    assert pass_at_k(10, 3, 5) == pytest.approx(1 - 21 / 252)  # C(7, 5) / C(10, 5)
    assert pytest.approx(pass_at_k(10, 3, 5), abs=0.05) != 1 - (1 - 0.3) ** 5
    assert pass_at_k(200, 1, 100) == pytest.approx(0.5)  # no overflow


@pytest.mark.parametrize("arguments", [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_what_cannot_be_chosen_is_refused(arguments):
    with pytest.raises(ValueError, match="needs 0 <= passed <= samples"):
        pass_at_k(*arguments)


def test_an_interval_holds_the_true_mean_about_as_often_as_it_says():
    generator = np.random.default_rng(0)
    hits, narrow = 0, 0
    for trial in range(200):
        values = generator.exponential(1.0, size=40)
        low, high = bootstrap_interval(values.tolist(), seed=trial)
        hits += low <= 1.0 <= high
        low, high = bootstrap_interval(values.tolist(), seed=trial, share=0.5)
        narrow += low <= 1.0 <= high
    assert 0.88 <= hits / 200 <= 0.98  # 0.95, a little less for skewed values
    assert 0.4 <= narrow / 200 <= 0.6


def test_an_interval_is_that_of_its_values_and_seed():
    values = [0.0, 1.0, 0.5, 0.25]
    assert bootstrap_interval(values) == bootstrap_interval(values)
    spread = [0.1 * number**1.5 for number in range(9)]
    assert bootstrap_interval(spread, seed=1) != bootstrap_interval(spread, seed=0)
    assert bootstrap_interval([0.3]) == (0.3, 0.3)
    with pytest.raises(ValueError, match="at least 1 value"):
        bootstrap_interval([])
