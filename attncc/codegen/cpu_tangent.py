"""The CPU program of a call's tangent: one PyTorch file, tiled like the forward, weights worked out again from lse."""

from __future__ import annotations

from dataclasses import dataclass

from attncc.analysis.derivative import ZERO
from attncc.analysis.tangent import MOVED_S, dual, tangent
from attncc.codegen import launch
from attncc.codegen.cpu import common_helpers, uses
from attncc.codegen.cpu_lower import CpuLowering, of_dtype, prepared
from attncc.codegen.cpu_ranges import ranges_of
from attncc.codegen.environment import rendered
from attncc.codegen.layout import provenance
from attncc.codegen.printer import UNARY
from attncc.codegen.selfcheck import DenseCheck, comment, dense_check, free_axes, in_order
from attncc.codegen.tangent_parts import TangentCall, call_of, shared, spelled_names
from attncc.ir import AttentionSpec, Expr, KernelPlan, Visits, names


@dataclass(frozen=True)
class CpuTangentView:
    """Finished text for the template: what cpu.CpuView has of the tiles, and the lines of the tangents."""

    comment: list[str]
    helpers: list[str]
    given: TangentCall
    ragged: bool
    programs: str
    align: str
    position: str
    uses: frozenset[str]
    scale: str
    scale_t: str  # empty where nothing that it is made of moves
    is_masked: str
    call: list[str]
    summaries: list[str]
    program: list[str]
    row: list[str]
    ranges: list[str]
    sink: str  # the sink and its tangent, where it has one
    sink_t: str
    tile_class: list[str]
    pair: list[str]
    mask: list[str]
    stages: list[str]  # from the scores and their tangents to p and its own, where they alone make it
    weight: list[str]
    check: DenseCheck
    tile_q: int
    tile_k: int
    head_dim: int
    head_dim_v: int
    dropout: str = ""  # it has no tangent yet


def render_cpu_tangent(spec: AttentionSpec, visits: Visits, plan: KernelPlan, text: str = "") -> str:
    """The file's text: `tangent(q, k, v, out, lse, q_t, k_t, v_t, *, parameters, NAME_t, …) -> (out_t, lse_t)`.

    `spec` has its consts bound; `visits` is analysis.visits(spec, "q"); `text` is the spec as written.
    Equal arguments give equal bytes.
    """
    return rendered("cpu/tangent.py.jinja", view_of(spec, visits, plan, text))


def view_of(spec: AttentionSpec, visits: Visits, plan: KernelPlan, text: str) -> CpuTangentView:
    spec = prepared(spec)
    called = spelled_names(spec)
    low = CpuLowering(dual(spec), called)
    low.printer.names = {**low.printer.names, MOVED_S.name: "s_t"}
    scale = low.scale()
    scale_t = _scale(low, spec)
    sink, sink_t = _sink(low, spec)
    pair = [line for e in spec.scores for line in _score(low, e, tangent(e, spec))]
    stages = _stages(low, spec, pair)
    weight = _weight(low, spec, pair)
    mask = low.masks()
    ranges, check = ranges_of(low.spec, visits, low), dense_check(spec, called)
    return CpuTangentView(
        comment=[
            *comment(text),
            f"# tangent · cpu · tile {plan.tile_q} × {plan.tile_k} · memory linear in length: one tile of scores",
            *provenance(launch.build_command(spec, plan), f"python {launch.file_name(spec.name, plan)}"),
        ],
        helpers=in_order({*common_helpers(low.normaliser), *low.printer.helpers, *check.helpers, *ranges.helpers}),
        given=call_of(spec, called), ragged=spec.ragged, programs=ranges.programs, align=spec.align,
        position=check.position,
        uses=uses(spec), scale=scale, scale_t=scale_t, is_masked=ranges.is_masked, call=free_axes(spec, called),
        summaries=ranges.summaries, program=low.program, row=low.row, ranges=ranges.lines, sink=sink,
        sink_t=sink_t, tile_class=ranges.tile_class, pair=pair, mask=mask, stages=stages, weight=weight, check=check,
        tile_q=plan.tile_q, tile_k=plan.tile_k, head_dim=plan.head_dim, head_dim_v=plan.head_dim_v,
    )  # fmt: skip


def _scale(low: CpuLowering, spec: AttentionSpec) -> str:
    moves = ZERO if spec.scale is None else tangent(spec.scale, spec)
    return "" if moves == ZERO else low.text(moves, low.row)


def _sink(low: CpuLowering, spec: AttentionSpec) -> tuple[str, str]:
    """The sink and its tangent; empty where it has none."""
    sink = low.normaliser.sink
    moves = ZERO if sink is None else tangent(sink, spec)
    if sink is None or moves == ZERO:
        return "", ""
    return low.number(sink, low.row), low.number(moves, low.row, UNARY)


def _stages(low: CpuLowering, spec: AttentionSpec, pair: list[str]) -> list[str]:
    """From the masked scores to the weights, for a normaliser that makes them of the scores alone."""
    before, lines = low.printer.names, []
    for e in low.normaliser.stages or ():
        lines += _score(low, e, tangent(e, spec), "p", pair)
        low.printer.names = {**before, "s": "p", MOVED_S.name: "p_t"}
    low.printer.names = before
    return lines


def _score(low: CpuLowering, e: Expr, moves: Expr, result: str = "s", pair: list[str] | None = None) -> list[str]:
    """The tangent of one score, then the score: the tangent reads the `s` before it. What they read goes to `pair`."""
    lines: list[str] = []
    reads = lines if pair is None else pair
    before = low.printer.names.get("s", "s")
    held = shared(e, moves)
    for f in held:
        name = low.free.fresh(f"{f.op}_s")
        lines.append(f"{name} = {low.number(f, reads)}")
        low.remember(f, name)
    if moves != MOVED_S or before != result:
        lines.append(_assigned(low, f"{result}_t", moves, reads))
    lines.append(_assigned(low, result, e, reads))
    for f in held:
        low.forget(f)
    return lines


def _assigned(low: CpuLowering, name: str, e: Expr, lines: list[str]) -> str:
    """A value for each pair, even where `e` has one for a row, a key or all of them."""
    text = low.number(e, lines)
    if of_dtype(e) and names(e) & {"s", MOVED_S.name}:
        return f"{name} = {text}"
    return f"{name} = torch.empty_like(s).copy_({text})"


def _weight(low: CpuLowering, spec: AttentionSpec, pair: list[str]) -> list[str]:
    """Lines that weigh p and what it moves by; values that they need go to `pair`."""
    if spec.weight is None:
        return []
    text, moves = low.text(spec.weight, pair), tangent(spec.weight, spec)
    more = "" if moves == ZERO else f" + p * ({low.text(moves, pair)})"
    lines = [f"p_t = torch.where(p == 0, 0.0, p_t * ({text}){more}).to(dtype)"]
    return [*lines, f"p = torch.where(p == 0, 0.0, p * ({text})).to(dtype)"]
