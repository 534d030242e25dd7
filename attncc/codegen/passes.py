"""Small rewrites of expressions before they are printed. Each keeps the meaning."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from attncc.ir import Const, Expr, Op, Read


def divide(a: float, b: float) -> float:
    """As IEEE 754 has it, where Python raises."""
    if b:
        return a / b
    return math.copysign(math.inf, a) * math.copysign(1.0, b) if a and not math.isnan(a) else math.nan


_FOLD: dict[str, Callable[..., Any]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": divide,
    "//": lambda a, b: a // b, "%": lambda a, b: a % b, "neg": lambda a: -a, "float": float,
    "<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b, "!=": lambda a, b: a != b,
    "and": lambda a, b: a and b, "or": lambda a, b: a or b, "not": lambda a: not a,
    "abs": abs, "min": min, "max": max, "exp": math.exp, "exp2": lambda a: 2.0**a, "log": math.log, "log2": math.log2,
    "tanh": math.tanh, "sigmoid": lambda a: 1 / (1 + math.exp(-a)), "sqrt": math.sqrt, "floor": math.floor,
    "where": lambda c, a, b: a if c else b,
}  # fmt: skip


def fold(e: Expr) -> Expr:
    """Work constants out, in float64. What Python cannot work out (log of -1) is left to the kernel."""
    if isinstance(e, Read):
        return Read(e.tensor, tuple(map(fold, e.indices)), e.type)
    if not isinstance(e, Op):
        return e
    args = tuple(map(fold, e.args))
    if all(isinstance(a, Const) for a in args):
        try:
            value = _FOLD[e.op](*(a.value for a in args if isinstance(a, Const)))
        except (ArithmeticError, ValueError):
            return Op(e.op, args, e.type)
        if not isinstance(value, float) or math.isfinite(value) or e.op == "/":
            return Const(float(value) if e.type == "float" else value)
    return Op(e.op, args, e.type)


def cheaper(e: Expr, constant: Callable[[Expr], bool]) -> Expr:
    """For 16-bit results: a quotient by what is `constant` for the program becomes a product with its reciprocal."""
    if not isinstance(e, Op):
        return e
    args = tuple(cheaper(a, constant) for a in e.args)
    if e.op == "/" and constant(args[1]) and not constant(args[0]):
        return Op("*", (args[0], Op("/", (Const(1.0), args[1]), "float")), "float")
    return Op(e.op, args, e.type)


def banded(terms: Sequence[Expr]) -> list[Expr]:
    """Terms of a mask, where `0 <= x` and `x < n` of one x are joined to one comparison without sign."""
    found, left = [], list(terms)
    for upper in terms:
        if not (isinstance(upper, Op) and upper.op == "<" and upper in left):
            continue
        x, n = upper.args
        lower = next((t for t in left if _from_zero(t) == x), None)
        if lower is not None and isinstance(x, Op):
            left = [t for t in left if t not in (upper, lower)]
            found.append(Op("within", (x, n), "bool"))
    return [*found, *left]


def _from_zero(t: Expr) -> Expr | None:
    """x where `t` says 0 <= x; a <= b says it of b - a."""
    if not isinstance(t, Op) or t.op not in ("<=", ">="):
        return None
    low, high = t.args if t.op == "<=" else reversed(t.args)
    return high if low == Const(0) else Op("-", (high, low), "int")
