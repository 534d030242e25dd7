"""Shared memory of the kernels of standard attention and of FA1, in bytes a block: no less than Triton allocates.

Each has its own tiles beside those of fa2's step. Standard attention multiplies once in a kernel, and what it stores
passes from the layout of the product to that of rows. FA1 keeps K and V of its outer loop and streams Q; the sums of a
row pass through on their way from HBM or back. tests/compile/test_ladder.py compares.
"""

from __future__ import annotations

from dataclasses import replace

from attncc.ir import KernelPlan, pieces
from attncc.planner.shared_memory import (
    ALIGNMENT,
    IN_HALVES,
    WORD,
    Parts,
    Tiles,
    mfma_passes,
    parts,
    triton_release,
)
from attncc.planner.units import matrix_unit
from attncc.targets import Target

SCORE = 4  # bytes of a score or a sum in HBM
WHOLE = 8  # elements of a thread that pass at once
MMA_ROWS = 16  # of a warp


def standard_forward(plan: KernelPlan, target: Target, tiles_of: Tiles = parts) -> int:
    """Of the kernel that takes most; 0 on a CPU."""
    return max(standard_kernels(plan, target, tiles_of).values(), default=0)


def standard_kernels(plan: KernelPlan, target: Target, tiles_of: Tiles = parts) -> dict[str, int]:
    """Of each kernel, by its stage."""
    if not target.is_gpu:
        return {}
    tiles, unit, ahead = tiles_of(plan, target), matrix_unit(plan, target), plan.stages - 1
    factors, bare = tiles.weights + tiles.value, tiles_of(replace(plan, dropout=False), target)  # scores drop nothing
    stored = tiles.pairs * SCORE  # on its way from the product's layout to rows
    if unit == "wgmma":
        scores = tiles.query + (plan.stages * tiles.key + stored if ahead else max(tiles.key, stored))
        output = plan.stages * factors
    elif unit == "tcgen05":
        scores = tiles.query + plan.stages * tiles.key + (tiles.pairs if ahead else 0) + ALIGNMENT
        scores += bare.passed if plan.chain_bytes else 0
        output = plan.stages * factors + ALIGNMENT
    elif unit == "mfma":
        scores = max(tiles.query_piece, max(tiles.key_piece, ahead * tiles.key) + bare.passed)
        output = max(ahead, 1) * factors
    else:
        scores = tiles.query + max(tiles.key_piece, ahead * tiles.key + stored)
        output = max(max(ahead, 1) * factors, tiles.out_piece)
    weights = tiles.rows * plan.warps * WORD + tiles.passed
    return {"scores": scores + tiles.key_operand, "weights": weights, "output": output}


def fa1_forward(plan: KernelPlan, target: Target, tiles_of: Tiles = parts) -> int:
    """0 on a CPU."""
    if not target.is_gpu:
        return 0
    tiles, unit, ahead = tiles_of(plan, target), matrix_unit(plan, target), plan.stages - 1
    kept, sums = tiles.key + tiles.value, max(_sums(plan, target, tiles), tiles.passed)
    statistics = tiles.rows * WORD  # of those of a row that run ahead, or are summed up across warps
    gathered = _gathered(plan, target, tiles.passed)
    if unit == "wgmma":
        taken = kept + (plan.stages * tiles.query + sums + ALIGNMENT if ahead else max(sums, tiles.query + gathered))
    elif unit == "tcgen05":
        taken = kept + ALIGNMENT + plan.stages * tiles.query + sums + tiles.weights
        if not ahead:
            at_once = WHOLE * plan.warps * target.warp_size * SCORE
            taken = kept + max(ALIGNMENT + tiles.query_piece + gathered, min(sums, at_once))
    elif unit == "mfma":
        weights = tiles.weights if mfma_passes(plan) else 0
        taken = max(sums + ahead * tiles.query, weights, tiles.key_piece, tiles.value_piece, tiles.query_piece)
    elif unit == "mma":
        weights = tiles.weights if plan.tile_q < pieces(plan.head_dim_v)[-1] else 0
        taken = kept + max(ahead * (tiles.query + statistics) + max(sums, weights), tiles.query_piece + gathered)
    else:
        taken = kept + statistics + max(sums, tiles.weights, tiles.query_piece + gathered)
    return taken + ahead * (tiles.ahead + tiles.rows * plan.row_bytes) + tiles.key_operand


def _gathered(plan: KernelPlan, target: Target, passed: int) -> int:
    """What is read at indices that were read themselves, while Q is there: half of it at a time where that goes."""
    in_halves = matrix_unit(plan, target) == "mma" and triton_release() >= IN_HALVES
    many = plan.tile_q * plan.tile_k > WHOLE * plan.warps * target.warp_size
    return 0 if not plan.chain_bytes else passed // 2 if in_halves and many else passed


def _sums(plan: KernelPlan, target: Target, tiles: Parts) -> int:
    """A piece of the output in float32; where several warps share out its columns, what of it passes at once, but all
    of it where no two warps have rows of their own."""
    columns = pieces(plan.head_dim_v)[0]
    if matrix_unit(plan, target) == "mma" and 2 * MMA_ROWS <= plan.tile_q < columns:
        return min(tiles.sums, WHOLE * plan.warps * target.warp_size * SCORE)
    return tiles.sums
