"""What a generated file checks itself against: the spec's expressions over all pairs at once, in float64."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from attncc.codegen.cpu_lower import CpuLowering, expressions
from attncc.codegen.launch import extent
from attncc.codegen.printer import ATOM
from attncc.ir import AttentionSpec, Param, names

HELPER_ORDER = (
    "copy", "matrices", "exp_", "finite", "finite_kept", "not_finite", "sparse", "Threshold", "Mean", "survivors",
    "tensor", "real", "read", "read_bit", "element", "tile_ends", "tile_scan",
    "where", "floor", "minimum", "maximum", "checked_div", "checked_mod", "exp", "exp2", "log", "log2", "tanh",
    "sigmoid", "sqrt",
)  # fmt: skip
BARE = {
    "copy",
    "matrices",
    "exp_",
    "finite",
    "finite_kept",
    "not_finite",
    "survivors",
    "sparse",
    "Threshold",
    "Mean",
    "tensor",
    "real",
    "read",
    "read_bit",
    "element",
    "tile_ends",
    "tile_scan",
}  # these call no `tensor`
SEED = 1  # of dropout in the file's own check
SIZES = {"b": 2, "h": 4, "h_kv": 2, "row": 300, "k": 331}  # of the file's own check; the template has them too
SPANS = {"row": "q_span", "k": "k_span"}  # what the templates call where a sequence lies
TORCH_TYPES = {
    "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8",
    "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
}  # fmt: skip


@dataclass(frozen=True)
class DenseCheck:
    """Finished lines for the templates' self-checks."""

    samples: list[str]  # parameters, drawn
    arguments: str  # of the call
    names: str  # ", NAME" for each parameter
    parts: str  # the same for one of packed sequences
    position: str
    has_lse: bool  # or the threshold of a sparse normaliser, in its place
    differentiable: bool  # of that
    reports: tuple[str, ...]  # of rows, beside it
    lines: list[str]  # to want, want_lse, and want_rows where there are reports
    helpers: frozenset[str]  # functions of cpu/helpers.jinja that the lines call


def dense_check(spec: AttentionSpec, spelled: Mapping[str, str]) -> DenseCheck:
    """`spec` as cpu_lower.prepared gives it, `spelled` the names of its parameters and free axes."""
    low = CpuLowering(spec, spelled)
    lines = [*free_axes(spec, spelled), *_dense(low)]
    return DenseCheck(
        samples=[f"{spelled[p.name]} = {_sample(spec, p)}" for p in spec.params],
        arguments="".join(f", {spelled[p.name]}={spelled[p.name]}" for p in spec.params)
        + (f", seed={SEED}" if spec.dropout is not None else ""),
        has_lse=low.normaliser.statistic,
        differentiable=low.normaliser.has_lse,
        names="".join(f", {spelled[p.name]}" for p in spec.params),
        parts="".join(f", {of_sequence(spec, p, spelled[p.name])}" for p in spec.params),
        position="row + (k_len - q_len)" if spec.align == "end" else "row",
        reports=spec.reports,
        lines=lines,
        helpers=frozenset(
            low.printer.helpers
            | ({"survivors"} if spec.dropout is not None else set())
            | ({"sparse"} if low.normaliser.alpha is not None else set())
        ),
    )


def of_sequence(spec: AttentionSpec, p: Param, name: str) -> str:
    """A parameter for one of packed sequences, with all of its axes: see cpu/packed.jinja."""
    axis = spec.packed_axis(p)
    if not axis:
        return name
    return f"alone({name}, {spec.stored_axes(p).index(axis)}, {SPANS[axis]}, {p.axes.index('b')}, B)"


def in_order(helpers: Collection[str]) -> list[str]:
    """Helpers with those that they call, in the order of HELPER_ORDER."""
    more = {"tensor"} if set(helpers) - BARE else set()
    more |= {"read"} if "read_bit" in helpers else set()
    return [h for h in HELPER_ORDER if h in {*helpers, *more}]


