"""From spec, visits and plan to the text of a Triton file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from attncc.analysis import nonnegative, spread
from attncc.analysis.bounded import bounded
from attncc.analysis.kernel import pruned
from attncc.analysis.normaliser import normaliser
from attncc.codegen import launch
from attncc.codegen.apart import apart
from attncc.codegen.cpu import policy
from attncc.codegen.cpu_lower import prepared
from attncc.codegen.environment import rendered
from attncc.codegen.gather import gathered
from attncc.codegen.hopper import HopperView, hopper_view, reached, seen_keys, tail
from attncc.codegen.ladder import fa1_view, standard_view
from attncc.codegen.layout import provenance
from attncc.codegen.loops import VisitsView, first_tile, visits_view
from attncc.codegen.lower import TILE, Lowering, conjoin, level, score_text
from attncc.codegen.naming import Names, parameter_names, reserved
from attncc.codegen.parts import Part, split
from attncc.codegen.prepass import TablesView, tables_view
from attncc.codegen.printer import BIT_AND, TERM
from attncc.codegen.same_entry import SameView, same_view
from attncc.codegen.selfcheck import SEED, TORCH_TYPES, DenseCheck, comment, dense_check, in_order
from attncc.codegen.signature import arguments
from attncc.codegen.sparse import SparseView, sparse_view
from attncc.codegen.tables import Tables, tables_of, uneven
from attncc.ir import AttentionSpec, Const, Expr, KernelPlan, Op, Var, Visits, conjuncts, tensors
from attncc.planner.hopper import value_columns

INSIDE = Op("<", (Var("k", "int"), Var("k_len", "int")), "bool")  # of the keys
# Sums of a row up to which neither P in its own type nor float32 overflows, for a reference that is no maximum.
SAFE = {"bf16": "2.0**60", "f32": "2.0**60", "f16": "30000.0"}


REFERENCES = {  # of exponentials
    "running": "the running maximum", "first_tile": "the first tiles' maximum", "two_pass": "the maximum, found first",
    "threshold": "a threshold, found first", "whole_tile": "a whole tile's maximum", "fixed": "a given reference",
    "bounded": "the middle of the scores' bounds", "none": "no reference",
}  # fmt: skip
LANGUAGE = {"fa3": "gl"}  # what kernels call the module of their language; else tl
SKELETONS = {"standard": "triton/standard_forward.py.jinja", "fa1": "triton/fa1_forward.py.jinja",
             "fa2": "triton/fa2_forward.py.jinja", "fa3": "gluon/fa3_forward.py.jinja"}  # fmt: skip
TRAFFIC = {  # in a file's head
    "standard": "S is written and read back, then P, in tiles that the mask leaves; K and V as in fa2",
    "fa1": "K and V once for a head; Q, and Out in float32 there and back, for each tile of keys",
    "fa2": "Q and Out once, K and V once for each tile of rows that sees them",
}  # fmt: skip
LADDER = {"standard": standard_view, "fa1": fa1_view}  # what makes their view of fa2's
TOLERANCE = {
    "bf16": "1e-2",
    "f16": "2e-3",
    "f32": "1e-5",
    "tf32": "5e-3",
    "f8e4m3": "5e-2",
    "f8e5m2": "5e-2",
}  # of the file's check of itself


@dataclass(frozen=True)
class KernelView:
    """Finished values for templates/triton: names, numbers and printed expressions, no structure."""

    kernel: str
    banner: tuple[str, ...]
    docstring: str
    softmax: str
    has_lse: bool  # or a threshold in its place
    kv: str
    seq: str
    align: str
    together: int
    other_file: str  # the one beside a descriptor kernel
    signature: tuple[str, ...]
    jit_options: tuple[str, ...]
    general: tuple[str, ...]
    forward_arguments: str
    free_axes: tuple[tuple[str, str], ...]
    launch: tuple[str, ...]
    head_dim: int
    head_dim_v: int
    k_parts: tuple[Part, ...]
    v_parts: tuple[Part, ...]
    d_parts: tuple[Part, ...]  # the distinct index vectors of both
    tile_q: int
    tile_k: int
    warps: int
    stages: int
    launch_options: str
    position_open: str
    position_close: str
    dot_options: str
    unit: str
    sparse: SparseView | None
    sink: str
    fixed: str  # a given reference of the exponentials
    weighing_lines: tuple[str, ...]
    weighing: tuple[str, ...]  # from the scores to p, for a normaliser that makes weights of them alone
    excludes: bool  # they leave what is excluded to a comparison
    program_lines: tuple[str, ...]
    row_lines: tuple[str, ...]
    own_lines: tuple[str, ...]  # what the walk over tiles reads of the tile's own rows
    key_lines: tuple[str, ...]
    score_lines: tuple[str, ...]
    scale_first: bool  # the scale is applied before scores and masks, not with the weights
    scale_last: bool  # the scale is applied with the weights; with neither, it is in the scores
    scores: tuple[str, ...]
    shift: str  # what a row adds to all scores of a tile, kept out of them
    weight_lines: tuple[str, ...]
    weight: str
    dropout: str  # the probability
    follows: bool  # values of the next sequence are left out where a row is computed again, and not before
    key_mask: str  # the part of the mask that keys alone decide
    mask_lines: tuple[str, ...]
    mask: str
    plain_lines: tuple[str, ...]  # the same for masked tiles in a range, where tensors that the mask reads keep all
    plain: str
    row_sink: bool  # the sink is a row's own
    reference: str
    middle: str  # of all scores, where they bound themselves
    radius: str
    safe: str
    visits: VisitsView
    tables: TablesView | None
    check: DenseCheck
    check_helpers: list[str]
    check_arguments: str
    elsewhere: str  # true where the target's hardware is not there
    target: str
    torch_dtype: str
    tolerance: str  # of the output's relative error
    helpers: frozenset[str] = field(default_factory=frozenset)
    element: str = ""  # of q, k and v, as Triton and PyTorch call it
    kept: str = ""  # what K and V are in memory where a tile converts them, as PyTorch calls it
    dtype_pair: str = ""  # two of them, as PTX calls them
    logistic: str = ""  # of sigmoids that a kernel makes itself: what their exponents have beside the score
    logistic_unit: int = 1  # times which they come: what f16 holds ends at 2^-24
    hopper: HopperView | None = None
    reports: tuple[str, ...] = ()  # of rows, beside their lse
    natural: str = ""  # what the maximum of a row is multiplied by
    same: SameView | None = None  # tiles whose scores read one entry for all pairs
    kernels: tuple[KernelView, ...] = ()  # of an algorithm of several: this is of the file then
    stage: str = ""  # which of them


def render(
    spec: AttentionSpec, visits: Visits, plan: KernelPlan, text: str = "", resources: Any = None,
) -> str:  # fmt: skip
    """The file of one kernel: equal arguments give equal bytes.

    `spec` has its consts bound, `visits` is analysis.visits(spec, "q"), `text` the spec as it stands on top in a
    comment, `resources` what the kernel compiled to (registers, spills, shared_bytes), where that is known.
    """
    view = kernel_view(spec, visits, plan, banner(spec, plan, text, resources))
    if plan.algorithm in LADDER:
        view = LADDER[plan.algorithm](spec, visits, plan, view, kernel_view)
    if plan.algorithm == "fa3":
        names = kernel_names(spec)[1]
        fresh = partial(_lowering, spec, plan, names, view.kernel, tables_of(visits), "gl")
        reach, seen = reached(spec, visits, plan, fresh()), seen_keys(spec, fresh())
        local = spread(spec, visits) == "local" or uneven(visits)  # where few tiles of rows see many
        view = replace(view, hopper=hopper_view(plan, arguments(spec, plan, names), view, reach, seen, local))
    return rendered(SKELETONS[plan.algorithm], view)


def compiled_to(plan: KernelPlan, resources: Any) -> str:
    """For a file's head: the target, the types and sizes, and what the compiler took, where that is known."""
    sizes = f"head size {plan.head_dim}" + (f" and {plan.head_dim_v}" if plan.head_dim_v != plan.head_dim else "")
    took = ""
    if resources is not None:
        spills = f"{resources.spills} spills" if resources.spills else "no spills"
        took = f": {resources.registers} registers, {spills}, {resources.shared_bytes // 1024} KB of shared memory"
    beside = f" beside K and V in {plan.kept}" if plan.kept else ""
    return f"{plan.target}, {plan.dtype}{beside}, {sizes}{took}"


