"""Packed sequences for `check`: a dense batch is some of the sequences of a packed call, and one reference judges both.

Between its entries lie sequences of other lengths, zero among them, with larger numbers: what leaks from them shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from attncc.ir import AttentionSpec, Expr, Param, Read, Var, children
from attncc.runtime.attention import Attention
from attncc.runtime.draw import expressions

BETWEEN = ((3, 5), (0, 7), (40, 0), (17, 70), (0, 0))  # rows and keys of the other sequences
LOUD = -3.0


@dataclass(frozen=True)
class _Sequence:
    entry: int  # of the batch; of another sequence, the one whose elements it repeats
    rows: int
    keys: int
    wanted: bool


def packed(attention: Attention, deterministic: bool = False) -> Callable[..., tuple[Tensor, Tensor]]:
    """`run(q, k, v, **params)` of dense tensors by a packed call: out [B, H, Q, D_v] and lse [B, H, Q], if any.
    `deterministic` is as for a call."""
    alone = attention.spec.dropout is not None or reads_batch(attention.spec)  # which drops weights by b

    def run(q: Tensor, k: Tensor, v: Tensor, **params: Any) -> tuple[Tensor, Tensor]:
        several = _sequences(q.shape[0], q.shape[2], k.shape[2], alone)
        rows, keys = [s.rows for s in several], [s.keys for s in several]
        starts = [torch.tensor([0, *accumulate(n)], dtype=torch.int32, device=q.device) for n in (rows, keys)]
        packed_q, packed_k, packed_v = (_lay_out(_pack(x, several, n), x) for x, n in ((q, rows), (k, keys), (v, keys)))
        mine = {p.name: _param(attention.packed.spec, p, params[p.name], several) for p in attention.spec.tensors}
        given = {**params, **mine, "cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
        out, lse = attention.packed.both(packed_q, packed_k, packed_v, given, deterministic=deterministic)
        at = [(int(starts[0][i]), s.rows) for i, s in enumerate(several) if s.wanted]
        outs = torch.stack([out.narrow(0, *span).transpose(0, 1) for span in at])
        return outs, torch.stack([lse.narrow(1, *span) for span in at]) if attention.statistic else lse

    return run


def reads_batch(spec: AttentionSpec) -> bool:
    """Whether a value depends on the number of a batch entry, or how many there are, beyond what is read there."""
    return any(_reads(e, spec) for e in expressions(spec))


def _reads(e: Expr, spec: AttentionSpec) -> bool:
    if isinstance(e, Var):
        return e.name in ("b", "b_len")
    inner: Iterator[Expr] = iter(children(e))
    if isinstance(e, Read):
        axes = spec.param(e.tensor).axes
        inner = (i for i, axis in zip(e.indices, axes, strict=True) if not (axis == "b" and i == Var("b", "int")))
    return any(_reads(i, spec) for i in inner)


def _sequences(batch: int, rows: int, keys: int, alone: bool) -> list[_Sequence]:
    made: list[_Sequence] = []
    for i in range(batch):
        if not alone:
            made.append(_Sequence(i, *BETWEEN[i % len(BETWEEN)], False))
        made.append(_Sequence(i, rows, keys, True))
    if not alone:
        made += [_Sequence(0, *lengths, False) for lengths in BETWEEN[1:]]
    return made


def _pack(x: Tensor, several: Sequence[_Sequence], lengths: Sequence[int]) -> Tensor:
    """[B, H, S, D] to [total, H, D]."""
    parts = []
    for s, length in zip(several, lengths, strict=True):
        part = x[s.entry].transpose(0, 1)
        parts.append(part if s.wanted else _loud(_stretched(part.detach(), 0, length)))
    return torch.cat(parts)


def _loud(x: Tensor) -> Tensor:
    """LOUD times x, also of 8 bits, in which there is no product."""
    return (LOUD * x.float()).to(x.dtype) if x.element_size() == 1 else LOUD * x


def _lay_out(x: Tensor, like: Tensor) -> Tensor:
    """The same numbers with other strides where `like` is not contiguous."""
    if like.is_contiguous():
        return x
    wide = torch.nn.functional.pad(x.transpose(0, 1), (3, 2), value=float("nan"))
    return wide[..., 3:-2].transpose(0, 1)


def _stretched(x: Tensor, axis: int, length: int) -> Tensor:
    """The elements along an axis, the last one repeated, or as many as there is room for."""
    if not x.shape[axis]:
        return x.new_zeros((*x.shape[:axis], length, *x.shape[axis + 1 :]))
    return x.index_select(axis, torch.arange(length, device=x.device).clamp(max=x.shape[axis] - 1))


def _param(spec: AttentionSpec, p: Param, x: Tensor, several: Sequence[_Sequence]) -> Tensor:
    """A tensor of the dense call as the packed one takes it."""
    if "b" not in p.axes:
        return x
    at, axis = p.axes.index("b"), spec.packed_axis(p)
    if not axis:
        return x.index_select(at, torch.tensor([s.entry for s in several], device=x.device))
    along = spec.stored_axes(p).index(axis)
    parts = []
    for s in several:
        part = x.select(at, s.entry)
        length = s.rows if axis == "row" else s.keys
        parts.append(part if s.wanted else _stretched(part.detach(), along, length))
    return torch.cat(parts, along)
