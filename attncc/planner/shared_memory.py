"""Shared memory that Triton gives to the fa2 kernel, in bytes a block, worked out without compiling.

The kernel holds Q, streams K and V through buffers of the software pipeline, and on some ways of multiplying sends the
weights P from one product to the next through shared memory. Which of these are there depends on the matrix unit, so
there is one small formula for each. They were read off Triton 3.6 to 3.9's own allocation; tests/compile compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from math import gcd

from attncc.ir import KernelPlan, pieces
from attncc.targets import Target

ELEMENT_BYTES = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}
WHOLE = ("tcgen05", "fma")  # where the scores go to the layout of a gathered bool, not the bool to that of the scores
DIRECT_TO_SHARED = (3, 8)  # the Triton that began to use the direct loads of CDNA4 for this
IN_HALVES = (3, 7)  # the Triton that began to pass a tile from a layout to another in parts where that goes
PADDING = 16  # of the bytes of a buffer, at least: what is added to it
WORD, FLAG = 4, 1  # bytes that a packed bit is loaded as, and that a bool takes on its way to the scores
SWAPPED = 32  # bytes of a thread that pass at a time from one layout to another
BARRIERS = 1152  # tcgen05 and TMA: barriers, the scratch of row reductions, and the alignment of what follows
ALIGNMENT = 1024  # of a tile that a matrix unit or a descriptor addresses


@cache
def triton_release() -> tuple[int, int]:
    """Major and minor number of the Triton that is installed, which will compile; without one, of the newest."""
    try:
        major, minor, *_ = version("triton").split(".")
    except PackageNotFoundError:
        return DIRECT_TO_SHARED
    return int(major), int(minor)


@cache
def padded(head_dim: int) -> int:
    """Elements that a head takes in a tile: the sum of its pieces."""
    return sum(pieces(head_dim))


def matrix_unit(plan: KernelPlan, target: Target) -> str:
    """What multiplies: wgmma, tcgen05, mma, mfma, or fma where no matrix unit takes the operands or the tile."""
    if plan.dtype == "f32" and plan.products == "ieee":
        return "mfma" if target.caps.has_matrix_f32 else "fma"
    if target.caps.has_mfma:
        return "mfma"
    if not target.caps.has_tensor_core:
        return "fma"
    wide = plan.tile_q >= 64 and plan.warps >= 4  # the warp-group instructions take 64 rows and 4 warps at least
    if wide and target.caps.has_wgmma:
        return "wgmma"
    return "tcgen05" if wide and target.caps.has_tcgen05 else "mma"


@dataclass(frozen=True)
class Parts:
    """Bytes of the tiles; `*_piece` is the largest piece of a head size that was split into powers of two."""

    query: int
    key: int
    value: int
    weights: int
    query_piece: int
    key_piece: int
    value_piece: int
    out_piece: int
    pair: int  # of tensor parameters, as the four below
    key_operand: int
    passed: int  # what changes its layout on the way to the scores: a read that was not loaded ahead
    chain: int
    swapped: int  # what a tile passes through on its way to another layout


def parts(plan: KernelPlan, target: Target) -> Parts:
    size = ELEMENT_BYTES[plan.dtype]
    d, dv = padded(plan.head_dim), padded(plan.head_dim_v)
    piece, piece_v = pieces(plan.head_dim)[0], pieces(plan.head_dim_v)[0]
    pairs = plan.tile_q * plan.tile_k
    return Parts(
        query=plan.tile_q * d * size, key=plan.tile_k * d * size, value=plan.tile_k * dv * size,
        weights=pairs * size, query_piece=plan.tile_q * piece * size,
        key_piece=plan.tile_k * piece * size, value_piece=plan.tile_k * piece_v * size,
        out_piece=plan.tile_q * piece_v * size,
        pair=pairs * (plan.pair_bytes + WORD * plan.pair_bits), key_operand=plan.tile_k * plan.key_bytes,
        passed=int(pairs * passed_bytes(plan, target)), chain=pairs * plan.chain_bytes,
        swapped=SWAPPED * plan.warps * target.warp_size,
    )  # fmt: skip


def passed_bytes(plan: KernelPlan, target: Target) -> float:
    """For each pair. A tile as wide as that of V is read in V's layout, whose registers can pass half at a time."""
    unit, gather = matrix_unit(plan, target), plan.gather_bytes
    if plan.chain_bytes and not chain_stages(plan, target):
        gather = max(gather, plan.chain_bytes - WORD)  # less what is an index alone
    if unit == "mfma":  # what it loads ahead, it keeps in registers, and never in the layout of the scores
        return max(gather, plan.pair_bytes, FLAG if plan.pair_bits else 0)
    if gather and unit in WHOLE:
        return max(gather, WORD)
    halved = gather >= WORD and plan.tile_k == pieces(plan.head_dim_v)[0] and triton_release() >= IN_HALVES
    return gather / 2 if halved else gather