def banner(spec: AttentionSpec, plan: KernelPlan, text: str, resources: Any) -> tuple[str, ...]:
    """The comment on top: the spec, the plan, what it compiled to, and how to make and check the file."""
    stages = f"{plan.stages} stage{'s' if plan.stages > 1 else ''}"
    means = "TMA" if plan.loads == "descriptor" else "pointers"
    reference = REFERENCES[plan.reference]
    weights = reference if normaliser(spec).statistic else "weights of the scores alone"
    made, checked = launch.build_command(spec, plan), f"python {launch.file_name(spec.name, plan)}"
    return (
        *comment(text),
        f"# forward · {plan.algorithm} · tile {plan.tile_q} × {plan.tile_k} · {stages} · {plan.warps} warps · "
        f"K and V by {means} · {weights}",
        f"# {compiled_to(plan, resources)}",
        f"# HBM: {TRAFFIC.get(plan.algorithm, TRAFFIC['fa2'])}. Rows without keys give 0"
        + (", lse -inf." if normaliser(spec).has_lse else "."),
        *provenance(made, checked),
    )


def call_arguments(spec: AttentionSpec, names: Mapping[str, str]) -> str:
    """The parameters of the file's own call, tensors on its device."""
    params = "".join(f", {names[p.name]}={names[p.name]}{'.to(device)' if p.is_tensor else ''}" for p in spec.params)
    return params + (f", seed={SEED}" if spec.dropout is not None else "")


