"""Compiled templates, kept beside Python's compiled modules: compiling those of one kernel takes a fifth of a second,
ten times as long as rendering it."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

import jinja2
from jinja2.bccache import Bucket, BytecodeCache

from attncc import pycache


class Templates(BytecodeCache):
    """One file for each template; what is broken, of another text or of other options is compiled anew."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = f"{jinja2.__version__} {sorted(options.items())}"

    def load_bytecode(self, bucket: Bucket) -> None:
        content = pycache.load(self._name(bucket), self._key(bucket))
        if content is not None:
            bucket.load_bytecode(BytesIO(content))

    def dump_bytecode(self, bucket: Bucket) -> None:
        made = BytesIO()
        bucket.write_bytecode(made)
        pycache.keep(self._name(bucket), self._key(bucket), made.getvalue())

    def _name(self, bucket: Bucket) -> str:
        """`bucket.key` is of the template's name and place."""
        return f"template-{bucket.key}"

    def _key(self, bucket: Bucket) -> str:
        return f"{self.options} {bucket.checksum}"