def chain_stages(plan: KernelPlan, target: Target) -> int:
    """Buffers of each read of a chain: two reads in turn share out the stages between them, where any are left."""
    ahead = plan.chain_bytes and is_pipelined(plan) and matrix_unit(plan, target) == "tcgen05"
    return (plan.stages - 1) // 2 if ahead else 0


def is_pipelined(plan: KernelPlan) -> bool:
    """Whether loads run ahead: more than one stage, and 4 bytes at least at a time (a head size of 31 in f16 has 2)."""
    run = gcd(16, plan.head_dim, plan.head_dim_v) * ELEMENT_BYTES[plan.dtype]
    return plan.stages > 1 and (run >= 4 or plan.loads == "descriptor")


Phase = dict[str, int]  # how many of each of Parts are there together; `bytes` counts single bytes


def phases(plan: KernelPlan, target: Target) -> tuple[Phase, ...]:
    """What lies in shared memory at the moments that could be the fullest: the loop, its parts, and the last store."""
    if not target.is_gpu:
        return ()
    unit = matrix_unit(plan, target)
    ahead = max(plan.stages - 1, 1)
    beside = {"key_operand": ahead} if unit == "mfma" else {"key_operand": ahead, "pair": ahead}
    loops = [{**moment, **beside} for moment in _LAYOUTS[unit](plan, target)]
    passing = [{**moment, "weights": 0, "passed": 1} for moment in loops]  # before there are weights
    if _swaps(plan, target):
        passing += [{**moment, "swapped": 1} for moment in loops]
    query = ({"query_piece": 1},) if unit == "mfma" else ()  # passes through once, before the loop
    return (*query, *loops, *passing, {"out_piece": 1})


def _swaps(plan: KernelPlan, target: Target) -> bool:
    """Whether a tile passes from one layout to another, a few registers at a time. In tcgen05's loops in loops, the
    output from that of its own columns to that of the scores, where two warp groups share them out; before wgmma, a
    mask over rows that were read one to a thread."""
    unit = matrix_unit(plan, target)
    if unit == "tcgen05":
        return plan.classed and plan.warps > 4 and plan.tile_k != padded(plan.head_dim_v)
    return unit in ("wgmma", "mma") and plan.row_bytes > 0 and plan.tile_q == target.warp_size * plan.warps


def fa2_forward(plan: KernelPlan, target: Target) -> int:
    """Shared memory of the forward kernel in bytes a block; 0 on a CPU."""
    tiles = parts(plan, target)
    return max((phase_bytes(phase, tiles) for phase in phases(plan, target)), default=0)


def phase_bytes(phase: Phase, tiles: Parts) -> int:
    return sum(n * (1 if what == "bytes" else int(getattr(tiles, what))) for what, n in phase.items())


def _wgmma(plan: KernelPlan, target: Target) -> tuple[Phase, ...]:
    """Q and every stage of K and V stay; P goes from registers."""
    if is_pipelined(plan):
        barriers = BARRIERS + 2 * ALIGNMENT if plan.loads == "descriptor" else 0
        return ({"query": 1, "key": plan.stages, "value": plan.stages, "bytes": barriers},)
    return {"query": 1, "key_piece": 1}, {"query": 1, "value_piece": 1}


