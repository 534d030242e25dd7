"""The CPU program of a spec: one PyTorch file, tiled, memory linear in length, printed by the shared printer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from attncc.codegen.cpu_lower import FORWARD, CpuLowering, expressions, prepared
from attncc.codegen.cpu_ranges import ranges_of
from attncc.codegen.environment import environment
from attncc.codegen.naming import parameter_names
from attncc.codegen.printer import ATOM
from attncc.ir import AttentionSpec, KernelPlan, Param, Visits, names

HELPER_ORDER = (
    "copy", "not_finite", "tensor", "real", "read", "read_bit", "element", "tile_ends", "tile_scan", "where", "floor",
    "minimum", "maximum", "checked_div", "checked_mod", "exp", "exp2", "log", "log2", "tanh", "sigmoid", "sqrt",
)  # fmt: skip
BARE = {
    "copy",
    "not_finite",
    "tensor",
    "real",
    "read",
    "read_bit",
    "element",
    "tile_ends",
    "tile_scan",
}  # these call no `tensor`
SIZES = {"b": 2, "h": 4, "h_kv": 2, "row": 300, "k": 331}  # of the file's own check; the template has them too
TORCH_TYPES = {
    "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8",
    "f16": "float16", "bf16": "bfloat16", "f32": "float32",
}  # fmt: skip


@dataclass(frozen=True)
class CpuView:
    """Finished text for the template: each list holds whole lines of Python."""

    comment: list[str]
    helpers: list[str]
    signature: str
    arguments: str  # of the file's own check
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
    tile_class: list[str]
    pair: list[str]  # for each tile of keys
    mask: list[str]  # for those that are masked
    weight: list[str]
    samples: list[str]
    dense: list[str]
    tile_q: int
    tile_k: int
    head_dim: int
    head_dim_v: int


def render_cpu(spec: AttentionSpec, visits: Visits, plan: KernelPlan, text: str = "") -> str:
    """The file's text: `forward(q, k, v, parameters in the spec's order) -> (out, lse)`.

    `spec` has its consts bound; `visits` is analysis.visits(spec, "q"); `text` is the spec as written.
    Equal arguments give equal bytes.
    """
    return environment().get_template(FORWARD).render(view=view_of(spec, visits, plan, text))


def view_of(spec: AttentionSpec, visits: Visits, plan: KernelPlan, text: str) -> CpuView:
    """Lower the spec once for the tiles and once, densely, for the file's own check."""
    spec = prepared(spec)
    spelled = parameter_names(spec)
    tiles, dense = CpuLowering(spec, spelled), CpuLowering(spec, spelled)
    scale, start, pair = tiles.scale(), tiles.start(), tiles.scores()
    weight, mask = tiles.weight(pair), tiles.masks()
    ranges, check = ranges_of(spec, visits, tiles), _dense(dense)
    helpers = {"copy", "not_finite", *tiles.printer.helpers, *dense.printer.helpers, *ranges.helpers}
    helpers |= {"tensor"} if helpers - BARE else set()
    helpers |= {"read"} if "read_bit" in helpers else set()
    return CpuView(
        comment=_comment(spec, plan, text),
        helpers=[h for h in HELPER_ORDER if h in helpers],
        signature=", ".join(["q", "k", "v", *_arguments(spec, spelled)]),
        arguments="".join(f", {spelled[p.name]}={spelled[p.name]}" for p in spec.params),
        programs=ranges.programs,
        align=spec.align,
        position="row + (k_len - q_len)" if spec.align == "end" else "row",
        uses=_uses(spec),
        scale=scale,
        is_masked=ranges.is_masked,
        call=_free_axes(spec, spelled),
        summaries=ranges.summaries,
        program=tiles.program,
        row=tiles.row,
        ranges=ranges.lines,
        start=start,
        tile_class=ranges.tile_class,
        pair=pair,
        mask=mask,
        weight=weight,
        samples=[f"{spelled[p.name]} = {_sample(p)}" for p in spec.params],
        dense=[*_free_axes(spec, spelled), *check],
        tile_q=plan.tile_q,
        tile_k=plan.tile_k,
        head_dim=plan.head_dim,
        head_dim_v=plan.head_dim_v,
    )


def _uses(spec: AttentionSpec) -> frozenset[str]:
    found = {n for e in expressions(spec) for n in names(e)}
    more = {"h": {"h_kv"} & found, "row": {"q"} & found}
    return frozenset(found | {n for n, because in more.items() if because})


def _comment(spec: AttentionSpec, plan: KernelPlan, text: str) -> list[str]:
    """The spec as a comment. Whatever it holds stays inside: no line end and no control character gets through."""
    lines = [re.sub(r"[^\t\x20-\x7e\xa1-\u2027\u202a-\ud7ff]", "?", t).rstrip() for t in text.strip().splitlines()]
    coding = any(re.search(r"coding[:=]", t) for t in lines[:2])  # Python would take it for the file's encoding
    return [
        *(["# -*- coding: utf-8 -*-"] if coding else []),
        *(f"# {t}".rstrip() for t in lines),
        *(["#"] if lines else []),
        f"# forward · cpu · tile {plan.tile_q} × {plan.tile_k} · memory linear in length: one tile of scores at a time",
        f"# made by: attncc build {spec.name}.attn --target cpu          checked by: python {spec.name}_forward_cpu.py",
    ]


def _arguments(spec: AttentionSpec, spelled: Mapping[str, str]) -> list[str]:
    """Parameters in the spec's order; a default where no parameter without one comes behind it."""
    made: list[str] = []
    behind = True
    for p in reversed(spec.params):
        behind = behind and p.default is not None
        made.append(f"{spelled[p.name]}={p.default!r}" if behind else spelled[p.name])
    return made[::-1]


def _free_axes(spec: AttentionSpec, spelled: Mapping[str, str]) -> list[str]:
    """A line for each free axis whose extent is read: taken from the first tensor that has it."""
    used = {n for e in expressions(spec) for n in names(e)}
    used |= {str(p.axes[-1]) for p in spec.tensors if p.element == "bit"}
    lines = []
    for axis in (a for a in spec.free_axes if a in used):
        owner = next(p for p in spec.tensors if axis in p.axes)
        at = owner.axes.index(axis)
        words = " * 32" if owner.element == "bit" and at == len(owner.axes) - 1 else ""
        lines.append(f"{spelled[axis]} = {spelled[owner.name]}.shape[{at}]{words}")
    return lines


def _dense(low: CpuLowering) -> list[str]:
    """The file's own check: the same expressions over all pairs at once."""
    scale, pair = low.scale(ATOM), low.scores()
    sink = None if low.sink is None else low.number(low.sink, low.row)
    weight, mask = low.weight(pair), low.masks()
    lse = "torch.logsumexp(s, -1, keepdim=True)"
    return [
        *low.program,
        *low.row,
        f"s = Q.double() @ K.double().repeat_interleave(group, 1).mT * {scale}",
        *pair,
        *mask,
        f"want_lse = {lse}" if sink is None else f"want_lse = torch.logaddexp({lse}, {sink})",
        "p = torch.where(s == -torch.inf, 0.0, torch.exp(s - want_lse))",
        *weight,
        "want = p @ V.double().repeat_interleave(group, 1)",
    ]


def _sample(p: Param) -> str:
    """A value of the right kind for the file's own check, as Python text."""
    if not p.is_tensor:
        return repr(p.default) if p.default is not None else "1.5" if p.type == "float" else "7"
    shape = [a if isinstance(a, int) else SIZES.get(a, 16) for a in p.axes]
    if p.element == "bit":
        shape[-1] = -(-shape[-1] // 32)
        return f"torch.randint(-(2**31), 2**31, {tuple(shape)}, dtype=torch.int32)"
    if p.element == "bool":
        return f"torch.rand({tuple(shape)}) < 0.7"
    kind = f"torch.{TORCH_TYPES[p.element or '']}"
    if p.type == "float":
        return f"torch.rand({tuple(shape)}).to({kind})"
    drawn = f"torch.randint(0, 100, {tuple(shape)}).to({kind})"
    return f"{drawn}.sort(-1).values" if p.sorted else drawn
