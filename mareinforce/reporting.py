"""How a command ends: its exit status, and what a person is told."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from mareinforce.errors import MareinforceError, UserCodeError
from mareinforce.quiet import quiet

FINISHED, FAILED, INTERRUPTED, TERMINATED = 0, 1, 130, 143
BEFORE_TRAINING = "before training began: there is no run to go on with"
"""What a command that trains was interrupted at; an argument of the KeyboardInterrupt."""
_HEAVIEST = "torch"
_OURS = str(Path(__file__).parent)


def exit_status(command: Callable[[], None]) -> int:
    """Run a command and return its exit status; an error is told on stderr, a user's own with its traceback."""
    with quiet():
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.insert(0, os.getcwd())  # my_task.reward is found beside the YAML, as with `python -m`
        try:
            command()
        except MareinforceError as error:
            if isinstance(error, UserCodeError) and error.__cause__ is not None:
                sys.stderr.write(user_traceback(error.__cause__))
            sys.stderr.write(f"error: {error}\n")
            return FAILED
        except _misconfiguration() as error:  # Lightning's word for a setting it cannot follow
            sys.stderr.write(f"error: trainer: {' '.join(str(error).split())}\n")
            return FAILED
        except KeyboardInterrupt as stop:
            sys.stderr.write(f"interrupted{' '.join(('', *map(str, stop.args)))}\n")
            return INTERRUPTED
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else FINISHED if stop.code is None else FAILED
        except Exception:
            traceback.print_exc()
            return FAILED
    return FINISHED


@contextmanager
def importing(begun: str = "") -> Iterator[None]:
    """While libraries are imported, for seconds: SIGINT ends the process at once, and says how far it was (`begun`).

    An exception in the middle of an import leaves modules half made, in which whatever comes next fails or crashes.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        with _made_for_good():
            yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        os.write(2, f"{' '.join(('interrupted', begun)).rstrip()}\n".encode())
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, stop)
    try:
        with _made_for_good():
            yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _made_for_good() -> Iterator[None]:
    """While libraries are imported for the first time: Python's garbage collector leaves what they make alone.

    Half a million objects that stay to the end; looking through them again and again takes a fifth of the imports.
    """
    if _HEAVIEST in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave(status: int) -> NoReturn:
    """End the process of a command. Python would look through all its objects a few times first, for a second."""
    gc.freeze()
    sys.exit(status)


def _misconfiguration() -> type[Exception]:
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    return MisconfigurationException


def user_traceback(error: BaseException) -> str:
    """The traceback of an error in a user's function, from the user's first line on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OURS):
        frames = frames.tb_next
    shown: TracebackType | None = frames or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, shown))
