"""Tiles in which an index has one value: the test says so only where it is true, and often enough to be of use."""

from __future__ import annotations

import pytest

from attncc.analysis import Env, alike_visits, evaluate, kernel_visits
from attncc.frontend import parse
from attncc.ir import Read, walk

TILE, Q, K = 16, 90, 130


def index_of(score: str):
    spec = parse(f"attention x(t: f32[n]) {{ score s + t[{score}] mask k <= q }}").spec
    (read,) = (n for n in walk(spec.scores[0]) if isinstance(n, Read))
    return spec, read.indices[0]


@pytest.mark.parametrize("outer", ["q", "k"])
@pytest.mark.parametrize("score", ["min(max(q - k, -3), 4) + 3", "min(q, 20)", "min(max(2 * k - q, 0), 1)"])
def test_a_tile_that_passes_has_one_value(outer, score):
    spec, index = index_of(score)
    found = alike_visits(spec, kernel_visits(spec, outer), [index])
    assert found is not None
    visits, (value,) = found
    sizes = {"q_len": Q, "k_len": K, "TILE_Q": TILE, "TILE_K": TILE, "n": 9, "b_len": 1, "h_len": 1}
    lengths = (Q, K) if outer == "q" else (K, Q)
    passed = 0
    for first in range(0, lengths[0], TILE):
        for inner in range(0, lengths[1], TILE):
            last, inner_last = min(first + TILE, lengths[0]) - 1, min(inner + TILE, lengths[1]) - 1
            at = {"first": first, "last": last, "inner_first": inner, "inner_last": inner_last}
            env = Env({**sizes, **at, "tile": first // TILE, "inner_tile": inner // TILE})
            rows, keys = (range(first, last + 1), range(inner, inner_last + 1))[:: 1 if outer == "q" else -1]
            pairs = [(row + K - Q, k) for row in rows for k in keys]
            values = {evaluate(index, env.plus(q=q, k=k)) for q, k in pairs}
            kept = all(k <= q for q, k in pairs)
            if evaluate(visits.must, env):
                passed += 1
                assert values == {evaluate(value, env)} and kept and inner + TILE <= lengths[1]
    assert passed > 5


def test_what_is_not_bounded_is_not_told_apart():
    spec, index = index_of("floor(exp(0.1 * k))")
    assert alike_visits(spec, kernel_visits(spec, "q"), [index]) is None
