"""Proofs and counts against the whole grid; warnings in plain words."""

from __future__ import annotations

import numpy as np
import pytest
from brute import environment, programs
from contents import HEADS, B
from corpus import MASKS, SHAPES, Mask
from spelling import Table, grid, spec_of

from attncc.analysis import counts, evaluate, kept_pairs, prove, row_counts, tile_counts, visited_tiles
from attncc.analysis.prove import future
from attncc.analysis.words import text
from attncc.frontend import parse
from attncc.ir import Shape

# Masks whose rows have no closed form: they are counted pair by pair, and only where the grid is small.
SAMPLE = [SHAPES[i] for i in (1, 2, 4, 8)]


def shape_of(shape: tuple[int, int, int, int]) -> Shape:
    return Shape(batch=B, heads=HEADS, kv_heads=HEADS, q_len=shape[0], k_len=shape[1])


def grids(mask: Mask, shape: tuple[int, int, int, int]) -> list[np.ndarray]:
    call = mask.call(shape[0], shape[1])
    return [grid(mask.text, call, mask.align, b, h) for b in range(B) for h in range(HEADS)]


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.name)
def test_what_is_proved_holds_in_every_call(mask: Mask) -> None:
    spec = spec_of(mask.text, mask.tables, mask.align)
    proved = prove(spec)
    for shape in SAMPLE:
        call = mask.call(shape[0], shape[1])
        for b, h in programs(mask.text):
            dense = grid(mask.text, call, mask.align, b, h)
            row, k = np.indices(dense.shape)
            q = row + (call.k_len - call.q_len if mask.align == "end" else 0)
            if proved.causal:
                assert not (dense & (k > (q if proved.causal == "k <= q" else row))).any()
            assert not proved.always or dense.all()
            assert not proved.never or not dense.any()
            empty = not dense.any(1).all()
            if proved.empty_rows in ("never", "always"):
                assert empty == (proved.empty_rows == "always")
            if proved.no_empty_row is not None:
                condition = bool(evaluate(proved.no_empty_row, environment(call, {}, b, h)))
                assert not (condition and empty), text(proved.no_empty_row)
                assert proved.empty_rows != "when" or condition != empty, text(proved.no_empty_row)


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.name)
def test_counts_are_exact(mask: Mask) -> None:
    spec = spec_of(mask.text, mask.tables, mask.align)
    for shape in SAMPLE[:2]:
        call = mask.call(shape[0], shape[1])
        values = {**call.scalars, **call.tensors}
        all_of_them = grids(mask, shape)
        assert kept_pairs(spec, shape_of(shape), values) == sum(int(d.sum()) for d in all_of_them)
        assert row_counts(spec, shape_of(shape), values).empty == sum(int((~d.any(1)).sum()) for d in all_of_them)


