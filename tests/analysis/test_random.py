"""Random masks against the whole grid: a fixed sample each time, 20,000 of them in the long run."""

from __future__ import annotations

import pytest
from brute import Tally, compare
from expressions import SORTED, TABLES, Maker
from spelling import grid, spec_of

from attncc.analysis import visits

TILES = (16, 32, 64)


def try_out(seed: int, count: int, calls: int = 1, **fixed: int) -> Tally:
    """Random masks with random options (those in `fixed` are not): nothing missed, nothing twice, full is full."""
    maker = Maker(seed)
    total = Tally()
    for i in range(count):
        text = maker.boolean(2 + int(maker.rng.integers(2)))
        tables, align = (SORTED if maker.rng.integers(2) else TABLES), ("end", "start")[int(maker.rng.integers(4)) == 0]
        spec = spec_of(text, tables, align)
        drawn = maker.rng.integers(0, 4, 3)
        options = {"tables": bool(drawn[0]), "search": bool(drawn[1] > 1), "ranges": 1 + int(drawn[2] > 0), **fixed}
        for outer in ("q", "k"):
            found = visits(spec, outer, **options)
            for _ in range(calls):
                call, tiles, h = (
                    maker.call(),
                    tuple(int(x) for x in maker.rng.choice(TILES, 2)),
                    int(maker.rng.integers(8)),
                )
                one = compare(spec, found, grid(text, call, align, 0, h), call, tiles, 0, h)
                assert one.wrong == 0, (
                    seed,
                    i,
                    text,
                    align,
                    outer,
                    options,
                    call.q_len,
                    call.k_len,
                    call.scalars,
                    tiles,
                )
                total += one
    return total


def test_a_sample_of_random_masks() -> None:
    try_out(0, 80)


def test_ranges_and_tests_of_random_masks_are_tight() -> None:
    total = try_out(1000, 100, 2, tables=True, ranges=2)
    assert total.refined <= 1.05 * total.needed
    assert total.proved >= 0.95 * total.full


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 41))
def test_twenty_thousand_random_masks(seed: int) -> None:
    try_out(seed, 500)
