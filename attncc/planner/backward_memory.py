"""Shared memory of the backward pass's kernels, in bytes a block: no less than Triton 3.7.1 allocates.

Each kernel keeps two tiles of its outer side, rows for dQ and keys for dK and dV, and streams two of the inner one;
that of dV alone keeps one. Some matrix units send p and ds from one product to the next through shared memory.
"""

from __future__ import annotations

from dataclasses import replace

from attncc.ir import KernelPlan, PassPlan, pieces
from attncc.planner.shared_memory import ALIGNMENT, BARRIERS, ELEMENT_BYTES, WHOLE, WORD, matrix_unit, padded
from attncc.targets import Target

STATISTICS = 8  # bytes of a row: its lse and delta
TILES = {"tcgen05": 4}  # of p, ds and sums that pass through shared memory in a pipelined loop, where not one


def fa2_backward(plan: KernelPlan, target: Target) -> int:
    """Of the kernel that takes most; 0 on a CPU."""
    return max(fa2_pass(plan, which, target) for which in plan.passes)


def fa2_pass(plan: KernelPlan, which: str, target: Target) -> int:
    """Of one kernel, by its name among `plan.passes`."""
    if not target.is_gpu:
        return 0
    own = plan.passes[which]
    outer, inner = sides(own, which)
    size, stages = ELEMENT_BYTES[plan.dtype], own.stages
    columns = padded(plan.head_dim) + padded(plan.head_dim_v)
    kept, streamed, weights = outer * columns * size, inner * columns * size, outer * inner * size
    kept -= outer * padded(plan.head_dim_v) * size if which == "dv" else 0
    ahead = max(stages - 1, 1)
    unit = pass_unit(plan, which, target)
    pair = outer * inner * (plan.pair_bytes + WORD * plan.pair_bits) * stages
    if unit in WHOLE and plan.pair_bytes:
        pair = max(pair, outer * inner * WORD)
    beside = pair + outer * inner * plan.gather_bytes * 2 + stages * inner * plan.key_bytes
    beside += outer * inner if plan.dropout else 0  # a byte for each pair that is kept or not
    beside += ALIGNMENT if beside else 0
    rows = 2 * ahead * inner * STATISTICS + ALIGNMENT if stages > 1 else 0
    piece = max(pieces(plan.head_dim)[0], pieces(plan.head_dim_v)[0])
    if unit == "mfma":  # what is kept is in registers, and passed through shared memory piece by piece
        passed = max(outer, inner) * piece * size
        return max(passed, (stages - 1) * streamed + weights + rows) + beside
    if unit == "wgmma":
        return kept + stages * streamed + rows + beside
    if unit == "tcgen05":
        passed = TILES[unit] * weights if stages > 1 else 0
        return kept + stages * streamed + passed + BARRIERS + rows + beside
    if stages == 1:  # p and ds pass through together, and a piece of what streams by on its way to its other layout
        weights = 2 * weights + inner * piece * size
    elif which == "dq" and plan.key_mask:  # keys and values that nobody sees are replaced in registers, and go back
        weights += streamed
    return kept + ahead * streamed + weights + rows + beside


def sides(own: PassPlan, which: str) -> tuple[int, int]:
    """The tile that a program keeps, and the one that streams by."""
    return (own.tile_q, own.tile_k) if which == "dq" else (own.tile_k, own.tile_q)


def pass_unit(plan: KernelPlan, which: str, target: Target) -> str:
    """What multiplies in one kernel."""
    own = plan.passes[which]
    return matrix_unit(replace(plan, tile_q=sides(own, which)[0], warps=own.warps), target)