def elsewhere(target: str) -> str:
    """A condition of Python that holds where the hardware of `target` is not there."""
    none = "not torch.cuda.is_available()"
    if target.startswith("gfx"):
        return f'{none} or "{target}" not in torch.cuda.get_device_properties(0).gcnArchName'
    digits = target.removeprefix("sm_")
    return f"{none} or torch.version.hip or torch.cuda.get_device_capability() != ({digits[:-1]}, {digits[-1]})"


def kernel_names(spec: AttentionSpec) -> tuple[Names, dict[str, str]]:
    """What is still free in the file, and how each parameter and free axis is called there."""
    names = parameter_names(spec)
    return Names(reserved() | set(names.values())), names


def kernel_view(spec: AttentionSpec, visits: Visits, plan: KernelPlan, banner: Sequence[str]) -> KernelView:
    fresh, names = kernel_names(spec)
    kernel = fresh.fresh(f"{spec.name}_forward")
    args = arguments(spec, plan, names)
    visits, language = _apart(spec, visits, plan), LANGUAGE.get(plan.algorithm, "tl")
    tables = tables_of(visits, spec.ragged, plan.algorithm == "fa3")

    lower = partial(_lowering, spec, plan, names, kernel, tables)
    lowering = lower(language)
    scale = Op("float", (spec.scale,), "float") if spec.scale is not None and spec.scale.type == "int" else spec.scale
    scale_text = lowering.text(scale if scale is not None else Const(plan.head_dim**-0.5), TERM)
    same = same_view(lowering) if plan.algorithm == "fa2" else None
    scores, score_lines, shift, scaled, shared, gain = _scores(spec, lowering)
    rule, logistic = normaliser(spec), plan.reference == "none"
    offset = _logistic(spec, plan, lowering) if logistic else Offset()
    sink, weighing = ("", ()) if logistic else _weighing(spec, lowering)
    weighing_lines = lowering.take("pair")
    weight = lowering.text(spec.weight, TERM) if spec.weight is not None else ""
    weight_lines = lowering.take("pair")
    key_lines, (plain_lines, plain), (mask_lines, mask) = _masks(spec, visits, plan, lowering)
    key_mask, follows = _key_mask(spec, plan, lowering)
    tables_text = tables_view(visits, tables, args, names, plan.int_bits, lower) if tables else None
    row_lines, early = (*lowering.take("row"), *offset.of_rows), plan.reference == "first_tile"
    sparse, bound = sparse_view(rule, plan.dtype, plan.algorithm == "fa2"), _bounds(spec, plan, lowering)
    walked, in_parts = first_tile(visits) if early and visits.full else visits, sparse is not None and sparse.skips
    view_visits = visits_view(walked, lowering, True, early, in_parts)
    unit = sparse.factor if sparse else "LOG2E" if rule.exponential or logistic else ""
    folds, scale_line = _scale(spec, scale, scale_text, unit)
    k_parts, alone = split(plan.head_dim, "d"), plan.head_dim_v == plan.head_dim and not plan.scales
    v_parts = k_parts if alone else split(plan.head_dim_v, "e", value_columns(plan))
    wide, check = plan.int_bits == 64, dense_check(prepared(spec), names)
    return KernelView(
        kernel=kernel, banner=tuple(banner), docstring=launch.docstring(spec, plan, rule.has_lse),
        softmax=policy(rule), has_lse=rule.statistic, kv=plan.loads, seq="ragged" if spec.ragged else "fixed",
        align=spec.align, together=plan.together, kept=TORCH_TYPES.get(plan.kept, ""),
        other_file=launch.file_name(spec.name, replace(plan, any_stride=True)),
        signature=launch.signature_lines(args), jit_options=launch.jit_options(args), general=launch.general(args),
        forward_arguments=launch.forward_arguments(spec, names),
        free_axes=tuple((names[a], launch.extent(spec, a, names)) for a in spec.free_axes),
        launch=launch.launch_lines(args, names), head_dim=plan.head_dim, head_dim_v=plan.head_dim_v,
        k_parts=k_parts, v_parts=v_parts, d_parts=tuple(dict.fromkeys((*k_parts, *v_parts))),
        tile_q=plan.tile_q, tile_k=plan.tile_k, warps=plan.warps, stages=plan.stages,
        launch_options=f" maxnreg={plan.max_registers}," if plan.max_registers else "", logistic_unit=offset.unit,
        position_open="(" if wide else "", position_close=f").to({language}.int64)" if wide else "",
        dot_options=f', input_precision="{plan.products}"' if plan.dtype == "f32" else "",
        unit="scale" if folds else gain or unit, sparse=sparse, sink=sink, middle=bound[0], radius=bound[1],
        fixed=lowering.text(rule.fixed, TERM) if rule.fixed else "", weighing_lines=weighing_lines,
        weighing=weighing, excludes=not rule.vanishes, dropout=lowering.text(spec.dropout) if spec.dropout else "",
        program_lines=(*lowering.take("program"), scale_line, *shared, *offset.of_all), row_lines=row_lines,
        own_lines=lowering.take("row" if visits.outer == "q" else "key"), element=TORCH_TYPES[plan.dtype],
        score_lines=score_lines, scores=scores, same=same, shift=shift, scale_first=not (folds or scaled),
        scale_last=folds, weight=weight, weight_lines=weight_lines, key_lines=key_lines, key_mask=key_mask,
        follows=follows, mask_lines=mask_lines, mask=mask, plain_lines=plain_lines, plain=plain, visits=view_visits,
        row_sink=rule.sink is not None and level(rule.sink) == "row", safe=SAFE.get(plan.dtype, ""), tables=tables_text,
        helpers=frozenset(lowering.printer.helpers), check=check, check_helpers=in_order(check.helpers),
        check_arguments=call_arguments(spec, names), elsewhere=elsewhere(plan.target), target=plan.target,
        reference=plan.reference, torch_dtype=f"torch.{TORCH_TYPES[plan.dtype]}", dtype_pair=f"{plan.dtype}x2",
        tolerance=TOLERANCE[plan.products if plan.products == "tf32" else plan.dtype], reports=spec.reports,
        natural=f" * scale{' / LOG2E' if unit else ''}" if folds else "", logistic=offset.name,
    )  # fmt: skip


