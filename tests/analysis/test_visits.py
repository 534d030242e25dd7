"""Tile ranges against the whole grid."""

from __future__ import annotations

import pytest
from brute import check
from corpus import MASKS, SHAPES, Mask

BY_NAME = {m.name: m for m in MASKS}


@pytest.mark.parametrize("outer", ["q", "k"])
@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.name)
def test_no_tile_is_missed_or_visited_twice_and_full_is_full(mask: Mask, outer: str) -> None:
    for i in range(2):
        shape = SHAPES[(MASKS.index(mask) + 3 * i) % 9]
        for tables in (False, True):
            assert check(mask, shape, outer, tables=tables).wrong == 0, (shape, tables)
