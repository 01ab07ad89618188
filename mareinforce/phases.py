"""What a run is doing now, and the seconds that each kind of work has taken."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PHASES = ("generation", "reward", "transition", "scoring", "update", "evaluation")
"""The kinds of work that are told apart; what is in none of them is small."""


@dataclass(slots=True)
class _Open:
    """A phase that is going on, and since when it has been the innermost."""

    name: str
    whole: bool
    since: float


class Phases:
    """A stopwatch a phase. Where one is measured inside another, its seconds are its own and not the outer one's.

    Threads at work at the same time are each measured, so their seconds add up to more than has passed. Nothing waits
    for a device: work handed to one is counted where its result is first needed.

    Attributes:
        current: the phase that was entered last and is not over; None between phases.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.current: str | None = None
        self._clock = clock
        self._open: dict[int, list[_Open]] = {}  # by thread, outermost first: no thread writes where another does
        self._seconds: dict[int, dict[str, float]] = {}  # by thread

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase since this object was made; a phase that never was is not in it."""
        totals: dict[str, float] = {}
        for own in list(self._seconds.values()):
            for name, seconds in own.copy().items():
                totals[name] = totals.get(name, 0.0) + seconds
        return totals

    @contextmanager
    def measure(self, name: str, *, whole: bool = False) -> Iterator[None]:
        """Count what is done inside under a name. ``whole``: also what is measured there under other names."""
        stack = self._open.setdefault(threading.get_ident(), [])
        outer = stack[-1] if stack else None
        if outer is not None and outer.whole:
            yield
            return
        now = self._clock()
        if outer is not None:
            self._count(outer, now)
        inner = _Open(name, whole, now)
        stack.append(inner)
        self.current = name
        try:
            yield
        finally:
            now = self._clock()
            self._count(inner, now)
            stack.pop()
            if outer is not None:
                outer.since = now
            self.current = None if outer is None else outer.name

    def _count(self, phase: _Open, now: float) -> None:
        own = self._seconds.setdefault(threading.get_ident(), {})
        own[phase.name] = own.get(phase.name, 0.0) + now - phase.since
