"""One builder for each key among processes and machines that share a folder, without the file system's own locks.

A lock is a folder with one file in it, named after the process that holds it (attncc.runtime.process). It comes into
being by a rename, as entries do: a rename onto a folder that is not empty fails everywhere, network file systems among
them, many of which have no locks or only pretend to. A dead holder blocks nobody: on its own machine it is known to be
gone; elsewhere its heartbeat, the file's time of change, no longer moves. The waiter measures that with its own clock,
so that clocks need not agree. Should two break one lock at once, both build, which is harmless: publishing is a rename.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from attncc.runtime import process

SUFFIX = ".lock"
POLL = 0.05  # seconds between tries
LOOK = 0.5  # seconds between looks at whether the holder lives
BEAT = 5.0  # seconds between signs of life
SILENCE = 90.0  # seconds without one, after which a holder elsewhere is dead: network folders hold times back for 60
PATIENCE = 600.0  # seconds until a waiter builds for itself
TAKEN = (errno.ENOTEMPTY, errno.EEXIST)  # how systems say that there is a folder of that name, with something in it


@dataclass(frozen=True)
class Sign:
    """What a waiter sees of a holder: its name, and the time of its last beat."""

    holder: str
    beat: int  # nanoseconds, by the folder's clock


@contextlib.contextmanager
def held(
    path: Path, waiting: Callable[[str], None], patience: float = PATIENCE, silence: float = SILENCE
) -> Iterator[bool]:
    """Hold the lock at `path`; True while held, False where `patience` (seconds) ran out or no lock can be made.

    `waiting` is told once, in words, when another process holds it.
    """
    mine = process.own_name()
    try:
        got = _wait(path, mine, waiting, patience, silence)
    except OSError:  # the folder is read-only, full or gone
        got = False
    finally:
        shutil.rmtree(path.with_name(mine), ignore_errors=True)  # never taken, or a wait that was interrupted
    if not got:
        yield False
        return
    done = threading.Event()
    threading.Thread(target=_beat, args=(path / mine, done), daemon=True, name="attncc-lock").start()
    try:
        yield True
    finally:
        done.set()
        drop(path, mine)


def look(path: Path) -> Sign | None:
    """Who holds the lock; None where nobody does."""
    try:
        (holder,) = os.listdir(path)
        fd = os.open(path / holder, os.O_RDONLY)  # opening it asks a network file system for its true time
        try:
            return Sign(holder, os.fstat(fd).st_mtime_ns)
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return None


def drop(path: Path, holder: str) -> None:
    """Take the lock away from `holder`, and from nobody else."""
    sign = look(path)
    if sign is None or sign.holder != holder:
        return
    aside = path.with_name(process.own_name())
    try:
        os.rename(path, aside)
    except OSError:
        return  # another one was first
    sign = look(aside)
    if sign is not None and sign.holder != holder:  # it changed hands in between: give it back
        with contextlib.suppress(OSError):
            os.rename(aside, path)
    shutil.rmtree(aside, ignore_errors=True)


def _wait(path: Path, mine: str, waiting: Callable[[str], None], patience: float, silence: float) -> bool:
    start = heard = time.monotonic()
    last, told, looked = None, False, 0.0
    ready = _prepare(path, mine)
    while not _take(path, ready, mine):
        now = time.monotonic()
        if now - looked >= LOOK:
            looked, sign = now, look(path)
            if sign != last:
                last, heard = sign, now
            if sign is not None and (process.is_gone(sign.holder) or _fell_silent(sign, now - heard, silence)):
                drop(path, sign.holder)
                continue
            if sign is not None and not told:
                told = True
                waiting(f"waiting for process {process.pid_of(sign.holder)}, which builds the same file")
        if now - start >= patience:
            return False
        time.sleep(POLL)
    return True


def _fell_silent(sign: Sign, seconds: float, silence: float) -> bool:
    return seconds > silence and not process.is_ours(sign.holder)


def _prepare(path: Path, mine: str) -> Path:
    ready = path.with_name(mine)
    ready.mkdir(mode=0o700)
    os.close(os.open(ready / mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    return ready


def _take(path: Path, ready: Path, mine: str) -> bool:
    try:
        os.rename(ready, path)
        return True
    except OSError as problem:
        sign = look(path)
        if sign is not None and sign.holder == mine:
            return True  # it was done, and the answer got lost
        if problem.errno in TAKEN:
            return False
        raise


def _beat(file: Path, done: threading.Event) -> None:
    while not done.wait(BEAT):
        with contextlib.suppress(OSError):
            os.utime(file)
