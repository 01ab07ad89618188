"""The program in which `sandbox.py` runs a snippet: a supervisor, and the snippet below it.

Started with ``python -S -s -P -B sandbox_child.py ALIVE RESULT`` and the job as JSON on stdin. ALIVE is the number of
a descriptor to read: anything there, or its end, means stop. RESULT is one to write to, a line of JSON when the snippet
starts and one when all is over. The exit status is 0 only if nothing of the snippet is left.

The supervisor holds what the snippet must not reach. For each step (the snippet, then each check) it puts a fresh
random token into a pipe; the step counts as finished when that token comes back in a report, and nobody but the code
after the step has a reason to read it. What ends the process earlier, whatever its exit status, has not passed.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import signal
import sys
import traceback
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from mareinforce.rewards import sandbox_walls as walls
    from mareinforce.rewards import sandbox_watch as watching
else:
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import sandbox_walls as walls
    import sandbox_watch as watching

    sys.path.pop()

_SNIPPET = "snippet.py"


def supervise(job: dict[str, Any], alive: int, result: int) -> NoReturn:
    """Run the job below this process and tell ``result`` how it went. Ends the process."""
    limits = job["limits"]
    processes = watching.Processes()  # opened before the mounts change: it shows our own numbers of the processes
    apart, own_users = walls.enter()
    user, reads_all = (None, False) if own_users else walls.choose_user(job["uid"])
    owner = os.geteuid() if user is None else user
    if user is not None:
        os.chown(job["scratch"], user, user)  # for where it gets no disk of its own
    adopts = walls.prctl(walls.PR_SET_CHILD_SUBREAPER, 1)
    walls.prctl(walls.PR_SET_DUMPABLE, 0)  # no one of our user may look into us
    (tokens_read, tokens_write), (reports_read, reports_write) = os.pipe(), os.pipe()
    os.set_blocking(reports_read, False)
    nothing = os.open(os.devnull, os.O_RDONLY)
    last = max(nothing, tokens_read, tokens_write, reports_read, reports_write, alive, result, processes.folder or 0)

    def snippet() -> NoReturn:
        os.setsid()  # what it does to its process group it does to itself
        walls.prctl(walls.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.chdir(job["scratch"])
        os.dup2(nothing, 0)
        keep = sorted((tokens_read, reports_write))
        for low, high in zip([2, *keep], [*keep, last + 1], strict=True):
            os.closerange(low + 1, high)
        walls.confine(limits, user, reads_all, (3 if apart else 1) if own_users else None)
        walls.prctl(walls.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user forgets it
        walls.prctl(walls.PR_SET_DUMPABLE, 1)
        run([job["source"], *job["checks"]], tokens_read, reports_write)

    def relay(child: int) -> NoReturn:
        """Wait for ``child`` and pass its exit status on, a signal as 128 + its number. Ends the process."""
        os.closerange(3, last + 1)  # a pipe ends when the snippet's end of it is closed
        pid = status = 0
        while pid != child:
            pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)

    def parent() -> NoReturn:
        """What a snippet ends if it kills its parent: the first process below cannot be killed from inside."""
        walls.prctl(walls.PR_SET_PDEATHSIG, signal.SIGKILL)
        relay(_fork(snippet))

    def first() -> NoReturn:
        """The first process of the namespace: as it ends, the kernel ends all others in it."""
        walls.prctl(walls.PR_SET_PDEATHSIG, signal.SIGKILL)
        walls.furnish(job["scratch"], owner, limits["file_bytes"])
        relay(_fork(parent))

    child = _fork(first if apart else snippet)
    os.close(tokens_read)
    os.close(reports_write)
    watch = watching.Watch(job, child, apart, processes, tokens_write, reports_read)
    verdict = watch.until_the_end(alive, lambda: _tell(result, {"network_cut": apart}))
    clean = processes.end_all(child, watch.child_ended) and (apart or adopts)
    if watch.begun is not None:
        _tell(result, verdict)
    os._exit(0 if clean else 1)


def run(steps: list[str], tokens: int, reports: int) -> NoReturn:
    """Run the steps as ``__main__`` in this process, and report each as it is done. Ends the process."""
    # what is needed afterwards is taken now: a snippet may replace functions of modules
    read, write, getpid, leave, dumps, spare = os.read, os.write, os.getpid, os._exit, json.dumps, walls.spare_memory
    show, out, err, me = traceback.print_exception, sys.stdout, sys.stderr, os.getpid()
    main = types.ModuleType("__main__")
    sys.modules["__main__"], sys.argv = main, [_SNIPPET]
    write(reports, b"ready\n")
    read(tokens, watching.TOKEN_BYTES)  # our start is known: whatever happens now is the snippet's doing
    for number, code in enumerate(steps):
        name = f"check {number - 1}" if number else _SNIPPET
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        error, memory = None, False
        try:
            exec(compile(code, name, "exec", dont_inherit=True), main.__dict__)
        except MemoryError:
            spare()
            error, memory = "MemoryError", True
        except BaseException as raised:  # SystemExit too: who leaves early has not reached the end
            error = _one_line(raised)
            with contextlib.suppress(BaseException):
                show(type(raised), raised, raised.__traceback__ and raised.__traceback__.tb_next, file=err)
        if getpid() != me:
            leave(0)  # a fork of the snippet has nothing to report
        for stream in (out, err):
            with contextlib.suppress(BaseException):
                stream.flush()
        report = dumps({"error": error, "memory": memory}).encode()
        write(reports, read(tokens, watching.TOKEN_BYTES) + b" " + report + b"\n")
        if error and not number:
            break
    leave(0)


def _one_line(error: BaseException) -> str:
    """``AssertionError: what it says``, on one line and not too long, whatever ``__str__`` does."""
    text = ""
    with contextlib.suppress(BaseException):
        text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__


def _tell(result: int, line: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # nobody may be there any more
        os.write(result, json.dumps(line).encode() + b"\n")


def _fork(run_in_child: Callable[[], NoReturn]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            run_in_child()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


if __name__ == "__main__":
    supervise(json.load(sys.stdin), int(sys.argv[1]), int(sys.argv[2]))
