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

from attncc.analysis import even, lopsided, nonnegative, spread
from attncc.analysis.derivative import ONE, ZERO, derivative, multiply
from attncc.codegen import launch
from attncc.codegen.backward_collect import Collected, collected
from attncc.codegen.backward_pairs import SHARE, VALUES, end_lines, row_lines, stage
from attncc.codegen.backward_sites import named, sites
from attncc.codegen.cpu_lower import prepared
from attncc.codegen.environment import rendered
from attncc.codegen.hopper import NEAR, tail, unpacked
from attncc.codegen.hopper_arguments import converting, given, over_keys, over_rows, row_statistics, with_turns
from attncc.codegen.hopper_walk import Walk, walk
from attncc.codegen.layout import provenance
from attncc.codegen.lower import Lowering, conjoin
from attncc.codegen.naming import Names, reserved
from attncc.codegen.parts import Part, split
from attncc.codegen.printer import TERM
from attncc.codegen.selfcheck import TORCH_TYPES, DenseCheck, comment, dense_check, in_order
from attncc.codegen.signature import CONSUMER_ROWS, Argument
from attncc.codegen.tables import Tables, tables_of
from attncc.codegen.triton import call_arguments, compiled_to, elsewhere, kernel_names
from attncc.ir import AttentionSpec, Const, KernelPlan, Op, PassPlan, Visits, tensors
from attncc.planner.hopper import CACHED_BYTES
from attncc.planner.hopper_backward import ADDED, JOINT, RING_BYTES, keys_plan, wide, widths
from attncc.targets import target

TOLERANCE = {"bf16": "3e-2", "f16": "5e-3"}  # of the file's check of itself
PIECE = 64  # rows and columns of dQ that a consumer makes at a time


@dataclass(frozen=True)
class Kernel:
    """One kernel of the file: what it is called, what a launch passes, and how it is compiled."""

    name: str
    arguments: tuple[Argument, ...]
    plan: KernelPlan
    form: str = ""  # behind its name, where it is compiled in several


@dataclass(frozen=True)
class KernelText:
    """One kernel's name, signature, options and launch; its arguments as a tuple, and where one is taken apart."""

    kernel: str
    signature: tuple[str, ...]
    jit_options: tuple[str, ...]
    launch: tuple[str, ...]
    arguments: str
    unpacked: str
    tile_q: int
    tile_k: int
    stages: int


@dataclass(frozen=True)
class HopperBackwardView:
    """Finished values for templates/gluon/fa3_backward.py.jinja."""

    banner: tuple[str, ...]
    docstring: str
    arguments: str
    free_axes: tuple[tuple[str, str], ...]
    adds: bool  # dQ is added up as it comes; else a kernel of its own makes it
    turns: bool  # in sums that heads may use in turns
    sums: str  # what describes them
    collected: Collected
    delta: KernelText
    main: KernelText
    convert: KernelText
    rows: KernelText
    kernel: str
    tile_q: int
    tile_k: int
    stages: int
    head_dim: int
    head_dim_v: int
    width: int  # of a head as it is multiplied: TMA brings zeros behind its columns
    width_v: int
    wide: bool  # a warp group holds one sum: dV with the weights, or dK
    consumers: int  # that have keys of their own
    v_parts: tuple[Part, ...]
    align: str
    constant: float | int | None  # the scale, where it is one
    scale_lines: tuple[str, ...]
    tl_scale_lines: tuple[str, ...]
    scale: str
    scale_first: bool
    unit: str  # brings a score to units of log 2
    lse_unit: str
    folds_lse: bool
    guards: bool  # no mask looks for keys behind the last: the sums of scores start with what leaves them out
    folds_delta: bool
    late: bool  # dP is asked for when the weights are there: they take the registers that it needs
    share_lines: tuple[str, ...]  # what a row gives to parameters by itself
    share_ends: tuple[str, ...]
    score_lines: tuple[str, ...]
    score: str
    slope: str
    mask_lines: tuple[str, ...]
    mask: str
    given: str  # to what stands between the products: parameters and sizes
    given_unpacked: str
    even: bool  # programs of a head have about as many rows each
    lopsided: bool  # the first one has many times as many as others
    by_keys: Walk
    by_rows: Walk
    loading: int  # registers of the warp that loads: those that are left, more where it classes tiles
    classes: bool  # some tiles are classed at run time
    together: int
    element: str
    keys: int  # of a consumer
    halves: int  # of 64 rows in a tile
    columns: int  # of 64 in a head
    cached_bytes: int
    ring_bytes: int  # of sums that heads use in turns
    processors: int  # of the target; a GPU may have less
    row_bytes: int  # of Q, d_out and dQ's sums
    near: int  # rows of a head that programs side by side go through, at most; 0 where they go through all
    helpers: frozenset[str]
    seq: str
    starts: str
    statistics: bool
    interpreted: bool
    sparse: bool
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
    own, rows = keys_plan(plan), plan.passes["dq"]
    alone = f"deterministic · dQ by itself in tiles of {rows.tile_q} × {rows.tile_k}"
    added = "dQ added up by TMA, in any order" + (", heads in turns" if plan.sums == "turns" else "")
    how = added if plan.sums in ADDED else alone
    banner = (
        *comment(text),
        f"# backward · fa3 · tile {own.tile_q} × {own.tile_k} · {own.stages} stages · {own.warps} warps · {how}",
        f"# {compiled_to(plan, resources)}",
        "# Weights are worked out again from lse. A row that sees nothing: zero gradients.",
        *provenance(made, f"python {checked}"),
    )
    view = hopper_backward_view(spec, visits_q, visits_k, plan, banner)
    return rendered("gluon/fa3_backward.py.jinja", view)


