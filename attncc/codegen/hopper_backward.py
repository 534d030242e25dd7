"""From spec, visits and plan to the text of the warp-specialised backward pass, in Gluon.

The math is that of codegen.backward. A program has a tile of keys, scores stand keys by rows, and everything that a
tile needs of a row's statistics is what the sums of products start with: s - lse / scale, and dp - delta. The slope of
the scores is rounded as weights are, so that it outlives the product of dp in half of the registers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from attncc.analysis import nonnegative
from attncc.analysis.derivative import ONE, ZERO
from attncc.codegen import launch
from attncc.codegen.backward_arguments import delta_arguments
from attncc.codegen.backward_pairs import stage
from attncc.codegen.cpu_lower import prepared
from attncc.codegen.environment import rendered
from attncc.codegen.hopper import CACHED_BYTES, Steps, steps, tail, unpacked
from attncc.codegen.layout import provenance
from attncc.codegen.loops import VisitsView, visits_view
from attncc.codegen.lower import Lowering, conjoin
from attncc.codegen.naming import Names, reserved
from attncc.codegen.parts import Part, split
from attncc.codegen.printer import TERM
from attncc.codegen.selfcheck import TORCH_TYPES, DenseCheck, comment, dense_check, in_order
from attncc.codegen.signature import CONSUMER_ROWS, POINTEES, TILES, Argument, arguments
from attncc.codegen.tables import tables_of
from attncc.codegen.triton import call_arguments, compiled_to, elsewhere, kernel_names
from attncc.ir import AttentionSpec, Const, KernelPlan, PassPlan, Visits

TOLERANCE = {"bf16": "3e-2", "f16": "5e-3"}  # of the file's check of itself
PIECE = 64  # rows and columns of dQ that a consumer makes at a time


@dataclass(frozen=True)
class Kernel:
    """One kernel of the file: what it is called, what a launch passes, and how it is compiled."""

    name: str
    arguments: tuple[Argument, ...]
    plan: KernelPlan


@dataclass(frozen=True)
class DeltaView:
    kernel: str
    jit_options: tuple[str, ...]
    signature: tuple[str, ...]
    launch: tuple[str, ...]


@dataclass(frozen=True)
class Walk:
    """The tiles that a producer walks over: `lines` come before them."""

    outer: str
    lines: tuple[str, ...]
    reads_h: bool
    visits: VisitsView
    masked: Steps | None
    full: Steps | None
    turns: bool  # each program begins at rows of its own: all see all rows


@dataclass(frozen=True)
class Rows:
    """The kernel of dQ alone."""

    kernel: str
    tile_q: int
    tile_k: int
    stages: int
    signature: tuple[str, ...]
    jit_options: tuple[str, ...]
    launch: tuple[str, ...]
    arguments: str
    unpacked: str


@dataclass(frozen=True)
class HopperBackward:
    """What the roles of the kernel hand on, and how a tile of dQ is shared out."""

    keys: int  # of a consumer
    halves: int  # of 64 rows in a tile
    columns: int  # of 64 in a head
    arguments: str  # of the kernel, by name
    unpacked: str  # the same where a function takes them apart
    cached_bytes: int
    row_bytes: int  # of Q, d_out and dQ's sums


@dataclass(frozen=True)
class HopperBackwardView:
    """Finished values for templates/gluon/fa3_backward.py.jinja."""

    banner: tuple[str, ...]
    docstring: str
    arguments: str
    free_axes: tuple[tuple[str, str], ...]
    adds: bool  # dQ is added up as it comes; else a kernel of its own makes it
    kernel: str
    convert: str
    delta: DeltaView
    signature: tuple[str, ...]
    jit_options: tuple[str, ...]
    launch: tuple[str, ...]
    tile_q: int
    tile_k: int
    stages: int
    head_dim: int
    head_dim_v: int
    k_parts: tuple[Part, ...]
    v_parts: tuple[Part, ...]
    align: str
    position_open: str
    position_close: str
    scale: float
    scale_first: bool
    unit: str  # brings a score to units of log 2
    lse_unit: str
    folds_lse: bool
    folds_delta: bool
    late: bool  # dP is asked for when the weights are there: scores of their own take the registers that it needs
    score_lines: tuple[str, ...]
    score: str
    slope: str
    mask_lines: tuple[str, ...]
    mask: str
    given: str  # to what stands between the products: parameters and sizes
    given_unpacked: str
    by_keys: Walk
    by_rows: Walk
    rows: Rows
    classes: bool  # some tiles are classed at run time
    together: int
    element: str
    hopper: HopperBackward
    helpers: frozenset[str]
    seq: str
    starts: str
    statistics: bool
    interpreted: bool
    check: DenseCheck
    check_helpers: list[str]
    check_inputs: str
    check_arguments: str
    checked: str
    elsewhere: str
    target: str
    torch_dtype: str
    tolerance: str


def render(spec: AttentionSpec, visits_q: Visits, visits_k: Visits, plan: KernelPlan, text: str, resources: Any) -> str:
    """The file: what codegen.backward.render_backward says, for a plan of fa3."""
    made, checked = launch.build_command(spec, plan), launch.file_name(spec.name, plan)
    own, rows = _main(plan), plan.passes["dq"]
    alone = f"deterministic · dQ by itself in tiles of {rows.tile_q} × {rows.tile_k}"
    how = "dQ added up by TMA, in any order" if plan.sums == "added" else alone
    banner = (
        *comment(text),
        f"# backward · fa3 · tile {own.tile_q} × {own.tile_k} · {own.stages} stages · {own.warps} warps · {how}",
        f"# {compiled_to(plan, resources)}",
        "# Weights are worked out again from lse. A row that sees nothing: zero gradients.",
        *provenance(made, f"python {checked}"),
    )
    view = hopper_backward_view(spec, visits_q, visits_k, plan, banner)
    return rendered("gluon/fa3_backward.py.jinja", view)


def hopper_backward_kernels(spec: AttentionSpec, plan: KernelPlan) -> tuple[Kernel, ...]:
    """Of the file, in its order."""
    kernels, names = _kernel_names(spec)
    own = _main(plan)
    keys = replace(plan, tile_q=own.tile_q, tile_k=own.tile_k, stages=own.stages)
    plain = replace(keys, algorithm="fa2", warps=4, stages=1, max_registers=0)
    delta = Kernel(kernels["delta"], _delta_arguments(spec, plan), plain)
    main = Kernel(kernels["main"], _arguments(spec, plan, names), keys)
    if plan.sums == "added":
        return delta, main, Kernel(kernels["convert"], _convert_arguments(plan), plain)
    return delta, main, Kernel(kernels["rows"], row_arguments(spec, plan, names), plan)


def _convert_arguments(plan: KernelPlan) -> tuple[Argument, ...]:
    return (
        Argument("Sums", "*fp32", "pointer", "output", "sums"),
        Argument("D_q", "*" + POINTEES[plan.dtype], "pointer", "output", "d_q"),
        Argument("q_len", "i32", "scalar", "call", "q_len"), TILES[0],
    )  # fmt: skip


def _kernel_names(spec: AttentionSpec) -> tuple[dict[str, str], dict[str, str]]:
    fresh, names = kernel_names(spec)
    called = {"main": "", "delta": "_delta", "convert": "_convert", "rows": "_rows"}
    return {k: fresh.fresh(f"{spec.name}_backward{end}") for k, end in called.items()}, names


def hopper_backward_view(
    spec: AttentionSpec, visits_q: Visits, visits_k: Visits, plan: KernelPlan, banner: tuple[str, ...]
) -> HopperBackwardView:
    kernels, names = _kernel_names(spec)
    args, adds, own = _arguments(spec, plan, names), plan.sums == "added", _main(plan)
    taken = reserved() | {*names.values(), *kernels.values()}

    def lower() -> Lowering:
        known = partial(nonnegative, spec=spec)
        return Lowering(spec, dict(names), Names(taken), known, tables_of(visits_k), plan.int_bits, "gl")

    lowering, helpers = lower(), set[str]()
    scale = plan.head_dim**-0.5 if spec.scale is None else spec.scale
    scale = scale.value if isinstance(scale, Const) else scale
    assert isinstance(scale, float | int)  # planner.hopper_backward refuses another
    folds = not spec.scores and scale > 0
    score_lines, score, slope = _scores(spec, lowering)
    score_lines = (*_take(lowering), *score_lines)
    inside = " & ".join(f"({t})" for t in (tail(spec), "row < q_len" if spec.scores else "") if t)
    mask = conjoin(lowering, spec.masks, inside[1:-1] if inside else "")
    mask_lines = _take(lowering)
    by_keys, by_rows = (_walk(spec, v, lower, helpers) for v in (visits_k, visits_q))
    delta, check = _delta_arguments(spec, plan), dense_check(prepared(spec), names)
    given = [a.name for a in args if a.kind != "descriptor"]
    wide = plan.int_bits == 64
    return HopperBackwardView(
        banner=banner, docstring=_docstring(plan), arguments=_call_arguments(spec, names),
        free_axes=tuple((names[a], launch.extent(spec, a, names)) for a in spec.free_axes),
        adds=adds, kernel=kernels["main"], convert=kernels["convert"],
        delta=DeltaView(
            kernels["delta"], launch.jit_options(delta), launch.signature_lines(delta),
            launch.launch_lines(delta, names),
        ),
        signature=launch.signature_lines(args), jit_options=launch.jit_options(args),
        launch=launch.launch_lines(args, names), tile_q=own.tile_q, tile_k=own.tile_k, stages=own.stages,
        head_dim=plan.head_dim, head_dim_v=plan.head_dim_v, k_parts=split(plan.head_dim, "d"),
        v_parts=split(plan.head_dim_v, "e"), align=spec.align,
        position_open="(" if wide else "", position_close=").to(gl.int64)" if wide else "",
        scale=scale, scale_first=not folds, unit="(SCALE * LOG2E)" if folds else "LOG2E",
        lse_unit="(-1.0 / SCALE)" if folds else "LOG2E", folds_lse=folds,
        folds_delta=own.tile_q == PIECE, late=bool(spec.scores),
        score_lines=score_lines, score=score, slope=slope, mask_lines=mask_lines, mask=mask,
        given=", ".join(given), given_unpacked=unpacked(given), by_keys=by_keys, by_rows=by_rows,
        rows=_rows(spec, plan, kernels["rows"], names), classes=any(w.visits.tested for w in (by_keys, by_rows)),
        together=plan.together, element=TORCH_TYPES[plan.dtype],
        hopper=HopperBackward(
            keys=CONSUMER_ROWS, halves=own.tile_q // PIECE, columns=plan.head_dim // PIECE,
            arguments=", ".join(a.name for a in args), unpacked=unpacked([a.name for a in args]),
            cached_bytes=CACHED_BYTES,
            row_bytes=6 * plan.head_dim + 2 * plan.head_dim_v,
        ),
        helpers=frozenset(lowering.printer.helpers | helpers),
        seq="fixed", starts="", statistics=True, interpreted=False, check=check,
        check_helpers=in_order(check.helpers), check_inputs="Q, K, V", check_arguments=call_arguments(spec, names),
        checked=", ".join(f'({i}, ("{n}", d_{n}))' for i, n in enumerate("qkv")), elsewhere=elsewhere(plan.target),
        target=plan.target, torch_dtype=f"torch.{TORCH_TYPES[plan.dtype]}", tolerance=TOLERANCE[plan.dtype],
    )  # fmt: skip


def _main(plan: KernelPlan) -> PassPlan:
    """The schedule of the kernel over keys."""
    assert plan.dkdv is not None
    return plan.dkdv


def _walk(spec: AttentionSpec, visits: Visits, lower: Callable[[], Lowering], helpers: set[str]) -> Walk:
    lowering = lower()
    seen = visits_view(visits, lowering)
    lines = lowering.take("program")
    helpers |= lowering.printer.helpers
    return Walk(
        visits.outer, lines, _reads_h((*lines, *seen.lines, *(seen.tested.lines if seen.tested else ()))), seen,
        steps(seen.masked, seen.jumps), steps(seen.full, seen.jumps), not spec.masks and visits.outer == "k",
    )  # fmt: skip


def _rows(spec: AttentionSpec, plan: KernelPlan, kernel: str, names: Mapping[str, str]) -> Rows:
    own, args = plan.passes["dq"], row_arguments(spec, plan, names)
    called = [a.name for a in args]
    return Rows(
        kernel, own.tile_q, own.tile_k, own.stages, launch.signature_lines(args), launch.jit_options(args),
        launch.launch_lines(args, names), ", ".join(called), unpacked(called),
    )  # fmt: skip


def _take(lowering: Lowering) -> tuple[str, ...]:
    """The statements of all levels, the coarsest first: a step computes them all."""
    return tuple(line for where in ("program", "key", "row", "pair") for line in lowering.take(where))


def _reads_h(lines: Sequence[str]) -> bool:
    return any(re.search(r"\bh\b", line) for line in lines)


def _scores(spec: AttentionSpec, lowering: Lowering) -> tuple[tuple[str, ...], str, str]:
    """Statements of the scores, the name of the last, and p times its slope in the product; "" where that is 1."""
    current, stages = "s", []
    for score in spec.scores:
        made, current = stage(lowering, score, (), current)
        stages.append(made)
    factors, wild = [], False
    for made in stages:
        lowering.names["s"] = made.before
        if made.slope != ONE:
            factors.append(lowering.text(made.slope, TERM))
            wild |= made.wild
    lowering.names["s"] = "s"
    lines = tuple(line for s in stages for line in s.lines)
    if any(made.slope == ZERO for made in stages):
        return lines, current, "gl.zeros_like(p)"
    slope = " * ".join(["p", *factors]) if factors else ""
    return lines, current, f"gl.where(p == 0, 0.0, {slope})" if wild and slope else slope


def _delta_arguments(spec: AttentionSpec, plan: KernelPlan) -> tuple[Argument, ...]:
    made = delta_arguments(spec, plan)
    sums = [Argument("Sums", "*fp32", "pointer", "output", "sums")] if plan.sums == "added" else []
    at = next(i for i, a in enumerate(made) if a.name == "Delta") + 1
    return (*made[:at], *sums, *made[at:])


def _arguments(spec: AttentionSpec, plan: KernelPlan, names: Mapping[str, str]) -> tuple[Argument, ...]:
    """Of the kernel: everything that it loads and stores itself by TMA, and what the forward has besides."""
    keys, rows, d, dv = CONSUMER_ROWS, _main(plan).tile_q, plan.head_dim, plan.head_dim_v
    made = [
        _tiles(plan, name, value, count, size, owner)
        for name, value, count, size, owner in (
            ("Q", "q", rows, d, "call"), ("K", "k", keys, d, "call"), ("V", "v", keys, dv, "call"),
            ("D_out", "d_out", rows, dv, "call"), ("D_k", "d_k", keys, d, "output"), ("D_v", "d_v", keys, dv, "output"),
        )
    ]  # fmt: skip
    for name, value in (("Lse_2", "lse_2"), ("Delta", "delta")):
        made.append(_described(name, "fp32", [rows], _layout(0, 32, 1), "output", f"described_row({value}, {rows})"))
    if plan.sums == "added":
        made.append(_described("D_q", "fp32", [16, 256], _layout(0, 32, 2), "output", "described_sums(sums)"))
    return (*made, *_given(spec, plan, names))


def row_arguments(spec: AttentionSpec, plan: KernelPlan, names: Mapping[str, str]) -> tuple[Argument, ...]:
    """Of the kernel of dQ alone."""
    own = plan.passes["dq"]
    rows, keys, d, dv = CONSUMER_ROWS, own.tile_k, plan.head_dim, plan.head_dim_v
    made = [
        _tiles(plan, name, value, count, size, owner)
        for name, value, count, size, owner in (
            ("Q", "q", rows, d, "call"), ("K", "k", keys, d, "call"), ("V", "v", keys, dv, "call"),
            ("D_out", "d_out", rows, dv, "call"), ("D_q", "d_q", rows, d, "output"),
        )
    ]  # fmt: skip
    made += [Argument(n, "*fp32", "pointer", "output", n.lower()) for n in ("Lse_2", "Delta")]
    return (*made, *_given(spec, plan, names))


def _given(spec: AttentionSpec, plan: KernelPlan, names: Mapping[str, str]) -> list[Argument]:
    """Parameters and sizes, as in the forward."""
    base = arguments(spec, replace(plan, loads="descriptor"), names)
    lengths = ("q_len", "k_len", "b_len", "h_len", "group", "together")
    return [a for a in base if a.owner == "parameter" or a.name in lengths]


def _tiles(plan: KernelPlan, name: str, value: str, rows: int, columns: int, owner: str) -> Argument:
    layout = _layout(min(128, 2 * columns), 16, 4)
    text = f"described({value}, {rows}, {columns})"
    return _described(name, POINTEES[plan.dtype], [1, 1, rows, columns], layout, owner, text)


def _described(name: str, element: str, shape: list[int], layout: str, owner: str, value: str) -> Argument:
    return Argument(name, f"tensordesc<{element}{shape},{layout}>", "descriptor", owner, value)


def _layout(swizzle: int, bits: int, rank: int) -> str:
    return f"NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth={bits}, rank={rank})"


def _docstring(plan: KernelPlan) -> str:
    d, dv = plan.head_dim, plan.head_dim_v
    bits = "dQ is added up in any order." if plan.sums == "added" else "Equal calls give equal bits."
    return (
        f"q [B, H, Q, {d}], k [B, H_kv, K, {d}], v [B, H_kv, K, {dv}], out and d_out [B, H, Q, {dv}] in {plan.dtype},\n"
        "    lse and d_lse [B, H, Q] in float32; any strides, what TMA cannot address is copied; d_lse may be None.\n\n"
        f"    Returns d_q, d_k, d_v, and the gradients of parameters by name. {bits}"
    )


def _call_arguments(spec: AttentionSpec, names: Mapping[str, str]) -> str:
    params = [names[p.name] + (f"={p.default!r}" if p.default is not None else "") for p in spec.params]
    return ", ".join(["q", "k", "v", "out", "lse", "d_out", "d_lse=None", *(["*", *params] if params else [])])
