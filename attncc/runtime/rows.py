"""What a call returns of each row beside its lse: the maximum of its scores, the entropy of its weights, its pairs.

The kernels of a spec with the setting `layout { rows … }` make them, side by side behind the lse; a call that asks for
some runs those of its spec with that setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, int64
from torch.compiler import is_compiling

from attncc.errors import NotBuilt
from attncc.frontend import reporting
from attncc.frontend import rows as rules
from attncc.ir import REPORTS, AttentionSpec

if TYPE_CHECKING:
    from attncc.runtime.attention import Attention


def columns(spec: AttentionSpec, statistic: bool) -> tuple[str, ...]:
    """What lies side by side of each row; `statistic`: its lse, or what stands in its place."""
    return (*(("lse",) if statistic else ()), *spec.reports)


def call(
    attention: Attention, tensors: tuple[Tensor, Tensor, Tensor], given: Mapping[str, Any],
    flags: Sequence[bool], validate: bool, deterministic: bool | None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """out, and what `flags` ask for of lse, max, entropy and pairs, in this order, [B, H, Q]: float32, pairs int64.

    Gradients go through out, lse and entropy. ValueError and NotBuilt say why something is not there.
    """
    returned = tuple(name for name, flag in zip(("lse", *REPORTS), flags, strict=True) if flag)
    asked = frozenset(returned) - {"lse"}
    if not asked <= {*attention.spec.reports}:
        wanted = attention.spec.reporting(asked)
        for _, what, _ in rules.meaningless(wanted):
            raise ValueError(f"return_entropy: {what}")
        for _, what in rules.unbuilt(wanted):
            raise NotBuilt(f"{attention.name}: {what}: not built yet")
        if is_compiling():  # a graph has the text of what it calls
            text = f"{attention.bare}\nlayout {{ rows {wanted.layout.rows} }}\n"
            out, rows = attention.in_graph(*tensors, given, validate, deterministic, text)
        else:
            out, rows = _reporting(attention, asked).both(*tensors, given, validate, deterministic)
    else:
        wanted = attention.spec
        out, rows = attention.both(*tensors, given, validate, deterministic)
    found = dict(zip(columns(wanted, attention.has_statistic), rows.unbind(-1), strict=True))
    for name in ("max", "pairs"):
        if name in found:
            found[name] = found[name].detach()
    if "pairs" in found:
        found["pairs"] = found["pairs"].to(int64)
    return (out, *(found[name] for name in returned)) if returned else out


def refuse_lse(attention: Attention) -> None:
    """ValueError: there is none, and why."""
    why = "has a threshold in place of an lse" if attention.has_statistic else "divides by no sum, and has no lse"
    raise ValueError(f"return_lse: softmax {attention.spec.softmax.policy} {why}")


def _reporting(attention: Attention, asked: frozenset[str]) -> Attention:
    """The same attention with these REPORTS, made once."""
    if asked not in attention.reporting:
        parsed = reporting(attention.parsed, asked)
        attention.reporting[asked] = type(attention)(parsed, attention.consts, attention.target)
    return attention.reporting[asked]


def differentiable(attention: Attention, rows: Tensor | None) -> Tensor | None:
    """Of rows, or of their gradients, what the backward pass takes: the lse, with the entropy where there is one."""
    reports = attention.spec.reports
    if rows is None or not reports or not attention.has_statistic:
        return rows
    return rows[..., [0, 1 + reports.index("entropy")]] if "entropy" in reports else rows[..., 0]
