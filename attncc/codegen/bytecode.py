"""Compiled templates, kept where Python keeps what it compiles of our modules, and under its rules.

Compiling those of one kernel takes a fifth of a second, ten times as long as rendering it. The cache of kernels is
no place for them: they are a part of the package, and the first call of a process that finds that cache empty needs
them most.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import jinja2
from jinja2.bccache import Bucket, BytecodeCache

DIGEST = 32  # bytes of the digest before the content


class Templates(BytecodeCache):
    """One file for each template; whatever is broken, of another text or of other options is compiled anew."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.folder = Path(importlib.util.cache_from_source(__file__)).parent
        self.options = f"{jinja2.__version__} {sorted(options.items())}"

    def get_source_checksum(self, source: str) -> str:
        return hashlib.sha256(f"{self.options}\n{source}".encode()).hexdigest()

    def load_bytecode(self, bucket: Bucket) -> None:
        with suppress(OSError):
            content = self._path(bucket).read_bytes()
            if hashlib.sha256(content[DIGEST:]).digest() == content[:DIGEST]:
                bucket.load_bytecode(BytesIO(content[DIGEST:]))

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Where Python may not write, or is told not to, each process compiles for itself."""
        if sys.dont_write_bytecode:
            return
        made = BytesIO()
        bucket.write_bytecode(made)
        content = hashlib.sha256(made.getvalue()).digest() + made.getvalue()
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, staged = tempfile.mkstemp(dir=self.folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
                os.replace(staged, self._path(bucket))
            except BaseException:
                with suppress(OSError):
                    os.unlink(staged)
                raise

    def _path(self, bucket: Bucket) -> Path:
        """`bucket.key` is of the template's name and place."""
        return self.folder / f"template-{bucket.key}.{sys.implementation.cache_tag}.bin"
