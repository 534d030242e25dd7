"""The summaries that visits read, worked out in numpy: what the kernel before the kernel has to write."""

from __future__ import annotations

import numpy as np

from attncc.analysis.evaluate import Array, Env, evaluate
from attncc.ir import AttentionSpec, Summary, Visits


def tables(visits: Visits, spec: AttentionSpec, env: Env) -> Env:
    """The environment of one batch entry and head with its summaries added; env names q_len, k_len, b, h, TILE_Q, TILE_K.

    A summary over b or h is stored as if all its leading entries held this one's values: reads at [b, h, t] find them.
    """
    tensors = dict(env.tensors)
    for s in visits.summaries:
        row = summary(s, spec, env)
        lead = tuple(int(env.names[n]) + 1 for n in s.over)
        tensors[s.name] = np.broadcast_to(row, (*lead, len(row)))
    return Env(env.names, tensors, env.bits)


def summary(s: Summary, spec: AttentionSpec, env: Env) -> Array:
    """One value for each tile of the summary's axis, int64."""
    names = env.names
    length, size = (names["q_len"], names["TILE_Q"]) if s.axis == "q" else (names["k_len"], names["TILE_K"])
    at = np.arange(length)
    shift = names["k_len"] - names["q_len"] if spec.align == "end" else 0
    here = env.plus(row=at, q=at + shift) if s.axis == "q" else env.plus(k=at)
    values = np.broadcast_to(np.asarray(evaluate(s.value, here)), (length,))
    starts = np.arange(0, length, size)
    return (np.minimum if s.reduce == "min" else np.maximum).reduceat(values, starts).astype(np.int64)
