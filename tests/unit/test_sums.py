"""Sums over batches and over processes."""

from __future__ import annotations

import pytest
from mareinforce.callbacks.sums import Sums


@pytest.fixture
def sums():
    return Sums(["a", "b"])


def test_numbers_are_added_up_exactly_until_they_are_reset(sums):
    sums.update({"a": 2.0**53 - 1, "b": 0.5})
    sums.update({"a": 1.0})
    assert sums.compute() == {"a": 2.0**53, "b": 0.5}  # in single precision a would be rounded
    sums.reset()
    sums.update({})
    assert sums.compute() == {"a": 0.0, "b": 0.0}


def test_those_of_all_processes_are_added_up(sums):
    sums.distributed_available_fn = lambda: True
    sums.dist_sync_fn = lambda tensor, group: [tensor, tensor + 1, 2 * tensor]
    sums.update({"a": 3.0})
    assert sums.compute() == {"a": 13.0, "b": 1.0}
    assert sums.totals.tolist() == [3.0, 0.0]  # the own ones are kept


def test_a_resumed_run_has_the_sums_of_all_processes_once(sums):
    assert sums.kept() == {}
    sums.update({"a": 1.5})
    first, second = Sums(["a", "b"]), Sums(["a", "b"])
    first.update({"b": 9.0})
    first.go_on_from(sums.kept(), first=True)
    second.go_on_from(sums.kept(), first=False)
    assert (first.compute(), second.compute()) == ({"a": 1.5, "b": 0.0}, {"a": 0.0, "b": 0.0})
