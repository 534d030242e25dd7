"""From spec, visits and plan to the text of the backward pass: delta, dK and dV over key tiles, dQ over query tiles.

The math, for d_out and d_lse given: p = exp(score - lse), dp = weight * (d_out · v), delta = sum(d_out * out) - d_lse,
ds = p * (dp - delta), dV = sum (weight * p) d_out, dK = scale * sum ds q, dQ = scale * sum ds k; a sink E gets
-exp(E - lse) * delta of each row. See Dao et al. 2022, "FlashAttention", appendix B.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from attncc.analysis import nonnegative
from attncc.analysis.derivative import ZERO, derivative, multiply
from attncc.analysis.normaliser import normaliser
from attncc.codegen import launch
from attncc.codegen.backward_alike import Alike, alike
from attncc.codegen.backward_arguments import delta_arguments, pass_arguments
from attncc.codegen.backward_collect import Collected, collected
from attncc.codegen.backward_pairs import SHARE, VALUES, end_lines, pairs, row_lines
from attncc.codegen.backward_sites import Site, named, sites
from attncc.codegen.backward_words import banner, docstring
from attncc.codegen.cpu_lower import prepared
from attncc.codegen.environment import rendered
from attncc.codegen.loops import VisitsView, visits_view
from attncc.codegen.lower import Lowering, conjoin, level
from attncc.codegen.naming import Names, reserved
from attncc.codegen.parts import Part, split
from attncc.codegen.prepass import TablesView, tables_view
from attncc.codegen.printer import BIT_AND, TERM
from attncc.codegen.selfcheck import TORCH_TYPES, DenseCheck, dense_check, in_order
from attncc.codegen.signature import Argument
from attncc.codegen.sparse import sparse_view
from attncc.codegen.tables import tables_of
from attncc.codegen.triton import call_arguments, elsewhere, kernel_names
from attncc.ir import AttentionSpec, Const, Expr, KernelPlan, Op, PassPlan, Visits, conjuncts, names
from attncc.planner.backward import PROGRAMS, walked

TOLERANCE = {"bf16": "3e-2", "f16": "5e-3", "f32": "1e-4", "tf32": "1e-2"}  # of the file's check of itself
STATISTICS = 128  # rows of a tile of the kernel before the others: a multiple of every tile
# Of cells that several batch entries or heads share, by the axes that they have: how many owners there are, how many
# members each has, and the batch entry and head of a member.
SHARED_BY = {
    (): ("1", "b_len * h_len", "member // h_len, member % h_len"),
    ("b",): ("b_len", "h_len", "owner, member"),
    ("h",): ("h_len", "b_len", "member, owner"),
    ("h_kv",): ("h_kv_len", "b_len * group", "member // group, owner * group + member % group"),
    ("b", "h_kv"): (
        "b_len * h_kv_len", "group", "owner // (h_len // group), owner % (h_len // group) * group + member",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class PassView:
    """Finished values for one kernel; those behind `kv` are the same for all kernels of a file."""

    kernel: str
    arguments: tuple[Argument, ...]
    signature: tuple[str, ...]
    jit_options: tuple[str, ...]
    general: tuple[str, ...]
    launch: tuple[str, ...]
    tile_q: int
    tile_k: int
    warps: int
    stages: int
    max_registers: int
    launch_options: str
    tma: bool  # what streams by may come by descriptor
    sums: frozenset[str]  # k and v, of a kernel over keys: what it makes the gradient of
    kv: str
    seq: str
    align: str
    position_open: str
    position_close: str
    k_parts: tuple[Part, ...]
    v_parts: tuple[Part, ...]
    d_parts: tuple[Part, ...]
    head_dim: int
    head_dim_v: int
    dot_options: str
    scale_lines: tuple[str, ...] = ()
    scale_first: bool = True
    weighing: tuple[str, ...] = ()
    statistics: bool = True  # of rows: their lse and delta
    tilted: bool = False  # the entropy of rows has a gradient
    sparse: bool = False
    mean_lines: tuple[str, ...] = ()  # of sparse weights: what a row's delta is summed up from, in a walk of its own
    unit_q: int = 0  # of sparse weights: what a bit for rows, or for keys, has at least, a whole tile in every kernel
    unit_k: int = 0
    program_lines: tuple[str, ...] = ()
    row_lines: tuple[str, ...] = ()
    key_lines: tuple[str, ...] = ()
    pair_lines: tuple[str, ...] = ()
    score_lines: tuple[str, ...] = ()
    score: str = ""
    product: bool = False
    weighted: str = ""  # the weights of the values, from p
    dropout: str = ""
    chain: tuple[str, ...] = ()
    alike: Alike | None = None  # takes the place of pair_lines and score_lines, and goes on where the chain ends
    seen_lines: tuple[str, ...] = ()  # of the mask, what the part that keys decide needs first
    mask_lines: tuple[str, ...] = ()
    mask: str = ""
    key_mask: str = ""
    visits: VisitsView | None = None
    tables: TablesView | None = None
    sites: tuple[Site, ...] = ()
    slots: bool = False  # there are tables, for so many tiles of rows at a time
    begin_lines: tuple[str, ...] = ()
    end_lines: tuple[str, ...] = ()
    members: str = ""  # how many batch entries and heads share a cell, and which one a `member` is
    member: str = ""
    first_member: str = ""  # the first of them, whose own axes are those of the cells
    programs: str = ""
    helpers: frozenset[str] = frozenset()


@dataclass(frozen=True)
class BackwardView:
    """Finished values for the whole file."""

    banner: tuple[str, ...]
    docstring: str
    arguments: str
    free_axes: tuple[tuple[str, str], ...]
    seq: str
    starts: str  # what a call of packed sequences passes beside
    statistics: bool
    sparse: bool  # weights have a threshold, and the kernel of dQ finds delta
    tilted: bool
    dropout: bool
    delta: PassView
    keys: tuple[PassView, ...]  # dK and dV in one kernel or in two
    dq: PassView
    cells: tuple[PassView, ...]  # a kernel for each site that is summed apart
    passes: tuple[PassView, ...]
    collected: Collected
    helpers: frozenset[str]
    tallies: frozenset[str]
    tma: bool  # of any kernel
    together: int
    walked: int  # rows or keys that L2 holds, of heads whose programs run side by side
    programs: int  # that fill the GPU
    check: DenseCheck
    check_helpers: list[str]
    check_inputs: str
    check_arguments: str
    checked: str  # (place among the inputs, (name, gradient)), ...
    elsewhere: str  # true where the target's hardware is not there
    target: str
    torch_dtype: str
    tolerance: str
    head_dim: int
    head_dim_v: int
    interpreted: bool = True  # without a GPU the file checks itself in Triton's interpreter


def render_backward(
    spec: AttentionSpec, visits_q: Visits, visits_k: Visits, plan: KernelPlan, text: str = "", resources: Any = None,
) -> str:  # fmt: skip
    """The file of the backward pass: equal arguments give equal bytes.

    `spec` has its consts bound; `visits_q` and `visits_k` are analysis.kernel_visits(spec, "q") and (spec, "k"); `plan`
    is planner.choose_backward's; `text` the spec as it stands on top in a comment, `resources` those of the kernel
    that takes most registers. Its call is `backward(q, k, v, out, lse, d_out, d_lse=None, *, parameters)` ->
    (d_q, d_k, d_v, {parameter: gradient}).
    """
    view = backward_view(spec, visits_q, visits_k, plan, banner(spec, plan, text, resources))
    return rendered(f"triton/{plan.algorithm}_backward.py.jinja", view)


def backward_view(
    spec: AttentionSpec, visits_q: Visits, visits_k: Visits, plan: KernelPlan, banner: tuple[str, ...]
) -> BackwardView:
    make = Builder(spec, plan)
    delta = make.delta()
    keys = make.keys(visits_k)
    dq = make.rows(visits_q)
    cells = tuple(make.cells(s) for s in make.sites if s.apart)
    rule = normaliser(spec)
    statistics = rule.statistic
    passes = (*((delta,) if rule.has_lse else ()), *keys, dq, *cells)
    found, check = collected(spec, make.sites, make.names, dq.tile_q), dense_check(prepared(spec), make.names)
    learned = [name for name, _, _ in found.gradients]
    checked = [f'({i}, ("{n}", d_{n}))' for i, n in enumerate("qkv")]
    checked += [f'({i}, ("{name}", more["{name}"]))' for i, name in enumerate(learned, 3)]
    return BackwardView(
        banner=banner, docstring=docstring(spec, plan, statistics), arguments=_call_arguments(spec, make.names),
        free_axes=tuple((make.names[a], launch.extent(spec, a, make.names)) for a in spec.free_axes),
        seq=dq.seq, starts="".join(f", {name}={name}.to(device)" for name in launch.starts(spec)),
        statistics=statistics, sparse=rule.alpha is not None, tilted=bool(spec.reports),
        dropout=spec.dropout is not None, delta=delta, keys=keys, dq=dq, cells=cells,
        passes=passes,
        collected=found, check=check, check_helpers=in_order(check.helpers),
        check_inputs=", ".join(["Q", "K", "V", *(make.names[name] for name in learned)]),
        check_arguments=call_arguments(spec, make.names), checked=", ".join(checked), elsewhere=elsewhere(plan.target),
        target=plan.target, torch_dtype=f"torch.{TORCH_TYPES[plan.dtype]}",
        tolerance=TOLERANCE[plan.products if plan.products == "tf32" else plan.dtype],
        helpers=frozenset(h for p in passes for h in p.helpers),
        tallies=_tallies(make.sites, passes),
        tma=any(p.tma for p in passes), together=plan.together, walked=walked(plan),
        programs=PROGRAMS, head_dim=plan.head_dim, head_dim_v=plan.head_dim_v,
    )  # fmt: skip


def _tallies(found: Sequence[Site], passes: Sequence[PassView]) -> frozenset[str]:
    """The helpers that sort values into tables."""
    called = {"table": "tally", "row_table": "tally_rows", "key_table": "tally_rows"}
    same = any("tally_one(" in line for p in passes if p.alike is not None for line in p.alike.chain_one)
    return frozenset({called[s.kind] for s in found if s.kind in called} | ({"tally_one"} if same else set()))


class Builder:
    """Makes the views of the kernels of one file."""

    def __init__(self, spec: AttentionSpec, plan: KernelPlan) -> None:
        self.spec, self.plan = spec, plan
        fresh, self.names = kernel_names(spec)
        called = {"delta": "delta", "dkdv": "dkdv" if plan.dv is None else "dk", "dv": "dv", "dq": "dq"}
        wanted = [k for k in called if k == "delta" or k in plan.passes]
        self.kernel = {k: fresh.fresh(f"{spec.name}_backward_{called[k]}") for k in wanted}
        self.sites = named(sites(spec), fresh)
        self._fresh = fresh

    def delta(self) -> PassView:
        return self._view(
            self.kernel["delta"], delta_arguments(self.spec, self.plan), PassPlan(STATISTICS, self.plan.tile_k, 1, 8)
        )

    def rows(self, visits: Visits) -> PassView:
        """dQ: a program for a tile of rows, K and V in the loop, and the parameters whose sums belong to rows."""
        mine = tuple(s for s in self.sites if not s.of_keys and not s.apart)
        return self._pass("dq", self.kernel["dq"], visits, mine)

    def keys(self, visits: Visits) -> tuple[PassView, ...]:
        """dK and dV: a program for a tile of keys, which walks over the heads of its group and their rows."""
        mine = tuple(s for s in self.sites if s.of_keys)
        both = self._pass("dkdv", self.kernel["dkdv"], visits, mine)
        if self.plan.dv is None:
            return (replace(both, sums=frozenset("kv")),)
        alone = replace(self._pass("dv", self.kernel["dv"], visits, ()), sums=frozenset("v"))
        return replace(both, sums=frozenset("k")), alone

    def cells(self, site: Site) -> PassView:
        """A table with a cell for each pair that several batch entries or heads share: a program for a tile of it."""
        view = self._pass("cells", self._fresh.fresh(f"{self.spec.name}_backward_{site.name}"), Visits("q"), (site,))
        owners, members, member = SHARED_BY[tuple(sorted(axis for _, axis in site.own))]
        tiles, first = f"row_tiles * triton.cdiv(k_len, {view.tile_k})", re.sub(r"\bmember\b", "0", member)
        return replace(
            view, members=members, member=member, first_member=first if site.own else "", programs=f"{owners} * {tiles}"
        )

    def _pass(self, which: str, kernel: str, visits: Visits, mine: tuple[Site, ...]) -> PassView:
        spec, plan, own = self.spec, self.plan, pass_plan(self.plan, which)
        swapped, tables, rule = which in ("dkdv", "dv"), tables_of(visits, spec.ragged), normaliser(spec)
        args = pass_arguments(which, spec, replace(plan, tables=tables.made), own, self.names, mine)
        ours = {n for s in self.sites for n in (s.name, s.pointer, f"cells_{s.name}")}
        taken = reserved() | {*self.names.values(), *self.kernel.values(), kernel, *ours}

        def lower() -> Lowering:
            known = partial(nonnegative, spec=spec)
            return Lowering(spec, dict(self.names), Names(taken), known, tables, plan.int_bits)

        lowering = lower()
        scale, folds = self._scale(lowering)
        dropout = "" if spec.dropout is None else lowering.text(spec.dropout)
        scale = (*scale, *lowering.take("program"))
        unit = "exponent" if folds else sparse.factor if (sparse := sparse_view(normaliser(spec))) else "LOG2E"
        found = pairs(lowering, mine, unit, which)
        same, visits = alike(lowering, mine, unit, which, found, visits) or (None, visits)
        found = found if same is None else replace(found, lines=(), scores=(), chain=same.chain)
        sums = _begin(lowering, mine, which), _end(lowering, mine)
        key_lines = lowering.take("key")
        pair_lines = (*found.lines, *lowering.take("pair"))
        mask = conjoin(lowering, spec.masks, "row < q_len" if swapped else "k < k_len")
        by_keys, mask_lines = () if swapped else lowering.take("key"), lowering.take("pair")
        by_key = [t for m in spec.masks for t in conjuncts(m) if level(t) == "key"]
        key_mask = " & ".join(lowering.text(t, BIT_AND if len(by_key) > 1 else 0) for t in by_key)
        seen_lines, mask_lines = (by_keys, mask_lines) if key_mask and which == "dq" else ((), (*by_keys, *mask_lines))
        tables_text = tables_view(visits, tables, args, self.names, plan.int_bits, lower) if tables else None
        view = visits_view(visits, lowering, in_parts=rule.alpha is not None)
        row_lines = lowering.take("row")
        if swapped:  # there, keys are what a program has, and rows come by
            key_lines, pair_lines, row_lines = (*key_lines, *lowering.take("key")), (*row_lines, *pair_lines), ()
        return replace(
            self._view(kernel, args, own),
            scale_lines=scale, scale_first=not folds, weighing=found.weighing,
            dropout=dropout, statistics=rule.statistic, sparse=rule.alpha is not None,
            unit_q=max(p.tile_q for p in plan.passes.values()), unit_k=max(p.tile_k for p in plan.passes.values()),
            mean_lines=found.mean if which == "dq" else (),
            program_lines=lowering.take("program"), row_lines=row_lines, key_lines=key_lines, pair_lines=pair_lines,
            score_lines=found.scores, score=found.score, product=found.product, weighted=found.weighted,
            chain=found.chain, alike=same,
            seen_lines=seen_lines, mask_lines=mask_lines, mask=mask, key_mask=key_mask, visits=view,
            tables=tables_text, sites=mine, slots=any(s.kind == "table" for s in mine),
            begin_lines=sums[0], end_lines=sums[1],
            helpers=frozenset(lowering.printer.helpers),
        )  # fmt: skip

    def _scale(self, lowering: Lowering) -> tuple[tuple[str, ...], bool]:
        """The lines of the scale, and whether it goes into the exponential's factor."""
        given = self.spec.scale
        scale: Expr = Const(self.plan.head_dim**-0.5) if given is None else given
        scale = Op("float", (scale,), "float") if scale.type == "int" else scale
        text = lowering.text(scale, TERM)
        rule = normaliser(self.spec)
        folds = rule.stages is None and not self.spec.scores and isinstance(scale, Const) and scale.value > 0
        sparse = sparse_view(rule)
        more = (f"exponent = scale * {sparse.factor if sparse else 'LOG2E'}",) if folds else ()
        return (*lowering.take("program"), f"scale = {text}", *more), folds

    def _view(self, kernel: str, args: Sequence[Argument], own: PassPlan) -> PassView:
        plan = self.plan
        k_parts = split(plan.head_dim, "d")
        v_parts = k_parts if plan.head_dim_v == plan.head_dim else split(plan.head_dim_v, "e")
        wide = plan.int_bits == 64
        return PassView(
            kernel=kernel, arguments=tuple(args), signature=launch.signature_lines(args),
            jit_options=launch.jit_options(args),
            general=launch.general(args), launch=launch.launch_lines(args, self.names),
            tile_q=own.tile_q, tile_k=own.tile_k, warps=own.warps, stages=own.stages,
            max_registers=own.max_registers,
            launch_options=f" maxnreg={own.max_registers}," if own.max_registers else "",
            tma=own.loads == "descriptor", sums=frozenset(), tilted=bool(self.spec.reports),
            kv="pointer", seq="ragged" if self.spec.ragged else "fixed", align=self.spec.align,
            position_open="(" if wide else "",
            position_close=").to(tl.int64)" if wide else "", k_parts=k_parts, v_parts=v_parts,
            d_parts=tuple(dict.fromkeys((*k_parts, *v_parts))), head_dim=plan.head_dim, head_dim_v=plan.head_dim_v,
            dot_options=f', input_precision="{plan.products}"' if plan.dtype == "f32" else "",
        )  # fmt: skip


