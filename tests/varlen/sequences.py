"""Packed calls, and the same sequences one by one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.cases.oracle import Array, attention, gradients, inputs


def starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def drawn(rows: Sequence[int], keys: Sequence[int], heads: int, kv_heads: int, d: int, d_v: int = 0) -> list[Array]:
    """q, k, v and d_out as the cases make them: [1, H, total, D], by seeds 1 to 4."""
    q, k = inputs((1, heads, sum(rows), d), 1), inputs((1, kv_heads, sum(keys), d), 2)
    return [q, k, inputs((1, kv_heads, sum(keys), d_v or d), 3), inputs((1, heads, sum(rows), d_v or d), 4)]


def packed(x: Array, dtype: torch.dtype = torch.float32) -> Tensor:
    """[1, H, total, D] as [total, H, D]."""
    return torch.from_numpy(np.ascontiguousarray(x[0].swapaxes(0, 1))).to(dtype)


def one_by_one(tensors: list[Array], rows: Sequence[int], keys: Sequence[int], keep: Any, scale: Any = None) -> dict:
    """out, lse and gradients of every sequence by the oracle, put together; `keep(Q, K)` is one's mask."""
    q, k, v, d_out = tensors
    found = {
        "out": np.zeros((*q.shape[:3], v.shape[3])), "lse": np.full(q.shape[:3], -np.inf),
        "q": np.zeros_like(q), "k": np.zeros_like(k), "v": np.zeros_like(v),
    }  # fmt: skip
    spans = (list(pairwise([0, *accumulate(n)])) for n in (rows, keys))
    for (a, b), (c, d) in zip(*spans, strict=True):
        if a == b or c == d:
            continue
        one = q[:, :, a:b], k[:, :, c:d], v[:, :, c:d]
        found["out"][:, :, a:b], found["lse"][:, :, a:b] = attention(*one, keep(b - a, d - c), scale=scale)
        back = gradients(*one, keep(b - a, d - c), d_out[:, :, a:b], scale=scale)
        found["q"][:, :, a:b], found["k"][:, :, c:d], found["v"][:, :, c:d] = (back[n] for n in "qkv")
    return found
