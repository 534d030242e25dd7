"""Visits against the whole grid: every tile that holds a kept pair is visited once, and what is called full is full."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import numpy as np
from corpus import Mask
from spelling import Call, grid, spec_of

from attncc.analysis import Env, evaluate, visits
from attncc.analysis.prepass import tables
from attncc.ir import AttentionSpec, Visits, tile_names

USED_HEADS = (0, 5)


@dataclass
class Tally:
    needed: int = 0  # tiles that hold a kept pair
    full: int = 0  # tiles that hold only kept pairs
    visited: int = 0
    refined: int = 0  # visited and not ruled out by `may`
    found: int = 0  # called full by a segment
    proved: int = 0  # called full by a segment or by `must`
    wrong: int = 0
    tiles: int = 0

    def __iadd__(self, other: Tally) -> Tally:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))
        return self


def programs(text: str) -> Iterator[tuple[int, int]]:
    for b in (0, 1) if "[b" in text else (0,):
        for h in USED_HEADS if "h" in text.replace("where", "").replace("length", "") else (0,):
            yield b, h


def check(mask: Mask, shape: tuple[int, int, int, int], outer: str, seed: int = 0, **options: bool | int) -> Tally:
    q_len, k_len, tile_q, tile_k = shape
    call = mask.call(q_len, k_len, seed)
    spec = spec_of(mask.text, mask.tables, mask.align)
    found = visits(spec, outer, **options)
    total = Tally()
    for b, h in programs(mask.text):
        dense = grid(mask.text, call, mask.align, b, h)
        total += compare(spec, found, dense, call, (tile_q, tile_k), b, h)
    return total


def compare(
    spec: AttentionSpec, found: Visits, dense: np.ndarray, call: Call, tiles: tuple[int, int], b: int, h: int
) -> Tally:
    """One batch entry and head. `dense` is [row, k]."""
    tile_q, tile_k = tiles
    called = tile_names({p.name for p in spec.params} | set(spec.free_axes))
    env = environment(call, dict(zip((called["TILE_Q"], called["TILE_K"]), tiles)), b, h)
    env = tables(found, spec, env)
    if found.outer == "q":
        grid_, (size, inner) = dense, (tile_q, tile_k)
    else:
        grid_, (size, inner) = dense.T, (tile_k, tile_q)
    needed, full = by_tiles(grid_, size, inner)
    count, is_full, may, must = walk(found, called, env, grid_.shape, size, inner)
    t = Tally(tiles=needed.size)
    visited = count > 0
    t.wrong = int((count > 1).sum() + (needed & ~visited).sum() + (is_full & ~full).sum())
    t.wrong += int((needed & ~may).sum() + (must & ~full).sum())
    t.needed, t.full, t.visited = int(needed.sum()), int(full.sum()), int(visited.sum())
    t.refined = int((visited & (is_full | may)).sum())
    t.found, t.proved = int(is_full.sum()), int((is_full | (visited & must)).sum())
    return t


def environment(call: Call, tiles: Mapping[str, int], b: int, h: int) -> Env:
    names = {"q_len": call.q_len, "k_len": call.k_len, "b": b, "h": h, "h_kv": h, "b_len": 2, "h_len": 8,
             **tiles, **call.scalars}  # fmt: skip
    return Env(names, {n: np.asarray(t) for n, t in call.tensors.items()})


def walk(
    found: Visits, called: Mapping[str, str], env: Env, shape: tuple[int, int], size: int, inner: int
) -> tuple[np.ndarray, ...]:
    """How often each tile is visited, which are called full, and the class tests, [outer tile, inner tile]."""
    n, m = -(-shape[0] // size), -(-shape[1] // inner)
    first, tiles = np.arange(n) * size, np.arange(m)[None]
    outer = {"tile": np.arange(n), "first": first, "last": np.minimum(first + size, shape[0]) - 1}
    env = env.plus(**{called[k]: v for k, v in outer.items()})
    for name, value in found.lets:
        env = env.plus(**{name: evaluate(value, env)})
    count, is_full = np.zeros((n, m), int), np.zeros((n, m), bool)
    each = lambda e: np.broadcast_to(np.asarray(evaluate(e, env)), (n,))
    for segments, kind in ((found.masked, False), (found.full, True)):
        for s in segments:
            for i, (begin, end) in enumerate(zip(each(s.begin), each(s.end))):
                if end > begin:
                    assert begin >= 0 and end <= m, (i, begin, end, m)
                    count[i, begin:end] += 1
                    is_full[i, begin:end] |= kind
    places = {
        "inner_tile": tiles,
        "inner_first": tiles * inner,
        "inner_last": np.minimum((tiles + 1) * inner, shape[1]) - 1,
    }
    columns = {k: v[:, None] if np.ndim(v) == 1 else v for k, v in env.names.items()}
    cells = Env({**columns, **{called[k]: v for k, v in places.items()}}, env.tensors)
    test = lambda e, otherwise: np.broadcast_to(
        np.asarray(otherwise if e is None else evaluate(e, cells), bool), (n, m)
    )
    return count, is_full, test(found.may, True), test(found.must, False)


def by_tiles(dense: np.ndarray, size: int, inner: int) -> tuple[np.ndarray, np.ndarray]:
    """Which tiles hold a kept pair, and which only kept pairs (rows behind the end count as kept, keys do not)."""
    n, m = dense.shape
    padded = np.zeros((-(-n // size) * size, -(-m // inner) * inner), bool)
    padded[:n, :m] = dense
    cells = padded.reshape(-1, size, padded.shape[1] // inner, inner)
    needed = cells.any((1, 3))
    padded[n:] = True
    padded[n:, m:] = True
    return needed, padded.reshape(cells.shape).all((1, 3))
