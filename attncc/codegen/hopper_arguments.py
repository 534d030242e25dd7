"""The arguments of the warp-specialised backward pass's kernels, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from attncc.codegen.backward_arguments import delta_arguments
from attncc.codegen.backward_sites import Site
from attncc.codegen.signature import CONSUMER_ROWS, POINTEES, TILES, Argument, arguments
from attncc.ir import AttentionSpec, KernelPlan
from attncc.planner.hopper_backward import ADDED, keys_plan, widths

SUMS = Argument("Sums", "*fp32", "pointer", "output", "sums")
PROGRESS = Argument("Progress", "*i32", "pointer", "output", "progress")
TURNS = Argument("TURNS", "constexpr", "constexpr", "output", "False")  # whether heads have the same sums
LENGTHS = ("q_len", "k_len", "b_len", "h_len", "group", "together")


def row_statistics(
    spec: AttentionSpec, plan: KernelPlan, names: Mapping[str, str], sites: Sequence[Site], reads: bool
) -> tuple[Argument, ...]:
    """Of the kernel before the others. `sites` get what rows give; where it `reads` parameters they come."""
    *made, tile = delta_arguments(spec, plan)
    at = next(i for i, a in enumerate(made) if a.name == "Delta") + 1
    sums = [SUMS] if plan.sums in ADDED else []
    sums += [PROGRESS] if plan.sums == "turns" else []
    sums += [Argument(s.pointer, "*fp32", "pointer", "output", s.name) for s in sites]
    known = ("q_len", "h_len", "together")
    rest = [*made[at:], *(a for a in given(spec, plan, names) if reads and a.name not in known)]
    pointers = [a for a in rest if a.kind == "pointer"]
    strides = [a for a in rest if "stride" in a.kind]
    others = [a for a in rest if a not in pointers and a not in strides]
    others += [_size("zeroed")] if plan.sums == "turns" else []
    return (*made[:at], *sums, *pointers, *strides, *others, tile)


def over_keys(spec: AttentionSpec, plan: KernelPlan, names: Mapping[str, str]) -> tuple[Argument, ...]:
    """Of the kernel over keys: all that it loads and stores by TMA, then what the forward has besides."""
    (d, dv), keys, rows = widths(plan.head_dim, plan.head_dim_v), CONSUMER_ROWS, keys_plan(plan).tile_q
    made = [
        _tiles(plan, name, count, size, owner)
        for name, count, size, owner in (
            ("Q", rows, d, "call"), ("K", keys, d, "call"), ("V", keys, dv, "call"), ("D_out", rows, dv, "call"),
            ("D_k", keys, d, "output"), ("D_v", keys, dv, "output"),
        )
    ]  # fmt: skip
    for name in ("Lse_2", "Delta"):
        value = f"described_row({name.lower()}, {rows})"
        made.append(_described(name, "fp32", [rows], _layout(0, 32, 1), "output", value))
    if plan.sums in ADDED:
        name = "Sums" if plan.sums == "turns" else "D_q"
        made.append(_described(name, "fp32", [16, 256], _layout(0, 32, 2), "output", "described_sums(sums)"))
    made += [_d_q(plan), PROGRESS] if plan.sums == "turns" else []
    more = [_size("behind"), _size("ring"), TURNS] if plan.sums == "turns" else []
    return (*made, *given(spec, plan, names), *more)


def with_turns(args: Sequence[Argument], turns: bool) -> tuple[Argument, ...]:
    """The same for calls in which heads use sums of dQ in turns, or each has its own."""
    return tuple(replace(a, value=str(turns)) if a.name == TURNS.name else a for a in args)


def over_rows(spec: AttentionSpec, plan: KernelPlan, names: Mapping[str, str]) -> tuple[Argument, ...]:
    """Of the kernel of dQ alone."""
    (d, dv), rows, keys = widths(plan.head_dim, plan.head_dim_v), CONSUMER_ROWS, plan.tile_k
    made = [
        _tiles(plan, name, count, size, owner)
        for name, count, size, owner in (
            ("Q", rows, d, "call"), ("K", keys, d, "call"), ("V", keys, dv, "call"), ("D_out", rows, dv, "call"),
            ("D_q", rows, d, "output"),
        )
    ]  # fmt: skip
    made += [Argument(n, "*fp32", "pointer", "output", n.lower()) for n in ("Lse_2", "Delta")]
    return (*made, *given(spec, plan, names))


def converting(plan: KernelPlan) -> tuple[Argument, ...]:
    """Of the kernel that makes dQ from its sums, without those that its scale reads."""
    length = Argument("q_len", "i32", "scalar", "call", "q_len")
    kept = (_size("kept"), _size("converted")) if plan.sums == "turns" else ()
    return SUMS, _d_q(plan), length, *kept, TILES[0]


def given(spec: AttentionSpec, plan: KernelPlan, names: Mapping[str, str]) -> list[Argument]:
    """Tables, parameters and sizes, as in the forward."""
    base = arguments(spec, replace(plan, loads="descriptor", direction="forward"), names)
    return [a for a in base if a.owner in ("parameter", "tables") or a.name in LENGTHS]


def _tiles(plan: KernelPlan, name: str, rows: int, columns: int, owner: str) -> Argument:
    layout = _layout(128, 16, 4)
    value = f"described({name.lower()}, {rows}, {columns})"
    return _described(name, POINTEES[plan.dtype], [1, 1, rows, columns], layout, owner, value)


def _d_q(plan: KernelPlan) -> Argument:
    return Argument("D_q", "*" + POINTEES[plan.dtype], "pointer", "output", "d_q")


def _size(name: str) -> Argument:
    """A number that the launcher works out."""
    return Argument(name, "i32", "scalar", "output", name)


def _described(name: str, element: str, shape: list[int], layout: str, owner: str, value: str) -> Argument:
    return Argument(name, f"tensordesc<{element}{shape},{layout}>", "descriptor", owner, value)


def _layout(swizzle: int, bits: int, rank: int) -> str:
    return f"NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth={bits}, rank={rank})"
