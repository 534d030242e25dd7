"""Registers that a thread of the fa2 kernel wants, estimated without compiling.

What lives at the height of a step, in 32-bit words spread over the block's threads: the output and the scores
(float32), Q where the matrix unit reads it from registers, addresses of the K and V loads, and a constant for row
statistics, the mask and the walk. How much of each a compiler keeps at once is fitted, a line for each matrix unit,
to what Triton 3.7.1 reported for the causal kernel at 30 to 50 tiles and head sizes; off by 15 registers in the mean,
60 at most.
"""

from __future__ import annotations

from attncc.ir import KernelPlan, PassPlan
from attncc.planner.backward_memory import sides
from attncc.planner.shared_memory import ELEMENT_BYTES, padded
from attncc.planner.units import matrix_unit
from attncc.targets import Target

WEIGHTS = {  # of: output, scores, loads of 16 bytes, Q; then the constant
    "mma": (0.4, 1.6, 0.0, 1.0, 118.0),
    "wgmma": (1.05, 0.85, 5.0, 0.0, 66.0),
    "tcgen05": (0.6, 2.0, 0.2, 1.3, 25.0),
    "mfma": (1.5, 0.2, 18.0, -1.0, 103.0),
    "fma": (0.0, 1.1, 0.0, 2.3, 50.0),
}
MFMA_F32 = 50  # more with float32 operands
MARGIN = {"mma": 15, "wgmma": 15, "tcgen05": 15, "mfma": 45, "fma": 15}  # by which the estimate may be wrong
# Of a thread: beyond these the products, which are all unrolled, spill by kilobytes.
FMA_OUTPUTS, FMA_PRODUCTS = 8, 768


def limit(plan: KernelPlan | PassPlan, target: Target) -> int:
    """Registers that a thread can have: by the plan's own cap, and so that one block finds room on an SM."""
    own = plan.max_registers or target.registers_thread
    return min(own, target.registers_thread, target.registers_sm // (plan.warps * target.warp_size))


def accumulators(plan: KernelPlan, target: Target) -> int:
    """Registers of a thread for the sums and the scores alone: with fewer no compiler can do."""
    return plan.tile_q * (padded(plan.head_dim_v) + plan.tile_k) // (plan.warps * target.warp_size)


def backward_accumulators(plan: KernelPlan, which: str, target: Target) -> int:
    """The same of one kernel of the backward pass: what it sums up, and p."""
    own = plan.passes[which]
    outer, inner = sides(own, which)
    sums = {"dq": ("k",), "dkdv": ("k",) if plan.dv else ("k", "v"), "dv": ("v",)}[which]
    columns = sum({"k": padded(plan.head_dim), "v": padded(plan.head_dim_v)}[side] for side in sums)
    return outer * (columns + inner) // (own.warps * target.warp_size)


def fa2_forward(plan: KernelPlan, target: Target) -> int:
    """Estimated registers that a thread of the forward kernel wants; more than the limit and it spills."""
    threads, size = plan.warps * target.warp_size, ELEMENT_BYTES[plan.dtype]
    d, dv = padded(plan.head_dim), padded(plan.head_dim_v)
    beside = bool(
        plan.pair_bytes or plan.pair_bits or plan.gather_bytes or plan.chain_bytes
    )  # a tile of words that joins the scores
    scores = plan.tile_q * plan.tile_k * (3 if beside else 1)
    words = (
        plan.tile_q * dv,
        scores,
        plan.tile_k * (d + dv) * size / 16,
        plan.tile_q * d * size / 4,
    )
    unit = matrix_unit(plan, target)
    *factors, constant = WEIGHTS[unit]
    constant += MFMA_F32 if unit == "mfma" and plan.dtype == "f32" else 0
    return int(sum(f * w for f, w in zip(factors, words, strict=True)) / threads + constant)


def pressure(plan: KernelPlan, target: Target) -> str:
    """`fits`, `tight` (the estimate cannot tell: some tens of bytes may spill) or `spills`."""
    unit = matrix_unit(plan, target)
    outputs = plan.tile_q * plan.tile_k / (plan.warps * target.warp_size)
    depth = max(padded(plan.head_dim), padded(plan.head_dim_v))
    if unit == "fma" and (outputs > FMA_OUTPUTS or outputs * depth > FMA_PRODUCTS):
        return "spills"
    excess = fa2_forward(plan, target) - limit(plan, target)
    return "fits" if excess <= -MARGIN[unit] else "tight" if excess <= 0 else "spills"
