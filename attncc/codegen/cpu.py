"""The CPU program of a spec: one PyTorch file, tiled, memory linear in length, printed by the shared printer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attncc.analysis.normaliser import Normaliser, normaliser
from attncc.codegen import launch
from attncc.codegen.cpu_lower import FORWARD, CpuLowering, expressions, prepared
from attncc.codegen.cpu_ranges import ranges_of
from attncc.codegen.environment import rendered
from attncc.codegen.layout import provenance
from attncc.codegen.naming import parameter_names
from attncc.codegen.selfcheck import TORCH_TYPES, DenseCheck, comment, dense_check, free_axes, in_order
from attncc.ir import AttentionSpec, KernelPlan, Visits, names


@dataclass(frozen=True)
class CpuView:
    """Finished text for the template: each list holds whole lines of Python."""

    comment: list[str]
    softmax: str  # which template of weights
    lse_words: str
    helpers: list[str]
    signature: str
    ragged: bool
    programs: str
    align: str
    position: str
    uses: frozenset[str]  # built-in names that the lines read
    scale: str
    is_masked: str
    call: list[str]  # once in a call
    summaries: list[str]  # tables of what the mask's tensors hold in each tile
    program: list[str]  # for each span of batch entries and heads
    row: list[str]  # for each tile of rows
    ranges: list[str]
    start: list[str]
    stages: list[str]
    alpha: float | None  # of sparse weights
    tile_class: list[str]
    pair: list[str]  # for each tile of keys
    mask: list[str]  # for those that are masked
    weight: list[str]
    dropout: str  # the probability
    reports: tuple[str, ...]  # of rows, beside their lse
    sinks: bool
    gain: str  # the name of the weight's value; empty without one
    check: DenseCheck
    tile_q: int
    tile_k: int
    head_dim: int
    head_dim_v: int
    kept: str  # what K and V are where they are not as Q, as PyTorch calls it


def render_cpu(spec: AttentionSpec, visits: Visits, plan: KernelPlan, text: str = "") -> str:
    """The file's text: `forward(q, k, v, parameters in the spec's order) -> (out, lse)`.

    `spec` has its consts bound; `visits` is analysis.visits(spec, "q"); `text` is the spec as written.
    Equal arguments give equal bytes.
    """
    return rendered(FORWARD, view_of(spec, visits, plan, text))


def view_of(spec: AttentionSpec, visits: Visits, plan: KernelPlan, text: str) -> CpuView:
    """Lower the spec for the tiles, and densely for the file's own check."""
    spec = prepared(spec)
    spelled = parameter_names(spec)
    tiles = CpuLowering(spec, spelled)
    scale, start, pair = tiles.scale(), tiles.start(), tiles.scores()
    stages, weight, mask = tiles.stages(pair), tiles.weight(pair), tiles.masks()
    ranges, check = ranges_of(spec, visits, tiles), dense_check(spec, spelled)
    dropout = "" if spec.dropout is None else tiles.text(spec.dropout, [])
    helpers = {*common_helpers(tiles.normaliser, plan.kept), *tiles.printer.helpers, *check.helpers, *ranges.helpers}
    helpers |= {"Threshold"} if tiles.normaliser.alpha is not None else set()
    return CpuView(
        comment=[
            *comment(text),
            f"# forward · cpu · tile {plan.tile_q} × {plan.tile_k} · memory linear in length: one tile of scores",
            *provenance(launch.build_command(spec, plan), f"python {launch.file_name(spec.name, plan)}"),
        ],
        softmax=policy(tiles.normaliser),
        lse_words=rows_words(spec, lse_words(tiles.normaliser)),
        helpers=in_order(helpers),
        signature=", ".join(["q", "k", "v", *launch.starts(spec), *_arguments(spec, spelled)]),
        ragged=spec.ragged,
        programs=ranges.programs,
        align=spec.align,
        position=check.position,
        uses=uses(spec),
        scale=scale,
        is_masked=ranges.is_masked,
        call=free_axes(spec, spelled),
        summaries=ranges.summaries,
        program=tiles.program,
        row=tiles.row,
        ranges=ranges.lines,
        start=start,
        stages=stages,
        alpha=tiles.normaliser.alpha,
        tile_class=ranges.tile_class,
        pair=pair,
        mask=mask,
        weight=weight,
        dropout=dropout,
        reports=spec.reports,
        sinks=tiles.sink is not None,
        gain=tiles.gain,
        check=check,
        tile_q=plan.tile_q,
        tile_k=plan.tile_k,
        head_dim=plan.head_dim,
        head_dim_v=plan.head_dim_v,
        kept=TORCH_TYPES.get(plan.kept, ""),
    )


def lse_words(rule: Normaliser) -> str:
    """What a forward pass returns beside out."""
    if rule.alpha is not None:
        return "threshold [B, H, Q] (inf for a row that sees nothing)"
    return "lse [B, H, Q], natural logarithm" if rule.has_lse else "no lse (it is empty)"


def rows_words(spec: AttentionSpec, lse: str) -> str:
    """The same where more of each row is asked for: all of it lies side by side."""
    if not spec.reports:
        return lse
    found = (*(("lse",) if normaliser(spec).statistic else ()), *spec.reports)
    return f"{', '.join(found)} of each row [B, H, Q, {len(found)}]"


def policy(rule: Normaliser) -> str:
    """Whose macros make the weights: templates/*/softmax_NAME.jinja."""
    return "sparse" if rule.alpha is not None else "online" if rule.exponential else "weights"


def common_helpers(rule: Normaliser, kept: str = "") -> set[str]:
    """Functions of cpu/helpers.jinja that the templates of every pass call; `kept` is that of the plan."""
    finite = "finite_kept" if kept else "finite"
    return {"copy", "matrices", finite, "not_finite", *(("exp_",) if policy(rule) == "online" else ())}


def uses(spec: AttentionSpec) -> frozenset[str]:
    """Built-in names that the lines of a spec read."""
    found = {n for e in expressions(spec) for n in names(e)}
    found |= {"b", "h", "row", "k"} if spec.dropout is not None else set()
    more = {"h": {"h_kv"} & found, "row": {"q"} & found}
    return frozenset(found | {n for n, because in more.items() if because})


def _arguments(spec: AttentionSpec, spelled: Mapping[str, str]) -> list[str]:
    """Parameters in the spec's order; a default where no parameter without one comes behind it."""
    made: list[str] = []
    behind = True
    for p in reversed(spec.params):
        behind = behind and p.default is not None
        made.append(f"{spelled[p.name]}={p.default!r}" if behind else spelled[p.name])
    return made[::-1] + (["*", "seed"] if spec.dropout is not None else [])
