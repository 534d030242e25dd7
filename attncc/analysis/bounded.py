"""Scores that bound themselves, as a soft cap does: where they lie, as values that all pairs of a program share."""

from __future__ import annotations

from collections.abc import Callable

from attncc.analysis.derivative import ONE, ZERO, add, multiply, negate
from attncc.ir import AttentionSpec, Const, Expr, Op, Var, names

S = Var("s", "float")
HALF = Const(0.5)
OF_PAIRS = frozenset(("s", "q", "row", "k"))

Span = tuple[Expr, Expr]  # the middle, and how far from it a value can be
Known = Callable[[Expr], "Span | None"]


def bounded(spec: AttentionSpec) -> Span | None:
    """(middle, radius) of every score of a kept pair, floats over the program's values; None where nothing bounds it.

    A score of finite s is within them to rounding. A score that is infinite, or no number, is not held to them.
    """
    span: Span | None = None
    for score in spec.scores:
        span = _span(score, span)
    return span


def _span(e: Expr, of_s: Span | None) -> Span | None:
    def known(x: Expr) -> Span | None:
        if x == S:
            return of_s
        if not names(x) & OF_PAIRS:
            return x, ZERO
        rule = _RULES.get(x.op) if isinstance(x, Op) else None
        return rule(x.args, known) if rule is not None and isinstance(x, Op) else None

    return known(e)


def _sum(args: tuple[Expr, ...], known: Known) -> Span | None:
    a, b = map(known, args)
    return None if a is None or b is None else (add(a[0], b[0]), add(a[1], b[1]))


def _difference(args: tuple[Expr, ...], known: Known) -> Span | None:
    b = known(args[1])
    return None if b is None else _sum(args, lambda x: (negate(b[0]), b[1]) if x is args[1] else known(x))


def _negative(args: tuple[Expr, ...], known: Known) -> Span | None:
    a = known(args[0])
    return None if a is None else (negate(a[0]), a[1])


def _product(args: tuple[Expr, ...], known: Known) -> Span | None:
    a, b = map(known, args)
    if a is None or b is None or ZERO not in (a[1], b[1]):
        return None
    factor, (middle, radius) = (a[0], b) if a[1] == ZERO else (b[0], a)
    return multiply(factor, middle), multiply(Op("abs", (factor,), "float"), radius)


def _quotient(args: tuple[Expr, ...], known: Known) -> Span | None:
    b = known(args[1])
    if b is None or b[1] != ZERO:
        return None
    return _product((args[0], Op("/", (ONE, b[0]), "float")), known)


def _choice(args: tuple[Expr, ...], known: Known) -> Span | None:
    """The wider of both spans around the mean of their middles, and how far these lie apart."""
    a, b = known(args[1]), known(args[2])
    if a is None or b is None:
        return None
    apart = Op("abs", (add(a[0], negate(b[0])),), "float") if a[0] != b[0] else ZERO
    radius = a[1] if a[1] == b[1] else Op("max", (a[1], b[1]), "float")
    return (a[0] if a[0] == b[0] else multiply(HALF, add(a[0], b[0]))), add(radius, multiply(HALF, apart))


def _magnitude(args: tuple[Expr, ...], known: Known) -> Span | None:
    a = known(args[0])
    if a is None:
        return None
    most = add(Op("abs", (a[0],), "float"), a[1]) if a[0] != ZERO else a[1]
    return multiply(HALF, most), multiply(HALF, most)


_RULES: dict[str, Callable[[tuple[Expr, ...], Known], Span | None]] = {
    "+": _sum, "-": _difference, "neg": _negative, "*": _product, "/": _quotient, "where": _choice, "abs": _magnitude,
    "tanh": lambda args, known: (ZERO, ONE), "sigmoid": lambda args, known: (HALF, HALF),
}  # fmt: skip
