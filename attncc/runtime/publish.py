"""Files that are there whole or not at all: write beside, fsync, rename; in an entry the manifest comes last."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attncc.runtime import keys

MANIFEST = "manifest.json"
FORMAT = 1


class Broken(Exception):
    """An entry that is not what its manifest says; the text says in which way."""


@dataclass(frozen=True)
class Sealed:
    """A published folder whose every byte was compared with its manifest."""

    kind: str
    key: Any  # the key in plain form
    files: Mapping[str, bytes]


def write_new(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Create a file that was not there, with its bytes on disk. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), mode)
    with open(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def fsync_folder(path: Path) -> None:
    """Put a folder's names on disk; a file system that cannot do that for folders is left to its own order."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, content: bytes) -> bool:
    """Give a user's file new content in one step, keeping its permissions; False where it had that content already.

    A symbolic link keeps pointing where it pointed: the file it leads to is replaced. Raises OSError.
    """
    path = Path(os.path.realpath(path))
    try:
        if path.read_bytes() == content:
            return False
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        mode = 0o666 & ~_umask()
    fd, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:64]}.")
    try:
        with open(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode) if hasattr(os, "fchmod") else os.chmod(beside, mode)
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    fsync_folder(path.parent)
    return True


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current


def seal(folder: Path, kind: str, content: Any) -> None:
    """Fsync what a builder wrote, then write the manifest with sizes and sha256. Raises OSError, ValueError."""
    remove_tree(folder / "__pycache__")
    listed = {}
    for name in sorted(os.listdir(folder)):
        path = folder / name
        if name == MANIFEST or not path.is_file() or path.is_symlink():
            raise ValueError(f"an entry holds plain files only, and writes no {MANIFEST} itself: {name}")
        with open(path, "rb") as file:
            data = file.read()
            os.fsync(file.fileno())
        listed[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest = {"format": FORMAT, "kind": kind, "key": content, "files": listed}
    write_new(folder / MANIFEST, (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode("ascii"))
    fsync_folder(folder)


def unseal(folder: Path) -> Sealed:
    """Read an entry and compare all of it with its manifest. Raises FileNotFoundError (no entry) or Broken."""
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    manifest = _manifest(folder)
    files = {name: _checked(folder, name, facts) for name, facts in manifest["files"].items()}
    unlisted = set(os.listdir(folder)) - set(files) - {MANIFEST, "__pycache__"}
    if unlisted:
        raise Broken(f"{min(unlisted)} is not in its manifest")
    if keys.digest(manifest["kind"], manifest["key"]) != folder.name:
        raise Broken("its key does not give its name")
    return Sealed(manifest["kind"], manifest["key"], files)


def _manifest(folder: Path) -> dict[str, Any]:
    if not is_private(folder):
        raise Broken("it belongs to another user, or others may write to it")
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise Broken("it has no manifest") from None
    except (OSError, ValueError, RecursionError):
        raise Broken("its manifest cannot be read") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise Broken("its manifest is of another format")
    if (
        not isinstance(manifest.get("files"), dict)
        or not isinstance(manifest.get("kind"), str)
        or "key" not in manifest
    ):
        raise Broken("its manifest is incomplete")
    return manifest


def _checked(folder: Path, name: str, facts: Any) -> bytes:
    if name in ("", ".", "..", MANIFEST) or "/" in name or "\\" in name or "\0" in name:
        raise Broken(f"its manifest names {name!r}")
    try:
        data = (folder / name).read_bytes()
    except OSError:
        raise Broken(f"{name} is missing") from None
    if not isinstance(facts, dict) or len(data) != facts.get("size"):
        raise Broken(f"{name} has {len(data)} bytes, which is not what its manifest says")
    if hashlib.sha256(data).hexdigest() != facts.get("sha256"):
        raise Broken(f"{name} has other content than its manifest says")
    return data


def is_private(folder: Path) -> bool:
    """Ours, and writable by us alone."""
    facts = folder.stat()
    ours = not hasattr(os, "geteuid") or facts.st_uid == os.geteuid()
    return ours and not facts.st_mode & 0o022


def rename_into(staged: Path, final: Path, aside: Path) -> None:
    """Publish a sealed folder under its name, moving what is there aside first. Raises OSError.

    A reader sees the old entry, none, or the new one whole, and takes "none" for a miss.
    """
    final.parent.mkdir(mode=0o700, exist_ok=True)
    for _ in range(8):
        try:
            os.rename(staged, final)
            break
        except OSError:  # something non-empty has the name: a broken entry, or another process was first
            if not os.path.lexists(final):
                raise
            with contextlib.suppress(FileNotFoundError), _moved(final, aside):
                pass
    else:
        raise OSError(f"{final} is busy")
    fsync_folder(final.parent)


@contextlib.contextmanager
def _moved(path: Path, aside: Path) -> Iterator[None]:
    os.rename(path, aside)
    try:
        yield
    finally:
        remove_tree(aside)


def remove_tree(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
