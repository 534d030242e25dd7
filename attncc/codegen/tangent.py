"""From spec, visits and plan to the text of a Triton file for the tangent of a call: forward-mode derivatives.

Like dQ of the backward pass it works the weights out again from lse, so that one walk over the keys does: see
tangent_parts for the formula.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from attncc.analysis import nonnegative
from attncc.analysis.derivative import ZERO
from attncc.analysis.normaliser import normaliser
from attncc.analysis.tangent import MOVED_S, dual, tangent
from attncc.codegen import launch
from attncc.codegen.cpu_lower import prepared
from attncc.codegen.environment import rendered
from attncc.codegen.layout import provenance
from attncc.codegen.loops import VisitsView, visits_view
from attncc.codegen.lower import Lowering, conjoin, level, score_text
from attncc.codegen.naming import Names, reserved
from attncc.codegen.parts import Part, split
from attncc.codegen.prepass import TablesView, tables_view
from attncc.codegen.printer import BIT_AND, TERM
from attncc.codegen.selfcheck import TORCH_TYPES, DenseCheck, comment, dense_check, in_order
from attncc.codegen.signature import Argument, arguments
from attncc.codegen.tables import tables_of
from attncc.codegen.tangent_parts import TangentCall, call_of, is_wild, shared, spelled_names
from attncc.codegen.triton import call_arguments, compiled_to, elsewhere
from attncc.ir import AttentionSpec, Const, Expr, KernelPlan, Op, Read, Var, Visits, conjuncts, rewrite

TOLERANCE = {"bf16": "2e-2", "f16": "5e-3", "f32": "1e-4", "tf32": "1e-2"}  # of the file's check of itself


@dataclass(frozen=True)
class TangentView:
    """Finished values for templates/triton/fa2_tangent.py.jinja: names, numbers and printed expressions."""

    kernel: str
    banner: tuple[str, ...]
    docstring: str
    given: TangentCall
    kv: str
    seq: str
    align: str
    together: int
    signature: tuple[str, ...]
    jit_options: tuple[str, ...]
    general: tuple[str, ...]
    free_axes: tuple[tuple[str, str], ...]
    launch: tuple[str, ...]
    head_dim: int
    head_dim_v: int
    k_parts: tuple[Part, ...]
    v_parts: tuple[Part, ...]
    d_parts: tuple[Part, ...]
    tile_q: int
    tile_k: int
    warps: int
    stages: int
    position_open: str
    position_close: str
    dot_options: str
    unit: str
    scale_first: bool
    scale_t: str  # the tangent of the scale, empty where it has none
    sink: str  # the sink and its tangent, where it has one
    sink_t: str
    program_lines: tuple[str, ...]
    row_lines: tuple[str, ...]
    key_lines: tuple[str, ...]
    pair_lines: tuple[str, ...]
    scores: tuple[str, ...]  # the tangent of each score, then the score
    has_lse: bool
    weighing: tuple[str, ...]  # from the scores and their tangents to p and its own, where they alone make it
    excludes: bool  # they leave what is excluded to a comparison
    wild: bool  # a tangent may be infinite where p is 0
    weight: str
    weight_t: str
    key_mask: str
    mask_lines: tuple[str, ...]
    mask: str
    visits: VisitsView
    tables: TablesView | None
    helpers: frozenset[str]
    check: DenseCheck
    check_helpers: list[str]
    check_arguments: str
    elsewhere: str
    target: str
    torch_dtype: str
    tolerance: str
    dropout: str = ""  # it has no tangent yet
    kept: str = ""  # nor have 8-bit inputs
    kernels: tuple[()] = ()  # this is its only one


def render_tangent(
    spec: AttentionSpec, visits: Visits, plan: KernelPlan, text: str = "", resources: Any = None,
) -> str:  # fmt: skip
    """The file of the tangent: equal arguments give equal bytes.

    `spec` has its consts bound, `visits` is analysis.kernel_visits(spec, "q"), `plan` planner.choose_tangent's. Its
    call is `tangent(q, k, v, out, lse, q_t=None, k_t=None, v_t=None, *, parameters, NAME_t=None, …)` -> (out_t, lse_t).
    """
    view = tangent_view(spec, visits, plan, _banner(spec, plan, text, resources))
    return rendered(f"triton/{plan.algorithm}_tangent.py.jinja", view)


def tangent_arguments(spec: AttentionSpec, plan: KernelPlan, called: Mapping[str, str]) -> tuple[Argument, ...]:
    """The forward's for the dual of `spec`, with tangents of q, k, v beside them and of out, lse as what is written."""
    made: list[Argument] = []
    base = arguments(dual(spec), plan, called)
    results = [a for a in base if a.name in ("Out", "Lse")]
    for a in base:
        made += [] if a in results else [a]
        if a.name == "V":
            made += [_moved(x) for x in base if x.name in ("Q", "K", "V")]
            made += [*(results if normaliser(spec).has_lse else ()), *map(_moved, results)]
    strides = [a for a in base if a.owner == "call" and "stride" in a.kind]
    at = made.index(strides[-1]) + 1
    made[at:at] = map(_moved, strides)
    return tuple(made)


