"""The summaries that visits read, worked out in numpy: what the kernel before the kernel has to write."""

from __future__ import annotations

import numpy as np

from attncc.analysis.evaluate import Array, Env, evaluate
from attncc.analysis.lift import taken
from attncc.ir import AttentionSpec, Summary, Visits, tile_names


def tables(visits: Visits, spec: AttentionSpec, env: Env) -> Env:
    """The environment of one batch entry and head with its summaries; env names q_len, k_len, b, h, TILE_Q, TILE_K.

    A summary over b or h is stored as if all its leading entries held this one's values: reads at [b, h, t] find them.
    """
    tensors = dict(env.tensors)
    for s in visits.summaries:
        row = summary(s, spec, Env(env.names, tensors, env.bits))
        lead = tuple(int(env.names[n]) + 1 for n in s.over)
        tensors[s.name] = np.broadcast_to(row, (*lead, len(row)))
    return Env(env.names, tensors, env.bits)


def summary(s: Summary, spec: AttentionSpec, env: Env) -> Array:
    """One value for each tile of the summary's axis, int64. Summaries that it reads are among env's tensors."""
    return _reduced(s, spec, env) if s.reduce in ("min", "max") else _scanned(s, spec, env)


def _side(axis: str, spec: AttentionSpec, env: Env) -> tuple[int, int]:
    """Length and tile size of a side."""
    called = tile_names(taken(spec))
    return (
        (env.names["q_len"], env.names[called["TILE_Q"]])
        if axis == "q"
        else (env.names["k_len"], env.names[called["TILE_K"]])
    )


def _reduced(s: Summary, spec: AttentionSpec, env: Env) -> Array:
    length, size = _side(s.axis, spec, env)
    at = np.arange(length)
    shift = env.names["k_len"] - env.names["q_len"] if spec.align == "end" else 0
    here = env.plus(row=at, q=at + shift) if s.axis == "q" else env.plus(k=at)
    values = np.broadcast_to(np.asarray(evaluate(s.value, here)), (length,))
    starts = np.arange(0, length, size)
    return (np.minimum if s.reduce == "min" else np.maximum).reduceat(values, starts).astype(np.int64)


def _scanned(s: Summary, spec: AttentionSpec, env: Env) -> Array:
    """first: the least inner tile that holds, their number where none does; stop: the greatest plus 1, or 0; run: how
    many hold, where they lie side by side, else 0."""
    length, size = _side(s.axis, spec, env)
    inner_length, inner_size = _side("k" if s.axis == "q" else "q", spec, env)
    n, m = -(-length // size), -(-inner_length // inner_size)
    tile, inner = np.arange(n)[:, None], np.arange(m)[None, :]
    places = {
        "tile": tile, "first": tile * size, "last": np.minimum((tile + 1) * size, length) - 1,
        "inner_tile": inner, "inner_first": inner * inner_size,
        "inner_last": np.minimum((inner + 1) * inner_size, inner_length) - 1,
    }  # fmt: skip
    called = tile_names(taken(spec))
    here = env.plus(**{called[n]: value for n, value in places.items()})
    holds = np.broadcast_to(np.asarray(evaluate(s.value, here), bool), (n, m))
    some, count = holds.any(1), holds.sum(1)
    first = np.where(some, holds.argmax(1), m) if m else np.zeros(n, int)
    stop = np.where(some, m - holds[:, ::-1].argmax(1), 0) if m else first
    return {"first": first, "stop": stop, "run": np.where(stop - first == count, count, 0)}[s.reduce]
