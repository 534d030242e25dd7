"""What the file of a backward pass says of itself: its head, and the docstring of its call."""

from __future__ import annotations

from typing import Any

from attncc.analysis.normaliser import Normaliser, normaliser
from attncc.codegen import launch
from attncc.codegen.layout import provenance
from attncc.codegen.selfcheck import comment
from attncc.codegen.triton import compiled_to
from attncc.ir import AttentionSpec, KernelPlan, PassPlan


def docstring(spec: AttentionSpec, plan: KernelPlan, statistics: bool) -> str:
    d, dv = plan.head_dim, plan.head_dim_v
    if spec.ragged:
        forms, rows = (f"[total_q, H, {d}]", f"[total_k, H_kv, {d}]", f"[total_k, H_kv, {dv}]"), "[H, total_q]"
        out, packed = f"[total_q, H, {dv}]", " sequences as in forward;"
    else:
        forms, rows = (f"[B, H, Q, {d}]", f"[B, H_kv, K, {d}]", f"[B, H_kv, K, {dv}]"), "[B, H, Q]"
        out, packed = f"[B, H, Q, {dv}]", ""
    lse = f"lse and d_lse {rows} in float32; any strides,{packed} d_lse may be None." if statistics else (
        f"any strides;{packed} there is no lse."
    )  # fmt: skip
    if spec.reports:
        lse = f"lse and entropy side by side, and their gradients d_lse, {rows[:-1]}, 2] in float32; d_lse may be None."
    return (
        f"q {forms[0]}, k {forms[1]}, v {forms[2]}, out and d_out {out} in {plan.dtype},\n    {lse}\n\n"
        "    Returns d_q, d_k, d_v, and the gradients of parameters by name. Equal calls give equal bits."
    )


def banner(spec: AttentionSpec, plan: KernelPlan, text: str, resources: Any) -> tuple[str, ...]:
    """The comment on top: the spec, the plan, what it compiled to, and how to make the file."""
    dq, *keys = (_pass_text(own) for own in plan.passes.values())
    titles = ("dK and dV",) if plan.dv is None else ("dK", "dV")
    made, checked = launch.build_command(spec, plan), launch.file_name(spec.name, plan)
    return (
        *comment(text),
        f"# backward · {plan.algorithm} · deterministic · dQ: {dq}",
        *(f"# {title}: {text}" for title, text in zip(titles, keys, strict=True)),
        f"# {compiled_to(plan, resources)}",
        f"# Weights are worked out again{_source(normaliser(spec))}, in each direction.",
        "# A row that sees nothing: zero gradients.",
        *provenance(made, f"python {checked}"),
    )  # fmt: skip


def _source(rule: Normaliser) -> str:
    return " from lse" if rule.has_lse else " from thresholds" if rule.statistic else ""


def _pass_text(own: PassPlan) -> str:
    means = "TMA" if own.loads == "descriptor" else "pointers"
    stages = f"{own.stages} stage{'s' if own.stages > 1 else ''}"
    return f"tile {own.tile_q} × {own.tile_k} · {stages} · {own.warps} warps · by {means}"
