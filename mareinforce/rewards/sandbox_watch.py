"""How `sandbox_child.py` watches what runs below it: the processes, their memory, the clock, and what is reported."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

TOKEN_BYTES = 32  # 16 random bytes in hexadecimal
_WAITING_BYTES = 16 << 20  # more than a process of ours that only waits occupies


class Processes:
    """The processes below this one, as far as the system shows them (Linux, by /proc)."""

    def __init__(self) -> None:
        try:
            self.folder: int | None = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        except (OSError, AttributeError):
            self.folder = None
        self._page = os.sysconf("SC_PAGE_SIZE")

    def below(self, top: int) -> dict[int, int]:
        """Process -> bytes of memory it occupies, of all that descend from ``top``. Zombies count, with 0 bytes."""
        children, occupied = dict[int, list[int]](), dict[int, int]()
        for name in os.listdir(self.folder) if self.folder is not None else ():
            if not name.isdigit():
                continue
            with contextlib.suppress(OSError):  # it may have ended meanwhile
                file = os.open(f"{name}/stat", os.O_RDONLY, dir_fd=self.folder)
                with open(file, "rb") as stat:
                    fields = stat.read().rpartition(b")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(name))
                occupied[int(name)] = int(fields[21]) * self._page
        found, queue = dict[int, int](), [top]
        while queue:
            for pid in children.get(queue.pop(), ()):
                if pid not in found:
                    found[pid] = occupied[pid]
                    queue.append(pid)
        return found

    def end_all(self, child: int, child_ended: bool) -> bool:
        """Kill all below this process. True if it has no child left, which is nothing at all if orphans become ours."""
        until = time.monotonic() + 5
        while time.monotonic() < until:
            for pid in {*self.below(os.getpid()), *([] if child_ended else [child])}:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if self.folder is None:  # all that can be found is what stayed in the snippet's group
                with contextlib.suppress(OSError):
                    os.killpg(child, signal.SIGKILL)
            try:
                while pid := os.waitpid(-1, os.WNOHANG)[0]:
                    child_ended = child_ended or pid == child
            except ChildProcessError:
                return True
            time.sleep(0.002)
        return False


class Watch:
    """Waits for the reports of a run, and for what ends it before."""

    def __init__(
        self, job: dict[str, Any], child: int, apart: bool, processes: Processes, tokens: int, reports: int
    ) -> None:
        self._limits, self._steps = job["limits"], 1 + len(job["checks"])
        self._child, self._apart = child, apart
        self._processes, self._tokens, self._reports = processes, tokens, reports
        self._buffer, self._token, self._told = b"", b"", list[dict[str, Any]]()
        self.begun: float | None = None
        """When the snippet started, in seconds of ``time.monotonic``."""
        self.child_ended = False

    def until_the_end(self, alive: int, on_ready: Callable[[], None]) -> dict[str, Any]:
        """Wait, and say how it went: status, error, seconds, checks. ``on_ready`` is called as the snippet starts."""
        poller = select.poll()
        poller.register(alive, select.POLLIN)
        poller.register(self._reports, select.POLLIN)
        pause, next_look = 0.02, 0.0
        while True:
            events = dict(poller.poll(1000 * pause))
            ended = self._reap()
            if self._reports in events and not self._receive(on_ready):
                poller.unregister(self._reports)
                pause = 0.005  # it is ending, or has closed what it should not
            if ended is not None:
                self._receive(on_ready)
                return self._verdict(*ended)
            if alive in events:
                return self._verdict("killed", "stopped by its caller")
            wall = self._limits["wall_seconds"]
            if self.begun is not None and time.monotonic() - self.begun > wall:
                return self._verdict("timeout", f"still running after {wall:g} seconds")
            if (look := time.monotonic()) >= next_look:
                if excess := self._excess():
                    return self._verdict(*excess)
                next_look = time.monotonic() + max(0.02, 10 * (time.monotonic() - look))  # at most a tenth of our time

    def _reap(self) -> tuple[str, str] | None:
        """Status and error of the child, once it has ended; orphans that became ours are reaped on the way."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return "killed", "its process is gone"
            if pid == 0:
                return None
            if pid == self._child:
                self.child_ended = True
                break
        code = os.waitstatus_to_exitcode(status)
        number = -code if code < 0 else code - 128  # the first process of a namespace passes a signal on as 128 + it
        cpu = self._limits["cpu_seconds"]
        if number == signal.SIGXCPU or (number == signal.SIGKILL and usage.ru_utime + usage.ru_stime >= cpu):
            return "timeout", f"used more than {cpu:g} seconds of processor time"
        if 0 < number <= 64:
            return "killed", f"ended by {_signal_name(number)}"
        return "failed", f"the process ended itself before the end was reached, with exit status {code}"

    def _receive(self, on_ready: Callable[[], None]) -> bool:
        """Read what has been reported. False at the end of the pipe."""
        try:
            data = os.read(self._reports, 1 << 16)
        except BlockingIOError:
            return True
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        self._buffer = self._buffer[: 1 << 16]  # no report is that long
        for line in lines:
            if self.begun is None:
                if line != b"ready":
                    continue
                self.begun = time.monotonic()
                on_ready()
                os.write(self._tokens, os.urandom(TOKEN_BYTES // 2).hex().encode())
            elif line.startswith(self._token + b" ") and len(self._told) < self._steps:
                with contextlib.suppress(ValueError):
                    self._told.append(json.loads(line[len(self._token) :]))
            else:
                continue
            self._token = os.urandom(TOKEN_BYTES // 2).hex().encode()
            if len(self._told) < self._steps:
                with contextlib.suppress(BrokenPipeError):
                    os.write(self._tokens, self._token)
        return bool(data)

    def _excess(self) -> tuple[str, str] | None:
        """What all processes together have too much of: the limits of the kernel are for each alone."""
        found = self._processes.below(os.getpid())
        ours = 2 if self._apart else 0  # two of them only wait for the snippet
        processes, memory = self._limits["processes"], self._limits["memory_bytes"]
        if len(found) > processes + ours:
            return "killed", f"more than {processes} processes"
        if sum(found.values()) > memory + ours * _WAITING_BYTES:
            return "memory", f"its processes occupied more than {memory} bytes together"
        return None

    def _verdict(self, status: str, error: str) -> dict[str, Any]:
        """``status`` and ``error`` say how the process ended; what it has reported before that stands."""
        seconds = 0.0 if self.begun is None else time.monotonic() - self.begun
        checks = [told["error"] is None for told in self._told[1:]]
        checks += [False] * (self._steps - 1 - len(checks))
        first = next((told for told in self._told if told["error"] is not None), None)
        if first is not None and (len(self._told) == self._steps or first is self._told[0]):
            status, error = "memory" if first["memory"] else "failed", first["error"]
        elif len(self._told) == self._steps:
            status, error = "passed", ""
        return {"status": status, "error": error or None, "seconds": seconds, "checks": checks}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
