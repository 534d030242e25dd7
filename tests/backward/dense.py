"""Attention by PyTorch's own operators in float64, over the whole score matrix, differentiated by autograd."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attncc.ir import AttentionSpec, Const, Expr, Read, Var, children, conjunction
from attncc.runtime.reference import DTYPES, OPERATIONS, environment, has_lse, sink_of, undivided, weighed


def value(e: Expr, names: Mapping[str, Any], tables: Mapping[str, Tensor], bits: Mapping[str, int]) -> Tensor:
    """Like runtime.reference.evaluate, but gradients flow through."""
    if isinstance(e, Const):
        return torch.tensor(e.value, dtype=DTYPES[e.type])
    if isinstance(e, Var):
        return torch.as_tensor(names[e.name]).to(DTYPES[e.type])
    inner = [value(c, names, tables, bits) for c in children(e)]
    return _read(e, inner, tables, bits) if isinstance(e, Read) else OPERATIONS[e.op](*inner)


def _read(e: Read, indices: list[Tensor], tables: Mapping[str, Tensor], bits: Mapping[str, int]) -> Tensor:
    table = tables[e.tensor]
    extents = list(table.shape)
    if e.tensor in bits:
        extents[-1] = bits[e.tensor]
    at = torch.broadcast_tensors(*indices)
    inside = torch.ones_like(at[0], dtype=torch.bool)
    for i, n in zip(at, extents, strict=True):
        inside = inside & (i >= 0) & (i < n)
    safe = [torch.where(inside, i, 0) for i in at]
    if e.tensor in bits:
        found = (table[(*safe[:-1], safe[-1] // 32)].to(torch.int64) >> (safe[-1] % 32)) & 1
    else:
        found = table[tuple(safe)]
    found = found.to(DTYPES[e.type])
    return torch.where(inside, found, torch.zeros((), dtype=found.dtype))


def attention(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, params: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """out and lse of float64 leaves; rows that see nothing give 0 and -inf (or the sink), and no gradient but its."""
    env = environment(spec, q, k, params)
    names = dict(env.values)

    def of(e: Expr) -> Tensor:
        return value(e, names, env.tensors, env.bits)

    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if spec.scale is None else of(spec.scale))
    for score in spec.scores:
        names["s"] = s
        s = of(score).expand(s.shape)
    mask = conjunction(spec.masks)
    keep = torch.ones(s.shape, dtype=torch.bool) if mask is None else of(mask).expand(s.shape)
    if not has_lse(spec):
        p = torch.where(keep, undivided(spec, torch.where(keep, s, 1.0), env), 0.0)
        return weighed(spec, p, keep, env, params) @ v, s.new_empty(0)
    sink = sink_of(spec)
    extra = None if sink is None else of(sink).to(torch.float64).expand(*s.shape[:3], 1)
    some = keep.any(-1, keepdim=True)
    masked = torch.where(keep, s, -1e300)  # finite, so that autograd has no inf - inf
    nothing = s.new_zeros((*s.shape[:3], 1)) if extra is None else extra.detach()
    top = torch.where(some, masked.detach().amax(-1, keepdim=True), nothing) if s.shape[-1] else nothing
    top = top if extra is None else torch.maximum(top, nothing)
    e = torch.where(keep, torch.exp(torch.where(keep, s, top) - top), 0.0)
    total = e.sum(-1, keepdim=True) + (0.0 if extra is None else torch.exp(extra - top))
    lse = torch.where(total > 0, top + torch.log(torch.where(total > 0, total, 1.0)), -math.inf)
    p = e / torch.where(total > 0, total, 1.0)
    return weighed(spec, p, keep, env, params) @ v, lse[..., 0]


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().to(torch.float64).requires_grad_() for x in tensors]