def _moved(a: Argument) -> Argument:
    """The same of the tangent."""
    return replace(a, name=f"{a.name}_t", value=re.sub(r"^\w+", r"\g<0>_t", a.value))


def kernel_name(spec: AttentionSpec) -> str:
    return Names(reserved() | set(spelled_names(spec).values())).fresh(f"{spec.name}_tangent")


def tangent_view(spec: AttentionSpec, visits: Visits, plan: KernelPlan, banner: tuple[str, ...]) -> TangentView:
    called, kernel, tables = spelled_names(spec), kernel_name(spec), tables_of(visits)
    args = tangent_arguments(spec, replace(plan, tables=tables.made), called)

    def lower() -> Lowering:
        known = Names(reserved() | {*called.values(), kernel})
        return Lowering(dual(spec), dict(called), known, partial(nonnegative, spec=spec), tables, plan.int_bits)

    lowering = lower()
    lowering.names[MOVED_S.name] = "s_t"
    scale = Op("float", (spec.scale,), "float") if spec.scale is not None and spec.scale.type == "int" else spec.scale
    scale_line = f"scale = {lowering.text(scale if scale is not None else Const(plan.head_dim**-0.5))}"
    folds = (
        normaliser(spec).has_lse
        and not spec.scores
        and (scale is None or (isinstance(scale, Const) and scale.value > 0))
    )
    scale_t = _moves(lowering, spec, scale)
    found = [_score(lowering, e, tangent(e, spec)) for e in spec.scores]
    rule = normaliser(spec)
    weighing = _weighing(lowering, spec)
    pair_lines = lowering.take("pair")
    weight = lowering.text(spec.weight, TERM) if spec.weight is not None else ""
    weight_t = _moves(lowering, spec, spec.weight)
    pair_lines += lowering.take("pair")
    sink_t = _moves(lowering, spec, rule.sink)
    sink_text = lowering.text(rule.sink, TERM) if rule.sink is not None and sink_t else ""
    key_lines = lowering.take("key")
    mask = conjoin(lowering, spec.masks, "k < k_len")
    mask_lines = (*lowering.take("key"), *lowering.take("pair"))
    by_key = [t for m in spec.masks for t in conjuncts(m) if level(t) == "key"]
    key_mask = " & ".join(lowering.text(t, BIT_AND) for t in (by_key and [*by_key, INSIDE]))
    tables_text = tables_view(visits, tables, args, called, plan.int_bits, lower) if tables else None
    view_visits = visits_view(visits, lowering)
    k_parts = split(plan.head_dim, "d")
    v_parts = k_parts if plan.head_dim_v == plan.head_dim else split(plan.head_dim_v, "e")
    wide, check = plan.int_bits == 64, dense_check(prepared(spec), called)
    return TangentView(
        kernel=kernel, banner=banner, docstring=_docstring(plan, rule.has_lse), given=call_of(spec, called),
        kv="pointer", seq="fixed", align=spec.align, together=plan.together, signature=launch.signature_lines(args),
        jit_options=launch.jit_options(args), general=launch.general(args), launch=launch.launch_lines(args, called),
        free_axes=tuple((called[a], launch.extent(spec, a, called)) for a in spec.free_axes),
        head_dim=plan.head_dim, head_dim_v=plan.head_dim_v, k_parts=k_parts, v_parts=v_parts,
        d_parts=tuple(dict.fromkeys((*k_parts, *v_parts))), tile_q=plan.tile_q, tile_k=plan.tile_k, warps=plan.warps,
        stages=plan.stages, position_open="(" if wide else "", position_close=").to(tl.int64)" if wide else "",
        dot_options=f', input_precision="{plan.products}"' if plan.dtype == "f32" else "",
        unit="exponent" if folds else "LOG2E", scale_first=not folds, scale_t=scale_t, sink=sink_text, sink_t=sink_t,
        program_lines=(*lowering.take("program"), scale_line, *(("exponent = scale * LOG2E",) if folds else ())),
        row_lines=lowering.take("row"), key_lines=key_lines, pair_lines=pair_lines,
        scores=tuple(line for lines, _ in found for line in lines), wild=any(wild for _, wild in found),
        has_lse=rule.has_lse, weighing=weighing, excludes=not rule.vanishes,
        weight=weight, weight_t=weight_t, key_mask=key_mask, mask_lines=mask_lines, mask=mask, visits=view_visits,
        tables=tables_text, helpers=frozenset(lowering.printer.helpers), check=check,
        check_helpers=in_order(check.helpers), check_arguments=call_arguments(spec, called),
        elsewhere=elsewhere(plan.target), target=plan.target, torch_dtype=f"torch.{TORCH_TYPES[plan.dtype]}",
        tolerance=TOLERANCE[plan.products if plan.products == "tf32" else plan.dtype],
    )  # fmt: skip


