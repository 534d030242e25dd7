"""Float64 answers for the cases, in numpy, from inputs that any language can make: nothing here comes from attncc."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def inputs(shape: tuple[int, ...], seed: int) -> Array:
    """Multiples of 1/64 between -1 and 1, exact in every 16-bit type: the fraction of a fast sine, rounded."""
    wave = np.sin(np.arange(np.prod(shape, dtype=np.int64), dtype=np.float64) * 12.9898 + seed * 78.233) * 43758.5453
    return (np.round((2 * (wave - np.floor(wave)) - 1) * 64) / 64).reshape(shape)


def qkv(batch: int, heads: int, kv_heads: int, rows: int, keys: int, head: int, head_v: int = 0) -> tuple[Array, ...]:
    """q [B, H, Q, D], k [B, H_kv, K, D], v [B, H_kv, K, D_v], by seeds 1, 2 and 3."""
    q, k = inputs((batch, heads, rows, head), 1), inputs((batch, kv_heads, keys, head), 2)
    return q, k, inputs((batch, kv_heads, keys, head_v or head), 3)


def attention(q: Array, k: Array, v: Array, keep, *, scale=None, score=None, sink=None) -> tuple[Array, Array]:
    """Output [B, H, Q, D_v] and lse [B, H, Q]. `keep` broadcasts to [B, H, Q, K]; `sink` [H] joins the sum alone."""
    group = q.shape[1] // k.shape[1]
    s = q @ np.repeat(k, group, 1).swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if score is None else score(s)
    s = np.where(np.broadcast_to(keep, s.shape), s, -np.inf)
    sinks = np.full((*s.shape[:3], 1), -np.inf) if sink is None else np.broadcast_to(
        np.reshape(sink, (1, -1, 1, 1)), (*s.shape[:3], 1))  # fmt: skip
    whole = np.concatenate([s, sinks], -1)
    top = whole.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(whole - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    p = np.divide(weights[..., :-1], total, out=np.zeros_like(s), where=total > 0)
    return p @ np.repeat(v, group, 1), lse


def gradients(
    q: Array, k: Array, v: Array, keep, d_out: Array, *, d_lse=0.0, scale=None, score=None, slope=None, sink=None
) -> dict[str, Array]:
    """Of sum(out * d_out) + sum(lse * d_lse): q, k, v, `score` (by the last score, [B, H, Q, K]), `s` (by the scaled
    product, itself as `scaled`) and sink [H]. `slope` of `score` by its argument, a function like it."""
    scale, group = q.shape[-1] ** -0.5 if scale is None else scale, q.shape[1] // k.shape[1]
    out, lse = attention(q, k, v, keep, scale=scale, score=score, sink=sink)
    wide_k, wide_v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scaled = q @ wide_k.swapaxes(-1, -2) * scale
    s = scaled if score is None else score(scaled)
    shown = np.where(np.broadcast_to(keep, s.shape), s, -np.inf) - np.where(np.isfinite(lse), lse, 0.0)[..., None]
    p, delta = np.exp(shown), (d_out * out).sum(-1) - np.where(np.isfinite(lse), d_lse, 0.0)
    d_score = p * (d_out @ wide_v.swapaxes(-1, -2) - delta[..., None])
    d_s = d_score if slope is None else d_score * slope(scaled)
    folded = lambda x: x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)
    found = {
        "q": d_s @ wide_k * scale, "k": folded(d_s.swapaxes(-1, -2) @ q) * scale,
        "v": folded(p.swapaxes(-1, -2) @ d_out),
        "score": d_score, "s": d_s, "scaled": scaled,
    }  # fmt: skip
    if sink is not None:
        found["sink"] = -(np.exp(np.reshape(sink, (-1, 1)) - lse) * delta).sum((0, 2))
    return found


def causal(rows: int, keys: int, align: str = "end") -> NDArray[np.bool_]:
    """Which keys each row sees, [Q, K]."""
    return np.tri(rows, keys, keys - rows if align == "end" else 0, dtype=bool)


def l1(x: Array) -> float:
    return float(np.abs(x[np.isfinite(x)]).sum())
