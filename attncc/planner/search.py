"""Which plan: every candidate that a schedule allows, sifted by the legality predicate, ranked by the time model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from attncc.errors import PlanError
from attncc.ir import AttentionSpec, KernelPlan, Schedule, Shape, Visits
from attncc.planner import shared_memory
from attncc.planner.legality import Violation, violations
from attncc.planner.model import Prediction, predict
from attncc.targets import Target

TILES_Q = (128, 64, 32, 16)
TILES_K = (128, 64, 32, 16)
WARPS = (4, 8)
STAGES = (1, 2, 3, 4)
CPU_TILES = ((128, 256),)
REJECTED_SHOWN = 12


@dataclass(frozen=True)
class Choice:
    """The plan, what was turned down with the reason in words (best first), and what the model predicts of the plan."""

    plan: KernelPlan
    rejected: tuple[tuple[KernelPlan, str], ...]
    predicted: Prediction


def choose(spec: AttentionSpec, shape: Shape, target: Target, visits: Visits | None = None) -> Choice:
    """The fastest plan by the model that fits `target` and keeps to what the spec pins; PlanError where none does.

    `visits` says whether the mask bounds the loops; None means that every tile is visited.
    """
    schedule = spec.schedule(target.name)
    candidates = [_finish(plan, target) for plan in _candidates(spec, shape, target, schedule)]
    broken = [(plan, violations(plan, target)) for plan in candidates]
    legal = [plan for plan, faults in broken if not faults]
    if not legal:
        raise PlanError(_nothing_fits(broken, spec, target, schedule))
    timed = sorted(((predict(plan, shape, target), plan) for plan in legal), key=lambda pair: _rank(*pair))
    best, plan = timed[0]
    slower = [(p, f"predicted {t.ms:.3g} ms against {best.ms:.3g} ms") for t, p in timed[1:]]
    illegal = sorted((_worst(faults).excess, i) for i, (_, faults) in enumerate(broken) if faults)
    unfit = [(broken[i][0], _worst(broken[i][1]).sentence) for _, i in illegal]
    return Choice(plan, tuple(slower[:REJECTED_SHOWN] + unfit[:REJECTED_SHOWN]), best)


def _rank(prediction: Prediction, plan: KernelPlan) -> tuple[float, int, int, int, int]:
    """Time first; ties go to the smaller footprint."""
    return (prediction.ms, plan.shared_bytes, plan.stages, plan.warps, -plan.tile_q)


def _candidates(spec: AttentionSpec, shape: Shape, target: Target, schedule: Schedule) -> Iterator[KernelPlan]:
    pinned = lambda value, choices: choices if value is None else (value,)
    if target.is_gpu:
        tiles_q = tuple(t for t in TILES_Q if t <= tile_q_bound(shape.q_len))
        space = product(
            pinned(schedule.tile_q, tiles_q), pinned(schedule.tile_k, TILES_K),
            pinned(schedule.stages, STAGES), pinned(schedule.warps, WARPS),
        )  # fmt: skip
    else:
        space = product(
            pinned(schedule.tile_q, (CPU_TILES[0][0],)), pinned(schedule.tile_k, (CPU_TILES[0][1],)), (1,), (1,)
        )
    for tile_q, tile_k, stages, warps in space:
        yield KernelPlan(
            target=target.name, algorithm=schedule.algorithm or "fa2", loop=schedule.loop or "q_outer",
            tile_q=tile_q, tile_k=tile_k, stages=stages, warps=warps, head_dim=shape.head_dim,
            head_dim_v=shape.head_dim_v, dtype=spec.precision.inputs or shape.dtype, products=spec.precision.products,
        )  # fmt: skip


def tile_q_bound(q_len: int) -> int:
    """The largest tile of rows worth having: lengths fall into three classes, so that few kernels are ever built."""
    return 16 if q_len <= 16 else 64 if q_len <= 64 else 128


def _finish(plan: KernelPlan, target: Target) -> KernelPlan:
    known = plan.dtype in shared_memory.ELEMENT_BYTES
    return replace(plan, shared_bytes=shared_memory.fa2_forward(plan, target)) if known else plan


def _worst(faults: tuple[Violation, ...]) -> Violation:
    return max(faults, key=lambda v: v.excess)


def _nothing_fits(
    broken: list[tuple[KernelPlan, tuple[Violation, ...]]], spec: AttentionSpec, target: Target, schedule: Schedule
) -> str:
    plan, faults = min(broken, key=lambda pair: _worst(pair[1]).excess)
    pins = [n for n in ("tile_q", "tile_k", "stages", "warps") if getattr(schedule, n) is not None]
    text = (
        f"no plan of {spec.name} fits {target.name} (head_dim {plan.head_dim}, head_dim_v {plan.head_dim_v}, "
        f"{plan.dtype}); the nearest, tile {plan.tile_q} x {plan.tile_k}, {plan.stages} stages, {plan.warps} warps: "
    )
    text += "; ".join(v.sentence for v in faults)
    return text + (f". The schedule pins {', '.join(pins)}: leave that out, or pin less" if pins else "")