@pytest.mark.parametrize("text_", ["k <= q", "0 <= q - k < w", "k <= q and (k < w or (q - k) % 3 == 0)", "k % w < 2"])
def test_counts_of_a_million_rows_take_no_grid(text_: str) -> None:
    n = 2**20
    got = kept_pairs(spec_of(text_), Shape(batch=1, heads=1, kv_heads=1, q_len=n, k_len=n), {"w": 1024})
    k = np.arange(n, dtype=np.int64)
    stripes = int(((k % 1024) < 2).sum())
    wanted = {
        "k <= q": n * (n + 1) // 2,
        "0 <= q - k < w": 1024 * n - 1024 * 1023 // 2,
        "k % w < 2": n * stripes,
        "k <= q and (k < w or (q - k) % 3 == 0)": int(
            (np.minimum(k + 1, 1024) + np.where(k >= 1024, (k - 1024) // 3 + 1, 0)).sum()
        ),
    }  # fmt: skip
    assert got == wanted[text_]


def test_a_count_that_needs_what_is_not_given_is_none() -> None:
    spec = spec_of("k < length[b]", {"length": Table("i32", ("b",))})
    shape = Shape(batch=2, heads=3, kv_heads=3, q_len=8, k_len=8)
    assert kept_pairs(spec, shape, {}) is None
    assert tile_counts(spec, shape, 16, 16, {}) is None
    assert row_counts(spec, shape, {}) is None
    assert visited_tiles(spec, shape, 16, 16, {}) is None
    assert kept_pairs(spec, shape, {"length": np.array([3, 8])}) == 3 * 8 * (3 + 8)


@pytest.mark.parametrize("mask", MASKS[::5], ids=lambda m: m.name)
def test_tiles_add_up_and_bound_the_work(mask: Mask) -> None:
    spec = spec_of(mask.text, mask.tables, mask.align)
    shape = SHAPES[1]
    call = mask.call(shape[0], shape[1])
    values = {**call.scalars, **call.tensors}
    called = ("_TILE_K" if "TILE_K" in call.scalars else "TILE_K"), "TILE_Q"
    assert called
    tiles = tile_counts(spec, shape_of(shape), shape[2], shape[3], values)
    assert tiles is not None
    everything = -(-shape[0] // shape[2]) * -(-shape[1] // shape[3]) * B * HEADS
    assert sum(tiles.values()) == everything
    even = visited_tiles(spec, shape_of(shape), shape[2], shape[3], values).balance
    assert even.least <= even.mean <= even.most
    assert round(even.mean * -(-shape[0] // shape[2]) * B * HEADS) == tiles["partial"] + tiles["full"]


def test_tiles_of_a_causal_mask() -> None:
    shape = Shape(batch=2, heads=4, kv_heads=4, q_len=4096, k_len=4096)
    assert tile_counts(spec_of("k <= q"), shape, 128, 64, {}) == {
        "skipped": 8 * 32 * 31, "partial": 8 * 64, "full": 8 * 32 * 31,
    }  # fmt: skip
    even = visited_tiles(spec_of("k <= q"), shape, 128, 64, {}).balance
    assert (even.least, even.most, even.mean) == (2, 64, 33.0)


@pytest.mark.parametrize(
    ("text_", "name", "code"),
    [
        ("k > q + 3 and k < q", "odd", "W201"),
        ("k >= q or k < q + 1", "odd", "W202"),
        ("true and k > q + 3 and k < q", "odd", "W201"),
        ("true", "odd", None),
        ("1 > 2", "odd", None),
        ("k <= q + w", "causal_window", "W203"),
        ("q - k < w", "causal", "W203"),
        ("k <= q or k < prefix[b]", "my_causal", "W203"),
        ("k <= q", "causal", None),
        ("0 <= q - k < w", "causal_window", None),
        ("q // 8 >= k // 8", "block_causal", None),
        ("k <= q + w", "window", None),
    ],
)
def test_masks_that_are_hardly_meant_are_warned_of(text_: str, name: str, code: str | None) -> None:
    found = prove(spec_of(text_, {"prefix": Table("i32", ("b",))}, name=name)).warnings
    assert [w.code for w in found] == ([code] if code else [])
    assert all(w.severity == "warning" and w.hint for w in found)


def test_a_mask_that_reads_nothing_is_told_of_once() -> None:
    def codes(*masks: str) -> list[str]:
        parsed = parse(f"attention x {{ {' '.join(f'mask {m}' for m in masks)} }}")
        return [d.code for d in (*parsed.warnings, *prove(parsed.spec).warnings)]

    assert codes("true") == codes("false") == codes("1 > 2", "k <= q") == ["W106"]
    assert codes("true", "false") == ["W106", "W106"]
    assert codes("true", "k > q", "k < q") == ["W106", "W201"]


def test_the_future_is_shown_by_a_pair() -> None:
    assert future(spec_of("q - k < w")) == "with q_len = k_len = 6, w = 1, row 0 sees key 1"
    assert future(spec_of("k <= q")) is None


@pytest.mark.parametrize(
    ("text_", "length", "values", "pairs", "empty"),
    [
        ("0 <= q - k < w", 16, {"w": 4}, 58, 0),
        ("0 <= q - k < w", 16, {"w": 5}, 70, 0),
        ("0 <= q - k < w", 16, {"w": 16}, 136, 0),
        ("0 <= q - k < w", 25, {"w": 6}, 135, 0),
        ("q - k < w", 25, {"w": 6}, 435, 0),  # a window without its causal half
        ("k < 4 and row < 4", 8, {}, 16, 4),
    ],
)
def test_pairs_of_reported_faults(text_: str, length: int, values: dict[str, int], pairs: int, empty: int) -> None:
    shape = Shape(batch=1, heads=1, kv_heads=1, q_len=length, k_len=length)
    assert kept_pairs(spec_of(text_), shape, values) == pairs
    assert row_counts(spec_of(text_), shape, values).empty == empty


def test_documents_by_ids_keep_what_packed_lengths_keep() -> None:
    spec = spec_of("doc[b, q] == doc[b, k]", {"doc": Table("i32", ("b", "k"))})
    ids = np.repeat([0, 1, 2], [3, 5, 8])[None]
    shape = Shape(batch=1, heads=2, kv_heads=2, q_len=16, k_len=16)
    assert kept_pairs(spec, shape, {"doc": ids}) == 2 * (3 * 3 + 5 * 5 + 8 * 8)


def test_packed_bits_count_like_booleans() -> None:
    spec = spec_of("on[b, row, k]", {"on": Table("bit", ("b", "row", "k"))})
    bits = np.random.default_rng(0).random((2, 40, 64)) < 0.3
    words = np.packbits(bits, axis=-1, bitorder="little").view(np.uint32).astype(np.int64).astype(np.int32)
    shape = Shape(batch=2, heads=3, kv_heads=3, q_len=40, k_len=64)
    assert kept_pairs(spec, shape, {"on": bits}) == kept_pairs(spec, shape, {"on": words}) == 3 * int(bits.sum())


def test_opaque_parts_come_with_a_reason() -> None:
    found = prove(
        spec_of("k <= q and (q - k) % d == 0 and k * k <= q * w and mark[b, k]", {"mark": Table("bool", ("b", "k"))})
    )
    reasons = dict(part.split(": ", 1) for part in found.opaque)
    assert reasons["mark[b, k]"].startswith("a tensor is read")
    assert "remainder" in reasons["(q - k) % d == 0"]
    assert len(reasons) == 3


@pytest.mark.parametrize(
    ("mask", "values"),
    [("0 <= q - k < w", {"w": 300}), ("k <= q and (q - k) % d == 0", {"d": 8}), ("q % d == 0", {"d": 64})],
)
def test_beyond_a_bound_rows_and_tiles_are_drawn(monkeypatch, mask, values):
    """Evenly, and not in step with what comes round again."""
    spec, shape = spec_of(mask), Shape(batch=2, heads=3, kv_heads=3, q_len=40_000, k_len=50_000)
    exact, tiles = counts.row_counts(spec, shape, values), counts.visited_tiles(spec, shape, 16, 512, values)
    monkeypatch.setattr(counts, "ROWS", 2000)
    monkeypatch.setattr(counts, "TESTED", 2**16)
    monkeypatch.setattr(counts, "DRAWN", 2000)
    monkeypatch.setattr(counts.drawn, "__defaults__", (2000,))
    about, some = counts.row_counts(spec, shape, values), counts.visited_tiles(spec, shape, 16, 512, values)
    assert (exact.drawn, tiles.drawn, about.drawn) == (None, None, 2000) and 0 < some.drawn <= 2000
    assert about.pairs == pytest.approx(exact.pairs, rel=0.06)
    assert about.empty == pytest.approx(exact.empty, rel=0.05)
    assert some.partial + some.full == pytest.approx(tiles.partial + tiles.full, rel=0.1)
    assert some.skipped + some.partial + some.full == tiles.skipped + tiles.partial + tiles.full
    assert some.balance.mean == pytest.approx(tiles.balance.mean, rel=0.1)


def test_ten_million_keys_take_few_evaluations(monkeypatch):
    made = []
    monkeypatch.setattr(counts, "evaluate", lambda e, env: made.append(e) or evaluate(e, env))
    shape = Shape(batch=1, heads=1, kv_heads=1, q_len=10**7, k_len=10**7)
    found = counts.visited_tiles(spec_of("k <= q and (k < 4 or q - k < w)"), shape, 128, 128, {"w": 1025})
    assert found.drawn is None and found.partial + found.full > 78_125 and len(made) < 100
