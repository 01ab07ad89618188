"""Seconds by kind of work: none counted twice, none lost."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest

from mareinforce.phases import Phases


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def phases(clock):
    return Phases(clock)


def test_an_inner_phase_has_its_own_seconds(phases, clock):
    with phases.measure("update"):
        clock.now += 1
        with phases.measure("scoring"):
            clock.now += 2
        clock.now += 4
        with phases.measure("scoring"):
            clock.now += 8
    clock.now += 16  # in no phase
    with phases.measure("update"):
        clock.now += 32
    assert phases.seconds == {"update": 37.0, "scoring": 10.0}


def test_a_whole_phase_keeps_what_is_measured_inside(phases, clock):
    with phases.measure("evaluation", whole=True):
        clock.now += 1
        with phases.measure("generation"), phases.measure("reward"):
            clock.now += 2
            assert phases.current == "evaluation"
    with phases.measure("generation"):
        clock.now += 4
    assert phases.seconds == {"evaluation": 3.0, "generation": 4.0}


def test_the_current_phase_is_the_innermost(phases):
    assert phases.current is None
    with phases.measure("update"):
        with phases.measure("scoring"):
            assert phases.current == "scoring"
        assert phases.current == "update"
    assert phases.current is None


def test_a_phase_that_fails_is_over(phases, clock):
    def fail() -> None:
        with phases.measure("update"), phases.measure("scoring"):
            clock.now += 3
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert phases.current is None
    with phases.measure("reward"):
        clock.now += 1
    assert phases.seconds == {"scoring": 3.0, "update": 0.0, "reward": 1.0}


def test_threads_do_not_nest_in_each_other(phases, clock):
    def score() -> None:
        with phases.measure("scoring"):
            clock.now += 1

    with phases.measure("update"), ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(score).result()
    assert phases.seconds == {"update": 1.0, "scoring": 1.0}


def test_a_copy_counts_for_itself(phases, clock):
    other = copy.deepcopy(phases)
    with phases.measure("reward"):
        clock.now += 1
    assert other.seconds == {}
