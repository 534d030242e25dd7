"""Which calls share a plan, and which a measured winner: known without planning."""

from __future__ import annotations

from dataclasses import replace

from attncc.ir import Shape

Q_CLASSES, LONG = (16, 64), 4096  # lengths of queries that are planned apart; what everything longer is planned for
SHORT = 1024  # up to here winners are measured apart from longer calls, which fill a GPU
TYPICAL_BATCH = 4


def class_of(shape: Shape) -> Shape:
    """The shape that stands for all that share a plan with this one."""
    rows = next((c for c in Q_CLASSES if shape.q_len <= c), LONG)
    return replace(Shape(), batch=TYPICAL_BATCH, q_len=rows, k_len=LONG, head_dim=shape.head_dim,
                   head_dim_v=shape.head_dim_v, dtype=shape.dtype)  # fmt: skip


def bucket_of(shape: Shape) -> Shape:
    """The shape that stands for all that share a measured winner: its class, of which short calls are set apart."""
    usual = class_of(shape)
    return replace(usual, q_len=SHORT) if usual.q_len == LONG and shape.q_len <= SHORT else usual
