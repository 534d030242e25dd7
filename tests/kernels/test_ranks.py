"""Tiles of rows in the order in which programs draw them where what rows read says how many keys they see."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from attncc import pipeline
from tests.scripts import interpreted

SCRIPT = Path(__file__).with_name("interpreted_ranks.py")
SPECS = Path(__file__).parents[2] / "specs"
SIDE, LENGTH = 100, 1500
TEXT = (
    "attention some(side: int, is_global: bool[{0}, k]) {{ "
    "align start mask abs(q - k) <= side or is_global[{0}, k] or is_global[{0}, q] }}"
)


def seen(flags: list[bool], tile_q: int, tile_k: int) -> list[int]:
    """Tiles of keys that hold a pair, for each tile of rows, by looking at the places of flags."""
    held = {i // tile_k for i, flag in enumerate(flags) if flag}
    every, counts = -(-LENGTH // tile_k), []
    for first in range(0, LENGTH, tile_q):
        last = min(first + tile_q, LENGTH) - 1
        near = range(max(0, first - SIDE) // tile_k, min(LENGTH - 1, last + SIDE) // tile_k + 1)
        counts.append(every if any(flags[first : last + 1]) else len(held | set(near)))
    return counts


@pytest.mark.parametrize("axis", ["b", "h"])
def test_tiles_that_see_most_are_drawn_first(axis):
    rng = random.Random(5)
    flags = [[False] * LENGTH for _ in range(3)]
    for one in flags[1:]:  # the first has none
        for place in rng.sample(range(LENGTH), 3):
            one[place] = True
    given = json.dumps({"text": TEXT.format(axis), "side": SIDE, "flags": flags})
    tile_q, tile_k, found = interpreted(SCRIPT, given=given)[0]
    for one, (order, counts) in zip(flags, found, strict=True):
        assert counts == seen(one, tile_q, tile_k)
        assert order == sorted(range(len(counts)), key=lambda tile: (-counts[tile], -tile))


@pytest.mark.parametrize(("name", "ranked"), [("global_tokens", True), ("document", False), ("causal", False)])
def test_others_come_as_they_lie(name, ranked):
    request = pipeline.Request(text=(SPECS / f"{name}.attn").read_text(encoding="utf-8"), target="sm_90")
    text = pipeline.render(pipeline.plan(request))
    assert ("gl.load(Ranked" in text) == (f"{name}_forward_ranks" in text) == ranked