INSIDE = Op("<", (Var("k", "int"), Var("k_len", "int")), "bool")  # of the keys


def _moves(lowering: Lowering, spec: AttentionSpec, e: Expr | None) -> str:
    """The tangent of an expression that stands for itself, empty where it has none."""
    moves = ZERO if e is None else tangent(e, spec)
    return "" if moves == ZERO else lowering.text(moves, TERM)


def _weighing(lowering: Lowering, spec: AttentionSpec) -> tuple[str, ...]:
    """From the scores and their tangents to p and its own, for weights that the scores alone make."""
    lines: list[str] = []
    for e in normaliser(spec).stages or ():
        lines += _score(lowering, e, tangent(e, spec), "p")[0]
        lowering.names["s"], lowering.names[MOVED_S.name] = "p", "p_t"
    lowering.names["s"], lowering.names[MOVED_S.name] = "s", "s_t"
    return tuple(lines)


def _score(lowering: Lowering, e: Expr, moves: Expr, result: str = "s") -> tuple[list[str], bool]:
    """The tangent of one score, then the score, functions that both hold first; and whether the tangent is wild."""
    lines, exprs, wild = [], [e, moves], is_wild(moves)
    while held := shared(*exprs):
        name = Var(lowering.fresh.fresh(f"{held[0].op}_s"), "float")
        lines.append(f"{name.name} = {lowering.text(held[0])}")
        exprs = [rewrite(x, partial(_put, old=held[0], new=name)) for x in exprs]
    if moves != MOVED_S or lowering.names[MOVED_S.name] != f"{result}_t":
        lines.append(f"{result}_t = {score_text(lowering, exprs[1])}")
    return [*lines, f"{result} = {score_text(lowering, exprs[0])}"], wild


def _put(node: Expr, old: Expr, new: Expr) -> Expr | None:
    return new if node == old else node if isinstance(node, Read) else None


def _docstring(plan: KernelPlan, has_lse: bool) -> str:
    d, dv = plan.head_dim, plan.head_dim_v
    statistics = "lse [B, H, Q] in float32" if has_lse else "an empty lse"
    return (
        f"q [B, H, Q, {d}], k [B, H_kv, K, {d}], v [B, H_kv, K, {dv}] and their out [B, H, Q, {dv}] in {plan.dtype},\n"
        f"    {statistics}; NAME_t is the tangent of NAME, zero where it is left out; any strides.\n\n"
        "    Returns out_t and lse_t, the tangents of out and lse."
    )


def _banner(spec: AttentionSpec, plan: KernelPlan, text: str, resources: Any) -> tuple[str, ...]:
    """The comment on top: the spec, the plan, what it compiled to, and how to make and check the file."""
    stages = f"{plan.stages} stage{'s' if plan.stages > 1 else ''}"
    made, checked = launch.build_command(spec, plan), f"python {launch.file_name(spec.name, plan)}"
    return (
        *comment(text),
        f"# tangent · {plan.algorithm} · tile {plan.tile_q} × {plan.tile_k} · {stages} · {plan.warps} warps",
        f"# {compiled_to(plan, resources)}",
        f"# x_t is the tangent of x. Weights are worked out again{' from lse' if normaliser(spec).has_lse else ''}. "
        "A row that sees nothing: zero tangents.",
        *provenance(made, checked),
    )
