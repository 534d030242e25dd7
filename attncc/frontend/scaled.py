"""Scales of 8-bit k and v beside a q of floats: parameters that the setting `scales` stands for.

Keys' scales are a factor of the scores, before those that are written; values' are one of the weights.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from attncc.ir import AttentionSpec, Const, Expr, Op, Param, Read, Var

KEYS, VALUES = SCALES = ("k_scales", "v_scales")  # arguments of the call
BLOCKS = "key_blocks"  # the free axis along which a head's scales lie


def scaled(spec: AttentionSpec) -> AttentionSpec:
    """The spec with the parameters that its `scales` stands for, [B, H_kv, m], and what they multiply."""
    if not _scales(spec):
        return spec
    taken = {*(p.name for p in spec.params), *spec.free_axes, *(n for n, _ in spec.lets)}
    size, blocks = spec.precision.block, fresh(BLOCKS, taken)
    at: Expr = Const(0) if size is None else Op("//", (Var("k", "int"), Const(size)), "int")
    axes = ("b", "h_kv", 1 if size is None else blocks)
    keys, values = (Read(name, (Var("b", "int"), Var("h_kv", "int"), at), "float") for name in SCALES)
    weight = values if spec.weight is None else Op("*", (values, _float(spec.weight)), "float")
    return replace(
        spec, params=(*(Param(name, "float", "f32", axes) for name in SCALES), *spec.params),
        scores=(Op("*", (Var("s", "float"), keys), "float"), *spec.scores), weight=weight,
    )  # fmt: skip


def as_written(spec: AttentionSpec) -> AttentionSpec:
    """What `scaled` made this of."""
    if not _scales(spec):
        return spec
    weight = spec.weight.args[1] if isinstance(spec.weight, Op) else None
    return replace(spec, params=spec.params[len(SCALES) :], scores=spec.scores[1:], weight=weight)


def _scales(spec: AttentionSpec) -> bool:
    return spec.precision.kept is not None and spec.precision.scales is not None


def _float(e: Expr) -> Expr:
    return e if e.type == "float" else Op("float", (e,), "float")


def fresh(name: str, taken: Collection[str]) -> str:
    """A name like this one that is not taken."""
    while name in taken:
        name += "_"
    return name
