"""The cage of model-written code: what it lets through, what it stops, and that nothing is left afterwards."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mareinforce.errors import ConfigError, RewardError
from mareinforce.rewards import sandbox, sandbox_process
from mareinforce.rewards.sandbox import Limits, Outcome, run_checks, run_python

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
MIB = 1 << 20

# systems that have less: appended to a copy of the walls
LESS = {
    "as it is": "",
    "no namespaces": "def enter(): return False, False",
    "bare": "_libc = None",  # no system calls but Python's own: no other user either, and no adoption of orphans
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Nothing is remembered from other tests, and what runs in a sandbox of this one can be told by its HOME."""
    sandbox._cache.clear()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(params=LESS)
def system(request, tmp_path_factory, monkeypatch):
    """The sandbox on this system, and on systems that have less."""
    if LESS[request.param]:
        folder = tmp_path_factory.mktemp("child")
        for name in ("sandbox_child.py", "sandbox_walls.py", "sandbox_watch.py"):
            shutil.copy(Path(sandbox_process.__file__).with_name(name), folder / name)
        with open(folder / "sandbox_walls.py", "a") as file:
            file.write(f"\n\n{LESS[request.param]}\n")
        monkeypatch.setattr(sandbox_process, "_CHILD", folder / "sandbox_child.py")
    return request.param


def run(source: str, **limits) -> Outcome:
    return run_python(textwrap.dedent(source), Limits(**limits))


