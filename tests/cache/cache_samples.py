"""Keys and builders that the tests of the cache share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from attncc.runtime.keys import KernelKey, Toolchain

TOOLS = Toolchain(attncc="1.0", triton="3.7.1", templates="aa", sources="bb")
KEY = KernelKey(
    spec="attention causal {\n    mask k <= q\n}\n", consts=(), direction="forward",
    plan={"tile_q": 128, "tile_k": 64}, target={"name": "sm_90"}, toolchain=TOOLS,
)  # fmt: skip


def write(content: str = "kernel = 1\n"):
    """A builder of two files."""

    def builder(folder: Path) -> None:
        (folder / "causal.py").write_text(content)
        (folder / "resources.json").write_text('{"registers": 168}\n')

    return builder


def other(**fields) -> KernelKey:
    return replace(KEY, **fields)
