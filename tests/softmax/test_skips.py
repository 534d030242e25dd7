"""Tiles of sparse weights that have none: later passes leave them out, and nothing changes by it."""

from __future__ import annotations

from pathlib import Path

from tests.scripts import interpreted

SCRIPT = Path(__file__).with_name("interpreted_skips.py")
SIDE = 10  # tiles
CAUSAL = SIDE * (SIDE + 1) // 2


def test_products_of_tiles_without_weights_are_left_out():
    """The forward pass makes one product of each tile to guess a threshold. The backward pass makes two of each to find
    weights and delta, then three for dQ and four for dK and dV of those that have some."""
    near, wide, one_key = interpreted(
        SCRIPT,
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
