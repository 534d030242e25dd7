"""Shared memory of the backward pass's kernels, in bytes a block: no less than Triton 3.7.1 allocates.

Both kernels keep two tiles of the outer side and stream two of the inner one; some matrix units send p and ds from one
product to the next through shared memory. `tile_q` is the outer size in both, `tile_k` the inner one.
"""

from __future__ import annotations

from attncc.ir import KernelPlan, pieces
from attncc.planner.shared_memory import ALIGNMENT, BARRIERS, ELEMENT_BYTES, WORD, matrix_unit, padded
from attncc.targets import Target

STATISTICS = 8  # bytes of a row: its lse and delta
TILES = {"tcgen05": 4}  # of p, ds and sums that pass through shared memory in a pipelined loop, where not one


def fa2_backward(plan: KernelPlan, target: Target) -> int:
    """Of the kernel that takes more; 0 on a CPU."""
    if not target.is_gpu:
        return 0
    size, outer, inner = ELEMENT_BYTES[plan.dtype], plan.tile_q, plan.tile_k
    columns = padded(plan.head_dim) + padded(plan.head_dim_v)
    kept, streamed, weights = outer * columns * size, inner * columns * size, outer * inner * size
    ahead = max(plan.stages - 1, 1)
    pair = outer * inner * (plan.pair_bytes + WORD * plan.pair_bits) * plan.stages
    beside = pair + outer * inner * plan.gather_bytes * 2 + plan.stages * inner * plan.key_bytes
    beside += ALIGNMENT if beside else 0
    rows = 2 * ahead * inner * STATISTICS + ALIGNMENT if plan.stages > 1 else 0
    unit = matrix_unit(plan, target)
    if unit == "mfma":  # what is kept is in registers, and passed through shared memory piece by piece
        piece = max(pieces(plan.head_dim)[0], pieces(plan.head_dim_v)[0])
        passed = max(outer, inner) * piece * size
        return max(passed, (plan.stages - 1) * streamed + weights + rows) + beside
    if unit == "wgmma":
        return kept + plan.stages * streamed + rows + beside
    if unit == "tcgen05":
        passed = TILES[unit] * weights if plan.stages > 1 else 0
        return kept + plan.stages * streamed + passed + BARRIERS + rows + beside
    return kept + ahead * streamed + weights + rows + beside
