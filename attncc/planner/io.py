"""What one call costs: bytes, products, exponentials, and the time in which a target can do them.

One set of formulas (planner/traffic.py) serves twice: with numbers they rank plans, with sympy's symbols
(`closed_forms`) `explain` prints them. The roofline is that of Williams et al. 2009.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from attncc.ir import KernelPlan, Shape
from attncc.planner import timing, traffic
from attncc.planner.amounts import SINGLE, named_parts, terms_of
from attncc.planner.backward import side_by_side
from attncc.planner.backward_memory import fa2_pass
from attncc.planner.efficiency import efficiency, resident_blocks
from attncc.planner.hopper import CACHED_BYTES
from attncc.planner.hopper_backward import ADDED
from attncc.planner.legality import BUILT
from attncc.planner.shared_memory import (
    ELEMENT_BYTES,
    ahead_bytes,
    padded,
    parts,
    passed_pair,
    split,
)
from attncc.planner.traffic import SUM, Kernel, Sizes
from attncc.planner.units import matrix_unit
from attncc.targets import Target

KERNELS = {  # of the backward pass, by name and whether dV is made apart
    ("delta", False): traffic.delta, ("delta", True): traffic.delta, ("dq", False): traffic.d_q,
    ("dq", True): traffic.d_q, ("dkdv", False): traffic.d_kv, ("dkdv", True): traffic.d_k, ("dv", True): traffic.d_v,
    ("dqkv", False): traffic.d_qkv,
}  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """The amounts of one call as numbers, and the time they take.

    hbm_bytes           to and from the memory, behind the L2 (`held`: each byte comes once)
    streamed_bytes      the same without a cache: what theorem 2 of FlashAttention counts
    standard_hbm_bytes  standard attention, with the same tiles left out: scores are written in float32 and read twice,
                        weights are written and read once
    flops               of the products over visited tiles, masked pairs inside them included
    exponentials        one for each pair of a visited tile and kernel

    `bound` is what takes longest at the target's reachable rates: memory, tensor (products) or exp. `roofline_ms` is
    that time; `predicted_ms` is what kernels of this plan take by the model of planner/efficiency.py. `programs` of a
    forward pass share the GPU out between them: with fewer than it has multiprocessors some are idle; 0 elsewhere.
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
    held: bool = True
    programs: int = 0


