"""Shared memory of the tangent's kernel, in bytes a block: no less than Triton 3.6 to 3.9 allocate.

It holds Q and its tangent, and streams K, V and their tangents; where warps share out the columns of the scores, p and
its tangent pass from one product to the next through shared memory. tests/compile/test_tangent.py compares.
"""

from __future__ import annotations

from attncc.ir import KernelPlan, pieces
from attncc.planner.shared_memory import (
    ALIGNMENT,
    BARRIERS,
    ELEMENT_BYTES,
    WORD,
    padded,
    triton_release,
)
from attncc.planner.units import matrix_unit
from attncc.targets import Target

ROWS = 16  # of a warp's share of a product
PASSED_WIDE = (3, 8)  # the Triton that began to change the layout of results before it rounds them


def fa2_tangent(plan: KernelPlan, target: Target) -> int:
    """0 on a CPU."""
    if not target.is_gpu:
        return 0
    size, outer, inner, unit = ELEMENT_BYTES[plan.dtype], plan.tile_q, plan.tile_k, matrix_unit(plan, target)
    d, dv = padded(plan.head_dim), padded(plan.head_dim_v)
    kept, streamed = 2 * outer * d * size, 2 * inner * (d + dv) * size
    pair = outer * inner * (plan.pair_bytes + WORD * plan.pair_bits) * plan.stages
    beside = pair + outer * inner * (plan.gather_bytes + plan.chain_bytes) + plan.stages * inner * plan.key_bytes
    beside += ALIGNMENT if beside else 0
    passed = 2 * outer * inner * size if unit == "fma" or outer < ROWS * plan.warps else 0
    if unit == "mfma":  # everything is in registers, and changes its layout piece by piece
        piece = max(pieces(plan.head_dim)[0], pieces(plan.head_dim_v)[0])
        passing = WORD if triton_release() >= PASSED_WIDE else size
        return max(max(outer, inner) * piece * passing, passed) + beside
    if unit in ("mma", "fma"):
        return kept + max(plan.stages - 1, 1) * streamed + passed + beside
    return kept + plan.stages * streamed + passed + beside + (BARRIERS if unit == "tcgen05" else 0)
