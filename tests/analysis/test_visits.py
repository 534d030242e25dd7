"""Tile ranges against the whole grid."""

from __future__ import annotations

import pytest
from brute import Tally, check
from corpus import MASKS, SHAPES, Mask
from spelling import spec_of

from attncc.analysis import visits
from attncc.frontend import parse
from attncc.ir import Const, Op, walk

BY_NAME = {m.name: m for m in MASKS}
OPTIONS = ({"tables": False}, {"tables": True}, {"tables": True, "search": True, "ranges": 1})


@pytest.mark.parametrize("outer", ["q", "k"])
@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.name)
def test_no_tile_is_missed_or_visited_twice_and_full_is_full(mask: Mask, outer: str) -> None:
    for i, options in enumerate(OPTIONS):
        shape = SHAPES[(MASKS.index(mask) + 3 * i) % 9]
        assert check(mask, shape, outer, **options).wrong == 0, (shape, options)


@pytest.mark.slow
@pytest.mark.parametrize("outer", ["q", "k"])
@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.name)
def test_every_mask_and_shape(mask: Mask, outer: str) -> None:
    for shape in SHAPES:
        for options in OPTIONS:
            assert check(mask, shape, outer, **options).wrong == 0, (shape, options)


@pytest.mark.parametrize("outer", ["q", "k"])
def test_few_tiles_are_visited_for_nothing_and_full_ones_found(outer: str) -> None:
    total = Tally()
    for i, mask in enumerate(MASKS):
        total += check(mask, SHAPES[i % 8], outer, tables=True)
    assert total.wrong == 0
    assert total.visited <= 1.1 * total.needed  # by the segments alone
    assert total.refined <= 1.05 * total.needed
    assert total.proved >= 0.95 * total.full


def test_masks_without_tensors_need_no_table() -> None:
    for mask in MASKS:
        if not mask.tables:
            spec = spec_of(mask.text, mask.tables, mask.align)
            assert not visits(spec, "q", tables=True).summaries and not visits(spec, "k", tables=True).summaries


def test_documents_take_a_quarter_megabyte_at_a_million_positions() -> None:
    spec = spec_of("k <= q and doc[b, q] == doc[b, k]", BY_NAME["documents"].tables)
    found = visits(spec, "q", tables=True)
    tiles = 2**20 // 128
    stored = [
        s for s in found.summaries if not (s.axis == "q" and s.reduce in ("min", "max"))
    ]  # of its own rows: no table
    assert all(s.over == ("b",) for s in stored)
    assert 4 * len(stored) * tiles <= 256 * 1024  # int32


@pytest.mark.parametrize("outer", ["q", "k"])
def test_plans_stay_small(outer: str) -> None:
    """What a kernel prints before its loops: the nodes of the lets and ends."""
    sizes = []
    for mask in MASKS:
        v = visits(spec_of(mask.text, mask.tables, mask.align), outer, tables=True)
        ends = [e for s in (*v.masked, *v.full) for e in (s.begin, s.end)]
        sizes.append(sum(isinstance(n, Op) for e in (*(e for _, e in v.lets), *ends) for n in walk(e)))
    assert sorted(sizes)[len(sizes) // 2] <= 40
    assert max(sizes) <= 500


def test_a_constant_false_is_not_the_constant_0_beside_it() -> None:
    assert Const(False) != Const(0) != Const(0.0)
    found = visits(parse("attention x(w: int) { mask false mask 0 <= q - k < w }").spec, "q")
    assert not found.masked and not found.full
