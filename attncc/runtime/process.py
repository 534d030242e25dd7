"""Who made a file: processes named so that another one can tell whether they still run.

A name is `home~pid~started~nonce`. The home stands for one boot of one machine and one space of process numbers: a
container with the same host name is another home, of whose processes nothing can be known.
"""

from __future__ import annotations

import hashlib
import os
import socket
from functools import cache
from pathlib import Path

ENDED = -1


def own_name() -> str:
    """A fresh name of this process, fit for a file."""
    pid = os.getpid()
    return f"{home()}~{pid}~{start_time(pid) or 0}~{os.urandom(4).hex()}"


def pid_of(name: str) -> int | None:
    """The process number in a name; None for what is no such name."""
    parts = name.split("~")
    numbers = parts[1:3]
    return int(numbers[0]) if len(parts) == 4 and all(n.isdecimal() and len(n) < 20 for n in numbers) else None


def is_ours(name: str) -> bool:
    """Whether the name comes from this boot and process space, so that `is_gone` can know."""
    return pid_of(name) is not None and name.startswith(f"{home()}~")


def is_gone(name: str) -> bool:
    """Whether the process surely ended. Of another home, and of what is no name, nothing is sure."""
    pid = pid_of(name)
    return pid is not None and is_ours(name) and not is_running(pid, int(name.split("~")[2]) or None)


def is_running(pid: int, started: int | None = None) -> bool:
    """Whether a process of this home runs; with `started` (see `start_time`), that very one."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # another user's
        return True
    now = start_time(pid)
    if now == ENDED:
        return False
    return now is None or started is None or now == started


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process; ENDED for one that waits to be reaped; None without /proc."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return ENDED if after_name[0] in (b"Z", b"X") else int(after_name[19])


@cache
def home() -> str:
    facts = [socket.gethostname()]
    for read in (lambda: Path("/proc/sys/kernel/random/boot_id").read_text(), lambda: os.readlink("/proc/self/ns/pid")):
        try:
            facts.append(read())
        except OSError:
            facts.append("")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
