"""What this version builds, as plain data; `refuse_unbuilt` reads it, and work that builds more adds to it."""

from __future__ import annotations

SOFTMAX = frozenset(
    ("online", "two_pass", "unified", "sink", "off_by_one", "sigmoid", "relu", "none", "custom", "sparsemax", "entmax")
)
LAYOUT = {"q": frozenset(("dense", "ragged")), "kv": frozenset(("dense", "ragged")), "v": frozenset(("",))}
QUANTISED: frozenset[str] = frozenset()  # elements of k and v in memory
INPUTS = frozenset(("bf16", "f16", "f32", "f8e4m3", "f8e5m2"))
BLOCK = 128  # rows or keys of a scale per block
ALGORITHMS = frozenset(("standard", "fa1", "fa2", "fa3"))
PASSES = frozenset(("forward", "backward"))
