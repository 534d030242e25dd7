"""How long a plan takes on a target, by a simple model: the slowest of four streams of work."""

from __future__ import annotations

from dataclasses import dataclass

from attncc.ir import KernelPlan, Shape
from attncc.planner.shared_memory import ELEMENT_BYTES, padded
from attncc.targets import Target


@dataclass(frozen=True)
class Prediction:
    """What the model says: milliseconds, what binds (memory, tensor or exp), and the amounts of work behind it."""

    ms: float
    bound: str
    flops: float
    hbm_bytes: float
    exponentials: float


def predict(plan: KernelPlan, shape: Shape, target: Target, kept: float = 1.0) -> Prediction:
    """Model time of one forward call. `kept` is the part of all pairs that lies in visited tiles, 0 to 1."""
    rows, pairs = shape.batch * shape.heads, float(shape.q_len) * shape.k_len * kept
    d, dv, size = padded(plan.head_dim), padded(plan.head_dim_v), ELEMENT_BYTES[plan.dtype]
    flops = 2.0 * rows * pairs * (d + dv)
    exponentials = rows * pairs
    hbm = size * (rows * shape.q_len + shape.batch * shape.kv_heads * shape.k_len) * (shape.head_dim + shape.head_dim_v)
    rate = target.fp32_tflops if plan.dtype == "f32" and plan.products == "ieee" else target.reachable_tflops
    reread = rows * pairs / plan.tile_q * (d + dv) * size  # K and V come from L2 once for each tile of rows
    times = {
        "memory": hbm / (target.reachable_gbs * 1e6),
        "tensor": flops / (rate * 1e9),
        "exp": exponentials / (target.exp_gps * 1e6),
    }
    bound = max(times, key=lambda name: times[name])
    overlap = {1: 1.6, 2: 1.1}.get(plan.stages, 1.0)  # with one stage, loads and products take turns
    rows_short = 1 + 16 / plan.tile_q  # a step costs something that does not depend on its rows
    cached = reread / (4 * target.reachable_gbs * 1e6)
    ms = max(*times.values(), cached) * (1 + 4 / plan.tile_k) * overlap * rows_short
    return Prediction(ms, bound, flops, hbm, exponentials)
