"""Which positions count."""

import pytest
import torch

from mareinforce.algorithms.masking import counts_mask, cut_at_end


def test_a_row_counts_its_first_positions():
    mask = counts_mask([3, 0, 2], 3)
    assert mask.tolist() == [[True, True, True], [False, False, False], [True, True, False]]
    assert mask.dtype == torch.bool


@pytest.mark.parametrize("length", [-1, 4])
def test_a_length_outside_of_the_width_is_refused(length):
    with pytest.raises(ValueError, match=rf"length {length} must lie in 0 .. 3"):
        counts_mask([length], 3)


@pytest.mark.parametrize(
    ("ids", "end_ids", "expected"),
    [
        ([5, 6, 2], (2,), (3, True)),
        ([5, 2, 2], (2,), (2, True)),  # the filler after the end is an end token itself: it does not count
        ([2, 5, 6], (2,), (1, True)),  # nothing but the end
        ([5, 6, 7], (2,), (3, False)),  # cut: no end token is invented
        ([5, 9, 2], (2, 9), (2, True)),  # the first of several end tokens
    ],
)
def test_the_first_end_token_counts_and_nothing_after_it(ids, end_ids, expected):
    assert cut_at_end(ids, end_ids) == expected