def comment(text: str) -> list[str]:
    """The spec as a comment. Whatever it holds stays inside: no line end and no control character gets through."""
    lines = [re.sub(r"[^\t\x20-\x7e\xa1-\u2027\u202a-\ud7ff]", "?", t).rstrip() for t in text.strip().splitlines()]
    coding = any(re.search(r"coding[:=]", t) for t in lines[:2])  # Python would take it for the file's encoding
    return [
        *(["# -*- coding: utf-8 -*-"] if coding else []),
        *(f"# {t}".rstrip() for t in lines),
        *(["#"] if lines else []),
    ]


def free_axes(spec: AttentionSpec, spelled: Mapping[str, str]) -> list[str]:
    """A line for each free axis whose extent is read: taken from the first tensor that has it."""
    used = {n for e in expressions(spec) for n in names(e)}
    used |= {str(p.axes[-1]) for p in spec.tensors if p.element == "bit"}
    return [f"{spelled[a]} = {extent(spec, a, spelled)}" for a in spec.free_axes if a in used]


def _dense(low: CpuLowering) -> list[str]:
    """The file's own check: the same expressions over all pairs at once."""
    scale, pair = low.scale(ATOM), low.scores()
    weights = low.stages(pair) if low.normaliser.stages is not None else _exponential(low)
    if low.normaliser.summed:
        weights += [
            "total = p.sum(-1, keepdim=True)",
            "p, want_lse = p / torch.where(total == 0, 1.0, total), torch.log(total)",
        ]
    weights += _rows(low)
    weight, mask = low.weight(pair), low.masks()
    return [
        *low.program,
        *low.row,
        f"s = Q.double() @ K.double().repeat_interleave(group, 1).mT * {scale}",
        *pair,
        *mask,
        *weights,
        *weight,
        *_dropped(low),
        "want = p @ V.double().repeat_interleave(group, 1)",
    ]


def _rows(low: CpuLowering) -> list[str]:
    """What is asked for of each row: the entropy is that of the weights, a sink's among them."""
    if not low.spec.reports:
        return []
    drawn = "want_lse - torch.where(p == 0, 0.0, p * s).sum(-1, keepdim=True)"
    if low.sink is not None:
        sink = low.number(low.sink, low.row)
        drawn += f" - torch.exp({sink} - want_lse) * {sink}"
    texts = {
        "max": "s.amax(-1, keepdim=True)", "entropy": f"torch.where(want_lse == -torch.inf, 0.0, {drawn})",
        "pairs": "(s != -torch.inf).sum(-1, keepdim=True)",
    }  # fmt: skip
    first = ["want_lse"] if low.normaliser.statistic else []
    return [f"want_rows = torch.cat(({', '.join([*first, *(texts[r] for r in low.spec.reports)])},), -1)"]


def _dropped(low: CpuLowering) -> list[str]:
    if low.spec.dropout is None:
        return []
    text = low.text(low.spec.dropout, low.program)
    return [f"drop = float({text})", f"p = torch.where(survivors({SEED}, drop, b, h, row, k), p / (1.0 - drop), 0.0)"]


def _exponential(low: CpuLowering) -> list[str]:
    if low.normaliser.alpha is not None:
        return [f"p, want_lse = sparse(s, {low.normaliser.alpha!r})"]
    sink = None if low.sink is None else low.number(low.sink, low.row)
    lse = "torch.logsumexp(s, -1, keepdim=True)"
    return [
        f"want_lse = {lse}" if sink is None else f"want_lse = torch.logaddexp({lse}, {sink})",
        "p = torch.where(s == -torch.inf, 0.0, torch.exp(s - want_lse))",
    ]


def _sample(spec: AttentionSpec, p: Param) -> str:
    """A value of the right kind for the file's own check, as Python text."""
    if not p.is_tensor:
        if p.type == "int":  # small enough for a window to leave something out
            return repr(7 if p.default is None else min(int(p.default), 100))
        return "1.5" if p.default is None else repr(p.default)
    sizes = {**SIZES, "b": 3} if spec.ragged else SIZES
    shape = [a if isinstance(a, int) else sizes.get(a, 16) for a in spec.stored_axes(p)]
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
