"""One builder for each key among processes: a lock that a dead process cannot hold.

The system drops a file lock with its process, but a child forked by a killed builder may keep it alive, and on file
systems without locks the file itself is the lock. So the holder writes down who it is, and where that process is gone
the next in line breaks the lock. Two that both break it build twice, which is harmless: publishing is a rename.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

POLL = 0.05  # seconds between tries
LOOK = 0.5  # seconds between looks at whether the holder lives
ZOMBIE = -1
PATIENCE = 600.0  # seconds until a waiter builds for itself


@contextlib.contextmanager
def held(path: Path, waiting: Callable[[str], None], patience: float = PATIENCE) -> Iterator[bool]:
    """Hold the lock at `path`; True while held, False where `patience` (seconds) ran out or no lock can be made.

    `waiting` is told once, in words, when another process holds it.
    """
    from filelock import FileLock, Timeout

    owner = path.with_suffix(".owner")
    deadline = time.monotonic() + patience
    lock, told = FileLock(path), False
    while True:
        try:
            lock.acquire(timeout=min(LOOK, max(0.0, deadline - time.monotonic())), poll_interval=POLL)
            break
        except Timeout:
            if is_dead(owner):
                _break(path, owner)
                lock = FileLock(path)
            elif time.monotonic() >= deadline:
                yield False
                return
            elif not told:
                told = True
                waiting(f"waiting for {_who(owner)}, which builds the same file")
        except OSError:  # the cache folder is read-only or full
            yield False
            return
    try:
        with contextlib.suppress(OSError):
            owner.write_text(json.dumps(identity()))
        yield True
    finally:
        with contextlib.suppress(OSError):
            owner.unlink()
        lock.release()


def identity() -> dict[str, Any]:
    """This process, told apart from a later one with the same number by its start time where the system gives it."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _start_time(os.getpid())}


def is_dead(owner: Path) -> bool:
    """Whether the process that wrote `owner` ran on this host and is gone. Unknown counts as alive."""
    try:
        who = json.loads(owner.read_bytes())
        host, pid, started = who["host"], int(who["pid"]), who["started"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return host == socket.gethostname() and not is_running(pid, started)


def is_running(pid: int, started: int | None = None) -> bool:
    """Whether a process of this host runs; with `started` (see `identity`), that very one."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # another user's
        return True
    now = _start_time(pid)
    if now == ZOMBIE:
        return False
    return now is None or started is None or now == started


def _start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process; ZOMBIE for one that ended; None without /proc."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return ZOMBIE if after_name[0] in (b"Z", b"X") else int(after_name[19])


def _who(owner: Path) -> str:
    try:
        return f"process {int(json.loads(owner.read_bytes())['pid'])}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _break(path: Path, owner: Path) -> None:
    for leftover in (owner, path):
        with contextlib.suppress(OSError):
            leftover.unlink()
