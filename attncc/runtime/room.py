"""The folder that a cache lives in: who may write to it, how much it may hold, and what dead processes left there."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from attncc.errors import EnvironmentFault
from attncc.runtime import lock, process, publish

DEFAULT_LIMIT = "4G"
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
LEFTOVER_AGE = 86400.0  # seconds after which what a process elsewhere was building is taken for a leftover


def limit() -> int | None:
    """ATTNCC_CACHE_LIMIT in bytes, such as 500M or 2G; None for `none`. EnvironmentFault for anything else."""
    text = os.environ.get("ATTNCC_CACHE_LIMIT") or DEFAULT_LIMIT
    if text.lower() == "none":
        return None
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,3})?)\s*([KMGT]?)B?", text.strip().upper())
    if found is None:
        raise EnvironmentFault(f"ATTNCC_CACHE_LIMIT is {text!r}: a number of bytes such as 500M or 2G, or none")
    return int(float(found[1]) * UNITS[found[2]])


def evict(folders: Sequence[Path], room: int, work: Path) -> None:
    """Remove, least recently used first, until the others take at most `room` bytes.

    A reader sees a whole entry or none. What cannot be removed stays; another process may be at the same.
    """
    known = []
    for folder in folders:
        with contextlib.suppress(OSError):
            known.append((folder.stat().st_mtime_ns, folder, occupied(folder)))
    total = sum(size for _, _, size in known)
    for _, folder, size in sorted(known):
        if total <= room:
            return
        aside = work / process.own_name()
        with contextlib.suppress(OSError):
            os.rename(folder, aside)
            total -= size
            publish.remove_tree(aside)


def sweep(work: Path) -> None:
    """Remove what processes that are gone left half built, and their locks.

    Of processes elsewhere nothing is known: what they left goes after a day by the folder's own clock.
    """
    with contextlib.suppress(OSError):
        os.utime(work)
        now = work.stat().st_mtime
        for path in work.iterdir():
            if path.name.endswith(lock.SUFFIX):
                sign = lock.look(path)
                if sign is not None and process.is_gone(sign.holder):
                    lock.drop(path, sign.holder)
            elif process.is_ours(path.name):
                if process.is_gone(path.name):
                    publish.remove_tree(path)
            elif "~" in path.name and _age(path, now) > LEFTOVER_AGE:
                publish.remove_tree(path)


def _age(path: Path, now: float) -> float:
    with contextlib.suppress(OSError):
        return now - path.stat().st_mtime
    return 0.0


def occupied(folder: Path) -> int:
    """Bytes of a folder's files."""
    with contextlib.suppress(OSError):
        return sum(p.stat().st_size for p in folder.iterdir() if p.is_file())
    return 0


def refuse_unsafe(root: Path) -> None:
    """Refuse a root in which others could put code that we would run. A root that is not there yet is fine."""
    if root == root.parent:
        raise EnvironmentFault(f"the cache folder is {root} itself: set ATTNCC_CACHE_DIR to a folder of its own")
    try:
        facts = root.stat()
    except OSError:
        return
    if not stat.S_ISDIR(facts.st_mode):
        raise EnvironmentFault(
            f"the cache folder {root} is a file: remove it, or set ATTNCC_CACHE_DIR to another folder"
        )
    if hasattr(os, "geteuid") and facts.st_uid != os.geteuid():
        raise EnvironmentFault(
            f"the cache folder {root} belongs to user {facts.st_uid}, and this is user {os.geteuid()}: "
            f"export ATTNCC_CACHE_DIR=a folder of your own"
        )
    if sys.platform != "win32" and facts.st_mode & 0o022:
        raise EnvironmentFault(
            f"others may write to the cache folder {root} (mode {stat.S_IMODE(facts.st_mode):04o}): "
            f"chmod go-w {shlex.quote(str(root))}"
        )
