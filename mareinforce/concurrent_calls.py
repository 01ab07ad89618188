"""How a level's calls of a user's function are made: one after the other, or several at once, in a limited time.

Whatever is done first, results come in the order of the calls, and of several failures the first call's is told.
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from mareinforce import event_loop
from mareinforce.call_process import WorkerProcess, pickled
from mareinforce.calling import UserFunction
from mareinforce.daemon_threads import DaemonThreads
from mareinforce.errors import CallTimeout, ConfigError, MareinforceError

T = TypeVar("T")
NOT_BEGUN = 0.1
"""Seconds after which a call that has not begun yet is looked at again."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a function is to be called with, and where that is in the run, for messages."""

    args: Sequence[Any]
    values: Mapping[str, Any]
    where: str


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """What a call gave, or why it gave nothing."""

    value: T | None = None
    error: MareinforceError | None = None


@dataclass(eq=False, slots=True)
class _Running:
    """A call that goes on somewhere."""

    index: int
    future: Future[tuple[Any, BaseException | None]]
    stop: Callable[[], None]
    began: float | None = None  # by time.monotonic; None: not yet


class CallRunner:
    """Makes calls of users' functions.

    Without workers and without a time limit a function is called in the main thread, one call after the other. Else it
    is called in threads, at most `workers` at once (0: one), or in as many worker processes. What is ``async def`` is
    awaited on one event loop, at most `workers` at once (0: all of them), unless there are worker processes.

    A call that takes too long is given up: a process is killed and replaced, what is awaited is cancelled, and a
    thread, which nothing can stop, is left to itself; it keeps neither the run nor the process from ending.

    Args:
        workers: calls at once.
        kind: whether workers are threads or processes.
        timeout: seconds that one call may take; None: no limit.
    """

    def __init__(
        self, workers: int = 0, kind: Literal["thread", "process"] = "thread", timeout: float | None = None
    ) -> None:
        self.workers, self.kind, self.timeout = workers, kind, timeout
        self._threads = DaemonThreads("mareinforce-call")
        self._idle: list[WorkerProcess] = []
        self._busy: set[WorkerProcess] = set()
        self._lock = threading.Lock()  # between who calls and the threads that wait for answers
        self._sent: dict[int, tuple[UserFunction, bytes]] = {}  # by id; the function is kept, so the id is its own

    @property
    def processes(self) -> list[WorkerProcess]:
        """Those there are."""
        return [*self._idle, *self._busy]

    def check(self, function: UserFunction) -> None:
        """Raises ConfigError if workers could not call it."""
        if self.kind == "process":
            self._function(function)

    def run(
        self, function: UserFunction, calls: Sequence[Call], read: Callable[[Any, int], T], *, keep_going: bool = False
    ) -> list[Outcome[T]]:
        """Make every call once. Returns one outcome a call, in their order.

        Args:
            read: makes of a result, and of the number of its call, what is wanted of it. It is called here, in the
                order in which calls end, so it must not change anything; what it raises is a failure of the call.
            keep_going: a failure is an outcome. False: it ends the other calls and is raised; of several, that of the
                first call.

        Raises:
            UserCodeError: the function raised.
            CallTimeout: it took too long.
            MareinforceError: what `read` raised.
            ConfigError: a worker process cannot be sent what the function is called with.
        """
        if self.workers == 0 and self.timeout is None and not function.is_async:
            return [self._here(function, call, index, read, keep_going) for index, call in enumerate(calls)]
        return self._at_once(function, calls, read, keep_going)

    def close(self) -> None:
        """Leave no worker process behind. Workers that are asked for later are made anew."""
        with self._lock:
            left, self._idle, self._busy = self.processes, [], set()
        for process in left:
            process.kill()
        self._threads.close()

    def _here(
        self, function: UserFunction, call: Call, index: int, read: Callable[[Any, int], T], keep_going: bool
    ) -> Outcome[T]:
        try:
            return Outcome(read(function.call(call.args, call.values, call.where), index))
        except MareinforceError as error:
            if not keep_going:
                raise
            return Outcome(error=error)

    def _at_once(
        self, function: UserFunction, calls: Sequence[Call], read: Callable[[Any, int], T], keep_going: bool
    ) -> list[Outcome[T]]:
        begin, limit = self._way(function, len(calls))
        waiting = deque(range(len(calls)))
        outcomes: list[Outcome[T]] = [Outcome()] * len(calls)
        done: queue.SimpleQueue[_Running] = queue.SimpleQueue()
        running: set[_Running] = set()
        failed = len(calls)  # the first call that ends the others
        try:
            while True:
                while waiting and len(running) < limit and failed == len(calls):
                    index = waiting.popleft()
                    one = begin(index, function, calls[index])
                    running.add(one)
                    one.future.add_done_callback(lambda future, one=one: done.put(one))  # type: ignore[misc]
                if all(one.index > failed for one in running):
                    break
                for one in self._ended(done, running):
                    running.discard(one)
                    outcome = outcomes[one.index] = self._outcome(one, function, calls[one.index], read)
                    if outcome.error is not None and not keep_going:
                        failed = min(failed, one.index)
        finally:
            for one in running:
                one.stop()
        if failed < len(calls):
            error = outcomes[failed].error
            assert error is not None
            raise error
        return outcomes

    def _ended(self, done: queue.SimpleQueue[_Running], running: set[_Running]) -> list[_Running]:
        """Wait for one that is done, or for one whose time is up."""
        try:
            return [one for one in [done.get(timeout=self._patience(running))] if one in running]
        except queue.Empty:
            now = time.monotonic()
            return [one for one in running if self._left(one, now) <= 0]

    def _patience(self, running: set[_Running]) -> float | None:
        if self.timeout is None:
            return None
        now = time.monotonic()
        return max(0.0, min(NOT_BEGUN if one.began is None else self._left(one, now) for one in running))

    def _left(self, one: _Running, now: float) -> float:
        return self.timeout - (now - one.began) if self.timeout is not None and one.began is not None else 1.0

    def _outcome(self, one: _Running, function: UserFunction, call: Call, read: Callable[[Any, int], T]) -> Outcome[T]:
        if not one.future.done():
            one.stop()
            return Outcome(
                error=CallTimeout(
                    f"{function.label} took longer than reward_timeout={self.timeout:g} seconds ({call.where}). Make "
                    f"it answer sooner, or raise reward_timeout."
                )
            )
        result, error = _result(one.future)
        if isinstance(error, Exception):
            return Outcome(error=function.failure(error, call.where, call.args, call.values))
        if error is not None:  # a request to stop
            raise error
        try:
            return Outcome(read(result, one.index))
        except MareinforceError as complaint:
            return Outcome(error=complaint)

    def _way(self, function: UserFunction, count: int) -> tuple[Callable[[int, UserFunction, Call], _Running], int]:
        """How a call begins, and how many of them at once."""
        if self.workers and self.kind == "process":
            return self._in_process, self.workers
        if function.is_async:
            return self._on_loop, self.workers or max(count, 1)
        return self._in_thread, max(self.workers, 1)

    def _in_thread(self, index: int, function: UserFunction, call: Call) -> _Running:
        args, keywords = function.arguments(call.args, call.values)

        def work() -> tuple[Any, None]:
            result = function.func(*args, **keywords)
            return (event_loop.run_to_completion(result) if hasattr(result, "__await__") else result), None

        return _Running(index, self._threads.submit(work), lambda: None, time.monotonic())

    def _on_loop(self, index: int, function: UserFunction, call: Call) -> _Running:
        args, keywords = function.arguments(call.args, call.values)

        async def work() -> Any:
            return await function.func(*args, **keywords)

        future = event_loop.begin(work())

        def stop() -> None:
            future.cancel()
            event_loop.leave_if_blocked()

        return _Running(index, future, stop, time.monotonic())

    def _in_process(self, index: int, function: UserFunction, call: Call) -> _Running:
        key, sent = id(function), self._function(function)
        args, keywords = function.arguments(call.args, call.values)
        try:
            arguments = pickle.dumps((args, keywords))
        except Exception as error:
            raise ConfigError(
                f"reward_worker_kind='process': what {function.label} is called with cannot be sent to another "
                f"process ({error}; {call.where}). Set reward_worker_kind: thread."
            ) from error
        process = self._process()

        def work() -> tuple[Any, BaseException | None]:
            error = process.load(key, sent)
            one.began = time.monotonic()  # importing what the function needs is not what is limited
            answer = process.call(key, arguments) if error is None else (None, error)
            self._give_back(process)
            return answer

        def stop() -> None:
            self._busy.discard(process)
            process.kill()

        one = _Running(index, Future(), stop)
        one.future = self._threads.submit(work)
        return one

    def _give_back(self, process: WorkerProcess) -> None:
        """Keep a process for the next call, unless it was stopped, or all were, while its answer was on its way."""
        with self._lock:
            if process in self._busy:
                self._busy.remove(process)
                self._idle.append(process)

    def _function(self, function: UserFunction) -> bytes:
        if id(function) not in self._sent:
            self._sent[id(function)] = function, pickled(function)
        return self._sent[id(function)][1]

    def _process(self) -> WorkerProcess:
        while self._idle:
            process = self._idle.pop()
            if process.is_alive:
                break
            process.kill()
        else:
            process = WorkerProcess()
        self._busy.add(process)
        return process


def _result(future: Future[tuple[Any, BaseException | None]]) -> tuple[Any, BaseException | None]:
    """What a call gave, and what it raised, with the traceback as it was raised."""
    if future.cancelled():
        return None, CancelledError("what was awaited was cancelled")
    error = future.exception()
    return (None, error) if error is not None else future.result()
