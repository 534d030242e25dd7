"""Kernels on disk, once for all processes of a user: try, lock, try again, build, publish, load.

Below <root>/v1:
    kernel/<digest>/     sources, resources, manifest.json (sizes and sha256, written last)
    binary/<digest>/     what Triton made of one of a source's kernels
    request/<digest>/    the listing that a request led to
    spec/<digest>/       what a text means
    call/<digest>/       which kernels serve a class of calls
    winner/<digest>/     what a search found to be fastest on a device; neither `clear` nor the size limit takes it away
    work/                what is being built; locks

What is broken in any way is a miss, and is built again. A root that cannot be written to costs one warning and the
cache; a root that others could write to is refused. Above ATTNCC_CACHE_LIMIT bytes (default 4G), what was not used for
longest goes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from attncc.errors import EnvironmentFault
from attncc.runtime import keys, process, publish
from attncc.runtime.room import evict, limit, occupied, refuse_unsafe, sweep

LAYOUT = "v1"
KINDS = ("kernel", "binary", "request", "spec", "call", "winner")
REBUILT = ("kernel", "binary", "request", "spec", "call")  # what a build brings back
DISK_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO))

Builder = Callable[[Path], None]


@dataclass(frozen=True)
class Entry:
    """A whole entry: its folder, and its files as they were when compared with the manifest."""

    path: Path
    kind: str
    digest: str
    key: Any  # the key in plain form
    files: Mapping[str, bytes]
    fresh: bool = False  # built by this call
    keep: Any = field(default=None, repr=False, compare=False)  # holds a temporary folder alive

    def text(self, name: str) -> str:
        return self.files[name].decode("utf-8")

    @property
    def size(self) -> int:
        """Bytes of its files, without the manifest."""
        return sum(map(len, self.files.values()))

    @property
    def modified(self) -> float:
        """Seconds since the epoch when it was published."""
        return (self.path / publish.MANIFEST).stat().st_mtime


@dataclass(frozen=True)
class Fault:
    """An entry that `verify` found broken, and in which way."""

    path: Path
    problem: str


def default_root() -> Path:
    """ATTNCC_CACHE_DIR, or the user's cache folder of this system. EnvironmentFault for a `~` of nobody."""
    chosen = os.environ.get("ATTNCC_CACHE_DIR")
    if chosen:
        expanded = os.path.expanduser(chosen)
        if expanded.startswith("~"):  # what no user is called stays as it is
            raise EnvironmentFault(f"ATTNCC_CACHE_DIR is {chosen}, and there is no user {expanded.split('/')[0][1:]!r}")
        return Path(os.path.abspath(expanded))
    from platformdirs import user_cache_path

    return user_cache_path("attncc", appauthor=False)


