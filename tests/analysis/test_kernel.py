"""What a kernel makes of visits: which tiles are listed, which tests are left out, how tiles lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from brute import environment
from corpus import MASKS, SHAPES
from spelling import grid
from spelling import spec_of as spelled

from attncc import analysis, frontend
from attncc.analysis import evaluate
from attncc.analysis.prepass import tables
from attncc.ir import conjunction, tile_names

SPECS = Path(__file__).parents[2] / "specs"
SPREADS = {
    "full": "all", "causal": "dense", "prefix": "dense", "padding": "dense", "window": "local", "streaming": "local",
    "chunked": "local", "document": "local", "global_tokens": "local", "neighborhood_2d": "scattered",
    "dilated": "scattered", "block_sparse": "scattered",
}  # fmt: skip


def spec_of(name: str):
    parsed = frontend.parse((SPECS / f"{name}.attn").read_text())
    return frontend.bind(parsed, {p.name: p.default for p in parsed.spec.params if p.const})


@pytest.mark.parametrize("name", SPREADS)
def test_how_tiles_lie(name):
    spec = spec_of(name)
    assert analysis.spread(spec, analysis.kernel_visits(spec, forward=True)) == SPREADS[name]


def test_tiles_are_listed_where_a_table_has_an_entry_for_each_pair_of_blocks():
    listed = analysis.kernel_visits(spec_of("block_sparse"), forward=True)
    assert listed.listed and listed.may is not None and not listed.full and not listed.summaries
    assert not analysis.kernel_visits(spec_of("block_sparse")).listed
    for name in ("document", "neighborhood_2d", "tree"):
        assert not analysis.kernel_visits(spec_of(name), forward=True).listed


def test_whole_tiles_are_not_looked_for_twice():
    """Ranges give those of documents; a neighbourhood has none, and keeps its test."""
    document = spec_of("document")
    forward, backward = analysis.kernel_visits(document, forward=True), analysis.kernel_visits(document)
    assert forward.full and forward.may is not None and forward.must is None
    assert backward.must is not None
    assert analysis.kernel_visits(spec_of("neighborhood_2d"), forward=True).must is not None


def test_what_is_left_of_documents_is_causal():
    found = analysis.kernel_visits(spec_of("document"), forward=True)
    assert found.plain == spec_of("causal").masks and found.plain_end is not None
    assert analysis.kernel_visits(spec_of("document")).plain_end is None
    assert sum(analysis.visits(spelled(m.text, m.tables, m.align), "q", tables=True, plain=True).plain_end is not None
               for m in MASKS) >= 5  # fmt: skip


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.name)
def test_where_tensors_keep_all_the_rest_of_the_mask_decides(mask):
    spec = spelled(mask.text, mask.tables, mask.align)
    found = analysis.visits(spec, "q", tables=True, plain=True)
    if found.plain_end is None:
        return
    for q_len, k_len, tile_q, tile_k in SHAPES[::3]:
        call = mask.call(q_len, k_len, 0)
        dense = grid(mask.text, call, mask.align, 0, 0)
        called = tile_names({p.name for p in spec.params} | set(spec.free_axes))
        sizes = {called["TILE_Q"]: tile_q, called["TILE_K"]: tile_k}
        env = tables(found, spec, environment(call, sizes, 0, 0))
        row, k = np.arange(q_len)[:, None], np.arange(k_len)[None]
        shift = k_len - q_len if mask.align == "end" else 0
        rest = np.broadcast_to(evaluate(conjunction(found.plain), env.plus(row=row, q=row + shift, k=k)), dense.shape)
        for tile in range(-(-q_len // tile_q)):
            first, last = tile * tile_q, min(tile * tile_q + tile_q, q_len) - 1
            here = env.plus(**{called["tile"]: tile, called["first"]: first, called["last"]: last})
            for name, value in found.lets:
                here = here.plus(**{name: evaluate(value, here)})
            behind, end = (int(evaluate(e, here)) for e in (found.full[-1].end, found.plain_end))
            assert behind <= end <= max(int(evaluate(found.masked[-1].end, here)), behind)
            there = np.s_[first : last + 1, behind * tile_k : end * tile_k]
            assert (rest[there] == dense[there]).all()
