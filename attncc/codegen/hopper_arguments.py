"""The arguments of the warp-specialised backward pass's kernels, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from attncc.codegen.backward_arguments import delta_arguments
from attncc.codegen.backward_sites import Site
from attncc.codegen.signature import CONSUMER_ROWS, POINTEES, TILES, Argument, arguments
from attncc.ir import AttentionSpec, KernelPlan
from attncc.planner.hopper_backward import keys_plan, widths

SUMS = Argument("Sums", "*fp32", "pointer", "output", "sums")
LENGTHS = ("q_len", "k_len", "b_len", "h_len", "group", "together")


def row_statistics(
    spec: AttentionSpec, plan: KernelPlan, names: Mapping[str, str], sites: Sequence[Site], reads: bool
) -> tuple[Argument, ...]:
    """Of the kernel before the others. `sites` get what rows give; where it `reads` parameters they come."""
    *made, tile = delta_arguments(spec, plan)
    at = next(i for i, a in enumerate(made) if a.name == "Delta") + 1
    sums = [SUMS] if plan.sums == "added" else []
    sums += [Argument(s.pointer, "*fp32", "pointer", "output", s.name) for s in sites]
    known = ("q_len", "h_len", "together")
    rest = [*made[at:], *(a for a in given(spec, plan, names) if reads and a.name not in known)]
    pointers = [a for a in rest if a.kind == "pointer"]
    strides = [a for a in rest if "stride" in a.kind]
    others = [a for a in rest if a not in pointers and a not in strides]
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
    if plan.sums == "added":
        made.append(_described("D_q", "fp32", [16, 256], _layout(0, 32, 2), "output", "described_sums(sums)"))
    return (*made, *given(spec, plan, names))


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
    d_q = Argument("D_q", "*" + POINTEES[plan.dtype], "pointer", "output", "d_q")
    return SUMS, d_q, Argument("q_len", "i32", "scalar", "call", "q_len"), TILES[0]


def given(spec: AttentionSpec, plan: KernelPlan, names: Mapping[str, str]) -> list[Argument]:
    """Tables, parameters and sizes, as in the forward."""
    base = arguments(spec, replace(plan, loads="descriptor", direction="forward"), names)
    return [a for a in base if a.owner in ("parameter", "tables") or a.name in LENGTHS]


def _tiles(plan: KernelPlan, name: str, rows: int, columns: int, owner: str) -> Argument:
    layout = _layout(128, 16, 4)
    value = f"described({name.lower()}, {rows}, {columns})"
    return _described(name, POINTEES[plan.dtype], [1, 1, rows, columns], layout, owner, value)


def _described(name: str, element: str, shape: list[int], layout: str, owner: str, value: str) -> Argument:
    return Argument(name, f"tensordesc<{element}{shape},{layout}>", "descriptor", owner, value)


def _layout(swizzle: int, bits: int, rank: int) -> str:
    return f"NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth={bits}, rank={rank})"
