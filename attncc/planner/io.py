"""What one forward call costs: bytes, products, exponentials, and the time in which a target can do them.

One set of formulas serves twice: with numbers they rank plans, with sympy's symbols (`closed_forms`) `explain` prints
them. Sources: the traffic of fa2 and of unfused attention is counted as in FlashAttention (Dao et al. 2022, algorithms
0 and 1, theorem 2), the roofline as in Williams et al. 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from attncc.ir import KernelPlan, Shape
from attncc.planner.efficiency import efficiency
from attncc.planner.shared_memory import (
    ELEMENT_BYTES,
    SWAPPED,
    ahead_bytes,
    matrix_unit,
    padded,
    parts,
    passed_bytes,
    phase_bytes,
    phases,
)
from attncc.targets import Target

LSE_BYTES = 4  # float32
CACHE_BYTES_CLOCK = 32  # that one SM gets of the L2 in a clock, half of what its port takes


@dataclass(frozen=True)
class Sizes:
    """What the formulas speak of, numbers or sympy expressions. `tiles` are those visited, of all batches and heads."""

    batch: Any
    heads: Any
    kv_heads: Any
    q_len: Any
    k_len: Any
    head_dim: Any
    head_dim_v: Any
    tile_q: Any
    tile_k: Any
    tiles: Any
    element: Any  # bytes
    operand: Any  # bytes of tensor parameters for each pair


@dataclass(frozen=True)
class Amounts:
    """Bytes and operations of a call, each one formula of Sizes.

    hbm_bytes           Q and Out once, K and V once: what a cache that holds one head's K and V leaves to the memory;
                        tensor parameters of each pair, such as a bias, once for each pair of a visited tile
    streamed_bytes      what programs load: K and V once for each visited tile, Q and Out once
    flops               of the two products over visited tiles, masked pairs inside them included
    exponentials        one for each pair of a visited tile
    standard_hbm_bytes  unfused attention: scores and weights are each written and read once
    """

    hbm_bytes: Any
    streamed_bytes: Any
    flops: Any
    exponentials: Any
    standard_hbm_bytes: Any


def amounts(s: Sizes) -> Amounts:
    """The formulas. Bytes are of the true head sizes; products are of what is computed, see `padded`."""
    columns = s.head_dim + s.head_dim_v
    rows = s.batch * s.heads * s.q_len
    queries = rows * columns * s.element + rows * LSE_BYTES
    keys = s.batch * s.kv_heads * s.k_len * columns * s.element
    pairs = s.tiles * s.tile_q * s.tile_k
    return Amounts(
        hbm_bytes=queries + keys + pairs * s.operand,
        streamed_bytes=queries + s.tiles * s.tile_k * columns * s.element + pairs * s.operand,
        flops=2 * pairs * columns,
        exponentials=pairs,
        standard_hbm_bytes=rows * columns * s.element + keys + rows * s.k_len * (4 * s.element + s.operand),
    )


@dataclass(frozen=True)
class Costs:
    """The amounts of one call as numbers, and the time they take.

    `bound` is what takes longest at the target's reachable rates: memory, tensor (products) or exp. `roofline_ms` is
    that time; `predicted_ms` is what a kernel of this plan takes by the model of planner/efficiency.py.
    """

    hbm_bytes: int
    streamed_bytes: int
    standard_hbm_bytes: int
    flops: int
    exponentials: int
    shared_bytes: int
    bound: str
    roofline_ms: float
    predicted_ms: float


def all_tiles(plan: KernelPlan, shape: Shape) -> int:
    """Tiles of the whole grid, all batches and heads: what a call without a mask visits."""
    return shape.batch * shape.heads * -(-shape.q_len // plan.tile_q) * -(-shape.k_len // plan.tile_k)


def costs(plan: KernelPlan, shape: Shape, target: Target, tiles: int | None = None, spread: str = "all") -> Costs:
    """Costs of one forward call that visits `tiles` tiles of plan.tile_q x plan.tile_k (None: all of them).

    `spread` says how they lie (analysis.spread): a kernel that was measured on several has several rates.
    """
    visited = all_tiles(plan, shape) if tiles is None else tiles
    sizes = Sizes(
        shape.batch, shape.heads, shape.kv_heads, shape.q_len, shape.k_len, plan.head_dim, plan.head_dim_v,
        plan.tile_q, plan.tile_k, visited, ELEMENT_BYTES[plan.dtype], plan.pair_bytes + Fraction(plan.pair_bits, 8),
    )  # fmt: skip
    a = amounts(sizes)
    times = stream_times(plan, target, a)
    bound = max(times, key=lambda name: times[name])
    return Costs(
        int(a.hbm_bytes), int(a.streamed_bytes), int(a.standard_hbm_bytes), a.flops, a.exponentials, plan.shared_bytes,
        bound, times[bound], _predicted(plan, shape, target, times, spread, a),
    )  # fmt: skip


def stream_times(plan: KernelPlan, target: Target, a: Amounts) -> dict[str, float]:
    """Milliseconds of each kind of work were it alone, at the target's reachable rates."""
    wide = (padded(plan.head_dim) + padded(plan.head_dim_v)) / (plan.head_dim + plan.head_dim_v)
    return {
        "memory": a.hbm_bytes / (target.reachable_gbs * 1e6),
        "tensor": a.flops * wide / (product_tflops(plan, target) * 1e9),
        "exp": a.exponentials / (target.exp_gps * 1e6),
    }


