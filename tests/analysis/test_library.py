"""The specs that are shipped, and the variants that the language was tried on: visits against the whole grid."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from brute import compare
from spelling import Call

from attncc import frontend
from attncc.analysis import Env, evaluate, prove, visits
from attncc.ir import AttentionSpec, conjunction

ROOT = Path(__file__).parents[2]
SPECS = sorted([*(ROOT / "specs").glob("*.attn"), *(ROOT / "tests/data/variants").glob("*.attn")])
SHAPES = ((70, 70, 16, 32), (33, 90, 32, 16), (90, 33, 16, 16))
SIZES = {"b": 2, "h": 4, "h_kv": 2}


def drawn(spec: AttentionSpec, q_len: int, k_len: int, rng: np.random.Generator) -> Call:
    """Contents of every parameter: small positive integers, ids in runs where a position is the last axis."""
    extents = {**SIZES, "row": q_len, "k": k_len} | {a: int(rng.integers(3, 80)) for a in spec.free_axes}
    scalars = {p.name: int(rng.integers(1, 40)) for p in spec.scalars if p.type == "int"}
    scalars |= {a: extents[a] for a in spec.free_axes}
    tensors = {}
    for p in spec.tensors:
        shape = tuple(a if isinstance(a, int) else extents[a] for a in p.axes)
        if p.type == "bool":
            tensors[p.name] = rng.random(shape) < 0.5
        elif p.type == "float":
            tensors[p.name] = rng.random(shape)
        elif p.sorted or p.axes[-1] in ("row", "k"):
            tensors[p.name] = np.sort(rng.integers(0, 6 if rng.integers(2) else k_len, shape), axis=-1)
        else:
            tensors[p.name] = rng.integers(0, k_len, shape)
    return Call(q_len, k_len, scalars, tensors)


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_no_tile_of_a_shipped_spec_is_lost(path: Path) -> None:
    spec = frontend.parse(path.read_text(encoding="utf-8"), path.name).spec
    spec = spec.bind({p.name: 16 for p in spec.consts if p.default is None})
    rng = np.random.default_rng(len(path.stem))
    mask = conjunction(spec.masks)
    proved = prove(spec)
    for outer, options in (("q", {"tables": True}), ("k", {"tables": True}), ("q", {})):
        found = visits(spec, outer, **options)
        for q_len, k_len, tile_q, tile_k in SHAPES:
            call = drawn(spec, q_len, k_len, rng)
            row, k = np.arange(q_len)[:, None], np.arange(k_len)[None, :]
            q = row + (k_len - q_len if spec.align == "end" else 0)
            names = {**call.scalars, "b": 1, "h": 3, "h_kv": 1, "b_len": 2, "h_len": 4, "q_len": q_len, "k_len": k_len}
            env = Env({**names, "row": row, "q": q, "k": k}, call.tensors)
            dense = np.broadcast_to(np.asarray(True if mask is None else evaluate(mask, env), bool), (q_len, k_len))
            assert compare(spec, found, dense, call, (tile_q, tile_k), 1, 3).wrong == 0, (outer, q_len, k_len)
            assert found.empty_rows or dense.any(1).all()
            assert proved.causal != "k <= q" or not (dense & (k > q)).any()