def hopper_backward_kernels(
    spec: AttentionSpec, visits_q: Visits, visits_k: Visits, plan: KernelPlan
) -> tuple[Kernel, ...]:  # fmt: skip
    """Of the file, in its order; those that make tables are not among them."""
    view, own = _Builder(spec, visits_q, visits_k, plan), keys_plan(plan)
    keys = replace(plan, tile_q=own.tile_q, tile_k=own.tile_k, stages=own.stages)
    plain = replace(keys, algorithm="fa2", warps=4, stages=1, max_registers=0)
    delta, main = Kernel(view.kernels["delta"], view.delta, plain), Kernel(view.kernels["main"], view.args, keys)
    if plan.sums == "added":
        return delta, main, Kernel(view.kernels["convert"], view.convert, plain)
    if plan.sums == "turns":
        alone, turns = (replace(main, arguments=with_turns(view.args, x)) for x in (False, True))
        return delta, alone, replace(turns, form=" in turns"), Kernel(view.kernels["convert"], view.convert, plain)
    return delta, main, Kernel(view.kernels["rows"], view.row_args, plan)


class _Builder:
    """What the view is made of: names, arguments, statements."""

    def __init__(self, spec: AttentionSpec, visits_q: Visits, visits_k: Visits, plan: KernelPlan) -> None:
        self.spec, self.plan, self.helpers = spec, plan, set[str]()
        fresh, self.names = kernel_names(spec)
        called = {"main": "", "delta": "_delta", "convert": "_convert", "rows": "_rows"}
        self.kernels = {k: fresh.fresh(f"{spec.name}_backward{end}") for k, end in called.items()}
        self.sites = named(sites(spec), fresh)
        own = {n for s in self.sites for n in (s.name, s.pointer)}
        self.taken = reserved() | {*self.names.values(), *self.kernels.values(), *own}
        scale = plan.head_dim**-0.5 if spec.scale is None else spec.scale
        self.constant = scale.value if isinstance(scale, Const) else scale if isinstance(scale, float) else None
        self.bare = not spec.scores and self.constant is not None and self.constant > 0
        # into what sums of products start with; kernels that make dQ apart have the registers, and narrow heads no time
        narrow = plan.sums == "apart" and widths(plan.head_dim, plan.head_dim_v)[0] < JOINT
        self.folds = self.bare and not narrow
        self.guards = self.folds and not spec.masks and plan.sums in ADDED
        self.by_keys, self.args = self._walk(visits_k, keys_plan(plan), "main", over_keys)
        self.by_rows, self.row_args = self._walk(visits_q, plan.passes["dq"], "rows", over_rows)
        self.scale_lines, self.scale = self._scale("gl")
        self.share_lines, self.share_ends = self._share()
        self.delta = row_statistics(spec, plan, self.names, self.sites, bool(self.sites))
        self.convert = self._converting()

    def lower(self, tables: Tables, language: str) -> Lowering:
        known = partial(nonnegative, spec=self.spec)
        return Lowering(self.spec, dict(self.names), Names(self.taken), known, tables, self.plan.int_bits, language)

    def plain(self, language: str) -> Lowering:
        """For what reads no tables."""
        return self.lower(tables_of(Visits("k")), language)

    def _walk(
        self, visits: Visits, own: PassPlan, kernel: str, over: Callable[..., tuple[Argument, ...]]
    ) -> tuple[Walk, tuple[Argument, ...]]:  # fmt: skip
        return walk(
            self.spec, visits, self.plan, own, self.kernels[kernel], lambda plan: over(self.spec, plan, self.names),
            self.names, self.lower, self.helpers,
        )  # fmt: skip

    def _scale(self, language: str) -> tuple[tuple[str, ...], str]:
        """The scale, after the statements that it needs; a constant is one of the file."""
        given = self.spec.scale
        if given is None or isinstance(given, Const):
            return (), "SCALE"
        lowering = self.plain(language)
        text = lowering.text(given if given.type == "float" else Op("float", (given,), "float"), TERM)
        self.helpers |= lowering.printer.helpers
        return (*lowering.take("program"), f"scale = {text}"), "scale"

    def _converting(self) -> tuple[Argument, ...]:
        """The arguments of the kernel that makes dQ from its sums."""
        *made, tile = converting(self.plan)
        read = set(re.findall(r"\w+", " ".join(self._scale("tl")[0]))) - {a.name for a in made}
        more = [a for a in given(self.spec, self.plan, self.names) if a.owner == "parameter" or a.name in read]
        return (*made, *(a for a in more if self.scale_lines and a not in made), tile)

    def _share(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What a row gives to the parameters of its sink, by itself; and how it is stored."""
        if not self.sites:
            return (), ()
        lowering, sink = self.plain("tl"), self.spec.softmax.args[0]
        lowering.names |= VALUES
        text = lowering.text(sink, TERM)
        lines = [f"{s.name} = tl.zeros([TILE_Q, 1], tl.float32)" for s in self.sites]
        lines.append(f"share = -tl.exp2({text} * LOG2E - lse * LOG2E) * delta")
        for s in self.sites:
            lines += row_lines(lowering, s, multiply(SHARE, derivative(sink, s.at)))
        ends = tuple(line for s in self.sites for line in end_lines(lowering, s))
        self.helpers |= lowering.printer.helpers
        return (*lowering.take("program"), *lowering.take("row"), *lines), ends


def hopper_backward_view(
    spec: AttentionSpec, visits_q: Visits, visits_k: Visits, plan: KernelPlan, banner: tuple[str, ...]
) -> HopperBackwardView:
    make, own = _Builder(spec, visits_q, visits_k, plan), keys_plan(plan)
    first, second = widths(plan.head_dim, plan.head_dim_v)
    lowering, names = make.plain("gl"), make.names
    constant, folds = make.constant, make.folds
    score_lines, score, slope = _scores(spec, lowering)
    score_lines = (*_take(lowering), *score_lines)
    terms = [t for t in ("" if make.guards else tail(spec), "row < q_len" if spec.scores else "") if t]
    mask = conjoin(lowering, spec.masks, " & ".join(f"({t})" for t in terms) if terms[1:] else "".join(terms))
    mask_lines = _take(lowering)
    given = [a.name for a in make.args if a.kind != "descriptor" and a.owner in ("call", "parameter")]
    check, found = dense_check(prepared(spec), names), collected(spec, make.sites, names, own.tile_q)
    learned = [name for name, _, _ in found.gradients]
    checked = [f'({i}, ("{n}", d_{n}))' for i, n in enumerate("qkv")]
    checked += [f'({i}, ("{name}", more["{name}"]))' for i, name in enumerate(learned, 3)]
    rows, near = plan.passes["dq"], spread(spec, visits_k) == "local"
    return HopperBackwardView(
        banner=banner, docstring=_docstring(plan), arguments=_call_arguments(spec, names),
        free_axes=tuple((names[a], launch.extent(spec, a, names)) for a in spec.free_axes),
        adds=plan.sums in ADDED, turns=plan.sums == "turns", sums="Sums" if plan.sums == "turns" else "D_q",
        collected=found,
        delta=_kernel(make.kernels["delta"], make.delta, names, own),
        main=_kernel(make.kernels["main"], make.args, names, own),
        convert=_kernel(make.kernels["convert"], make.convert, names, own),
        rows=_kernel(make.kernels["rows"], make.row_args, names, rows),
        kernel=make.kernels["main"], tile_q=own.tile_q, tile_k=own.tile_k, stages=own.stages,
        head_dim=plan.head_dim, head_dim_v=plan.head_dim_v, width=first, width_v=second, wide=wide(plan),
        consumers=1 if wide(plan) else 2,
        v_parts=split(plan.head_dim_v, "e"), align=spec.align, constant=constant, scale_lines=make.scale_lines,
        tl_scale_lines=make._scale("tl")[0], scale=make.scale, scale_first=not make.bare,
        unit="(SCALE * LOG2E)" if make.bare else "LOG2E", lse_unit="(-1.0 / SCALE)" if folds else "LOG2E",
        folds_lse=folds, guards=make.guards,
        folds_delta=own.tile_q == PIECE, late=bool(spec.scores) or any(tensors(e) for e in spec.masks),
        share_lines=make.share_lines, share_ends=make.share_ends, score_lines=score_lines, score=score, slope=slope,
        mask_lines=mask_lines,
        mask=mask, given=", ".join(given), given_unpacked=unpacked(given), even=even(spec, visits_k),
        lopsided=lopsided(spec, visits_k), by_keys=make.by_keys, by_rows=make.by_rows,
        loading=32 if make.by_keys.visits.tested else 24,
        classes=any(w.visits.tested for w in (make.by_keys, make.by_rows)), together=plan.together,
        element=TORCH_TYPES[plan.dtype], keys=CONSUMER_ROWS, halves=own.tile_q // PIECE,
        columns=first // PIECE, cached_bytes=CACHED_BYTES, processors=target(plan.target).units,
        row_bytes=6 * plan.head_dim + 2 * plan.head_dim_v,
        near=NEAR if near else 0, ring_bytes=CACHED_BYTES if near else RING_BYTES,
        helpers=frozenset(lowering.printer.helpers | make.helpers), seq="fixed", starts="", statistics=True,
        interpreted=False, sparse=False, check=check, check_helpers=in_order(check.helpers),
        check_inputs=", ".join(["Q", "K", "V", *(names[name] for name in learned)]),
        check_arguments=call_arguments(spec, names), checked=", ".join(checked), elsewhere=elsewhere(plan.target),
        target=plan.target, torch_dtype=f"torch.{TORCH_TYPES[plan.dtype]}", tolerance=TOLERANCE[plan.dtype],
    )  # fmt: skip


def _kernel(name: str, args: Sequence[Argument], names: Mapping[str, str], own: PassPlan) -> KernelText:
    called = [a.name for a in args if a.kind != "constexpr"]
    return KernelText(
        name, launch.signature_lines(args), launch.jit_options(args), launch.launch_lines(args, names),
        ", ".join(called), unpacked(called), own.tile_q, own.tile_k, own.stages,
    )  # fmt: skip


def _take(lowering: Lowering) -> tuple[str, ...]:
    """The statements of all levels, the coarsest first: a step computes them all."""
    return tuple(line for where in ("program", "key", "row", "pair") for line in lowering.take(where))


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


def _docstring(plan: KernelPlan) -> str:
    d, dv = plan.head_dim, plan.head_dim_v
    bits = "dQ is added up in any order." if plan.sums in ADDED else "Equal calls give equal bits."
    return (
        f"q [B, H, Q, {d}], k [B, H_kv, K, {d}], v [B, H_kv, K, {dv}], out and d_out [B, H, Q, {dv}] in {plan.dtype},\n"
        "    lse and d_lse [B, H, Q] in float32; any strides, what TMA cannot address is copied; d_lse may be None.\n\n"
        f"    Returns d_q, d_k, d_v, and the gradients of parameters by name. {bits}"
    )


def _call_arguments(spec: AttentionSpec, names: Mapping[str, str]) -> str:
    params = [names[p.name] + (f"={p.default!r}" if p.default is not None else "") for p in spec.params]
    return ", ".join(["q", "k", "v", "out", "lse", "d_out", "d_lse=None", *(["*", *params] if params else [])])
