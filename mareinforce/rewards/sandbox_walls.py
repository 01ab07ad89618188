"""What keeps a snippet in, as far as the system allows: namespaces, a read-only disk, a user of its own, limits.

Loaded by `sandbox_child.py` in a process of its own, without the rest of the package. Nothing here raises where a
system lacks something; each function says what it achieved, and the docs say what that leaves open.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import sys
from typing import Any

try:
    import ctypes

    _libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
except (ImportError, OSError):
    _libc = None

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS = 1, 4, 8
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_APART = _NEWNS | _NEWIPC | _NEWPID | _NEWNET
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x4000, 1 << 18
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = 442, -100, 0x8000, 1  # one number on every architecture
_CAPABILITY_VERSION_3, _CAP_DAC_READ_SEARCH, _CAP_SETGID = 0x20080522, 2, 6
_SPARE_BYTES = 16 << 20  # for telling of a MemoryError when the snippet has used up all it may have


def prctl(option: int, value: int) -> bool:
    """prctl(2) with one argument. False where there is none or it refuses."""
    return _libc is not None and _libc.prctl(option, value, 0, 0, 0) == 0


def enter() -> tuple[bool, bool]:
    """Leave the caller's network, processes (for children) and mounts behind.

    Returns:
        Whether namespaces of network, processes and mounts are new, and whether the namespace of users is.
    """
    if _libc is None:
        return False, False
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0 and _libc.unshare(_APART) == 0:
        return True, False
    apart = _libc.unshare(_NEWUSER | _APART) == 0
    # a user namespace alone still counts processes separately and hides environments; root has better: another user
    if not apart and (uid == 0 or _libc.unshare(_NEWUSER) != 0):
        return False, False
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return apart, True


def choose_user(uid: int) -> tuple[int | None, bool]:
    """Whether root can hand the snippet to the user ``uid``, and whether that user needs help to read Python's files.

    Returns:
        The user, or None where the snippet must stay who we are; and whether it needs CAP_DAC_READ_SEARCH.
    """
    if os.geteuid() != 0 or _libc is None or not _permitted() >> _CAP_SETGID & 1:
        return None, False
    try:
        os.setresuid(-1, uid, -1)  # type: ignore[attr-defined, unused-ignore]
    except OSError:
        return None, False
    try:
        os.close(os.open(os.__file__, os.O_RDONLY))
        return uid, False
    except OSError:  # Python lies in a folder that is closed to others, as root's home is
        return (uid, True) if _permitted() >> _CAP_DAC_READ_SEARCH & 1 else (None, False)
    finally:
        os.setresuid(-1, 0, -1)  # type: ignore[attr-defined, unused-ignore]


def furnish(scratch: str, owner: int, file_bytes: int) -> None:
    """In namespaces of its own: the own processes in /proc, everything read-only, and a small disk as ``scratch``."""
    if _mount(None, "/", None, _MS_REC | _MS_PRIVATE) != 0:
        return  # else what follows would be seen outside
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY, 0, 0, 0)
    _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, ctypes.sizeof(attributes))
    options = f"size={file_bytes},nr_inodes=4096,mode=0700,uid={owner},gid={owner}"
    if _mount("tmpfs", scratch, "tmpfs", _MS_NOSUID | _MS_NODEV, options) != 0:  # the gid may be another's
        _mount("tmpfs", scratch, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={file_bytes},nr_inodes=4096,mode=0700")
    _mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={file_bytes},nr_inodes=4096,mode=1777")


def confine(limits: dict[str, Any], user: int | None, reads_all: bool, own_users: int | None) -> None:
    """The last steps before the snippet runs: its limits, its user, and no way back.

    Args:
        limits: the fields of ``Limits``.
        user: the user to become, or None to stay who we are.
        reads_all: keep the right to read (not write) every file.
        own_users: where the namespace of users is new, how many processes besides the snippet's are counted in it.

    Raises:
        OSError: the user cannot be changed, although ``choose_user`` could.
    """
    cpu = math.ceil(limits["cpu_seconds"])
    _limit(resource.RLIMIT_CPU, cpu, cpu + 1)
    _limit(resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"] + _SPARE_BYTES)
    _limit(resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"])
    _limit(resource.RLIMIT_CORE, 0, 0)
    _limit(resource.RLIMIT_NOFILE, 256, 256)
    if user is not None:  # a user that has no other processes: the kernel can count the snippet's
        prctl(PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(user, user, user)  # type: ignore[attr-defined, unused-ignore]
        _limit(resource.RLIMIT_NPROC, limits["processes"], limits["processes"])
        os.setresuid(user, user, user)  # type: ignore[attr-defined, unused-ignore]
    elif own_users is not None and _counts_by_namespace():
        _limit(resource.RLIMIT_NPROC, limits["processes"] + own_users, limits["processes"] + own_users)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    _keep_capabilities(1 << _CAP_DAC_READ_SEARCH if reads_all and user is not None else 0)


def spare_memory() -> None:
    """Let the process use the last of its memory, to tell that it used up the rest."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)


def _limit(kind: int, soft: int, hard: int) -> None:
    """Set a limit, or the lower one that already holds. macOS refuses some; the watch and the wall clock remain."""
    highest = resource.getrlimit(kind)[1]
    if highest != resource.RLIM_INFINITY:
        soft, hard = min(soft, highest), min(hard, highest)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (soft, hard))


def _counts_by_namespace() -> bool:
    """Linux counts a user's processes for each user namespace since 5.14; before, the trainer's would be among them."""
    numbers = os.uname().release.split(".")[:2]
    return all(n.isdigit() for n in numbers) and tuple(map(int, numbers)) >= (5, 14)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> int:
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    return int(_libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]))


def _permitted() -> int:
    """The capabilities this process may use, as bits."""
    header, data = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    return data[1] | data[4] << 32 if _libc.capget(header, data) == 0 else 0


def _keep_capabilities(bits: int) -> None:
    """Give up all capabilities but ``bits``."""
    if _libc is not None:
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
        _libc.capset(header, (ctypes.c_uint32 * 6)(bits, bits, 0, 0, 0, 0))
