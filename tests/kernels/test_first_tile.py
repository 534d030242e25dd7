"""Rows whose first tiles set the reference of their exponentials: right for any input, computed again where need be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("interpreted_first_tile.py")


def run(*names: str) -> list[dict]:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SCRIPT.parents[2])}
    found = subprocess.run([sys.executable, SCRIPT, *names], env=env, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    return [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]


def hold(rows: list[dict]) -> None:
    for row in rows:
        assert not row["nan"], row
        assert row["empty"], row
        # Beside a key of a thousand times the others' size, float32 products that cancel leave this much.
        lse = 3e-4 if row["kind"] == "spike" else 3e-5
        assert row["out"] < 2e-5 and row["lse"] < lse, row


def test_adversarial_rows():
    rows = run("causal", "window_alibi_sinks")
    assert {r["kind"] for r in rows} == {"plain", "grows", "falls", "spike", "large"}
    hold(rows)


def test_tiles_that_are_classed_or_listed():
    """Each row's reference is the first tile in which it sees something."""
    rows = run("document:grows", "neighborhood_2d:plain", "block_sparse:spike")
    assert len(rows) == 3
    hold(rows)


@pytest.mark.slow
def test_more_specs():
    hold(run())
