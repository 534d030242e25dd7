"""The CPU program of a spec: one PyTorch file, tiled, memory linear in length, printed by the shared printer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from attncc.codegen.cpu_lower import TORCH_TILES, CpuLowering, ranges_text
from attncc.codegen.environment import environment
from attncc.codegen.naming import Names
from attncc.codegen.passes import fold
from attncc.ir import AttentionSpec, Const, Expr, KernelPlan, Op, Param, Var, Visits, names

TEMPLATE = "cpu_forward.py.jinja"
HELPERS = "cpu_helpers.py.jinja"
SELFCHECK = "cpu_selfcheck.py.jinja"
KV_HEADS, HEADS, ROWS, KEYS = 2, 4, 300, 331  # sizes of the file's own check


@dataclass(frozen=True)
class CpuView:
    """Finished text for the template: each list holds whole lines of Python."""

    comment: list[str]
    helpers: list[str]
    signature: str
    arguments: str
    programs: str
    align: str
    position: str
    scale: str
    sees: str
    is_masked: str
    call: list[str]  # once
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


def taken_names() -> frozenset[str]:
    """Every identifier of the templates' code, comments and docstrings left out."""
    loader = environment().loader
    assert loader is not None
    found: set[str] = set()
    for name in (TEMPLATE, HELPERS, SELFCHECK):
        text = loader.get_source(environment(), name)[0]
        text = re.sub(r'""".*?"""|\{#.*?#\}|#[^\n]*', "", text, flags=re.DOTALL)
        found |= set(re.findall(r"[A-Za-z_]\w*", text))
    return frozenset(found)


def parameter_names(spec: AttentionSpec) -> dict[str, str]:
    """The keyword of each parameter and the name of each free axis in the file: the spec's own, `_` behind it on a clash."""
    free = Names(taken_names())
    return {n: free.fresh(n) for n in (*(p.name for p in spec.params), *spec.free_axes)}


def render_cpu(spec: AttentionSpec, visits: Visits, plan: KernelPlan, text: str = "") -> str:
    """The file's text. `spec` has its consts bound; `visits` is analysis.visits(spec, "q"); `text` is the spec as written.

    Equal arguments give equal bytes. The file has `forward(q, k, v, *, parameters) -> (out, lse)`.
    """
    view = view_of(spec.map(fold), visits, plan, text)
    return environment().get_template(TEMPLATE).render(view=view)


def view_of(spec: AttentionSpec, visits: Visits, plan: KernelPlan, text: str) -> CpuView:
    """Lower the spec once for the tiles and once, densely, for the file's own check."""
    spelled = parameter_names(spec)
    tiles, dense = CpuLowering(spec, spelled), CpuLowering(spec, spelled)
    scale = tiles.scale()
    start, pair, weight, mask = tiles.start(), tiles.scores(), tiles.weight(), tiles.masks()
    ranges = ranges_text(spec, visits, spelled)
    helpers = {"copy", "not_finite", *tiles.printer.helpers, *ranges.helpers}
    dense_lines = _dense(dense)
    helpers |= dense.printer.helpers
    if helpers & set(TORCH_TILES.forms) | (helpers & {"minimum", "maximum", "checked_div", "checked_mod"}):
        helpers.add("tensor")
    if "read_bit" in helpers:
        helpers.add("read")
    return CpuView(
        comment=_comment(spec, plan, text), helpers=[h for h in HELPER_ORDER if h in helpers],
        signature=", ".join(["q", "k", "v", *(["*"] if spec.params else []), *_keywords(spec, spelled)]),
        arguments="".join(f", {spelled[p.name]}={spelled[p.name]}" for p in spec.params),
        programs=ranges.programs, align=spec.align, position="row + (k_len - q_len)" if spec.align == "end" else "row",
        scale=scale, sees=ranges.sees, is_masked=ranges.is_masked,
        call=[*_free_axes(spec, spelled), *ranges.summaries], program=tiles.section("program"), row=tiles.section("row"),
        ranges=ranges.lines, start=start, tile_class=ranges.tile_class, pair=pair, mask=mask, weight=weight,
        samples=_samples(spec, spelled), dense=[*_free_axes(spec, spelled), *dense_lines],
        tile_q=plan.tile_q, tile_k=plan.tile_k, head_dim=plan.head_dim, head_dim_v=plan.head_dim_v,
    )  # fmt: skip


HELPER_ORDER = (
    "copy", "not_finite", "tensor", "real", "read", "read_bit", "element", "tile_ends", "where", "floor", "minimum",
    "maximum", "checked_div", "checked_mod", "exp", "exp2", "log", "log2", "tanh", "sigmoid", "sqrt",
)  # fmt: skip


