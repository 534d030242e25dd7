"""Masks that people use, and masks that are hard: text, parameters and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from contents import (
    HEADS,
    B,
    Number,
    Tensors,
    big_bird,
    block_table,
    documents,
    each_batch,
    images,
    lengths,
    part,
    row_bounds,
    runs,
    tree,
    two_documents,
)
from spelling import Call, Table


@dataclass(frozen=True)
class Mask:
    name: str
    text: str
    scalars: Mapping[str, Number] = field(default_factory=dict)
    tables: Mapping[str, Table] = field(default_factory=dict)
    tensors: Tensors | None = None
    align: str = "end"

    def call(self, q_len: int, k_len: int, seed: int = 0) -> Call:
        rng = np.random.default_rng(seed + 7 * q_len + k_len)
        scalars = {n: int(v(q_len, k_len, rng)) if callable(v) else v for n, v in self.scalars.items()}
        tensors = dict(self.tensors(q_len, k_len, rng, scalars)) if self.tensors else {}
        for name, table in self.tables.items():
            for axis, extent in zip(table.axes, np.shape(tensors[name])):
                if isinstance(axis, str) and axis not in ("b", "h", "h_kv", "row", "k"):
                    scalars[axis] = int(extent)
        return Call(q_len, k_len, scalars, tensors)


DOC = {"doc": Table("i32", ("b", "k"))}
DOC_SORTED = {"doc": Table("i32", ("b", "k"), sorted=True)}
LENGTH = {"length": Table("i32", ("b",)), "q_length": Table("i32", ("b",)), "prefix": Table("i32", ("b",))}
BOUNDS = {"lo": Table("i32", ("b", "row")), "hi": Table("i32", ("b", "row"))}
BOUNDS_SORTED = {n: Table("i32", ("b", "row"), sorted=True) for n in ("lo", "hi")}
TREE = {
    "enter": Table("i32", ("b", "nodes")),
    "leave": Table("i32", ("b", "nodes")),
    "until": Table("i32", ("b", "nodes")),
    "ancestor": Table("bool", ("b", "nodes", "nodes")),
}
CACHED = {"p": lambda Q, K, rng: max(0, K - Q)}
IMAGES = {**DOC_SORTED, "img": Table("i32", ("b", "k"))}
BLOCKS = {"blocks": Table("bool", ("h", "q_blocks", "k_blocks"))}
W = {"w": part(6)}
GRID = {"W": 16, "r": 2}

MASKS = [
    Mask("full", "True"),
    Mask("empty", "False"),
    Mask("contradiction", "k > q + 3 and k < q"),
    Mask("contradiction by a parameter", "k >= q + w and k < q + w - 5", W),
    Mask("causal", "k <= q"),
    Mask("causal from the start", "k <= q", align="start"),
    Mask("causal by rows", "k <= row"),
    Mask("anti-causal", "k >= q"),
    Mask("anti-causal from the start", "k >= q", align="start"),
    Mask("window", "0 <= q - k < w", W),
    Mask("window from the start", "0 <= q - k < w", W, align="start"),
    Mask("window that is empty", "0 <= q - k < w", {"w": 0}),
    Mask("window below nothing", "0 <= q - k < w", {"w": -3}),
    Mask("window to both sides", "q - wl <= k <= q + wr", {"wl": part(5), "wr": part(12)}),
    Mask("band", "abs(q - k) <= w", W),
    Mask("outside a band", "not (abs(q - k) <= w)", W),
    Mask("dilated band", "abs(q - k) <= w and (q - k) % d == 0", {"w": part(5), "d": 4}),
    Mask("dilated causal", "k <= q and (q - k) % d == 0", {"d": 3}),
    Mask("widely dilated", "k <= q and (q - k) % 64 < 8"),
    Mask("streaming", "k <= q and (k < first or q - k < w)".replace("first", "sinks"), {"w": part(6), "sinks": 4}),
    Mask("streaming from the start", "k <= q and (k < sinks or q - k < w)", {"w": part(6), "sinks": 40}, align="start"),
    Mask("prefix", "k <= q or k < prefix_len", {"prefix_len": part(4)}),
    Mask("prefix of each batch", "k <= q or k < prefix[b]", tables=LENGTH, tensors=lengths),
    Mask("prefix and padding", "(k <= q or k < prefix[b]) and k < length[b]", tables=LENGTH, tensors=lengths),
    Mask("chunked", "k <= q and q // C == k // C", {"C": part(3)}),
    Mask("chunked by a constant", "k <= q and q // 96 == k // 96"),
    Mask("chunk and window", "k <= q and q // C == k // C and q - k < w", {"C": part(2), "w": part(7)}),
    Mask("block-causal", "q // C >= k // C", {"C": 24}),
    Mask("block-causal, n blocks", "0 <= q // C - k // C <= n", {"C": 24, "n": 3}),
    Mask(
        "strided", "k <= q and (q - k < s or (q - k) % s == 0)".replace("s", "st").replace("<= q", "<= q"), {"st": 40}
    ),
    Mask("fixed", "k <= q and (q // st == k // st or k % st >= st - c)", {"st": 160, "c": 8}),
    Mask("column stripes", "k <= q and k % st < c", {"st": 192, "c": 4}),
    Mask("documents, sorted", "doc[b, q] == doc[b, k]", tables=DOC_SORTED, tensors=documents("sorted")),
    Mask(
        "documents, sorted, causal", "k <= q and doc[b, q] == doc[b, k]", tables=DOC_SORTED, tensors=documents("sorted")
    ),
    Mask(
        "documents, sorted, from the start",
        "k <= q and doc[b, q] == doc[b, k]",
        tables=DOC_SORTED,
        tensors=documents("sorted"),
        align="start",
    ),
    Mask("documents", "k <= q and doc[b, q] == doc[b, k]", tables=DOC, tensors=documents("sorted")),
    Mask("documents, shuffled ids", "k <= q and doc[b, q] == doc[b, k]", tables=DOC, tensors=documents("shuffled")),
    Mask("documents, interleaved", "k <= q and doc[b, q] == doc[b, k]", tables=DOC, tensors=documents("interleaved")),
    Mask(
        "retrieval",
        "asks[b, row] == from_[b, k]",
        tensors=two_documents,
        tables={"asks": Table("i32", ("b", "row")), "from_": Table("i32", ("b", "k"))},
    ),
    Mask(
        "retrieval, sorted",
        "asks[b, row] == from_[b, k]",
        tensors=two_documents,
        tables={"asks": Table("i32", ("b", "row"), True), "from_": Table("i32", ("b", "k"), True)},
    ),
    Mask(
        "documents and window",
        "0 <= q - k < w and doc[b, q] == doc[b, k]",
        {"w": part(8)},
        DOC_SORTED,
        documents("sorted", 3),
    ),
    Mask("other documents", "doc[b, q] != doc[b, k]", tables=DOC_SORTED, tensors=documents("sorted")),
    Mask(
        "images in documents",
        "doc[b, q] == doc[b, k] and (k <= q or (img[b, q] == img[b, k] and img[b, q] >= 0))",
        tables=IMAGES,
        tensors=images,
    ),
    Mask("padding", "k < length[b]", tables=LENGTH, tensors=lengths),
    Mask("padding of both", "k < length[b] and row < q_length[b]", tables=LENGTH, tensors=lengths),
    Mask(
        "padding, causal at the end", "k < length[b] and k <= row + length[b] - q_len", tables=LENGTH, tensors=lengths
    ),
    Mask(
        "valid keys",
        "valid[b, k]",
        tables={"valid": Table("bool", ("b", "k"))},
        tensors=lambda Q, K, rng, s: {"valid": np.stack([runs(K, rng, 40) % 3 > 0 for _ in range(B)])},
    ),
    Mask(
        "valid keys, scattered",
        "k <= q and valid[b, k]",
        tables={"valid": Table("bool", ("b", "k"))},
        tensors=lambda Q, K, rng, s: {"valid": rng.random((B, K)) < 0.7},
    ),
    Mask(
        "gated keys",
        "k <= q and gate[b, k] > 0.5",
        tables={"gate": Table("f32", ("b", "k"))},
        tensors=lambda Q, K, rng, s: {"gate": (np.stack([runs(K, rng, 60) % 2 for _ in range(B)])).astype(np.float64)},
    ),
    Mask("row bounds, rising", "lo[b, row] <= k < hi[b, row]", tables=BOUNDS, tensors=row_bounds(True)),
    Mask("row bounds, sorted", "lo[b, row] <= k < hi[b, row]", tables=BOUNDS_SORTED, tensors=row_bounds(True, True)),
    Mask("row bounds, random", "lo[b, row] <= k < hi[b, row]", tables=BOUNDS, tensors=row_bounds(False)),
    Mask("row bounds or sinks", "k < 4 or lo[b, row] <= k < hi[b, row]", tables=BOUNDS, tensors=row_bounds(True)),
    Mask(
        "key bounds",
        "not (lts[b, k] <= row < lte[b, k])",
        tables={n: Table("i32", ("b", "k")) for n in ("lts", "lte")},
        tensors=lambda Q, K, rng, s: (lambda a: {"lts": a, "lte": a + rng.integers(0, max(2, Q // 2), (B, K))})(
            np.sort(rng.integers(0, Q, (B, K)), 1)
        ),
    ),
    Mask("neighbourhood, narrow", "abs(q // W - k // W) <= r and abs(q % W - k % W) <= r", {"W": 16, "r": 2}),
    Mask("neighbourhood", "abs(q // W - k // W) <= r and abs(q % W - k % W) <= r", {"W": 48, "r": 2}),
    Mask("neighbourhood, wide", "abs(q // 256 - k // 256) <= 1 and abs(q % 256 - k % 256) <= r", {"r": 20}),
    Mask("raster", "k <= q and q // W - k // W <= r and abs(q % W - k % W) <= r", {"W": 24, "r": 3}),
    Mask(
        "natten",
        "abs(k // W - min(max(q // W, r), H - 1 - r)) <= r and abs(k % W - min(max(q % W, r), W - 1 - r)) <= r",
        {"W": 20, "H": lambda Q, K, rng: -(-K // 20), "r": 2},
    ),
    Mask(
        "video", "abs(q // 128 - k // 128) <= 1 and abs(q // 16 % 8 - k // 16 % 8) <= 1 and abs(q % 16 - k % 16) <= 2"
    ),
    Mask("natten, one axis", "abs(k - min(max(q, r), k_len - 1 - r)) <= r", {"r": 15}),
    Mask("longformer", "abs(q - k) <= w or k < g or q < g", {"w": part(10), "g": 8}),
    Mask(
        "longformer by marks",
        "abs(q - k) <= w or mark[b, k] or mark[b, q]",
        {"w": part(10)},
        {"mark": Table("bool", ("b", "k"))},
        lambda Q, K, rng, s: {"mark": np.arange(K)[None] < rng.integers(0, max(1, K // 8), (B, 1))},
    ),
    Mask(
        "big bird",
        "abs(q // C - k // C) <= 1 or k < C or q < C or picks[h, q // C, 0] == k // C or picks[h, q // C, 1] == k // C",
        {"C": 64},
        {"picks": Table("i32", ("h", "n_blocks", 3))},
        big_bird,
    ),
    Mask("all but itself", "k != q"),
    Mask("two bands", "abs(q - k - a) <= w or abs(q - k + a) <= w", {"a": part(3), "w": part(16)}),
    Mask(
        "three bands",
        "abs(q - k) <= w or abs(q - k - a) <= w or abs(q - k - 2 * a) <= w",
        {"a": part(4), "w": part(20)},
    ),
    Mask("two windows", "k <= q and (q - k < w or a <= q - k < a + w)", {"a": part(3), "w": part(8)}),
    Mask("some heads local", "where(h < 4, abs(q - k) <= w, True)", W),
    Mask("some heads local, causal", "k <= q and (h >= 4 or q - k < w)", W),
    Mask("even heads chunked", "k <= q and (h % 2 == 0 or q // C == k // C)", {"C": part(3)}),
    Mask(
        "window of each head",
        "0 <= q - k < win[h]",
        tables={"win": Table("i32", ("h",))},
        tensors=lambda Q, K, rng, s: {"win": rng.integers(1, K + 1, HEADS)},
    ),
    Mask(
        "dilation of each head",
        "abs(q - k) <= w * dil[h] and (q - k) % dil[h] == 0",
        {"w": part(8)},
        {"dil": Table("i32", ("h",))},
        lambda Q, K, rng, s: {"dil": np.arange(HEADS) % 3},
    ),
    Mask(
        "tree by times",
        "k < p or (enter[b, k - p] <= enter[b, q - p] and enter[b, q - p] < leave[b, k - p])",
        CACHED,
        TREE,
        tree,
    ),
    Mask("tree in order", "k < p or (k <= q and q - p < until[b, k - p])", CACHED, TREE, tree),
    Mask("tree by a table", "k < p or ancestor[b, row, k - p]", CACHED, TREE, tree),
    Mask("swin", "q // W // m == k // W // m and q % W // m == k % W // m", {"W": 32, "m": 8}),
    Mask(
        "swin, shifted",
        "(q // W + t) // m == (k // W + t) // m and (q % W + t) // m == (k % W + t) // m",
        {"W": 32, "m": 8, "t": 4},
    ),
    Mask("blocks with exceptions", "q // C == k // C or k == 0 or q == 5", {"C": 40}),
    Mask("blocks but some", "q // C == k // C and not (k % C == 0 and q % C != 0)", {"C": 40}),
    Mask("proportional", "k * q_len <= row * k_len"),
    Mask("proportional, floored", "k <= row * k_len // q_len"),
    Mask("bounds by min and max", "max(q - w, 0) <= k < min(q + 1, length[b])", W, LENGTH, lengths),
    Mask("radius of two kinds", "abs(q - k) <= where(q < g, w1, w2)", {"g": part(3), "w1": part(4), "w2": part(16)}),
    Mask("anti-diagonal", "q + k < n", {"n": lambda Q, K, rng: (Q + K) // 2}),
    Mask("checkerboard", "(q + k) % 2 == 0"),
    Mask("block checkerboard", "(q // C + k // C) % 2 == 0", {"C": 64}),
    Mask("several scales", "k <= q and (q - k < 16 or (q - k < 64 and k % 4 == 3) or k % 16 == 15)"),
    Mask("zigzag", "k <= where(row < q_len // 2, row + o1, row + o2)", {"o1": part(8), "o2": part(2)}),
    Mask(
        "decode",
        "k <= start[b] + row",
        tables={"start": Table("i32", ("b",))},
        tensors=each_batch("start", lambda Q, K, rng: int(rng.integers(0, K))),
    ),
    Mask("block table", "blocks[h, q // 64, k // 64]", tables=BLOCKS, tensors=block_table(64, 0.3)),
    Mask("block table, causal", "k <= q and blocks[h, q // 64, k // 64]", tables=BLOCKS, tensors=block_table(64, 0.3)),
    Mask("block table by rows", "blocks[h, row // 32, k // 64]", tables=BLOCKS, tensors=block_table(32, 0.1)),
    Mask(
        "graph",
        "adjacent[b, row, k]",
        tables={"adjacent": Table("bool", ("b", "row", "k"))},
        tensors=lambda Q, K, rng, s: {"adjacent": rng.random((B, Q, K)) < 0.05},
    ),
    Mask(
        "random keys by id",
        "k <= q and (q - k < w or k == ids[b, 0] or k == ids[b, 1])",
        {"w": part(8)},
        {"ids": Table("i32", ("b", 2))},
        lambda Q, K, rng, s: {"ids": rng.integers(0, K, (B, 2))},
    ),
    Mask("a remainder that comes always", "k <= q and (q - k) % C != w", {"C": 5, "w": -2}),
    Mask(
        "chunks of each head",
        "k <= q and q // dil[h] == k // dil[h]",
        {},
        {"dil": Table("i32", ("h",))},
        lambda Q, K, rng, s: {"dil": np.arange(HEADS) % 3 * 20},
    ),
    Mask("a remainder that never comes", "k < 3 or (q - k) % C == w", {"C": 5, "w": 9}),
    Mask("a condition that covers nothing", "(q < g and k > q + 5) or k <= q - 3", {"g": part(2)}),
    Mask(
        "names of the tile itself",
        "k <= q and (k < first or q - k < last) and k < tile + TILE_K and q_low + q_high >= begin",
        {"first": 20, "last": part(6), "tile": part(2), "TILE_K": 7, "q_low": -3, "q_high": 5, "begin": 2},
    ),
    Mask("root distance", "k <= q and k >= floor(sqrt(abs(q)))"),
    Mask("table of small blocks", "blocks[h, q // 4, k // 4]", tables=BLOCKS, tensors=block_table(4, 0.02)),
]

SHAPES = [  # q_len, k_len, tile_q, tile_k
    (256, 256, 32, 32),
    (200, 333, 32, 64),
    (333, 200, 64, 32),
    (129, 129, 64, 16),
    (1, 257, 16, 64),
    (77, 500, 16, 32),
    (512, 512, 64, 64),
    (640, 640, 128, 64),
    (40, 17, 16, 16),
    (1024, 1024, 64, 32),
]
