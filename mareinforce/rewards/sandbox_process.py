"""The process of a snippet, from outside: starting it, listening to it, and seeing to it that nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mareinforce.errors import RewardError

if TYPE_CHECKING:
    from mareinforce.rewards.sandbox import Limits

_CHILD = Path(__file__).with_name("sandbox_child.py")
_MARK = "MAREINFORCE_SANDBOX"
_START_SECONDS = 30.0  # what a busy machine may take to start Python, on top of the snippet's own time


def play(source: str, checks: Sequence[str], limits: Limits) -> dict[str, Any]:
    """Run the source and then the checks, and return the fields of an ``Outcome``. Nothing is remembered.

    Raises:
        RewardError: the process cannot be started.
    """
    uid, mark = random.SystemRandom().randrange(1 << 30, 1 << 31), os.urandom(16).hex()
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="mareinforce-", ignore_cleanup_errors=True))
        scratch = os.path.realpath(scratch)
        job = stack.enter_context(tempfile.TemporaryFile())
        task = {"source": source, "checks": list(checks), "limits": asdict(limits), "scratch": scratch, "uid": uid}
        job.write(json.dumps(task).encode())
        job.seek(0)
        ends = [
            stack.enter_context(open(end, mode, buffering=0))
            for pair in (os.pipe(), os.pipe())
            for end, mode in zip(pair, ("rb", "wb"), strict=True)
        ]
        alive, stop, result, result_end = ends
        numbers = (alive.fileno(), result_end.fileno())
        home = {"PATH": os.defpath, "HOME": scratch, "TMPDIR": scratch}
        try:
            process = subprocess.Popen(
                [sys.executable, "-S", "-s", "-P", "-B", str(_CHILD), *map(str, numbers)],
                stdin=job,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=numbers,
                start_new_session=True,
                cwd=scratch,
                env={**home, "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0", _MARK: mark},
            )
        except OSError as error:
            raise _no_start(str(error)) from error
        stack.enter_context(process)
        alive.close(), result_end.close()
        try:
            (out, err, told), over = _listen([process.stdout, process.stderr, result], limits)
        finally:
            _end(process, stop, uid, mark)
        told += result.read() or b""  # if we stopped listening before it had ended
    if not told:
        raise _no_start(err.decode(errors="replace").strip()[-2000:] or "it said nothing")
    fields: dict[str, Any] = {"status": "killed", "error": "its supervisor was killed", "seconds": 0.0}
    fields |= {"checks": [False] * len(checks), "stdout": out.decode(errors="replace")}
    fields |= {"stderr": err.decode(errors="replace")}
    for line in told.splitlines():
        fields |= json.loads(line)
    if over:
        fields |= {"status": "output", "error": f"printed more than {limits.output_bytes} bytes"}
    return fields


def _no_start(why: str) -> RewardError:
    return RewardError(
        f"The sandbox could not start {sys.executable!r}: {why}. No reward can be made of that; see docs/sandbox.md "
        "for what it needs."
    )


def _listen(pipes: Sequence[Any], limits: Limits) -> tuple[list[bytes], bool]:
    """What came through stdout, stderr and the result pipe, and whether the first two brought too much.

    Never keeps more than the limit, and stops at the end of the result pipe: somebody may keep the others open.
    """
    until = time.monotonic() + limits.wall_seconds + _START_SECONDS
    kept, room = [bytearray() for _ in pipes], limits.output_bytes
    result = pipes[-1]
    with selectors.DefaultSelector() as selector:
        for pipe, text in zip(pipes, kept, strict=True):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ, text)
        ended = False
        while selector.get_map():
            ready = selector.select(0 if ended else max(0.0, until - time.monotonic()))
            if not ready:  # all has been read, or time is up
                break
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                    ended = ended or key.fileobj is result
                elif key.fileobj is result:
                    key.data.extend(data)
                else:
                    key.data.extend(data[:room])
                    if len(data) > room:
                        return [bytes(text) for text in kept], True
                    room -= len(data)
    return [bytes(text) for text in kept], False


def _end(process: subprocess.Popen[bytes], stop: Any, uid: int, mark: str) -> None:
    """Have the process end all that is below it, and itself; see to it ourselves if it cannot any more."""
    with contextlib.suppress(OSError):
        stop.write(b"stop")
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.returncode != 0:  # it was killed from below, or could not finish
        _sweep(uid, mark)


def _sweep(uid: int, mark: str) -> None:
    """Kill every process that bears the mark of this run: its user, or a word in its environment (Linux)."""
    for _ in range(100):
        found = 0
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                status = (folder / "status").read_text()
                ours = f"\nUid:\t{uid}\t" in status
                with contextlib.suppress(PermissionError):
                    ours = ours or f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes()
                if ours and "\nState:\tZ" not in status:
                    os.kill(int(folder.name), signal.SIGKILL)
                    found += 1
        if not found:
            return
        time.sleep(0.01)
