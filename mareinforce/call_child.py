"""The program of a worker process: it calls a user's function as often as it is asked to, until nobody asks.

It is run by its path and imports nothing but the standard library and what the user's function needs.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import queue
import signal
import struct
import sys
import threading
import traceback
from typing import Any, BinaryIO

LENGTH = struct.Struct("!Q")


def read_frame(file: BinaryIO) -> bytes | None:
    """One message; None where there will be no other."""
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = file.read(size)
    return body if len(body) == size else None


def write_frame(file: BinaryIO, body: bytes) -> None:
    """Send one message."""
    file.write(LENGTH.pack(len(body)))
    file.write(body)
    file.flush()


def main() -> None:
    """Answer requests until the process that sends them is gone, also if it goes in the middle of a call."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what the user's function starts must not read our requests,
    os.dup2(2, 1)  # and what it prints is no reply
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):  # sent to a whole group; it is the first process that decides
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, frame: None)
    waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests, waiting), daemon=True).start()
    sys.path[:] = pickle.loads(waiting.get())
    functions: dict[int, Any] = {}
    with asyncio.Runner() as runner:
        while True:
            write_frame(replies, _answer(waiting.get(), functions, runner))


def _listen(requests: BinaryIO, waiting: queue.SimpleQueue[bytes]) -> None:
    while (request := read_frame(requests)) is not None:
        waiting.put(request)
    os._exit(0)


def _answer(request: bytes, functions: dict[int, Any], runner: asyncio.Runner) -> bytes:
    """The reply to (key, function or None, arguments or None): None or the result, and the error if there was one."""
    try:
        key, function, arguments = pickle.loads(request)
        if function is not None:
            functions[key] = pickle.loads(function)
            return pickle.dumps((None, None))
        args, keywords = pickle.loads(arguments)
        result = functions[key](*args, **keywords)
        if hasattr(result, "__await__"):
            result = runner.run(_awaited(result))
    except BaseException as error:
        return _failure(error)
    try:
        return pickle.dumps((result, None))
    except Exception as error:
        return _failure(TypeError(f"its result, a {type(result).__name__}, cannot be sent between processes: {error}"))


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _failure(error: BaseException) -> bytes:
    """An error with the traceback, which does not travel by itself, as a note; told in words if it cannot travel."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    told = "".join(traceback.format_exception(type(error), error, frames))
    error.add_note(f"In a worker process:\n{told}".rstrip())
    try:
        sent = pickle.dumps((None, error))
        pickle.loads(sent)
    except Exception:
        instead = RuntimeError(f"{type(error).__name__}: {error}")
        instead.__notes__ = error.__notes__
        return pickle.dumps((None, instead))
    return sent


if __name__ == "__main__":
    main()
