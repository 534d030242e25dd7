"""The plan of the tangent's kernel: a short list of schedules for each matrix unit.

It keeps tile_q rows of Q and of its tangent, and streams tile_k keys of K, of V and of their tangents.
"""

from __future__ import annotations

from dataclasses import replace

from attncc.analysis.tangent import dual, tangent
from attncc.errors import PlanError
from attncc.ir import AttentionSpec, KernelPlan, Shape
from attncc.planner import shared_memory
from attncc.planner.backward import Schedule
from attncc.planner.classes import MAX_HEAD_DIM
from attncc.planner.legality import violations
from attncc.planner.operands import operands
from attncc.planner.shared_memory import padded
from attncc.planner.tangent_memory import fa2_tangent
from attncc.planner.units import matrix_unit
from attncc.targets import Target

# The widest that do not spill for causal attention, but for a few words at the edge of a loop.
SCHEDULES = {
    "wgmma": (Schedule(64, 128, 64, 8, 3), Schedule(128, 128, 64, 8, 2), Schedule(192, 128, 32, 8, 2),
              Schedule(256, 128, 16, 8, 2), Schedule(512, 32, 16, 8, 1)),
    "tcgen05": (Schedule(64, 128, 64, 8, 1), Schedule(128, 128, 32, 8, 1), Schedule(192, 128, 16, 8, 1),
                Schedule(256, 32, 32, 8, 1), Schedule(512, 16, 16, 8, 1)),
    "mma": (Schedule(64, 128, 32, 8, 2), Schedule(128, 64, 32, 8, 2), Schedule(256, 32, 32, 8, 1),
            Schedule(512, 16, 16, 8, 1)),
    "mfma": (Schedule(64, 64, 32, 4, 1), Schedule(128, 64, 32, 8, 1), Schedule(256, 32, 16, 4, 1),
             Schedule(512, 16, 16, 4, 1)),
    "fma": (Schedule(64, 32, 32, 8, 1), Schedule(512, 16, 16, 8, 1)),
}  # fmt: skip


def choose_tangent(spec: AttentionSpec, shape: Shape, target: Target, int_bits: int = 32) -> KernelPlan:
    """The first schedule that fits `target`; PlanError where none does. It depends on head sizes and dtype alone."""
    reasons = []
    width = max(padded(shape.head_dim), padded(shape.head_dim_v))
    widest = _plan(spec, shape, target, Schedule(0, 128, 64, 8, 1), 32)
    for schedule in SCHEDULES[matrix_unit(widest, target)]:
        if width > schedule.head_dim:
            continue
        plan = _plan(spec, shape, target, schedule, int_bits)
        faults = violations(plan, target)
        if not faults:
            return plan
        reasons.append(f"tile {plan.tile_q} x {plan.tile_k}: " + "; ".join(v.sentence for v in faults))
    sizes = f"head_dim {shape.head_dim}, head_dim_v {shape.head_dim_v}, {shape.dtype}"
    why = "; ".join(reasons) or f"head sizes up to {MAX_HEAD_DIM} are planned"
    raise PlanError(f"no plan of the tangent of {spec.name} fits {target.name} ({sizes}): {why}")


def _plan(spec: AttentionSpec, shape: Shape, target: Target, schedule: Schedule, int_bits: int) -> KernelPlan:
    read = operands(_moving(spec))
    made = KernelPlan(
        target=target.name, algorithm="fa2", loop="q_outer", tile_q=schedule.outer, tile_k=schedule.inner,
        stages=schedule.stages, warps=schedule.warps, head_dim=shape.head_dim, head_dim_v=shape.head_dim_v,
        dtype=spec.precision.inputs or shape.dtype, products=spec.precision.products, int_bits=int_bits,
        pair_bytes=read.pair, pair_bits=read.bits, key_bytes=read.key, row_bytes=read.row,
        gather_bytes=read.gather, chain_bytes=read.chain, direction="tangent",
    )  # fmt: skip
    known = made.dtype in shared_memory.ELEMENT_BYTES
    return replace(made, shared_bytes=fa2_tangent(made, target)) if known else made


def _moving(spec: AttentionSpec) -> AttentionSpec:
    """The dual, with the tangents of scores and weight among its scores: what a step reads."""
    whole = (*spec.scores, *(() if spec.weight is None else (spec.weight,)))
    return replace(dual(spec), scores=(*spec.scores, *(tangent(e, spec) for e in whole)))