def _scale(spec: AttentionSpec, scale: Expr | None, text: str, unit: str) -> tuple[bool, str]:
    """Whether the scale can wait until the scores are masked, and its line; what makes them weights then joins it."""
    folds = not spec.scores and (scale is None or (isinstance(scale, Const) and scale.value > 0))
    shared = " * input_scale" if spec.precision.is_eight_bit else ""
    return folds, f"scale = {text}" + (f" * {unit}" if folds and unit else "") + shared


def _lowering(
    spec: AttentionSpec, plan: KernelPlan, names: Mapping[str, str], kernel: str, tables: Tables, language: str = "tl"
) -> Lowering:
    """For one function of the file, in which nothing is taken yet but the file's own names."""
    known = Names(reserved() | {*names.values(), kernel})
    size = spec.scale_blocks[1] if spec.scale_blocks is not None else 0
    tiles = size // plan.tile_k if size % plan.tile_k == 0 else 0
    spelled = {**names, TILE.name: "tile"}
    return Lowering(spec, spelled, known, partial(nonnegative, spec=spec), tables, plan.int_bits, language, tiles)


def _scores(
    spec: AttentionSpec, lowering: Lowering
) -> tuple[tuple[str, ...], tuple[str, ...], str, bool, tuple[str, ...], str]:
    """Right sides of the scores, statements before them, and what a row adds to all of a tile's; whether the scale is
    in the scores, statements for factors that a program shares, and the name of what scores are to be multiplied by."""
    if lowering.language != "gl":
        scores = tuple(score_text(lowering, e) for e in spec.scores)
        return scores, lowering.take("pair"), "", False, (), ""
    written, shift = apart(spec)
    made = gathered(written, lowering.fresh.fresh, normaliser(spec).exponential)
    scores = tuple(score_text(lowering, e) for e in made.scores)
    lines = [f"{name} = {lowering.text(value)}" for name, value in made.shared]
    gain = lowering.fresh.fresh("gain") if made.gain is not None else ""
    if made.gain is not None:
        lines.append(f"{gain} = {lowering.text(made.gain, TERM)} * LOG2E")
    shift_text = "" if shift is None else lowering.text(shift, TERM)
    return scores, lowering.take("pair"), shift_text, made.scaled, tuple(lines), gain


