"""Tiles whose scores read one entry of a table for all pairs take one number: which specs have them, and that it is
right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attncc import pipeline
from attncc.analysis import same_entry
from attncc.frontend import parse
from tests.scripts import interpreted

SCRIPT = Path(__file__).with_name("interpreted_same_entry.py")
TAKEN = [
    "attention a(t: f32[h, n]) { mask k <= q score s + t[h, min(q - k, n - 1)] }",
    "attention a(t: f32[n, h], at: i32[m]) { let d = min(max(k - q, -5), 5) score s + t[at[d + 5], h] }",
    "attention a(t: f32[n], c: float) { mask k <= q score where(k < q, s * t[min(q - k, 3)], s + c) }",
    "attention a(t: f32[n], u: f32[m]) { mask q - k < 60 score s + t[min(max(q - k, 0), 6)] "
    "score tanh(s + u[min(k // 4, q // 9)]) }",
    "attention a(t: f32[n]) { let d = min(q - k, 9) mask d >= 0 score s + d * 0.01 + t[d] softmax off_by_one }",
]  # fmt: skip
LEFT = [
    "attention a { mask k <= q }",
    "attention a(t: f32[h, n]) { mask k <= q score s + t[h, q - k] }",
    "attention a(t: f32[h, row, k]) { score s + t[h, row, k] }",
    "attention a(t: f32[n], u: f32[h, row, k]) { score s + t[min(abs(q - k), 4)] + u[h, row, k] }",
    "attention a(t: f32[n]) { mask t[min(abs(q - k), 4)] > 0 score s + t[min(abs(q - k), 4)] }",
    "attention a(t: f32[n]) { let x = t[min(abs(q - k), 4)] score s + x }",
    "attention a(t: f32[n], at: i32[row]) { score s + t[min(k, at[row])] }",
    "attention a(t: bf16[h, n]) { mask k <= q score s + t[h, min(q - k, n - 1)] }",
]


@pytest.mark.parametrize("text", TAKEN)
def test_a_clamped_distance_is_taken_once(text):
    planned = pipeline.plan(pipeline.Request(text=text + " schedule { algorithm fa2 }", target="sm_90"))
    assert "if same_index == " in pipeline.render(planned) or " & (same_index_" in pipeline.render(planned)


@pytest.mark.parametrize("text", LEFT)
def test_what_has_no_such_tiles_or_shares_what_it_reads(text):
    assert same_entry(parse(text).spec) is None


def test_near_and_far_tiles_are_right():
    found = interpreted(SCRIPT, given=json.dumps(TAKEN))
    assert len(found) == 3 * len(TAKEN)
    assert not [row for row in found if row["faults"]]
