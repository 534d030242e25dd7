"""Rows whose first tiles set the reference of their exponentials: right for any input, computed again where need be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import interpreted

SCRIPT = Path(__file__).with_name("interpreted_first_tile.py")


def hold(rows: list[dict]) -> None:
    for row in rows:
        assert not row["nan"], row
        assert row["empty"], row
        # Beside a key of a thousand times the others' size, float32 products that cancel leave this much.
        lse = 3e-4 if row["kind"] == "spike" else 3e-5
        assert row["out"] < 2e-5 and row["lse"] < lse, row


def test_adversarial_rows():
    rows = interpreted(SCRIPT, "causal", "window_alibi_sinks")
    assert {r["kind"] for r in rows} == {"plain", "grows", "falls", "spike", "large"}
    hold(rows)


def test_tiles_that_are_classed_or_listed():
    """Each row's reference is the first tile in which it sees something."""
    rows = interpreted(SCRIPT, "document:grows", "neighborhood_2d:plain", "block_sparse:spike")
    assert len(rows) == 3
    hold(rows)


@pytest.mark.slow
def test_more_specs():
    hold(interpreted(SCRIPT))
