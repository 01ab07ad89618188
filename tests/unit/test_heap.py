"""Free memory is given back beside large models alone."""

from __future__ import annotations

import pytest
import torch

from mareinforce import heap


@pytest.mark.parametrize(("count", "calls"), [(heap.WORTH_BYTES // 4, 1), (heap.WORTH_BYTES // 4 - 1, 0)])
def test_it_is_given_back_beside_many_bytes_of_weights(monkeypatch, count, calls):
    asked = []
    monkeypatch.setattr(heap, "_trim", lambda: asked.append)
    halves = [torch.empty(1).expand(n) for n in (count // 2, count - count // 2)]
    heap.give_back_beside(halves)
    assert asked == [0] * calls


def test_elsewhere_than_in_glibc_nothing_is_done(monkeypatch):
    monkeypatch.setattr(heap, "_trim", lambda: None)
    heap.give_back_beside([torch.empty(1).expand(heap.WORTH_BYTES)])
