"""Functions that worker processes can import: the standard library and nothing else."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import time
from functools import wraps
from pathlib import Path


def after(seconds: float, value: object) -> object:
    """The value, after a while."""
    time.sleep(seconds)
    return value


async def after_async(seconds: float, value: object) -> object:
    """The value, after a while of computing."""
    time.sleep(seconds)
    return value


def meets(folder: str, name: str, others: int, patience: float) -> bool:
    """Leave a file in the folder and wait for so many others: are they at work at the same time?"""
    Path(folder, name).touch()
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if len(list(Path(folder).iterdir())) > others:
            return True
        time.sleep(0.01)
    Path(folder, name).unlink()
    return False


def who() -> int:
    """The process that does it."""
    return os.getpid()


def hang(folder: str) -> None:
    """Say who hangs, and whom it has started, and go on for minutes."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    Path(folder, f"{os.getpid()} {child.pid}").touch()
    time.sleep(300)


def sleep(seconds: str) -> None:
    """Go on for so long."""
    time.sleep(float(seconds))


async def sleep_in_a_thread(seconds: str) -> None:
    """Go on for so long in a thread that asyncio has started."""
    await asyncio.to_thread(time.sleep, float(seconds))


def die(status: int) -> None:
    """End the process that does it."""
    os._exit(status)


def bad_json() -> None:
    """Fail."""
    raise ValueError("bad json")


class Unpicklable(Exception):
    """An error that cannot be made again from its text."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def fail_unpicklably() -> None:
    """Fail with an error that cannot travel."""
    raise Unpicklable(1, 2)


def leave() -> None:
    """Ask the run to stop."""
    raise KeyboardInterrupt


def generator(count: int) -> object:
    """What cannot be sent between processes."""
    return (index for index in range(count))


def chatter(value: object) -> object:
    """Print, which must not be taken for a reply, and read, which must not take what others wait for."""
    print("printed by the reward")
    subprocess.run([sys.executable, "-c", "import sys; print(sys.stdin.read())"], check=True)
    return value


def hidden(function):  # type: ignore[no-untyped-def]
    """A function in another, which cannot be pickled."""

    @wraps(function)
    def inside(*args: object) -> object:
        return function(*args)

    return inside


def rank(first: list[str], second: list[str]) -> list[float]:
    """0, 1, 2 ... in joint-action order."""
    return [float(index) for index in range(len(first))]


def missing(first: list[str], second: list[str]) -> list[float | None]:
    """Two of four are no numbers."""
    return [1.0, None, 0.0, math.nan]


def slow(first: list[str], second: list[str]) -> list[float]:
    """Goes on for minutes, and says so in a file, if there is one to say it in."""
    if "SLOW_REWARD_BEGAN" in os.environ:
        Path(os.environ["SLOW_REWARD_BEGAN"]).touch()
    time.sleep(300)
    return [0.0] * len(first)


def onward(prompt: str) -> list[str]:
    """The next turn's prompts."""
    return ["on", "up"]


def slow_onward(prompt: str) -> list[str]:
    """Goes on for minutes."""
    time.sleep(300)
    return ["on", "up"]