def pass_plan(plan: KernelPlan, which: str) -> PassPlan:
    """Of one kernel. A kernel of cells has the tiles of dQ's, and addresses of its own."""
    return replace(plan.passes["dq"], loads="pointer") if which == "cells" else plan.passes[which]


def _begin(lowering: Lowering, mine: Sequence[Site], which: str) -> tuple[str, ...]:
    """Sums start at 0, tables at their program's own entries; a sink gives its share."""
    lines = []
    side = "TILE_K" if which in ("dkdv", "dv") else "TILE_Q"
    for s in mine:
        if s.kind in ("table", "row_table"):
            own = "at" if s.kind == "row_table" else f"({_table(lowering.spec)} - slots_before).to(tl.int64)"
            lines.append(f"{s.pointer} += {own} * cells_{s.name}")
        if s.gathers or s.kind == "key":
            lines.append(f"{s.name} = tl.zeros([{side}, 1], tl.float32)")
    sink = lowering.spec.softmax.args[0] if lowering.spec.softmax.policy == "sink" else None
    if sink is None or which != "dq":
        return tuple(lines)
    found = [(s, d) for s in mine if (d := derivative(sink, s.at)) != ZERO]
    if found:
        lowering.names |= VALUES
        text = f"{lowering.text(sink, TERM)} * LOG2E"
        # in Triton's interpreter a float parameter is Python's, and no tensor can be taken from it
        exponent = f"-lse + {text}" if names(sink) <= {p.name for p in lowering.spec.scalars} else f"{text} - lse"
        if lowering.spec.reports:
            lines += [f"of_sink = tl.maximum({exponent}, NOTHING)"]
            lines.append("share = -tl.exp2(of_sink) * (delta + tilt * of_sink)")
        else:
            lines.append(f"share = -tl.exp2({exponent}) * delta")
    for s, slope in found:
        lines += row_lines(lowering, s, multiply(SHARE, slope))
    return tuple(lines)


def _table(spec: AttentionSpec) -> str:
    """The number of a program's own table among those of all tiles of rows."""
    return "h * slots + slot" if spec.ragged else "head * slots + mine"


def _end(lowering: Lowering, mine: Sequence[Site]) -> tuple[str, ...]:
    return tuple(line for s in mine if s.gathers or s.apart or s.kind == "key" for line in end_lines(lowering, s))


def _call_arguments(spec: AttentionSpec, names: dict[str, str]) -> str:
    params = [names[p.name] + (f"={p.default!r}" if p.default is not None else "") for p in spec.params]
    params = [*launch.starts(spec), *params, *(["seed"] if spec.dropout is not None else [])]
    return ", ".join(["q", "k", "v", "out", "lse", "d_out", "d_lse=None", *(["*", *params] if params else [])])
