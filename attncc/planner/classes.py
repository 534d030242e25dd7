"""Which calls share a plan, and which a measured winner: known without planning."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from attncc.ir import Shape

Q_CLASSES, LONG = (16, 64), 4096  # lengths of queries that are planned apart; what everything longer is planned for
MAX_HEAD_DIM = 512
SHORT = 1024  # up to here winners are measured apart from longer calls, which fill a GPU
TYPICAL_BATCH = 4


def class_of(shape: Shape) -> Shape:
    """The shape that stands for all that share a plan with this one."""
    rows = next((c for c in Q_CLASSES if shape.q_len <= c), LONG)
    return _standing(rows, shape.head_dim, shape.head_dim_v, shape.dtype)


def bucket_of(shape: Shape) -> Shape:
    """The shape that stands for all that share a measured winner: its class, of which short calls are set apart."""
    usual = class_of(shape)
    if usual.q_len == LONG and shape.q_len <= SHORT:
        return _standing(SHORT, shape.head_dim, shape.head_dim_v, shape.dtype)
    return usual


@lru_cache
def _standing(rows: int, head_dim: int, head_dim_v: int, dtype: str) -> Shape:
    """Every call of a new length asks for one of these few."""
    return replace(Shape(), batch=TYPICAL_BATCH, q_len=rows, k_len=LONG, head_dim=head_dim, head_dim_v=head_dim_v,
                   dtype=dtype)  # fmt: skip