def _tcgen05(plan: KernelPlan, target: Target) -> tuple[Phase, ...]:
    """As wgmma; where only products are pipelined, not loads, two tiles of one and one of the other are there. A chain
    of reads is loaded ahead too, and takes half of the stages."""
    if is_pipelined(plan):
        barriers = BARRIERS + 2 * ALIGNMENT * (plan.loads == "descriptor")
        deep = chain_stages(plan, target)
        loads = deep + 1 if deep else plan.stages
        return ({"query": 1, "key": loads, "value": loads, "chain": deep, "bytes": barriers},)
    if plan.stages > 1:
        return (
            {"query": 1, "key": 2, "value": 1, "bytes": BARRIERS},
            {"query": 1, "key": 1, "value": 2, "bytes": BARRIERS},
        )
    return {"query": 1, "key_piece": 1, "bytes": BARRIERS}, {"query": 1, "value_piece": 1, "bytes": BARRIERS}


def _mma(plan: KernelPlan, target: Target) -> tuple[Phase, ...]:
    """One stage of K and V is in registers. P passes through shared memory where the warps share out the columns:
    Triton does so where the last piece of the output is wider than the tile has rows."""
    weights = int(plan.tile_q < pieces(plan.head_dim_v)[-1])
    if is_pipelined(plan):
        loads, barriers = plan.stages - 1, BARRIERS if plan.loads == "descriptor" else 0
        return ({"query": 1, "key": loads, "value": loads, "weights": weights, "bytes": barriers},)
    return {"query": 1, "key_piece": 1}, {"query": 1, "value_piece": 1, "weights": weights}


def _fma(plan: KernelPlan, target: Target) -> tuple[Phase, ...]:
    """As mma, P always through shared memory, and 4 bytes a row for reductions across warps."""
    always: Phase = {"query": 1, "weights": 1, "bytes": 4 * plan.tile_q}
    if is_pipelined(plan):
        return ({**always, "key": plan.stages - 1, "value": plan.stages - 1},)
    return {**always, "key_piece": 1}, {**always, "value_piece": 1}


def _mfma(plan: KernelPlan, target: Target) -> tuple[Phase, ...]:
    """Q is in registers; P passes through where the two products deal out rows to warps differently, and for
    float32 in 16 rows. From Triton 3.8 on, loads that go past the registers (CDNA4) have a buffer for every stage,
    padded against bank conflicts; before, and on CDNA3, one stage waits in registers."""
    rows, rows_out = _mfma_rows(plan, plan.tile_k), _mfma_rows(plan, pieces(plan.head_dim_v)[-1])
    small = plan.dtype == "f32" and rows == 16
    weights = int(rows != rows_out or rows < plan.tile_q < rows * plan.warps or small)
    if plan.stages > 1 and target.caps.has_async_copy and triton_release() >= DIRECT_TO_SHARED:
        tiles = parts(plan, target)
        padding = plan.stages * (tiles.key + tiles.value) // PADDING
        return ({"key": plan.stages, "value": plan.stages, "weights": weights, "bytes": padding},)
    if is_pipelined(plan):
        return ({"key": plan.stages - 1, "value": plan.stages - 1, "weights": weights},)
    if plan.stages > 1 and target.caps.has_async_copy:
        return ({"key": 1, "value": 1, "weights": weights},)
    return {"key_piece": 1}, {"value_piece": 1}, {"weights": weights}


def _mfma_rows(plan: KernelPlan, columns: int) -> int:
    """Rows of the instruction that makes a tile of so many columns."""
    return 32 if plan.tile_q >= 32 and columns >= 32 else 16


_LAYOUTS = {"wgmma": _wgmma, "tcgen05": _tcgen05, "mma": _mma, "fma": _fma, "mfma": _mfma}
