"""Proofs that an expression is never negative, by the shape of it alone: what sums of weights ask for."""

from __future__ import annotations

from attncc.ir.expr import Const, Expr, Op, Var
from attncc.ir.spec import BUILTINS

POSITIVE = ("exp", "exp2", "sigmoid", "sqrt", "abs")


def never_negative(e: Expr) -> bool:
    """Whether `e` is proved to be at least 0, whatever its variables are; NaN aside."""
    return _least(e) >= 0


def _least(e: Expr) -> float:
    """1 where `e` is proved to be at least 1, 0 where at least 0, else -1."""
    if isinstance(e, Const):
        return 1 if e.value >= 1 else 0 if e.value >= 0 else -1
    if isinstance(e, Var):
        return 0 if e.name in BUILTINS and e.name not in ("s", "q") else -1
    if not isinstance(e, Op):
        return -1
    if e.op in POSITIVE:
        return 0
    known = [_least(a) for a in e.args if a.type != "bool"]
    if e.op == "max":
        return max(known)
    if e.op in ("min", "where", "float", "floor"):
        return min(known)
    if e.op == "*" and e.args[0] == e.args[1]:
        return 0
    if e.op in ("+", "*", "/") and min(known) >= 0:
        return 0 if e.op == "/" else max(known) if e.op == "+" else min(known)
    return 0 if e.op in ("log", "log2") and known[0] >= 1 else -1
