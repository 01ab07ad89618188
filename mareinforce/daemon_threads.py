"""Threads that a process does not wait for when it ends, as it does for those of a ThreadPoolExecutor."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_Inbox = queue.SimpleQueue["tuple[Future[Any], Callable[[], Any]] | None"]


class DaemonThreads:
    """As many threads as there is work at once; one that has done its work waits for more."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[_Inbox] = []

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Let a thread do it, now."""
        future: Future[Any] = Future()
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), name=self._name, daemon=True).start()
        inbox.put((future, work))
        return future

    def close(self) -> None:
        """Let those go that have nothing to do."""
        while self._idle:
            self._idle.pop().put(None)

    def _serve(self, inbox: _Inbox) -> None:
        while (task := inbox.get()) is not None:
            future, work = task
            if not future.set_running_or_notify_cancel():
                self._idle.append(inbox)
                continue
            try:
                result = work()
            except BaseException as error:
                self._idle.append(inbox)
                future.set_exception(error)
            else:
                self._idle.append(inbox)
                future.set_result(result)
            del task, future, work  # what it held is not kept until there is more to do


class DaemonExecutor(ThreadPoolExecutor):
    """What `asyncio.to_thread` runs on: at most `limit` at once, in threads that the process does not wait for."""

    def __init__(self, limit: int) -> None:
        super().__init__(max_workers=1)  # which is never made
        self._daemons = DaemonThreads("mareinforce-async-thread")
        self._gate = threading.Semaphore(limit)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Let a thread do it, as soon as there is one."""

        def work() -> Any:
            with self._gate:
                return fn(*args, **kwargs)

        return self._daemons.submit(work)
