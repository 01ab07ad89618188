"""Advantages in closed form, with what a wrong baseline would give beside them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from mareinforce.algorithms.advantages import advantages, is_zero_signal

MODES = ("raw", "mean", "rloo", "max")


def group(*returns: float) -> torch.Tensor:
    return torch.tensor(returns, dtype=torch.float64)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("raw", [1, 0, 0, 2]),
        ("mean", [0.25, -0.75, -0.75, 1.25]),
        ("rloo", [1 / 3, -1, -1, 5 / 3]),
        ("max", [-1, -2, -2, 0]),
    ],
)
def test_baselines_of_one_group(mode, expected):
    found = advantages(group(1, 0, 0, 2), mode, False)
    torch.testing.assert_close(found, group(*expected), rtol=0, atol=1e-12)
    others = [advantages(group(1, 0, 0, 2), other, False) for other in MODES if other != mode]
    assert not any(torch.allclose(found, other) for other in others)


def test_baselines_of_a_sparse_group_of_eight():
    returns = group(1, 1, 1, 0, 0, 0, 0, 0)
    mean, rloo = advantages(returns, "mean", False), advantages(returns, "rloo", False)
    assert mean.tolist() == pytest.approx([0.625] * 3 + [-0.375] * 5)
    assert rloo.tolist() == pytest.approx([0.714286] * 3 + [-0.428571] * 5, abs=1e-6)


def test_normalisation_divides_by_the_population_deviation():
    found = advantages(group(1, 0, 0, 2), "mean", True).tolist()
    assert found == pytest.approx([0.3015, -0.9045, -0.9045, 1.5076], abs=1e-4)
    assert found != pytest.approx([0.2611, -0.7833, -0.7833, 1.3056], abs=1e-3)  # the sample deviation's


def test_normalisation_makes_all_modes_equal_and_scale_keeps_them_apart():
    returns = group(1, 0, 0, 2)
    normalised = [advantages(returns, mode, True) for mode in MODES]
    scaled = [advantages(returns, mode, "scale") for mode in MODES]
    assert all(torch.allclose(one, normalised[0], atol=1e-12) for one in normalised)
    assert not any(torch.allclose(scaled[0], one) for one in scaled[1:])
    spread = returns.std(correction=0)
    torch.testing.assert_close(scaled[1], advantages(returns, "mean", False) / spread)


@pytest.mark.parametrize("value", [1.0, 5.0, -3.0, 0.1 + 0.2])
@pytest.mark.parametrize("normalization", [False, True, "scale"])
def test_a_group_without_signal_is_exactly_zero_unless_raw(value, normalization):
    returns = group(value, value, value, value)
    assert is_zero_signal(returns)
    for mode in ("mean", "rloo", "max"):
        assert advantages(returns, mode, normalization).tolist() == [0.0] * 4
    kept = [0.0] * 4 if normalization is True else [value] * 4
    assert advantages(returns, "raw", normalization).tolist() == kept


def test_rounding_of_huge_equal_returns_is_no_signal_and_a_real_difference_is():
    assert is_zero_signal(group(1e9, 1e9 + 1e-4, 1e9))
    assert not is_zero_signal(group(1e9, 1.001e9))
    assert not is_zero_signal(group(0.0, 2e-6))


def test_two_prompts_are_two_groups():
    first, second = (advantages(group(*[value] * 4), "mean", False) for value in (1.0, 5.0))
    assert first.tolist() == second.tolist() == [0.0] * 4
    pooled = advantages(group(*[1.0] * 4, *[5.0] * 4), "mean", False)
    assert pooled.tolist() == [-2.0] * 4 + [2.0] * 4  # what pooling the prompts would have given


returns_lists = st.lists(st.floats(-100, 100, allow_nan=False), min_size=2, max_size=9)


@given(returns_lists, st.floats(-50, 50))
def test_every_baseline_but_raw_ignores_a_constant(returns, shift):
    torch.testing.assert_close(
        advantages(group(*returns), "rloo", False),
        advantages(group(*[value + shift for value in returns]), "rloo", False),
        rtol=0, atol=1e-3,
    )  # fmt: skip


@given(returns_lists)
def test_leave_one_out_is_the_plain_mean_baseline_times_k_over_k_minus_1(returns):
    if is_zero_signal(group(*returns)):
        return
    size = len(returns)
    slow = [value - sum(returns[:k] + returns[k + 1 :]) / (size - 1) for k, value in enumerate(returns)]
    found = advantages(group(*returns), "rloo", False)
    assert found.tolist() == pytest.approx(slow, abs=1e-9)
    torch.testing.assert_close(found, advantages(group(*returns), "mean", False) * size / (size - 1))


@given(returns_lists)
def test_the_max_baseline_is_never_positive_and_zero_for_the_best(returns):
    found = advantages(group(*returns), "max", False)
    assert float(found.max()) == 0.0


@pytest.mark.parametrize("wrong", [group(1.0), torch.zeros(2, 2, dtype=torch.float64)])
def test_what_is_no_group_is_refused(wrong):
    with pytest.raises((ValueError, TypeCheckError)):
        advantages(wrong, "mean", False)