def living(folder: Path) -> list[int]:
    """Processes started with ``folder`` in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if bytes(folder) in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


# What passes and what fails


def test_a_snippet_that_reaches_its_end_passes():
    outcome = run("""
        from __future__ import annotations
        import dataclasses, json, pickle, subprocess, sys, threading
        @dataclasses.dataclass
        class Point:
            x: int
        assert pickle.loads(pickle.dumps(Point(3))) == Point(3)
        assert subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True).stdout == b"7\\n"
        thread = threading.Thread(target=print, args=("from a thread",))
        thread.start(), thread.join()
        open("file", "w").write("text")
        assert open("file").read() == "text" and __name__ == "__main__"
        print("hellö"), print("err", file=sys.stderr)
    """)
    assert (outcome.status, outcome.error, outcome.checks) == ("passed", None, ())
    assert (outcome.stdout, outcome.stderr) == ("from a thread\nhellö\n", "err\n")
    assert 0 < outcome.seconds < 10


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("assert 1 + 1 == 3, f'{1 + 1} is\\n not 3'", "AssertionError: 2 is not 3"),
        ("assert False", "AssertionError"),
        ("x = 1\nx.y", "AttributeError: 'int' object has no attribute 'y'"),
        ("def f(:", "SyntaxError: invalid syntax (snippet.py, line 1)"),
        ("'\ud800'", "UnicodeEncodeError: 'utf-8' codec can't encode character"),
        ("import numpy", "ModuleNotFoundError: No module named 'numpy'"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("class E(Exception):\n  def __str__(self): 1 / 0\nraise E", "E"),
        ("raise ValueError('x' * 9999)", "ValueError: xxx"),
    ],
)
def test_a_snippet_that_raises_fails_with_its_error(source, error):
    outcome = run_python(source)
    assert outcome.status == "failed"
    assert outcome.error is not None
    assert outcome.error.startswith(error)
    assert len(outcome.error) <= 500


def test_the_traceback_shows_the_snippet_and_nothing_of_ours():
    outcome = run_python("def f(x):\n    return 1 / x\nf(0)")
    assert "return 1 / x" in outcome.stderr
    assert 'File "snippet.py", line 3' in outcome.stderr
    assert "sandbox" not in outcome.stderr


REPORT = b'{"error": null, "memory": false}'
FORGED = {
    "os._exit": "import os; os._exit(0)",
    "sys.exit": "import sys; sys.exit(0)",
    "SystemExit": "raise SystemExit",
    "print": "print('passed', flush=True); import os; os._exit(0)",
    "every descriptor": f"""
        import os
        for fd in range(1, 256):
            try: os.write(fd, b"0" * 32 + b' {REPORT.decode()}\\n')
            except OSError: pass
        os._exit(0)""",
    "closed descriptors": "import os; os.closerange(3, 256)",
    "all closed": "import os; os.closerange(0, 256)",
    "closed, then exit": "import os; os.closerange(0, 256); os._exit(0)",
    "a fork reaches the end": "import os\nif os.fork(): os._exit(0)",
    "a thread": "import os, threading; threading.Thread(target=os._exit, args=(0,)).start()\nwhile True: pass",
    "another program": "import os; os.execv('/bin/true', ['true'])",
    "a signal": "import os; os.kill(os.getpid(), 15)",
    "its group": "import os; os.killpg(0, 9)",
    "no more functions": "import os, json\nos.read = os.write = os._exit = json.dumps = lambda *a: b''\nassert False",
}


@pytest.mark.parametrize("source", FORGED.values(), ids=FORGED)
def test_who_leaves_before_the_end_has_not_passed(source):
    assert run(source + "\n", wall_seconds=5).status in ("failed", "killed")


def test_what_forgeries_are_made_of_is_not_what_fails_them():
    assert run("import os, sys; os.close(1); os.close(2); sys.stdout = None").status == "passed"
    assert run("import os\nif os.fork() == 0: os._exit(0)\nos.wait()").status == "passed"
    assert run("import sys\ntry: sys.exit(0)\nexcept SystemExit: pass").status == "passed"
    assert run("import os; print('passed'); os.write(2, b'passed')").status == "passed"


# Limits


def test_a_loop_ends_at_the_wall_clock(system):
    begin = time.monotonic()
    outcome = run("while True: pass", wall_seconds=0.5)
    assert (outcome.status, outcome.error) == ("timeout", "still running after 0.5 seconds")
    assert 0.5 <= outcome.seconds <= time.monotonic() - begin < 8


def test_sleeping_ends_at_the_wall_clock_and_below_it_passes():
    assert run("import time; time.sleep(60)", wall_seconds=0.3).status == "timeout"
    assert run("import time; time.sleep(0.3)", wall_seconds=5).status == "passed"
    stubborn = "import signal, time\nfor n in range(1, 20):\n  if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\n"
    assert run(stubborn + "time.sleep(60)", wall_seconds=0.3).status == "timeout"


def test_processor_time_is_limited_and_waiting_is_not_processor_time():
    outcome = run("while True: pass", wall_seconds=30, cpu_seconds=1)
    assert (outcome.status, outcome.error) == ("timeout", "used more than 1 seconds of processor time")
    assert run("import time; time.sleep(1.2)", cpu_seconds=1).status == "passed"


def test_a_memory_hog_ends_and_less_passes():
    limits = {"memory_bytes": 128 * MIB}
    assert run("x = bytearray(1 << 40)", **limits).status == "memory"
    assert run("x = []\nwhile True: x.append(str(len(x)) * 100)", **limits).status == "memory"
    assert run("x = bytearray(64 << 20)", **limits).status == "passed"


@linux
def test_processes_share_the_memory_limit(system):
    source = """
        import os, time
        for _ in range(4):
            if os.fork() == 0:
                x = os.urandom(1) * (60 << 20)
                time.sleep(1), os._exit(0)
        time.sleep(0.5)
    """
    outcome = run(source, memory_bytes=160 * MIB)
    assert (outcome.status, "occupied more than" in str(outcome.error)) == ("memory", True)
    assert run(source, memory_bytes=512 * MIB).status == "passed"


@linux
def test_processes_are_counted(system):
    source = """
        import os, time
        for _ in range({}):
            if os.fork() == 0:
                time.sleep(1), os._exit(0)
        time.sleep(0.4)
    """
    assert run(source.format(4), processes=5).status == "passed"
    outcome = run(source.format(8), processes=5)
    assert outcome.status in ("failed", "killed")
    assert outcome.error in ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "more than 5 processes")


@linux
def test_a_fork_bomb_ends_and_nothing_of_it_lives_on(tmp_path):
    outcome = run("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", wall_seconds=1)
    assert outcome.status in ("timeout", "killed")
    assert living(tmp_path) == []


def test_files_are_limited(system):
    outcome = run("open('f', 'wb').write(bytes(3 << 20))", file_bytes=2 * MIB)
    assert (outcome.status, outcome.error) == ("failed", "OSError: [Errno 27] File too large")
    assert run("open('f', 'wb').write(bytes(1 << 20))", file_bytes=2 * MIB).status == "passed"


def test_endless_printing_ends_and_is_not_kept():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = run("while True: print('x' * 1_000_000)", output_bytes=1000)
    unit = 1 if sys.platform == "darwin" else 1024
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit < 50 * MIB
    assert (outcome.status, outcome.error, outcome.stdout) == ("output", "printed more than 1000 bytes", "x" * 1000)


def test_output_is_counted_together_and_up_to_the_limit_it_passes():
    both = "import sys; print('x' * 499); print('y' * {}, file=sys.stderr)"
    assert run(both.format(499), output_bytes=1000).status == "passed"
    assert run(both.format(500), output_bytes=1000).status == "output"
    assert run("", output_bytes=0).status == "passed"
    assert run("print(1)", output_bytes=0).status == "output"
    assert run("import sys; sys.stdout.buffer.write(b'\\xff')").stdout == "\ufffd"


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("wall_seconds", 0, "finite number of seconds above 0"),
        ("wall_seconds", float("nan"), "finite number"),
        ("cpu_seconds", float("inf"), "finite number"),
        ("cpu_seconds", "3", "finite number"),
        ("cpu_seconds", True, "finite number"),
        ("memory_bytes", 1000, "at least 67108864"),
        ("memory_bytes", 1e9, "whole number"),
        ("file_bytes", -1, "at least 0"),
        ("processes", 0, "at least 1"),
        ("processes", True, "whole number"),
        ("output_bytes", None, "whole number"),
        ("output_bytes", 1 << 70, "whole number"),
    ],
)
def test_wrong_limits_are_refused(field, value, rule):
    with pytest.raises(ConfigError, match=rule) as error:
        Limits(**{field: value})
    assert f"Limits.{field} is {value!r}" in str(error.value)
    assert f"Leave it out for {getattr(Limits(), field)}" in str(error.value)


def test_the_smallest_limits_are_enough_to_start():
    assert run("x = 1", memory_bytes=64 * MIB, file_bytes=0, processes=1, output_bytes=0).status == "passed"


# What a snippet cannot reach


def test_killing_its_parent_does_not_harm_us(system):
    outcome = run("import os, time; os.kill(os.getppid(), 9); time.sleep(0.5)")
    assert outcome.status in ("failed", "killed")
    assert run("import os, time; os.kill(os.getppid(), 0); time.sleep(0.1)").status in ("passed", "failed")


def test_killing_all_it_can_does_not_harm_us():
    if not run("1").network_cut:
        pytest.skip("without namespaces this would end us")
    ours = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        run("import os; os.kill(-1, 9)")
        assert ours.poll() is None
        os.kill(ours.pid, signal.SIGKILL)  # that it can be killed, by us
        assert ours.wait() == -signal.SIGKILL
    finally:
        ours.communicate()


def test_our_environment_is_not_its_environment(monkeypatch, system):
    monkeypatch.setenv("API_TOKEN", "very-secret-word")
    assert run("import os; print(sorted(os.environ))").stdout == (
        "['HOME', 'LC_ALL', 'MAREINFORCE_SANDBOX', 'PATH', 'PYTHONHASHSEED', 'TMPDIR']\n"
    )


@linux
def test_it_cannot_read_the_environment_of_another_process():
    secret = subprocess.Popen(
        [sys.executable, "-S", "-c", "input()"], env={"API_TOKEN": "very-secret-word"}, stdin=subprocess.PIPE
    )
    source = """
        import glob
        for name in glob.glob("/proc/*/environ"):
            try: assert b"very-secret" + b"-word" not in open(name, "rb").read(), "read it"
            except OSError: pass
    """
    try:
        if not run("1").network_cut:
            pytest.skip("possible without namespaces, as the docs say")
        assert run(source).status == "passed"
        control = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True)
        assert "AssertionError: read it" in control.stderr
    finally:
        secret.communicate(b"\n")


@linux
def test_our_open_files_are_not_its_open_files(tmp_path, system):
    source = """
        import os
        for fd in os.listdir("/proc/self/fd"):
            try: print(os.readlink("/proc/self/fd/" + fd).split(":")[0])
            except OSError: pass  # the one of the listing
    """
    with open(tmp_path / "ours", "w") as file:
        os.set_inheritable(file.fileno(), True)
        seen = run(source).stdout.split()
        control = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, close_fds=False
        )
    assert sorted(seen) == ["/dev/null", "pipe", "pipe", "pipe", "pipe"]
    assert str(tmp_path / "ours") in control.stdout.split()


def test_it_has_no_network_where_we_are_told_so(system):
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=2)"
        outcome = run(source)
        assert outcome.status == ("failed" if outcome.network_cut else "passed")
        assert not (outcome.network_cut and system != "as it is")
        subprocess.run([sys.executable, "-c", source], check=True)


def test_it_cannot_change_files_outside_its_folder_where_it_has_mounts_of_its_own(tmp_path):
    (tmp_path / "ours").write_text("kept")
    tmp_path.chmod(0o777), (tmp_path / "ours").chmod(0o666)
    outcome = run(f"open({str(tmp_path / 'ours')!r}, 'w').write('changed')")
    if not outcome.network_cut:
        pytest.skip("possible without namespaces, as the docs say")
    assert (outcome.status, (tmp_path / "ours").read_text()) == ("failed", "kept")


# What is left afterwards


def test_the_scratch_folder_is_removed(system, tmp_path):
    outcome = run("""
        import os
        os.makedirs("a/b"), open("a/b/c", "w").write("x")
        os.chmod("a/b", 0)
        print(os.getcwd()), print(os.listdir("."))
    """)
    folder, content = outcome.stdout.splitlines()
    assert content == "['a']"
    assert Path(folder).parent == tmp_path
    assert list(tmp_path.iterdir()) == []


DAEMON = """
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.close(1), os.close(2)
            time.sleep(60)
        os._exit(0)
    os.wait()
