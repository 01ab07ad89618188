"""A cage for Python that a model wrote: a process of its own, with limits, that is gone afterwards.

The cage keeps a training run safe from code that is wrong: loops, leaks, fork bombs, prints without end, files
deleted by accident, exits taken for success. It is NOT a security boundary against code that was written to break out,
and a snippet that goes looking for it can still claim a success; see docs/sandbox.md for what remains possible.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Literal

from mareinforce.errors import ConfigError
from mareinforce.rewards.sandbox_process import play

Status = Literal["passed", "failed", "timeout", "memory", "killed", "output"]

_SMALLEST = {"memory_bytes": 64 << 20, "file_bytes": 0, "processes": 1, "output_bytes": 0}
_CACHE_ENTRIES = 1024


@dataclass(frozen=True)
class Limits:
    """What a snippet may use. Each is checked when it is made.

    Raises:
        ConfigError: a value is not a number of its kind, or too small.
    """

    wall_seconds: float = 10.0
    """Seconds from the snippet's start to the end of its last check, on the clock; starting Python is not counted."""
    cpu_seconds: float = 10.0
    """Seconds of processor time of each process, rounded up to whole ones."""
    memory_bytes: int = 512 << 20
    """Bytes of address space of each process, and (on Linux) of occupied memory of all of them; at least 64 MiB."""
    file_bytes: int = 16 << 20
    """Bytes of each file written; of all files together where the scratch folder has a disk of its own."""
    processes: int = 16
    """Processes at the same time, the snippet's own included; where the kernel counts them, threads count too."""
    output_bytes: int = 64 << 10
    """Bytes of stdout and stderr together; what writes more is ended."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _SMALLEST:
                smallest = _SMALLEST[field.name]
                if not isinstance(value, int) or isinstance(value, bool) or not smallest <= value < 1 << 62:
                    raise ConfigError(
                        f"Limits.{field.name} is {value!r}; it must be a whole number of at least {smallest}. "
                        f"Leave it out for {field.default}."
                    )
            elif not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
                raise ConfigError(
                    f"Limits.{field.name} is {value!r}; it must be a finite number of seconds above 0. "
                    f"Leave it out for {field.default}."
                )


@dataclass(frozen=True)
class Outcome:
    """How a snippet ended."""

    status: Status
    """``passed``: its end was reached. ``failed``: it raised, or left before its end with whatever exit status.
    ``timeout``, ``memory``, ``output``: beyond that limit. ``killed``: by a signal, or too many processes."""
    error: str | None
    """What was wrong, on one line of at most 500 characters, e.g. ``AssertionError: 3 is not 4``; None if passed."""
    stdout: str
    stderr: str
    """What it printed, as UTF-8 with bad bytes replaced, both together at most ``Limits.output_bytes`` bytes."""
    seconds: float
    """Time on the clock from the snippet's start to its end (of the run itself, if this came from the cache)."""
    network_cut: bool
    """True if it had no network: not even the machine's own addresses. False if the system did not allow to cut it."""
    checks: tuple[bool, ...] = ()
    """Which checks passed, in their order. Empty without checks."""


def run_python(source: str, limits: Limits = Limits()) -> Outcome:
    """Run Python source, e.g. a model's code with tests appended, and say how it ended. Blocks until it is gone.

    The source runs as ``__main__`` with the standard library only, in an empty folder that is removed afterwards, with
    an environment of its own and the hash seed 0. ``passed`` means that its last line was reached: ``sys.exit(0)`` and
    ``os._exit(0)`` are failures. May be called from several threads. Passes and failures are remembered (1,024 of
    them, by source and limits), so a source that depends on chance or on the clock gives the result of its first run.

    NOT guaranteed: that code written to deceive cannot pass or get out. It shares its process with its tests and may
    change what they mean, and it may read files. Where the system lacks namespaces it keeps the network too.

    Args:
        source: the code, with its tests.
        limits: what it may use.

    Raises:
        RewardError: the process cannot be started at all; its own words are in the message.
    """
    return _remembered(source, (), limits)


def run_checks(source: str, checks: Sequence[str], limits: Limits = Limits()) -> list[bool]:
    """Run Python source once and then each check, a statement such as an ``assert``, in the same process.

    Checks run in order in the source's own names, and see what earlier ones changed. One that raises, ``SystemExit``
    included, is False, and the next runs. If one ends the process, or the limits (which hold for all together) end it,
    it and the following are False. If the source itself fails all are. Otherwise as ``run_python``.

    Args:
        source: the code.
        checks: Python source of each check.
        limits: what all may use together.

    Returns:
        One verdict a check.

    Raises:
        ConfigError: ``checks`` is a text instead of a sequence of texts.
        RewardError: the process cannot be started at all; its own words are in the message.
    """
    if isinstance(checks, str):
        raise ConfigError(
            f"checks is the text {checks[:40]!r}; it must be a sequence of them. Write [{checks[:40]!r}]."
        )
    return list(_remembered(source, tuple(checks), limits).checks) if checks else []


_cache: OrderedDict[bytes, Outcome] = OrderedDict()
_cache_lock = threading.Lock()


def _remembered(source: str, checks: tuple[str, ...], limits: Limits) -> Outcome:
    """The outcome, from the cache if it does not depend on how busy the machine was."""
    key = hashlib.sha256(json.dumps([source, checks, asdict(limits)]).encode()).digest()
    with _cache_lock:
        if key in _cache:
            _cache.move_to_end(key)
            return _cache[key]
    told = play(source, checks, limits)  # outside the lock: other threads have work of their own
    outcome = Outcome(**{**told, "checks": tuple(told["checks"])})
    if outcome.status in ("passed", "failed"):
        with _cache_lock:
            _cache[key] = outcome
            while len(_cache) > _CACHE_ENTRIES:
                _cache.popitem(last=False)
    return outcome