def _comment(spec: AttentionSpec, plan: KernelPlan, text: str) -> list[str]:
    """The spec as a comment: nothing in it can end the comment."""
    lines = [re.sub(r"[^\t\x20-\x7e\xa1-\u2027\u202a-\ud7ff]", "?", t).rstrip() for t in text.strip().splitlines()]
    head = [f"# {t}".rstrip() for t in lines]
    return [
        *head, *(["#"] if head else []),
        f"# forward · cpu · tile {plan.tile_q} × {plan.tile_k} · scratch in proportion to the tile, not to the lengths",
        f"# made by: attncc build {spec.name}.attn --target cpu          checked by: python {spec.name}_forward_cpu.py",
    ]  # fmt: skip


def _keywords(spec: AttentionSpec, spelled: dict[str, str]) -> Iterable[str]:
    for p in spec.params:
        yield spelled[p.name] if p.default is None else f"{spelled[p.name]}={p.default!r}"


def _free_axes(spec: AttentionSpec, spelled: dict[str, str]) -> list[str]:
    """A line for each free axis that an expression reads: its extent, taken from the first tensor that has it."""
    used: set[str] = set()
    spec.map(lambda e: (used.update(names(e)), e)[1])
    lines = []
    for axis in spec.free_axes:
        owner = next(p for p in spec.tensors if axis in p.axes)
        at = owner.axes.index(axis)
        words = " * 32" if owner.element == "bit" and at == len(owner.axes) - 1 else ""
        if axis in used or words or _bit_axis(spec, axis):
            lines.append(f"{spelled[axis]} = {spelled[owner.name]}.shape[{at}]{words}")
    return lines


def _bit_axis(spec: AttentionSpec, axis: str) -> bool:
    return any(p.element == "bit" and p.axes[-1] == axis for p in spec.tensors)


def _dense(low: CpuLowering) -> list[str]:
    """The file's own check: the same expressions over all pairs."""
    scale, start, pair, weight, mask = low.scale(), low.start(), low.scores(), low.weight(), low.masks()
    sink = [line for line in start if line.startswith("m = ")]
    lse = "torch.logsumexp(s, -1, keepdim=True)"
    if low.sink is not None:
        sink = [f"sink = {low.tensor(low.sink)}"]
        lse = "torch.logaddexp(torch.logsumexp(s, -1, keepdim=True), sink.to(dtype))"
    return [
        *low.section("program"), *low.section("row"),
        f"s = Q.double() @ K.double().repeat_interleave(group, 1).mT * {scale}",
        *pair, *mask, *(sink if low.sink is not None else []), f"want_lse = {lse}",
        "p = torch.where(s == -torch.inf, 0.0, torch.exp(s - want_lse))", *weight,
        "want = p @ V.double().repeat_interleave(group, 1)",
        "lse_error = torch.where(lse == want_lse[..., 0], 0.0, lse - want_lse[..., 0]).abs().max()",
    ]  # fmt: skip


def _samples(spec: AttentionSpec, spelled: dict[str, str]) -> list[str]:
    return [f"{spelled[p.name]} = {_sample(spec, p)}" for p in spec.params]


def _sample(spec: AttentionSpec, p: Param) -> str:
    """A value of the right kind for the file's own check, as Python text."""
    if not p.is_tensor:
        if p.default is not None:
            return repr(p.default)
        return "1.5" if p.type == "float" else "7"
    call = {"b": 2, "h": HEADS, "h_kv": KV_HEADS, "row": ROWS, "k": KEYS}
    shape = [a if isinstance(a, int) else call.get(a, 16) for a in p.axes]
    if p.element == "bit":
        shape[-1] = -(-shape[-1] // 32)
        return f"torch.randint(-(2**31), 2**31, {tuple(shape)}, dtype=torch.int32)"
    if p.element == "bool":
        return f"torch.rand({tuple(shape)}) < 0.7"
    kind = {"i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8",
            "f16": "float16", "bf16": "bfloat16", "f32": "float32"}[p.element or ""]  # fmt: skip
    if p.type == "float":
        return f"torch.rand({tuple(shape)}).to(torch.{kind})"
    drawn = f"torch.randint(0, 100, {tuple(shape)}, dtype=torch.{kind})"
    return f"{drawn}.sort(-1).values" if p.sorted else drawn


__all__ = ["CpuView", "parameter_names", "render_cpu", "view_of"]
_ = (Const, Expr, Op, Var, replace)
