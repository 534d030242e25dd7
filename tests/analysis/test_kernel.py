"""What a kernel makes of visits: which tiles are listed, which tests are left out, how tiles lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from attncc import analysis, frontend

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
