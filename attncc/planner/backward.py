"""The plan of the backward pass: a short list of schedules for each matrix unit, and the shared memory that they take.

Two kernels share a plan. That of dQ keeps tile_q rows of Q and d_out and streams tile_k keys; that of dK and dV keeps
tile_q keys of K and V and streams tile_k rows: the first size is the outer one in both. Shared memory was read off
what Triton 3.7.1 allocates; the estimate is never below it, and tests/compile/test_backward.py compares them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attncc.errors import PlanError
from attncc.ir import AttentionSpec, KernelPlan, PassPlan, Shape
from attncc.planner import shared_memory
from attncc.planner.backward_memory import fa2_backward
from attncc.planner.legality import MAX_HEAD_DIM, violations
from attncc.planner.operands import WORD, operands
from attncc.planner.shared_memory import matrix_unit, padded
from attncc.targets import Target


@dataclass(frozen=True)
class Schedule:
    """For heads of up to `head_dim` columns."""

    head_dim: int
    outer: int
    inner: int
    warps: int
    stages: int


# The widest that do not spill for causal attention, but for a few words at the edge of a loop. tcgen05 keeps sums in a
# memory of its own, which costs registers as soon as the loop is pipelined; mfma has no asynchronous copies.
SCHEDULES = {
    "wgmma": (Schedule(64, 128, 64, 8, 3), Schedule(128, 128, 32, 8, 3), Schedule(192, 64, 32, 8, 2),
              Schedule(512, 64, 16, 8, 2), Schedule(512, 64, 16, 8, 1)),
    "tcgen05": (Schedule(64, 128, 64, 8, 1), Schedule(128, 128, 32, 8, 1), Schedule(512, 64, 16, 8, 1)),
    "mma": (Schedule(32, 128, 64, 8, 2), Schedule(64, 128, 32, 8, 2), Schedule(96, 64, 16, 8, 2),
            Schedule(128, 64, 32, 8, 2), Schedule(192, 32, 32, 8, 1), Schedule(256, 32, 16, 8, 1),
            Schedule(512, 16, 16, 8, 1)),
    "mfma": (Schedule(64, 128, 32, 8, 1), Schedule(128, 64, 32, 4, 1), Schedule(256, 64, 16, 8, 1),
             Schedule(512, 32, 16, 8, 1), Schedule(512, 16, 16, 4, 1)),
    "fma": (Schedule(64, 32, 32, 8, 1), Schedule(512, 16, 16, 8, 1)),
}  # fmt: skip


def choose_backward(spec: AttentionSpec, shape: Shape, target: Target, int_bits: int = 32) -> KernelPlan:
    """The first schedule that fits `target`; PlanError where none does.

    It depends on the head sizes and the dtype alone. What a spec's schedule pins is about the forward pass.
    """
    reasons = []
    width = max(padded(shape.head_dim), padded(shape.head_dim_v))
    fitting = [s for s in _schedules(spec, shape, target) if width <= s.head_dim]
    most = _pairs_of_a_thread(spec)
    fitting.sort(key=lambda s: s.outer * s.inner > most * s.warps * target.warp_size)  # keeps the order otherwise
    candidates = [_plan(spec, shape, target, s, int_bits) for s in fitting]
    for plan in candidates:
        faults = violations(plan, target)
        if not faults:
            return plan
        reasons.append(f"tile {plan.tile_q} x {plan.tile_k}: " + "; ".join(v.sentence for v in faults))
    sizes = f"head_dim {shape.head_dim}, head_dim_v {shape.head_dim_v}, {shape.dtype}"
    why = "; ".join(reasons) or f"head sizes up to {MAX_HEAD_DIM} are planned"
    raise PlanError(f"no plan of the backward pass of {spec.name} fits {target.name} ({sizes}): {why}")


def _pairs_of_a_thread(spec: AttentionSpec) -> int:
    """How many pairs a thread can hold: those for which a tensor is read take addresses and values too."""
    read = operands(spec)
    return 4 if read.pair or read.bits else 8 if read.gather else 64


def _schedules(spec: AttentionSpec, shape: Shape, target: Target) -> tuple[Schedule, ...]:
    widest = _plan(spec, shape, target, Schedule(0, 128, 64, 8, 1), 32)
    return SCHEDULES[matrix_unit(widest, target)]


def _plan(spec: AttentionSpec, shape: Shape, target: Target, schedule: Schedule, int_bits: int) -> KernelPlan:
    read = operands(spec)
    made = KernelPlan(
        target=target.name, algorithm="fa2", loop="q_outer", tile_q=schedule.outer, tile_k=schedule.inner,
        stages=schedule.stages, warps=schedule.warps, head_dim=shape.head_dim, head_dim_v=shape.head_dim_v,
        dtype=spec.precision.inputs or shape.dtype, products=spec.precision.products, int_bits=int_bits,
        pair_bytes=read.pair, pair_bits=read.bits, key_bytes=max(read.key, read.row),
        gather_bytes=max(WORD if read.gather else 0, read.chain - WORD), direction="backward",
        dkdv=PassPlan(tile_q=schedule.inner, tile_k=schedule.outer, stages=schedule.stages, warps=schedule.warps),
    )  # fmt: skip
    known = made.dtype in shared_memory.ELEMENT_BYTES
    return replace(made, shared_bytes=fa2_backward(made, target)) if known else made