"""


@linux
def test_a_daemon_is_gone(system, tmp_path):
    seen = set()
    done = threading.Event()

    def look():
        while not done.is_set():
            seen.update(living(tmp_path))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        outcome = run(DAEMON + "    time.sleep(0.5)")
    finally:
        done.set(), looking.join()
    assert outcome.status == "passed"
    assert len(seen) >= 3  # the supervisor, the snippet, the daemon
    assert living(tmp_path) == []


@linux
def test_a_daemon_is_gone_even_if_the_supervisor_was_killed(system, tmp_path):
    outcome = run(DAEMON + "    os.kill(os.getppid(), 9); time.sleep(60)", wall_seconds=5)
    assert outcome.status in ("failed", "killed")
    verdicts = run_checks(textwrap.dedent(DAEMON), ["1", "os.kill(os.getppid(), 9); time.sleep(60)", "1 / 0"])
    assert verdicts[1:] == [False, False]  # the first may be lost with the supervisor
    assert living(tmp_path) == []


@linux
def test_living_finds_what_lives(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "input()"], env={"HOME": str(tmp_path)}, stdin=subprocess.PIPE)
    try:
        while b"HOME" not in Path(f"/proc/{process.pid}/environ").read_bytes():  # it has not become Python yet
            time.sleep(0.01)
        assert living(tmp_path) == [process.pid]
    finally:
        process.communicate(b"\n")


@linux
def test_nothing_lives_on_when_we_are_killed(tmp_path):
    program = f"""
        import sys, types
        for name in ("mareinforce", "mareinforce.rewards"):  # without what else the package imports
            sys.modules[name] = module = types.ModuleType(name)
            module.__path__ = [{str(Path(sandbox.__file__).parents[1])!r} + name[len("mareinforce"):].replace(".", "/")]
        from mareinforce.rewards.sandbox import run_python
        run_python("import time; time.sleep(60)")
    """
    ours = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    until = time.monotonic() + 20
    while len(living(tmp_path)) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    found = living(tmp_path)
    ours.send_signal(signal.SIGKILL), ours.wait()
    while living(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(found) >= 3
    assert living(tmp_path) == []


# Checks


def test_every_check_has_a_verdict():
    source = "def add(a, b): return a + b"
    checks = ["assert add(1, 2) == 3", "assert add(1, 2) == 4", "exit_ = add(2, 2)", "assert exit_ == 4", "def f(:"]
    assert run_checks(source, checks) == [True, False, True, True, False]
    assert run_checks(source, []) == []
    assert run_checks("1 / 0", checks) == [False] * 5
    assert run_checks("x = 1", ["assert x"] * 1000) == [True] * 1000


@pytest.mark.parametrize("end", ["import os; os._exit(0)", "while True: pass", "import os; os.closerange(0, 256)"])
def test_a_check_that_ends_the_process_fails_with_all_that_follow(end):
    limits = Limits(wall_seconds=0.5)
    assert run_checks("x = 1", ["assert x == 1", end, "assert x == 1"], limits) == [True, False, False]
    assert run_checks("x = 1", ["import sys; sys.exit()", "assert x == 1"], limits) == [False, True]


def test_a_text_is_no_list_of_checks():
    with pytest.raises(ConfigError, match=r"Write \['assert x'\]"):
        run_checks("x = 1", "assert x")


# The cache, threads, and what cannot start


@pytest.fixture
def plays(monkeypatch):
    """What has been run, not remembered."""
    seen = []

    def play(source, *rest):
        seen.append(source)
        return sandbox_process.play(source, *rest)

    monkeypatch.setattr(sandbox, "play", play)
    return seen


def test_the_same_code_with_the_same_limits_runs_once(plays):
    chance = "import os; print(os.urandom(8).hex())"
    first = run_python(chance)
    assert run_python(chance) is first
    assert plays == [chance]
    assert run_python(chance, Limits(processes=2)).stdout != first.stdout
    assert run_python(chance + "\n").stdout != first.stdout
    assert len(plays) == 3
    run_python("assert 0"), run_python("assert 0")
    assert len(plays) == 4
    run_checks("x = 1", ["assert x"]), run_checks("x = 1", ["assert x"]), run_checks("x = 1", ["x"])
    assert len(plays) == 6


def test_what_depends_on_the_machine_is_not_remembered(plays):
    for _ in range(2):
        assert run("while True: pass", wall_seconds=0.2).status == "timeout"
        assert run("import os; os.kill(os.getpid(), 9)").status == "killed"
        assert run("x = bytearray(1 << 40)").status == "memory"
        assert run("print(1)", output_bytes=0).status == "output"
    assert len(plays) == 8


def test_the_cache_forgets_what_was_used_longest_ago(plays, monkeypatch):
    monkeypatch.setattr(sandbox, "_CACHE_ENTRIES", 2)
    for source in ("1", "2", "1", "3", "1", "2"):
        run_python(source)
    assert plays == ["1", "2", "3", "2"]
    assert len(sandbox._cache) == 2


def test_hashes_do_not_depend_on_chance():
    assert run("print(hash('word'))").stdout == run("print(hash('word')) ").stdout


def test_several_threads_at_once(tmp_path):
    begin = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda n: run(f"import time; time.sleep(1); print({n}); assert {n} % 2"), range(8)))
    assert time.monotonic() - begin < 7  # one after the other they need more than 8
    assert [outcome.stdout for outcome in outcomes] == [f"{n}\n" for n in range(8)]
    assert [outcome.status for outcome in outcomes] == ["failed", "passed"] * 4
    assert living(tmp_path) == []


def test_a_sandbox_that_cannot_start_is_an_error_and_no_verdict(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("raise SystemError('no such thing')")
    monkeypatch.setattr(sandbox_process, "_CHILD", tmp_path / "broken.py")
    with pytest.raises(RewardError, match=r"(?s)could not start .*SystemError: no such thing"):
        run("x = 1")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(RewardError, match=r"could not start .*nothing"):
        run("x = 1")
