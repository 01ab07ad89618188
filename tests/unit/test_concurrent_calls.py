"""Calls of users' functions at once and in a limited time: their order, how many, and what is left of them."""

from __future__ import annotations

import asyncio
import functools
import os
import queue
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from mareinforce import event_loop
from mareinforce.calling import UserFunction
from mareinforce.concurrent_calls import Call, CallRunner
from mareinforce.daemon_threads import DaemonExecutor, DaemonThreads
from mareinforce.errors import CallTimeout, ConfigError, RewardError, UserCodeError
from tests import worker_functions

ROOT = Path(__file__).parents[2]
PROCESSES = {"kind": "process", "workers": 2}
HERE, IN_TIME, THREADS = {}, {"timeout": 60.0}, {"workers": 3}


def function(func, *names):
    return UserFunction(func, "a_field", positional=names)


@pytest.fixture
def run():
    """Call a function with each of some arguments; what was made for it is closed."""
    made = []

    def run(func, arguments, read=lambda value, index: value, keep_going=False, **options):
        runner = CallRunner(**options)
        made.append(runner)
        calls = [Call(args, {}, f"call {index}") for index, args in enumerate(arguments)]
        names = [f"argument {index}" for index in range(len(arguments[0]))]
        outcomes = runner.run(function(func, *names), calls, read, keep_going=keep_going)
        return outcomes if keep_going else [outcome.value for outcome in outcomes]

    yield run
    for runner in made:
        runner.close()


class Counter:
    """Counts how many are inside at once."""

    def __init__(self):
        self.inside = self.most = 0
        self.lock = threading.Lock()

    def __enter__(self):
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)

    def __exit__(self, *_):
        with self.lock:
            self.inside -= 1


# Order


def delays(count=6):
    seconds = [0.02 * index for index in range(count)]
    random.Random(0).shuffle(seconds)
    return [(delay, index) for index, delay in enumerate(seconds)]


@pytest.mark.parametrize("options", [HERE, IN_TIME, THREADS, PROCESSES], ids=str)
@pytest.mark.parametrize("func", [worker_functions.after, worker_functions.after_async])
def test_results_come_in_the_order_of_the_calls(run, func, options):
    assert run(func, delays(), **options) == list(range(6))


def test_what_is_done_first_is_not_what_comes_first(run):
    ends = []

    def note(seconds, index):
        time.sleep(seconds)
        ends.append(index)
        return index

    given = [(0.3, 0), (0.0, 1), (0.15, 2)]
    assert run(note, given, workers=3) == [0, 1, 2]
    assert ends == [1, 2, 0]  # else the order would have been no achievement


def test_without_workers_and_limit_everything_happens_in_this_thread_in_order(run):
    def who(index):
        return threading.current_thread(), index

    def who_else(index):
        return threading.current_thread() is threading.main_thread()

    assert run(who, [(0,), (1,)]) == [(threading.main_thread(), 0), (threading.main_thread(), 1)]
    for options in (IN_TIME, THREADS):
        assert run(who_else, [(0,), (1,)], **options) == [False, False]


# How many at once


@pytest.mark.parametrize(("workers", "most"), [(8, 8), (3, 3), (1, 1)])
def test_so_many_calls_run_at_the_same_time(run, workers, most):
    counter, gate = Counter(), threading.Barrier(most)

    def call(index):
        with counter:
            if index < most:
                gate.wait(30)
            time.sleep(0.01)

    run(call, [(index,) for index in range(8)], workers=workers)
    assert counter.most == most


def test_the_gate_does_not_open_for_fewer(run):
    gate = threading.Barrier(3)
    with pytest.raises(UserCodeError, match="BrokenBarrierError"):
        run(lambda index: gate.wait(0.2), [(index,) for index in range(3)], workers=2)


@pytest.mark.parametrize(("workers", "most"), [(0, 20), (3, 3)])
def test_so_many_are_awaited_at_the_same_time(run, workers, most):
    counter, gate = Counter(), asyncio.Barrier(most)

    async def call(index):
        with counter:
            if index < most:
                await asyncio.wait_for(gate.wait(), 30)
            await asyncio.sleep(0.01)
        return asyncio.get_running_loop()

    loops = run(call, [(index,) for index in range(20)], workers=workers)
    assert counter.most == most
    assert len(set(loops)) == 1


