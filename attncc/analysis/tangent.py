"""The tangent of a spec: how scores, scale, weight and sink move when their inputs do, for forward-mode derivatives.

A spec becomes its dual: for each parameter marked `grad` it gets a second one of the same kind, its tangent. The
tangent of an expression is then an expression too, by the derivatives of analysis.derivative, and is lowered as any
other.
"""

from __future__ import annotations

from dataclasses import replace

from attncc.analysis.derivative import add, derivative, multiply, variables
from attncc.analysis.normaliser import normaliser
from attncc.ir import AttentionSpec, Expr, Param, Read, Var

S = Var("s", "float")
MOVED_S = Var("_s_t", "float")  # the tangent of `s`; no spec can have such a name


def moved(name: str) -> str:
    """What the tangent of a parameter is called in the dual of its spec."""
    return f"_{name}_t"


def learned(spec: AttentionSpec) -> tuple[Param, ...]:
    """The parameters that have tangents: those marked `grad`."""
    return tuple(p for p in spec.params if p.grad)


def dual(spec: AttentionSpec) -> AttentionSpec:
    """`spec` with the tangents among its parameters: tensors of the same axes and element, floats that default to 0."""
    more = tuple(
        replace(p, name=moved(p.name), grad=False, default=None if p.is_tensor else 0.0) for p in learned(spec)
    )
    return replace(spec, params=(*spec.params, *more))


def unbuilt(spec: AttentionSpec) -> list[str]:
    """What of a spec has no tangent yet, in words."""
    rule = normaliser(spec)
    sparse = [f"softmax {spec.softmax.policy}"] if rule.alpha is not None or rule.summed else []
    dropout = ["dropout"] if spec.dropout is not None else []
    rows = [f"layout rows {spec.layout.rows}"] if spec.reports else []
    return [*sparse, *dropout, *(["packed sequences"] if spec.ragged else []), *rows]


def tangent(e: Expr, spec: AttentionSpec) -> Expr:
    """The change of a float `e` along the tangents of `s` and of the parameters of `spec` (not its dual)."""
    total = multiply(derivative(e, S), MOVED_S)
    for p in learned(spec):
        for at in variables(e, p):
            total = add(total, multiply(derivative(e, at), _moved(p, at)))
    return total


def _moved(p: Param, at: Expr) -> Expr:
    return Read(moved(p.name), at.indices, at.type) if isinstance(at, Read) else Var(moved(p.name), at.type)