def _bounds(spec: AttentionSpec, plan: KernelPlan, lowering: Lowering) -> tuple[str, str]:
    """The middle and the radius of scores that bound themselves, where that is the reference."""
    span = bounded(spec) if plan.reference == "bounded" else None
    return ("", "") if span is None else (lowering.text(span[0], TERM), lowering.text(span[1], TERM))


def _apart(spec: AttentionSpec, visits: Visits, plan: KernelPlan) -> Visits:
    """The visits, without the tiles where the mask reads no tensor if those take no loop of their own: but in fa2, and
    where a tensor says which keys' values may be anything."""
    by_key = (t for m in spec.masks for t in conjuncts(m) if level(t) == "key")
    if visits.plain_end is None or (plan.algorithm == "fa2" and not any(tensors(t) for t in by_key)):
        return visits
    return pruned(replace(visits, plain_end=None, plain=()))


@dataclass(frozen=True)
class Offset:
    """What exponents of sigmoids have beside the score, in units of log 2, for `unit` times the sigmoids: its name, and
    its line, where it is a row's own or one for all."""

    name: str = ""
    of_rows: tuple[str, ...] = ()
    of_all: tuple[str, ...] = ()
    unit: int = 1


def _logistic(spec: AttentionSpec, plan: KernelPlan, lowering: Lowering) -> Offset:
    e, name = spec.softmax.args[0], lowering.fresh.fresh("offset")
    e = Op("float", (e,), "float") if e.type == "int" else e
    unit, more = (8, " + 3") if plan.dtype == "f16" else (1, "")
    lines = (f"{name} = {lowering.text(e, TERM)} * LOG2E{more}",)
    return Offset(name, lines, (), unit) if level(e) == "row" else Offset(name, (), lines, unit)


Mask = tuple[tuple[str, ...], str]  # statements where it is looked at, and the mask


def _masks(
    spec: AttentionSpec, visits: Visits, plan: KernelPlan, lowering: Lowering
) -> tuple[tuple[str, ...], Mask, Mask]:
    """What is worked out for a tile of keys; the mask of tiles in ranges, and that of tiles that are classed. Tiles of
    keys that are outside have what belongs to them once; else only those that need the mask have its part of it."""
    always = lowering.take("key")
    lines: tuple[str, ...] = ()
    made: list[Mask] = []
    for some in (replace(spec, masks=visits.plain) if visits.plain_end is not None else spec, spec):
        text = conjoin(lowering, some.masks, tail(some) if plan.algorithm in ("fa2", "fa3") else "k < k_len")
        by_keys, pairs = lowering.take("key"), lowering.take("pair")
        if visits.outer == "k":
            always, by_keys = (*always, *by_keys), ()
        lines = (*lines, *by_keys, *pairs)
        made.append((lines, text))
    return always, made[0], made[1]


def _key_mask(spec: AttentionSpec, plan: KernelPlan, lowering: Lowering) -> tuple[str, bool]:
    """What keys alone decide, that they lie in the sequence among it where TMA goes on into the next one; and whether
    that is all, which can wait until a row is computed again."""
    by_key = [t for m in spec.masks for t in conjuncts(m) if level(t) == "key"]
    follows = spec.ragged and plan.loads == "descriptor"
    text = " & ".join(lowering.text(t, BIT_AND) for t in (*by_key, INSIDE) if by_key or follows)
    return text, follows and not by_key and plan.reference == "first_tile"


def _weighing(spec: AttentionSpec, lowering: Lowering) -> tuple[str, tuple[str, ...]]:
    """The sink, and what turns a score into its weight: right sides of statements, each after the first of p."""
    rule, made = normaliser(spec), []
    sink = lowering.text(rule.sink, TERM) if rule.sink is not None else ""
    for stage in rule.stages or ():
        made.append(score_text(lowering, stage))
        lowering.names["s"] = "p"
    lowering.names["s"] = "s"
    return sink, tuple(made)
