"""The arguments of the backward pass's kernels, in order: for the templates, the launcher and the cross-compiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from attncc.analysis.normaliser import normaliser
from attncc.codegen.backward_sites import Site
from attncc.codegen.parts import split
from attncc.codegen.signature import POINTEES, Argument, arguments, strides
from attncc.ir import AttentionSpec, KernelPlan, PassPlan

OUTPUTS = {"dq": ("D_q",), "dkdv": ("D_k", "D_v"), "dk": ("D_k",), "dv": ("D_v",)}
STREAMED = {"dq": ("k", "v"), "dkdv": ("q", "d_out"), "dv": ("q", "d_out")}
UNREAD = {"dv": ("V", "Delta", "Delta_tiles", "Tilt", "Tilt_tiles", *(f"stride_v{axis}" for axis in "bhnd"))}


def statistics(spec: AttentionSpec) -> tuple[str, ...]:
    """Of rows, as the kernels read them: with the gradient of the entropy, in units of log 2, where there is one."""
    return ("Lse_2", "Delta", *(("Tilt",) if spec.reports else ()))


def delta_arguments(spec: AttentionSpec, plan: KernelPlan) -> tuple[Argument, ...]:
    """Of the kernel before the others, over rows. `D_lse` may be None, which is a constant then."""
    pointer = "*" + POINTEES[plan.dtype]
    made = [
        Argument("Out", pointer, "pointer", "call", "out"), Argument("D_out", pointer, "pointer", "call", "d_out"),
        Argument("D_lse", "*fp32", "pointer", "output", "d_lse"),
        *(Argument(n, "*fp32", "pointer", "output", n.lower()) for n in ("Lse", *statistics(spec))),
        *(Argument(n, "*fp32", "pointer", "output", n.lower()) for n in ("Entropy", "D_entropy") if spec.reports),
        *([Argument("Starts_q", "*i32", "pointer", "starts", "cu_seqlens_q")] if spec.ragged else []),
        *strides(spec, "o", "out"), *strides(spec, "g", "d_out"),
    ]  # fmt: skip
    lengths = ("total_q", "b_len", "h_len") if spec.ragged else ("q_len", "h_len")
    made += [Argument(name, "i32", "scalar", "call", name) for name in lengths]
    return (*made, Argument("TILE_Q", "constexpr", "constexpr", "tile", "TILE_Q"))


def pass_arguments(
    kernel: str, spec: AttentionSpec, plan: KernelPlan, own: PassPlan, names: Mapping[str, str], sites: Sequence[Site]
) -> tuple[Argument, ...]:
    """Of one of plan.passes, or the kernel of one site that is summed apart: the forward's, and what comes back."""
    base = arguments(spec, replace(plan, loads="pointer"), names)
    pointer = "*" + POINTEES[plan.dtype]
    inputs = [a for a in base if a.name in ("Q", "K", "V")]
    inputs.append(Argument("D_out", pointer, "pointer", "call", "d_out"))
    rule = normaliser(spec)
    if rule.statistic:
        inputs += [Argument(n, "*fp32", "pointer", "output", n.lower()) for n in statistics(spec)]
    if rule.alpha is not None and kernel == "dq":
        inputs.append(Argument("Lse", "*fp32", "pointer", "output", "lse"))
    if rule.alpha is not None and kernel in OUTPUTS:
        inputs.append(Argument("Alive", "*i64", "pointer", "output", "alive"))
    if own.loads == "descriptor":
        inputs += _descriptors(kernel, plan, own, statistics(spec) if rule.statistic else ())
    made = OUTPUTS["dk" if kernel == "dkdv" and plan.dv is not None else kernel] if kernel in OUTPUTS else ()
    outputs = [Argument(n, pointer, "pointer", "output", n.lower()) for n in made]
    outputs += [Argument(s.pointer, _pointee(s), "pointer", "output", s.name) for s in sites]
    several = [a for a in base if a.owner == "call" and "stride" in a.kind]
    others = [a for a in base if a.owner != "output" and a not in inputs and a not in several]
    pointers = [a for a in others if a.kind == "pointer" and a.owner in ("parameter", "starts")]
    rest = [a for a in others if a not in pointers and not (kernel not in OUTPUTS and a.name == "together")]
    cells = [Argument(f"cells_{s.name}", "i32", "scalar", "gradient", f"cells_{s.name}") for s in sites if tabled(s)]
    if any(s.kind == "table" for s in sites):
        cells += [Argument(name, "i32", "scalar", "gradient", name) for name in ("slots", "slots_before")]
    gradient = strides(spec, "g", "d_out")
    every = (*inputs, *outputs, *pointers, *several, *gradient, *rest[:-2], *cells, *rest[-2:])
    return tuple(a for a in every if a.name not in UNREAD.get(kernel, ()))


def _descriptors(kernel: str, plan: KernelPlan, own: PassPlan, of_rows: Sequence[str]) -> list[Argument]:
    """Of the tensors that stream by; None, a constant, for those that TMA cannot address."""
    rows, made = own.tile_k if kernel == "dq" else own.tile_q, []
    for name, size in zip(STREAMED[kernel], (plan.head_dim, plan.head_dim_v), strict=True):
        for part in split(size, ""):
            kind = f"tensordesc<{POINTEES[plan.dtype]}[1,1,{rows},{part.size}]>"
            value = f"descriptor({name}, {rows}, {part.size}) if by_tma else None"
            made.append(Argument(f"{name.capitalize()}_tiles{part.tag}", kind, "descriptor", "call", value))
    if kernel != "dq":
        for name in of_rows:
            value = f"descriptor({name.lower()}, {rows}) if by_tma else None"
            kind = f"tensordesc<fp32[1,1,{rows}]>"
            made.append(Argument(f"{name}_tiles", kind, "descriptor", "call", value))
    return made


def tabled(site: Site) -> bool:
    return site.kind in ("table", "row_table", "key_table")


def _pointee(site: Site) -> str:
    """Cells that one program writes once have the parameter's own type; sums are float32."""
    direct = site.kind == "cells" and not site.apart
    return "*" + POINTEES[site.param.element or ""] if direct else "*fp32"
