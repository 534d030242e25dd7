"""The arguments of the backward pass's kernels, in order: for the templates, the launcher and the cross-compiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from attncc.codegen.backward_sites import Site
from attncc.codegen.signature import POINTEES, Argument, arguments
from attncc.ir import AttentionSpec, KernelPlan

OUTPUTS = {"dq": ("D_q",), "dkdv": ("D_k", "D_v")}


def delta_arguments(plan: KernelPlan) -> tuple[Argument, ...]:
    """Of the kernel that sums do * out over a row. `D_lse` may be None, which is a constant then."""
    pointer = "*" + POINTEES[plan.dtype]
    made = [
        Argument("Out", pointer, "pointer", "call", "out"), Argument("D_out", pointer, "pointer", "call", "d_out"),
        Argument("D_lse", "*fp32", "pointer", "output", "d_lse"),
        Argument("Delta", "*fp32", "pointer", "output", "delta"),
        *_strides("o", "out"), *_strides("g", "d_out"),
    ]  # fmt: skip
    made += [Argument(name, "i32", "scalar", "call", name) for name in ("q_len", "h_len")]
    return (*made, Argument("TILE_Q", "constexpr", "constexpr", "tile", "TILE_Q"))


def pass_arguments(
    kernel: str, spec: AttentionSpec, plan: KernelPlan, names: Mapping[str, str], sites: Sequence[Site]
) -> tuple[Argument, ...]:
    """Of `dq`, `dkdv`, or the kernel of one site that is summed apart: the forward's, and what comes back."""
    base = arguments(spec, replace(plan, loads="pointer"), names)
    pointer = "*" + POINTEES[plan.dtype]
    inputs = [a for a in base if a.name in ("Q", "K", "V")]
    inputs.append(Argument("D_out", pointer, "pointer", "call", "d_out"))
    inputs += [Argument(n, "*fp32", "pointer", "output", v) for n, v in (("Lse", "lse"), ("Delta", "delta"))]
    outputs = [Argument(n, pointer, "pointer", "output", n.lower()) for n in OUTPUTS.get(kernel, ())]
    outputs += [Argument(s.pointer, _pointee(s), "pointer", "output", s.name) for s in sites]
    strides = [a for a in base if a.owner == "call" and "stride" in a.kind]
    others = [a for a in base if a.owner != "output" and a not in inputs and a not in strides]
    pointers = [a for a in others if a.kind == "pointer" and a.owner == "parameter"]
    rest = [a for a in others if a not in pointers and not (kernel not in OUTPUTS and a.name == "together")]
    cells = [Argument(f"cells_{s.name}", "i32", "scalar", "gradient", f"cells_{s.name}") for s in sites if tabled(s)]
    if any(s.kind == "table" for s in sites):
        cells += [Argument(name, "i32", "scalar", "gradient", name) for name in ("slots", "slots_before")]
    return (*inputs, *outputs, *pointers, *strides, *_strides("g", "d_out"), *rest[:-2], *cells, *rest[-2:])


def tabled(site: Site) -> bool:
    return site.kind in ("table", "row_table")


def _pointee(site: Site) -> str:
    """Cells that one program writes once have the parameter's own type; sums are float32."""
    direct = site.kind == "cells" and not site.apart
    return "*" + POINTEES[site.param.element or ""] if direct else "*fp32"


def _strides(letter: str, value: str) -> list[Argument]:
    kinds = ("stride", "stride", "stride", "last_stride")
    return [
        Argument(f"stride_{letter}{axis}", "i64", kind, "call", f"{value}.stride({i})")
        for i, (axis, kind) in enumerate(zip("bhmd", kinds, strict=True))
    ]