class Cache:
    """The cache below `root` (default: `default_root()`), made when first written to.

    `warn` takes the one warning of an unusable folder, `note` what is worth telling while it happens.
    Raises EnvironmentFault where the root is another user's, writable by others, or no folder, and for a limit that is
    no size.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        warn: Callable[[str], None] | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        self.root = Path(root) if root is not None else default_root()
        self._warn = warn or (lambda text: warnings.warn(text, RuntimeWarning, stacklevel=4))
        self._note = note or (lambda text: None)
        self._explain = note or partial(print, file=sys.stderr)  # asked for: said also where nobody listens
        self._warned = False
        self._limit = limit()
        refuse_unsafe(self.root)

    def get(self, key: keys.Key) -> Entry | None:
        """The entry of a key, compared with its manifest; None where there is none or it is broken."""
        return self.load(key.kind, keys.key_digest(key))

    def load(self, kind: str, digest: str) -> Entry | None:
        """As `get`, by the entry's own name."""
        folder = self._folder(kind, digest)
        try:
            sealed = publish.unseal(folder)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except publish.Broken as problem:
            self._note(f"cache: {kind} {digest[:12]} is built again: {problem}")
            return None
        except OSError as problem:
            self._degrade(problem)
            return None
        with contextlib.suppress(OSError):
            os.utime(folder)  # used now; times of reading are often not kept
        return Entry(folder, kind, digest, sealed.key, sealed.files)

    def get_or_build(self, key: keys.Key, builder: Builder) -> Entry:
        """The entry of a key; on a miss `builder` writes its files into the fresh folder that it is given.

        What the builder raises goes through, and leaves no trace. One process builds, the others wait for it.
        """
        found = self.get(key)
        if found is not None:
            return found
        if os.environ.get("ATTNCC_EXPLAIN_MISS") == "1":
            self._explain("\n".join(self.explain_miss(key)))
        work = self._work_folder()
        if work is None:
            return self._build_aside(key, builder)
        from attncc.runtime import lock

        digest = keys.key_digest(key)
        with lock.held(work / f"{key.kind}-{digest}.lock", self._note):
            found = self.get(key)  # another process may have been first
            return found if found is not None else self._build(key, digest, work, builder)

    def replace(self, key: keys.Key, builder: Builder) -> Entry:
        """As `get_or_build`, and instead of what is there; whoever comes last is right."""
        work = self._work_folder()
        return (
            self._build_aside(key, builder) if work is None else self._build(key, keys.key_digest(key), work, builder)
        )

    def explain_miss(self, key: keys.Key) -> list[str]:
        """In words: the fields in which a key differs from the nearest entry of its kind."""
        wanted = keys.plain(key)
        head = f"cache miss: {key.kind} {keys.key_digest(key)[:12]}"
        others = [e for e in self.entries() if e.kind == key.kind]
        if not others:
            return [f"{head}: the cache holds no {key.kind} yet"]
        near = min(others, key=lambda e: (len(keys.differences(e.key, wanted)), -e.modified))
        lines = keys.differences(near.key, wanted)
        if not lines:
            return [f"{head}: it was published just now"]
        return [f"{head}: differs from the nearest entry, {near.digest[:12]}, in", *(f"    {line}" for line in lines)]

    def entries(self) -> Iterator[Entry]:
        """Every whole entry, kernels first, by name."""
        for kind, folder in self._folders():
            with contextlib.suppress(publish.Broken, OSError):
                sealed = publish.unseal(folder)
                yield Entry(folder, kind, folder.name, sealed.key, sealed.files)

    def verify(self) -> list[Fault]:
        """Compare every entry with its manifest. Broken ones are harmless: the next build replaces them."""
        faults = []
        for kind, folder in self._folders():
            try:
                if publish.unseal(folder).kind != kind:
                    raise publish.Broken("it lies in the folder of another kind")
            except (publish.Broken, OSError) as problem:
                faults.append(Fault(folder, str(problem)))
        return faults

    def clear(self, winners: bool = False) -> tuple[int, int]:
        """Remove all that a build brings back, and what dead processes left; gives the number of entries and of bytes.

        With `winners` what was tuned too. Only folders that attncc makes itself are touched. Raises EnvironmentFault
        where one cannot be removed.
        """
        count = size = 0
        for kind, folder in list(self._folders()):
            if kind not in REBUILT and not winners:
                continue
            held = occupied(folder)
            publish.remove_tree(folder)
            if folder.exists():
                raise EnvironmentFault(f"{folder} cannot be removed: is it writable?")
            count, size = count + 1, size + held
        work = self.root / LAYOUT / "work"
        if work.is_dir():
            sweep(work)
        return count, size

    def _folder(self, kind: str, digest: str) -> Path:
        return self.root / LAYOUT / kind / digest

    def _folders(self) -> Iterator[tuple[str, Path]]:
        for kind in KINDS:
            try:
                found = sorted(p for p in (self.root / LAYOUT / kind).iterdir() if p.is_dir())
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as problem:
                raise EnvironmentFault(f"the cache folder {self.root} cannot be read: {problem.strerror}") from None
            yield from ((kind, p) for p in found)

    def _work_folder(self) -> Path | None:
        """The folder of what is being built, made private; None (and the one warning) where that fails."""
        work = self.root / LAYOUT / "work"
        try:
            if not self.root.is_dir():
                self.root.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    self.root.mkdir(mode=0o700)
            refuse_unsafe(self.root)
            for folder in (self.root / LAYOUT, work):
                folder.mkdir(mode=0o700, exist_ok=True)
            if not os.access(work, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            sweep(work)
        except OSError as problem:
            self._degrade(problem)
            return None
        return work

    def _build(self, key: keys.Key, digest: str, work: Path, builder: Builder) -> Entry:
        try:
            staged = work / process.own_name()
            staged.mkdir(mode=0o700)
        except OSError as problem:
            self._degrade(problem)
            return self._build_aside(key, builder)
        folder = self._folder(key.kind, digest)
        sealing = False
        try:
            builder(staged)
            sealing = True
            publish.seal(staged, key.kind, keys.plain(key))
            publish.rename_into(staged, folder, staged.with_name(process.own_name()))
        except OSError as problem:
            if not sealing and problem.errno not in DISK_FULL:
                raise  # the builder's own trouble
            self._degrade(problem)
            return self._build_aside(key, builder)
        finally:
            publish.remove_tree(staged)
        entry = self._fresh(folder, key, None)
        if self._limit is not None:
            lost = [p for kind, p in self._folders() if kind in REBUILT and p != folder]
            evict(lost, self._limit - occupied(folder), work)
        return entry

    def _build_aside(self, key: keys.Key, builder: Builder) -> Entry:
        """Build without the cache, in a folder that lives as long as the entry does."""
        try:
            folder = tempfile.TemporaryDirectory(prefix="attncc-", ignore_cleanup_errors=True)
        except OSError as problem:
            raise EnvironmentFault(f"no folder for temporary files can be made: {problem}") from None
        inside = Path(folder.name, keys.key_digest(key))
        inside.mkdir(mode=0o700)
        builder(inside)
        publish.seal(inside, key.kind, keys.plain(key))
        return self._fresh(inside, key, folder)

    def _fresh(self, folder: Path, key: keys.Key, keep: Any) -> Entry:
        try:
            sealed = publish.unseal(folder)
        except (publish.Broken, OSError) as problem:
            raise EnvironmentFault(f"{folder} changed while it was written: {problem}") from None
        return Entry(folder, key.kind, folder.name, sealed.key, sealed.files, fresh=True, keep=keep)

    def _degrade(self, problem: OSError) -> None:
        if self._warned:
            return
        self._warned = True
        reason = problem.strerror or type(problem).__name__
        self._warn(
            f"the cache folder {self.root} cannot be used ({reason}): going on without it; ATTNCC_CACHE_DIR moves it"
        )
