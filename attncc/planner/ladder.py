"""Schedules of standard attention and FA1: a short list for each matrix unit, of which the model takes the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attncc.ir import LOOP_OF, AttentionSpec, KernelPlan, Shape
from attncc.planner.ladder_memory import SCORE
from attncc.planner.shared_memory import ELEMENT_BYTES, padded
from attncc.planner.units import matrix_unit
from attncc.targets import Target

ALGORITHMS = ("standard", "fa1")


@dataclass(frozen=True)
class Schedule:
    """For heads of up to `head_dim` columns."""

    head_dim: int
    tile_q: int
    tile_k: int
    stages: int
    warps: int


SCHEDULES = {
    "standard": {
        "wgmma": (Schedule(128, 128, 64, 2, 8), Schedule(256, 64, 64, 2, 8), Schedule(512, 64, 32, 1, 8)),
        "tcgen05": (Schedule(128, 128, 64, 2, 8), Schedule(256, 64, 64, 2, 8), Schedule(512, 64, 32, 1, 8)),
        "mma": (Schedule(128, 128, 64, 2, 8), Schedule(128, 64, 64, 2, 8), Schedule(256, 64, 64, 2, 8),
                Schedule(512, 32, 32, 1, 8)),
        "mfma": (Schedule(128, 128, 64, 2, 8), Schedule(256, 64, 64, 2, 8), Schedule(512, 32, 32, 2, 4)),
        "fma": (Schedule(128, 32, 32, 1, 8), Schedule(512, 16, 16, 1, 4)),
    },
    "fa1": {
        "wgmma": (Schedule(64, 128, 64, 2, 8), Schedule(128, 64, 128, 2, 8), Schedule(256, 64, 32, 1, 8),
                  Schedule(512, 64, 16, 1, 8)),
        "tcgen05": (Schedule(64, 128, 64, 1, 8), Schedule(128, 64, 64, 1, 8), Schedule(256, 64, 32, 1, 8),
                    Schedule(512, 32, 16, 1, 8)),
        "mma": (Schedule(64, 128, 64, 2, 8), Schedule(128, 128, 64, 2, 8), Schedule(128, 64, 64, 1, 8),
                Schedule(256, 64, 32, 1, 8), Schedule(512, 16, 16, 1, 4)),
        "mfma": (Schedule(128, 64, 64, 1, 4), Schedule(256, 32, 32, 1, 4), Schedule(512, 16, 16, 1, 4)),
        "fma": (Schedule(64, 32, 32, 1, 8), Schedule(512, 16, 16, 1, 4)),
    },
}  # fmt: skip


def scratch_bytes(plan: KernelPlan, shape: Shape) -> int:
    """What a call puts into HBM beside its output: scores and weights, or the state of FA1's rows."""
    rows = shape.batch * shape.heads * -(-shape.q_len // plan.tile_q) * plan.tile_q
    if plan.algorithm == "standard":
        return rows * -(-shape.k_len // plan.tile_k) * plan.tile_k * (SCORE + ELEMENT_BYTES[plan.dtype])
    return rows * (plan.head_dim_v + 2) * SCORE if plan.algorithm == "fa1" else 0


def schedules(
    algorithm: str, spec: AttentionSpec, shape: Shape, target: Target, rows: int
) -> Iterator[tuple[int, int, int, int]]:
    """tile_q, tile_k, stages and warps, for tiles of at most `rows` rows."""
    dtype, width = spec.precision.inputs or shape.dtype, max(padded(shape.head_dim), padded(shape.head_dim_v))
    widest = KernelPlan(target.name, algorithm, LOOP_OF[algorithm], rows, 64, 1, 8, width, width, dtype,
                        spec.precision.products)  # fmt: skip
    for s in SCHEDULES[algorithm][matrix_unit(widest, target)]:
        if width <= s.head_dim:
            yield min(s.tile_q, rows), s.tile_k, s.stages, s.warps
