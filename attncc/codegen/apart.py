"""A score that is linear in the key's position, taken apart: what differs between keys, and what a tile's keys share.

s + c * k + d, c of the program and d of the row, is (s + c * column) + (c * k_first + d), where k is k_first + column.
The second part joins the row's reference, so that a pair costs one multiply-add more than a score without it.
"""

from __future__ import annotations

from attncc.codegen.lower import level
from attncc.ir import AttentionSpec, Const, Expr, Op, Var, names, substitute

S, K = Var("s", "float"), Var("k", "int")
FIRST, COLUMN = Var("k_first", "int"), Var("column", "float")


def apart(spec: AttentionSpec) -> tuple[tuple[Expr, ...], Expr | None]:
    """The scores as they are, and None; or one of pairs and keys, and what a row adds to it for a whole tile."""
    if len(spec.scores) != 1:
        return spec.scores, None
    (score,) = spec.scores
    rest = _beside(score)
    slope = None if rest is None else _slope(rest)
    if rest is None or slope is None:
        return spec.scores, None
    return (Op("+", (S, Op("*", (slope, COLUMN), "float")), "float"),), substitute(rest, {"k": FIRST})


def _beside(e: Expr) -> Expr | None:
    """x where `e` is s + x or s - x, and x is free of s."""
    if not isinstance(e, Op) or e.op not in ("+", "-"):
        return None
    a, b = e.args
    if a == S and "s" not in names(b):
        return b if e.op == "+" else Op("neg", (b,), "float")
    return a if e.op == "+" and b == S and "s" not in names(a) else None


def _slope(e: Expr) -> Expr | None:
    """The factor of k in `e`, a value of the program; None where `e` is not linear in k, or k is not there."""
    if e == K:
        return Const(1.0)
    if not isinstance(e, Op):
        return None
    if e.op == "float":
        return _slope(e.args[0])
    if e.op == "neg":
        return _negated(_slope(e.args[0]))
    if e.op in ("+", "-"):
        return _sum(e)
    if e.op == "*":
        a, b = e.args
        if level(a) == "program" and a.type == "float":
            return _times(a, _slope(b))
        if level(b) == "program" and b.type == "float":
            return _times(b, _slope(a))
    return None


def _sum(e: Op) -> Expr | None:
    """That of a sum or difference, one side of which k is in."""
    left, right = ("k" in names(a) for a in e.args)
    if left and right:
        return None
    if left:
        return _slope(e.args[0])
    found = _slope(e.args[1]) if right else None
    return found if e.op == "+" else _negated(found)


def _times(factor: Expr, slope: Expr | None) -> Expr | None:
    if slope is None or slope == Const(1.0):
        return None if slope is None else factor
    if isinstance(slope, Op) and slope.op == "neg":
        return _negated(_times(factor, slope.args[0]))
    return Op("*", (factor, slope), "float")


def _negated(slope: Expr | None) -> Expr | None:
    if slope is None:
        return None
    return slope.args[0] if isinstance(slope, Op) and slope.op == "neg" else Op("neg", (slope,), "float")