def test_processes_work_at_the_same_time(run, tmp_path):
    (tmp_path / "two").mkdir(), (tmp_path / "one").mkdir()
    two = [(str(tmp_path / "two"), name, 1, 60.0) for name in "ab"]
    assert run(worker_functions.meets, two, workers=2, kind="process") == [True, True]
    one = [(str(tmp_path / "one"), name, 1, 0.2) for name in "ab"]
    assert run(worker_functions.meets, one, workers=1, kind="process") == [False, False]


def test_processes_are_used_again_and_closed(run):
    runner = CallRunner(**PROCESSES)
    who = function(worker_functions.who)
    calls = [Call((), {}, "")] * 6

    def pids():
        return {outcome.value for outcome in runner.run(who, calls, lambda value, index: value)}

    first = pids()
    assert os.getpid() not in first
    assert len(first | pids()) <= 2
    runner.close()
    assert not any(alive(pid) for pid in first)
    assert not pids() & first  # made anew
    runner.close()


# Failures


def fails_at(*indices):
    def call(index):
        time.sleep(0.1 if index == min(indices) else 0.0)
        if index in indices:
            raise ValueError(f"bad json {index}")
        return index

    return call


@pytest.mark.parametrize("options", [HERE, IN_TIME, THREADS], ids=str)
def test_of_several_failures_the_first_calls_is_told(run, options):
    with pytest.raises(UserCodeError, match=r"raised ValueError: bad json 1 \(call 1\)") as told:
        run(fails_at(1, 2), [(index,) for index in range(6)], **options)
    assert told.value.__cause__.__traceback__ is not None
    assert run(fails_at(9), [(index,) for index in range(6)], **options) == list(range(6))


def test_after_a_failure_no_other_call_begins(run):
    begun = []

    def call(index):
        begun.append(index)
        raise ValueError

    with pytest.raises(UserCodeError):
        run(call, [(index,) for index in range(9)], workers=2)
    time.sleep(0.2)  # in which another one would have begun
    assert set(begun) <= {0, 1}
    outcomes = run(call, [(index,) for index in range(9)], workers=2, keep_going=True)
    assert len(begun) - len(set(begun)) >= 1
    assert [type(outcome.error) for outcome in outcomes] == [UserCodeError] * 9


@pytest.mark.parametrize("options", [HERE, THREADS, PROCESSES], ids=str)
def test_what_goes_on_after_a_failure_is_in_its_place(run, options):
    def read(value, index):
        if value == 2:
            raise RewardError("two")
        return value * 10

    outcomes = run(worker_functions.after, [(0.0, index) for index in range(4)], read, True, **options)
    assert [outcome.value for outcome in outcomes] == [0, 10, None, 30]
    assert [str(outcome.error) for outcome in outcomes] == ["None", "None", "two", "None"]
    with pytest.raises(RewardError, match="two"):
        run(worker_functions.after, [(0.0, index) for index in range(4)], read, **options)


def test_an_error_in_a_process_keeps_its_traceback_in_words(run):
    with pytest.raises(UserCodeError, match=r"bad_json raised ValueError: bad json \(call 0\)") as told:
        run(worker_functions.bad_json, [()], **PROCESSES)
    assert type(told.value.__cause__) is ValueError
    (note,) = told.value.__cause__.__notes__
    assert 'raise ValueError("bad json")' in note
    assert "call_child" not in note
    with pytest.raises(UserCodeError, match="Unpicklable: 1 and 2"):
        run(worker_functions.fail_unpicklably, [()], **PROCESSES)


