"""What is made of the package's own data once, kept where Python keeps what it compiles of modules, under its rules.

The cache of kernels is no place for it: it is a part of the package, and the first call of a process that finds that
cache empty needs it most.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

DIGEST = 32  # bytes of each of the two digests before the content: of the key, and of the content


def folder() -> Path:
    return Path(importlib.util.cache_from_source(__file__)).parent


def load(name: str, key: str) -> bytes | None:
    """What was kept under a name; None where that was made by another key, or is broken, or not there."""
    with suppress(OSError):
        whole = _path(name).read_bytes()
        wanted, content = _digest(key.encode()), whole[2 * DIGEST :]
        if whole[: 2 * DIGEST] == wanted + _digest(content):
            return content
    return None


def keep(name: str, key: str, content: bytes) -> None:
    """In place of what the name had. Where Python may not write, or is told not to, nothing is kept."""
    if sys.dont_write_bytecode:
        return
    with suppress(OSError):
        path = _path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, staged = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_digest(key.encode()) + _digest(content) + content)
            os.replace(staged, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(staged)
            raise


def _path(name: str) -> Path:
    return folder() / f"{name}.{sys.implementation.cache_tag}.kept"


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
