"""A worker process, from outside: it is sent a user's function once, then what to call it with, again and again."""

from __future__ import annotations

import contextlib
import os
import pickle
import pickletools
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from mareinforce.call_child import read_frame, write_frame
from mareinforce.calling import UserFunction
from mareinforce.errors import ConfigError

_CHILD = Path(__file__).with_name("call_child.py")
_WAY_OUT = "or set reward_worker_kind: thread"


def pickled(function: UserFunction) -> bytes:
    """The function as a worker process is sent it.

    Raises:
        ConfigError: it cannot be sent, or not be found there.
    """
    try:
        sent = pickle.dumps(function.func)
    except Exception as error:
        raise ConfigError(
            f"reward_worker_kind='process': {function.label} cannot be sent to another process ({error}). Define it "
            f"at the top of a module, a lambda or a function inside of another as a function there, {_WAY_OUT}."
        ) from error
    if any(argument == "__main__" for _, argument, _ in pickletools.genops(sent)):
        raise ConfigError(
            f"reward_worker_kind='process': {function.label} is defined in the script or notebook that runs, which a "
            f"worker process does not run again. Move it to a module of its own and import it from there, {_WAY_OUT}."
        )
    return sent


class WorkerProcess:
    """One process. It ends when this one does, however that ends, and when it is killed.

    It is started by itself, so that nothing of a running program (threads, devices, the script that runs) is in it.
    """

    def __init__(self) -> None:
        self._functions: set[int] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a signal to the terminal's processes is not for it, and it is killed as a group
        )
        self._send(pickle.dumps([str(Path.cwd()) if entry == "" else entry for entry in sys.path]))

    def load(self, key: int, function: bytes) -> BaseException | None:
        """Send a function, once. Returns what importing it there raised."""
        if key in self._functions:
            return None
        _, error = self._ask((key, function, None))
        if error is None:
            self._functions.add(key)
        return error

    def call(self, key: int, arguments: bytes) -> tuple[Any, BaseException | None]:
        """Call a function that was sent. Returns its result, and what it raised."""
        return self._ask((key, None, arguments))

    def kill(self) -> None:
        """End it and what it has started, whatever they are doing."""
        if self.is_alive:  # else its number may be another's by now
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it ends by itself just now
                if hasattr(os, "killpg"):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._process.wait()
        for end in (self._process.stdin, self._process.stdout):
            assert end is not None
            with contextlib.suppress(BrokenPipeError):
                end.close()

    @property
    def is_alive(self) -> bool:
        """Can it still be asked?"""
        return self._process.poll() is None

    def _send(self, frame: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead, which is seen when its reply is read
            write_frame(self._process.stdin, frame)  # type: ignore[arg-type]

    def _ask(self, request: tuple[int, bytes | None, bytes | None]) -> tuple[Any, BaseException | None]:
        self._send(pickle.dumps(request))
        assert self._process.stdout is not None
        reply = read_frame(self._process.stdout)  # type: ignore[arg-type]
        if reply is None:
            status = self._process.wait()
            return None, RuntimeError(f"its worker process ended in the middle of the call, with exit status {status}")
        result, error = pickle.loads(reply)
        return result, error