def all_tiles(plan: KernelPlan, shape: Shape) -> int:
    """Tiles of the whole grid, all batches and heads: what a call without a mask visits."""
    return shape.batch * shape.heads * -(-shape.q_len // plan.tile_q) * -(-shape.k_len // plan.tile_k)


def sizes_of(plan: KernelPlan, shape: Shape, target: Target, tiles: int | None = None) -> Sizes:
    """The numbers that the formulas speak of, for a plan that visits `tiles` tiles (None: all of them)."""
    kv_heads = shape.batch * shape.kv_heads
    row = (plan.head_dim + plan.head_dim_v) * ELEMENT_BYTES[plan.dtype]
    blocks = resident_blocks(plan, target) if target.is_gpu else 1
    side = target.units * blocks
    if plan.algorithm == "fa1":  # one program a head
        side = min(side, shape.batch * shape.heads)
    together = plan.together
    if plan.algorithm == "fa3":  # head by head where all tiles of rows take as long
        even = tiles is None or tiles >= all_tiles(plan, shape)
        together = 1 if even and plan.direction == "forward" else max(1, CACHED_BYTES // (row * shape.k_len))
    together = min(kv_heads, together)
    return Sizes(
        shape.batch, shape.heads, shape.kv_heads, shape.q_len, shape.k_len, plan.head_dim, plan.head_dim_v,
        plan.tile_q, plan.tile_k, all_tiles(plan, shape) if tiles is None else tiles, ELEMENT_BYTES[plan.dtype],
        plan.pair_bytes + (Fraction(plan.pair_bits, 8) if plan.pair_bits else 0), max(side, together), together,
        side if blocks > 1 else 0, kept=ELEMENT_BYTES[plan.kept] if plan.kept else 0,
    )  # fmt: skip


def costs(
    plan: KernelPlan, shape: Shape, target: Target, tiles: int | None = None, spread: str = "all", special: int = 0
) -> Costs:  # fmt: skip
    """Costs of one forward call that visits `tiles` tiles of plan.tile_q x plan.tile_k (None: all of them).

    `spread` says how they lie (analysis.spread): a kernel that was measured on several has several rates. `special`
    special functions are computed for each pair beside the exponential (timing.special_functions).
    """
    sizes = sizes_of(plan, shape, target, tiles)
    kernels = forward_kernels(plan, sizes)
    if not target.is_gpu or tiles is None:
        rate = efficiency(plan, target, spread) if target.is_gpu else 1.0
        taken = sum(_ranked(k, plan, sizes, target, rate) for k in kernels)
    else:
        taken = sum(
            timing.forward_ms(kernel_times(k, plan, target), k, sizes, plan, target, spread, special) for k in kernels
        )
    many = timing.programs(plan, sizes) if target.is_gpu else 0
    return replace(summed(kernels, sizes, plan, target), predicted_ms=taken, programs=many)


def ranking_ms(plan: KernelPlan, shape: Shape, target: Target, rate: float) -> float:
    """The time by `costs` of all tiles, and nothing else, since some hundred plans are ranked by it; `rate` is what
    planner.efficiency says of the plan."""
    sizes = sizes_of(plan, shape, target)
    return sum(_ranked(k, plan, sizes, target, rate) for k in forward_kernels(plan, sizes))


def forward_kernels(plan: KernelPlan, sizes: Sizes) -> tuple[Kernel, ...]:
    """Those of the forward pass, with the numbers or symbols of `sizes`."""
    return traffic.forward(plan.algorithm, sizes, plan.reference == "two_pass")


def backward_costs(
    plan: KernelPlan, shape: Shape, target: Target, tiles: Mapping[str, int] | None = None, spread: str = "all",
    special: int = 0,
) -> tuple[Costs, dict[str, Costs]]:  # fmt: skip
    """Costs of one backward call, and of each of its kernels; `tiles` by name of plan.passes (None: all of them),
    `spread` and `special` as for a forward call."""
    made = backward_kernels(plan, shape, target, tiles)
    kernels = tuple(k for k, _ in made)
    found = {}
    for kernel, sizes in made:
        taken = timing.backward_ms(kernel_times(kernel, plan, target), kernel, sizes, plan, target, spread, special)
        found[kernel.name] = replace(summed((kernel,), sizes, plan, target), predicted_ms=taken)
    whole = summed(kernels, made[0][1], plan, target)
    return replace(whole, predicted_ms=sum(own.predicted_ms for own in found.values())), found


def backward_kernels(
    plan: KernelPlan, shape: Shape, target: Target, tiles: Mapping[str, int] | None = None
) -> tuple[tuple[Kernel, Sizes], ...]:
    """The kernels of a backward plan, each with the sizes that it speaks of."""
    whole = sizes_of(plan, shape, target)
    kernels = [(traffic.delta(whole), whole)]
    for name, own in plan.passes.items():
        if plan.sums in ADDED and name == "dq":
            continue  # the kernel over keys makes it too
        mine = replace(
            plan, together=side_by_side(plan, name, shape), tile_q=own.tile_q, tile_k=own.tile_k, stages=own.stages,
            warps=own.warps, max_registers=own.max_registers or target.registers_thread,
            shared_bytes=fa2_pass(plan, name, target),
        )  # fmt: skip
        sizes = sizes_of(mine, shape, target, None if tiles is None else tiles[name])
        called = "dqkv" if plan.sums in ADDED else name
        kernels.append((KERNELS[called, plan.dv is not None](sizes), sizes))
    return tuple(kernels)


def summed(kernels: tuple[Kernel, ...], sizes: Sizes, plan: KernelPlan, target: Target) -> Costs:
    """The amounts of kernels that run one after the other, and what binds them at the target's reachable rates."""
    memory = sum(k.from_memory(target.l2_bytes) for k in kernels)
    flops, exponentials = sum(k.flops for k in kernels), sum(k.exponentials for k in kernels)
    each = [kernel_times(k, plan, target) for k in kernels]
    bound = max(each[0], key=lambda name: sum(max(t.values()) for t in each if max(t, key=t.__getitem__) == name))
    roofline = sum(max(times.values()) for times in each)
    return Costs(
        int(memory), int(sum(k.streamed for k in kernels)), int(standard_bytes(sizes, sizes)), int(flops),
        int(exponentials), plan.shared_bytes, bound, roofline, roofline,
        all(s.from_memory(target.l2_bytes) <= s.distinct for k in kernels for s in k.streams),
    )  # fmt: skip


def standard_bytes(s: Sizes, own: Sizes) -> Any:
    """`algorithm standard` over the same tiles, where the L2 holds K and V, and not the scores. `own` has the numbers
    of `s`."""
    whole, numbers = traffic.forward("standard", s), traffic.forward("standard", own)
    streams = [pair for k, n in zip(whole, numbers, strict=True) for pair in zip(k.streams, n.streams, strict=True)]
    return sum(k.once for k in whole) + sum(
        x.loaded if x.what == "scores" or n.loaded < n.distinct else x.distinct for x, n in streams
    )


def kernel_times(kernel: Kernel, plan: KernelPlan, target: Target) -> dict[str, float]:
    """Milliseconds of each kind of work of a kernel were it alone, at the target's reachable rates."""
    wide = (padded(plan.head_dim) + padded(plan.head_dim_v)) / (plan.head_dim + plan.head_dim_v)
    return {
        "memory": float(kernel.from_memory(target.l2_bytes)) / (target.reachable_gbs * 1e6),
        "tensor": kernel.flops * wide / (product_tflops(plan, target) * 1e9),
        "exp": kernel.exponentials / (target.exp_gps * 1e6),
    }


def product_tflops(plan: KernelPlan, target: Target) -> float:
    """TFLOP/s of the unit that multiplies."""
    if matrix_unit(plan, target) == "fma":
        return target.fp32_tflops
    if plan.dtype != "f32":
        return target.reachable_tflops
    return target.fp32_tflops if plan.products == "ieee" else target.reachable_tflops / 2  # tf32 runs at half of bf16


def _ranked(kernel: Kernel, plan: KernelPlan, sizes: Sizes, target: Target, rate: float) -> float:
    """What ranks plans where nothing is known but how the mask spreads its tiles: products and exponentials at the rate
    that such tiles allow, no faster than the memory and the L2 deliver."""
    times = kernel_times(kernel, plan, target)
    if not target.is_gpu:
        return max(times.values())
    busy = max(times["tensor"], times["exp"]) / rate
    cached = float(kernel.streamed) / (target.units * target.clock_ghz * timing.CACHE_BYTES_CLOCK * 1e6)
    return max(times["memory"], cached, busy * max(1.0, target.units / timing.programs(plan, sizes)))


def symbols(plan: KernelPlan) -> Sizes:
    """Sizes of a plan's calls as sympy's symbols: N_q, N_k, d, d_v, B, H, H_kv, T_q, T_k, tiles, e (bytes of an
    element), p (bytes of tensor parameters for each pair, where there are any), R (programs side by side), G (heads of
    K and V that they belong to)."""
    import sympy

    letters = "B H H_kv N_q N_k d d_v T_q T_k tiles e p R G"
    made = Sizes(*sympy.symbols(letters, positive=True, integer=True))
    made = replace(made, kept=ELEMENT_BYTES[plan.kept]) if plan.kept else made
    return made if plan.pair_bytes or plan.pair_bits else replace(made, operand=0)


def closed_forms(plan: KernelPlan, target: Target, sizes: Sizes) -> dict[str, Any]:
    """The formulas of a forward call as sympy expressions of `symbols`, by name of Costs.

    `hbm_bytes` is that of a call whose streams the L2 holds, or does not, or which loads less than all of them, as
    `sizes` tells.
    `shared_bytes` is of this plan's stages and matrix unit, with the head sizes as if they were powers of two.
    """
    named = symbols(plan)
    kernels = forward_kernels(plan, named)
    forms = [kernel_forms(k, own, target) for k, own in zip(kernels, forward_kernels(plan, sizes), strict=True)]
    found = {name: sum(form[name] for form in forms) for name in forms[0]}
    found["standard_hbm_bytes"] = standard_bytes(named, sizes)
    found = {name: tidied(value, named) for name, value in found.items()}
    shared = _shared_form(plan, target, named)
    return found if shared is None else {**found, "shared_bytes": shared}


def backward_forms(
    plan: KernelPlan, shape: Shape, target: Target, tiles: Mapping[str, int] | None = None
) -> dict[str, dict[str, Any]]:
    """The same of each kernel of a backward call, by its name; T_q, T_k and tiles are that kernel's own."""
    named, own = symbols(plan), backward_kernels(plan, shape, target, tiles)
    found = {k.name: kernel_forms(KERNELS[k.name, plan.dv is not None](named), k, target) for k, _ in own}
    return {name: {n: tidied(f, named) for n, f in forms.items()} for name, forms in found.items()}


def tidied(form: Any, s: Sizes) -> Any:
    """By pairs of visited tiles, tiles, rows and keys, with what stands for each of them."""
    import sympy

    pair, row, key = sympy.symbols("pair row key", positive=True)
    rest = sympy.expand(form).subs(s.tiles, pair / (s.tile_q * s.tile_k))
    rest = sympy.expand(rest).subs(s.heads, row / (s.batch * s.q_len)).subs(s.kv_heads, key / (s.batch * s.k_len))
    found = sympy.Integer(0)
    for unit, whole in ((pair, s.pairs), (row, s.rows), (key, s.keys)):
        part = sympy.expand(rest).coeff(unit, 1)
        found += whole * min(sympy.factor_terms(part), sympy.factor(part), key=lambda form: len(str(form)))
    return found


def kernel_forms(kernel: Kernel, own: Kernel, target: Target) -> dict[str, Any]:
    """Of one kernel in symbols, of which `own` has the numbers."""
    return {
        "hbm_bytes": _behind_cache(kernel, own, target), "streamed_bytes": kernel.streamed, "flops": kernel.flops,
        "exponentials": kernel.exponentials,
    }  # fmt: skip


def _behind_cache(kernel: Kernel, own: Kernel, target: Target) -> Any:
    """The bytes behind the L2 in symbols: of each stream the case that holds for the numbers of `own`."""
    found = kernel.once
    for stream, number in zip(kernel.streams, own.streams, strict=True):
        if number.loaded >= number.distinct:
            found += stream.distinct + number.lost(target.l2_bytes) * stream.again
        else:
            found += stream.loaded
    return found


def _split_forms(plan: KernelPlan, target: Target, s: Sizes) -> dict[str, Any]:
    """What of K and V runs ahead, and what does not: all of a head, or so many of its columns."""
    found: dict[str, Any] = {}
    for what, head, symbol in (("key", plan.head_dim, s.head_dim), ("value", plan.head_dim_v, s.head_dim_v)):
        ahead, late = split(plan, head, target)
        columns = {f"{what}_ahead": (sum(ahead), s.stored), f"{what}_late": (max(late, default=0), s.element)}
        found |= {name: s.tile_k * e * (symbol if n == padded(head) else n) for name, (n, e) in columns.items()}
    return found


def _shared_form(plan: KernelPlan, target: Target, s: Sizes) -> Any:
    """Shared memory of the forward kernel that takes most, at its fullest moment; None on a CPU."""
    import sympy

    if not target.is_gpu:
        return None
    d, dv, e, tq, tk = s.head_dim, s.head_dim_v, s.element, s.tile_q, s.tile_k
    pairs, one, made = tq * tk, sympy.Integer(1), parts(plan, target)
    form = {
        "query": tq * d * e, "key": tk * d * e, "value": tk * dv * e, "weights": pairs * e, "query_piece": tq * d * e,
        "key_piece": tk * d * e, "value_piece": tk * dv * e, "out_piece": tq * dv * e, "out": tq * dv * e,
        "sums": tq * dv * SUM, "pairs": pairs, "rows": tq, "ahead": pairs * ahead_bytes(plan),
        "key_operand": tk * plan.key_bytes, "passed": pairs * sympy.nsimplify(passed_pair(plan, target)),
        "key_passed": one * made.key_passed, "swapped": one * made.swapped, SINGLE: one,
        **_split_forms(plan, target, s),
    }  # fmt: skip
    if made.key_operand != plan.tile_k * plan.key_bytes:  # to where a tile may begin
        form["key_operand"] = one * made.key_operand
    if made.out_piece * SUM != made.sums * ELEMENT_BYTES[plan.dtype]:  # as much as passes at once
        form["out_piece"] = one * made.out_piece
    taken = terms_of(BUILT[plan.algorithm](plan, target, named_parts))
    return sum((sympy.Rational(n) * form[what] for what, n in taken.items() if n), sympy.Integer(0))