def test_a_process_that_dies_is_told_and_replaced(run):
    with pytest.raises(UserCodeError, match=r"die raised RuntimeError: its worker process ended .* exit status 7"):
        run(worker_functions.die, [(7,)], **PROCESSES)
    runner = CallRunner(1, "process")
    die, who = function(worker_functions.die, "status"), function(worker_functions.who)
    outcomes = runner.run(die, [Call((7,), {}, "")] * 2, lambda value, index: value, keep_going=True)
    assert all(outcome.error is not None for outcome in outcomes)
    assert runner.run(who, [Call((), {}, "")], lambda value, index: value)[0].value > 0
    runner.close()


@pytest.mark.parametrize("options", [IN_TIME, THREADS, PROCESSES], ids=str)
def test_a_request_to_stop_is_not_taken_for_an_error(run, options):
    with pytest.raises(KeyboardInterrupt):
        run(worker_functions.leave, [()], **options)


def test_printing_and_reading_in_a_process_disturb_nothing(run):
    assert run(worker_functions.chatter, [(1,), (2,), (3,)], **PROCESSES) == [1, 2, 3]


def test_what_cannot_be_sent_back_is_told(run):
    with pytest.raises(UserCodeError, match="its result, a generator, cannot be sent between processes"):
        run(worker_functions.generator, [(3,)], **PROCESSES)
    assert len(list(run(worker_functions.generator, [(3,)], workers=1)[0])) == 3


# Time limits


@pytest.mark.parametrize("options", [{}, {"workers": 2}, PROCESSES], ids=str)
@pytest.mark.parametrize("keep_going", [False, True])
def test_a_call_that_takes_too_long_is_given_up(run, options, keep_going):
    began = time.monotonic()
    given = [(0.0, "fast"), (300.0, "slow"), (0.0, "fast")]
    says = r"a_field .*after took longer than reward_timeout=0.5 seconds \(call 1\)"
    if keep_going:
        one, two, three = run(worker_functions.after, given, keep_going=True, timeout=0.5, **options)
        assert (one.value, three.value) == ("fast", "fast")
        with pytest.raises(CallTimeout, match=says):
            raise two.error
    else:
        with pytest.raises(CallTimeout, match=says):
            run(worker_functions.after, given, timeout=0.5, **options)
    assert time.monotonic() - began < 60
    assert run(worker_functions.after, given[:1], timeout=20.0, **options) == ["fast"]


def test_what_is_awaited_is_cancelled(run):
    seen = []

    async def call(index):
        try:
            await asyncio.sleep(300 if index else 0)
        except asyncio.CancelledError:
            seen.append(index)
            raise

    first, second = run(call, [(0,), (1,)], keep_going=True, timeout=0.5)
    assert first.error is None
    assert isinstance(second.error, CallTimeout)
    for _ in range(100):
        if seen:
            break
        time.sleep(0.05)
    assert seen == [1]


def test_a_loop_that_is_blocked_is_left(run):
    release = threading.Event()

    async def blocks(index):
        release.wait(60)

    async def works(index):
        return index

    with pytest.raises(CallTimeout):
        run(blocks, [(0,)], timeout=0.3)
    assert run(works, [(5,)], timeout=20.0) == [5]
    release.set()


def test_so_many_threads_of_asyncio_work_at_once(run):
    counter = Counter()

    def blocks():
        with counter:
            time.sleep(0.05)

    async def call(index):
        await asyncio.to_thread(blocks)
        return index

    assert run(call, [(index,) for index in range(event_loop.THREADS + 8)]) == list(range(event_loop.THREADS + 8))
    assert 1 < counter.most <= event_loop.THREADS


def test_work_that_is_cancelled_before_it_begins_is_not_done():
    done, gate = [], threading.Event()
    executor = DaemonExecutor(1)
    first = executor.submit(gate.wait, 30)
    second = executor.submit(done.append, 1)
    threads = DaemonThreads("one")
    inbox = queue.SimpleQueue()
    cancelled, later = Future(), Future()
    cancelled.cancel()
    for future in (cancelled, later):
        inbox.put((future, lambda: done.append(2)))
    inbox.put(None)
    threads._serve(inbox)
    assert (done, later.done()) == ([2], True)
    gate.set()
    assert (first.result(30), second.result(30)) == (True, None)
    assert done == [2, 1]


