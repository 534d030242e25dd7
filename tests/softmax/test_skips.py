"""Tiles of sparse weights that have none: later passes leave them out, and nothing changes by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("interpreted_skips.py")
SIDE = 10  # tiles
CAUSAL = SIDE * (SIDE + 1) // 2
STREAMS = "mask k < 4 or 0 <= q - k < 40"  # 16 tiles of keys' begin, and at most 4 before each row's own


def counted(*texts: str) -> list[dict]:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SCRIPT.parents[2])}
    found = subprocess.run([sys.executable, SCRIPT, *texts], env=env, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    return [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]


def test_products_of_tiles_without_weights_are_left_out():
    """The forward pass makes one product of each tile to guess a threshold. The backward pass makes two of each to find
    weights and delta, then three for dQ and four for dK and dV of those that have some."""
    near, wide, one_key = counted(
        "attention near { mask k <= q score s - 2 * (q - k) softmax entmax(1.5) }",
        "attention wide { mask k <= q score 0.01 * s softmax sparsemax }",
        "attention one_key { score s + 40 * where(k == 70, 1, 0) softmax sparsemax }",
    )
    for found in (near, wide, one_key):
        assert found["error"] < 1e-5, found
    assert near["weighty"] < CAUSAL / 2 and wide["weighty"] == CAUSAL and one_key["weighty"] == SIDE
    assert near["backward"] == 2 * CAUSAL + 7 * near["weighty"]
    assert wide["backward"] == 9 * CAUSAL
    assert one_key["backward"] == 2 * SIDE * SIDE + 7 * SIDE
    assert near["forward"] < CAUSAL + 12 * near["weighty"] < wide["forward"]
    assert one_key["forward"] < SIDE * SIDE + 12 * SIDE