def product_tflops(plan: KernelPlan, target: Target) -> float:
    """TFLOP/s of the unit that multiplies."""
    if matrix_unit(plan, target) == "fma":
        return target.fp32_tflops
    if plan.dtype != "f32":
        return target.reachable_tflops
    return target.fp32_tflops if plan.products == "ieee" else target.reachable_tflops / 2  # tf32 runs at half of bf16


def _predicted(
    plan: KernelPlan, shape: Shape, target: Target, times: dict[str, float], spread: str, a: Amounts
) -> float:
    """Products and exponentials at the plan's own efficiency, no faster than the memory and the L2 deliver."""
    if not target.is_gpu:
        return max(times.values())
    busy = max(times["tensor"], times["exp"]) / efficiency(plan, target, spread)
    programs = shape.batch * shape.heads * -(-shape.q_len // plan.tile_q)
    fill = max(1.0, target.units / programs)  # fewer programs than SMs: some have nothing to do
    cached: float = a.streamed_bytes / (target.units * target.clock_ghz * CACHE_BYTES_CLOCK * 1e6)
    return max(times["memory"], cached, busy * fill)


def closed_forms(plan: KernelPlan, target: Target) -> dict[str, Any]:
    """The formulas as sympy expressions, by name of Costs: N_q, N_k, d, d_v, B, H, H_kv, T_q, T_k, tiles, e (bytes of
    an element), p (bytes of tensor parameters for each pair).

    `shared_bytes` is of this plan's stages and matrix unit, with the head sizes as if they were powers of two.
    """
    import sympy

    letters = "B H H_kv N_q N_k d d_v T_q T_k tiles e p"
    symbols = Sizes(*sympy.symbols(letters, positive=True, integer=True))
    found = {name: sympy.factor_terms(value) for name, value in vars(amounts(symbols)).items()}
    d, dv, e, tq, tk = symbols.head_dim, symbols.head_dim_v, symbols.element, symbols.tile_q, symbols.tile_k
    size = {
        "query": tq * d * e, "key": tk * d * e, "value": tk * dv * e, "weights": tq * tk * e, "query_piece": tq * d * e,
        "key_piece": tk * d * e, "value_piece": tk * dv * e, "out_piece": tq * dv * e, "bytes": sympy.Integer(1),
        "ahead": tq * tk * ahead_bytes(plan), "key_operand": tk * plan.key_bytes,
        "passed": tq * tk * sympy.nsimplify(passed_bytes(plan, target)),
        "swapped": sympy.Integer(SWAPPED * plan.warps * target.warp_size),
    }  # fmt: skip
    moments, tiles = phases(plan, target), parts(plan, target)
    if moments:
        fullest = max(moments, key=lambda m: phase_bytes(m, tiles))
        found["shared_bytes"] = sum(
            (n * size[what] for what, n in fullest.items() if phase_bytes({what: n}, tiles)), sympy.Integer(0)
        )
    return found