def alive(pid):
    """Is there such a process, and is it more than an exit status that nobody has asked for?"""
    try:
        os.kill(pid, 0)
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    except ProcessLookupError:
        return False
    return bool(state.strip()) and not state.startswith("Z")


def gone(pids, seconds=30.0):
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


def hanging(folder):
    """The processes that say they hang, once they do."""
    for _ in range(1200):
        if files := list(folder.iterdir()):
            return [int(pid) for file in files for pid in file.name.split()]
        time.sleep(0.05)
    raise AssertionError("nothing has begun")


def test_a_process_whose_time_is_up_is_killed_with_what_it_has_started(run, tmp_path):
    with pytest.raises(CallTimeout):
        run(worker_functions.hang, [(str(tmp_path),)], timeout=2.0, **PROCESSES)
    both = hanging(tmp_path)
    assert len(both) == 2
    assert gone(both)


PROGRAM = """
import sys

from mareinforce.calling import UserFunction
from mareinforce.concurrent_calls import Call, CallRunner
from tests import worker_functions

kind, name, argument = sys.argv[1:]
runner = CallRunner(1, kind, 1.0 if kind == "thread" else None)
function = UserFunction(getattr(worker_functions, name), "a_field", positional=["one"])
runner.run(function, [Call((argument,), {}, "")], lambda value, index: value)
"""


@pytest.mark.parametrize("name", ["sleep", "sleep_in_a_thread"])
def test_a_thread_that_is_left_to_itself_does_not_keep_the_process(name):
    began = time.monotonic()
    command = [sys.executable, "-c", PROGRAM, "thread", name, "300"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "took longer than reward_timeout=1 seconds" in done.stderr
    assert done.returncode == 1
    assert time.monotonic() - began < 100  # and not 300


def test_a_process_that_is_killed_leaves_no_worker_behind(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PROGRAM, "process", "hang", str(tmp_path)], cwd=ROOT)
    worker, child = hanging(tmp_path)
    assert alive(worker)
    parent.kill()
    parent.wait()
    assert gone([worker])
    os.kill(child, 9)  # what a user's function has started is its own business here


# What a process can be sent


@pytest.mark.parametrize(
    "func",
    [lambda: 1, functools.partial(lambda one: one, 1), worker_functions.hidden(lambda: 1)],
    ids=["lambda", "partial", "closure"],
)
def test_what_cannot_be_sent_to_a_process_is_refused_beforehand(func):
    with pytest.raises(ConfigError, match=r"reward_worker_kind='process': a_field .* cannot be sent .*: thread"):
        CallRunner(**PROCESSES).check(function(func))
    CallRunner(workers=2).check(function(func))
    CallRunner(**PROCESSES).check(function(functools.partial(worker_functions.after, 0.0, 1)))


def test_what_is_defined_in_the_script_that_runs_is_refused(monkeypatch):
    def mine():
        return 1

    monkeypatch.setattr(sys.modules["__main__"], "mine", mine, raising=False)
    mine.__module__, mine.__qualname__ = "__main__", "mine"
    with pytest.raises(ConfigError, match=r"mine is defined in the script .* module of its own"):
        CallRunner(**PROCESSES).check(function(mine))


def test_arguments_that_cannot_be_sent_are_told(run):
    with pytest.raises(ConfigError, match=r"what a_field .*after is called with cannot be sent .*call 0.*: thread"):
        run(worker_functions.after, [(0.0, lambda: 1)], **PROCESSES)


def test_arguments_are_copies_in_every_kind(run):
    def vandal(texts):
        texts.clear()
        return texts

    for options in (HERE, IN_TIME, THREADS):
        texts = ["a"]
        assert run(vandal, [(texts,)], **options) == [[]]
        assert texts == ["a"]


def test_an_answer_that_comes_after_the_end_brings_no_process_back():
    runner = CallRunner(**PROCESSES)
    kept, late = runner._process(), runner._process()
    runner._give_back(kept)
    assert runner.processes == [kept, late]
    runner.close()
    runner._give_back(late)  # by the thread that waited for it
    assert runner.processes == []
    assert not kept.is_alive
    assert not late.is_alive
