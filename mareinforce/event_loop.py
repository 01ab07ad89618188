"""The event loop that users' `async def` functions run on, in a thread of its own.

All of them run on one loop, so that what a user keeps open (an HTTP client, say) is still usable in the next call.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from concurrent.futures import Future, TimeoutError
from typing import Any

from mareinforce.daemon_threads import DaemonExecutor

PATIENCE = 1.0
"""Seconds in which a loop that is not blocked does the least thing."""

THREADS = 32
"""Calls of `asyncio.to_thread` that are at work at once."""

Awaited = Future[tuple[Any, BaseException | None]]
"""What awaiting something will give, and a request to stop that was raised instead."""


def run_to_completion(awaitable: Awaitable[Any]) -> Any:
    """Await something from code that is not async, also while this thread's own loop runs, as in a notebook.

    Interrupting the wait cancels what is waited for.
    """
    future = begin(awaitable)
    try:
        result, stop = future.result()
    except BaseException:
        future.cancel()
        raise
    if stop is not None:
        raise stop
    return result


def begin(awaitable: Awaitable[Any]) -> Awaited:
    """Begin to await something on the loop. Cancelling the future cancels what is awaited."""
    return asyncio.run_coroutine_threadsafe(_outcome(awaitable), _event_loop())


def leave_if_blocked() -> None:
    """Let later calls have a loop of their own, if something that does not await keeps this one from going on."""
    global _loop
    try:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), _event_loop()).result(PATIENCE)
    except TimeoutError:
        with _loop_lock:
            _loop = None


async def _outcome(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    try:
        return await awaitable, None
    except (KeyboardInterrupt, SystemExit) as stop:  # raised on the loop they would end it, and the wait would not end
        return None, stop


_loop: asyncio.AbstractEventLoop | None = None
_loop_thread: threading.Thread | None = None
_loop_lock = threading.Lock()


def _event_loop() -> asyncio.AbstractEventLoop:
    global _loop, _loop_thread
    with _loop_lock:
        if _loop is None or _loop_thread is None or not _loop_thread.is_alive():  # not alive: in a forked process
            _loop = asyncio.new_event_loop()
            _loop.set_default_executor(DaemonExecutor(THREADS))
            _loop_thread = threading.Thread(target=_loop.run_forever, name="mareinforce-async", daemon=True)
            _loop_thread.start()
        return _loop
