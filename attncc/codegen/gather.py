"""Products in scores: factors that all pairs of a program share are multiplied once, and what can be left to the
exponential's own factor is.

cap * tanh(s / cap) of the scaled s is gain * tanh(s * multiple), with `gain` beside log2(e). It is kept positive, so
that it leaves the order of scores alone: its sign goes into the odd function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from attncc.codegen.lower import level
from attncc.codegen.passes import cheaper, fold
from attncc.ir import Const, Expr, Op, Var, names, substitute, walk

S, SCALE = Var("s", "float"), Var("scale", "float")
TINY = Const(2.0**-126)  # a gain of 0 would make an excluded pair's -inf no number
ODD = ("tanh",)


@dataclass
class Gathered:
    """Scores without the factors that are `shared`, each a name and its value; what the last is to be multiplied by."""

    fresh: Callable[[str], str]
    scaled: bool = False  # the scale is in the scores
    scores: tuple[Expr, ...] = ()
    shared: list[tuple[str, Expr]] = field(default_factory=list)
    gain: Expr | None = None

    def name(self, value: Expr) -> Expr:
        """A name for a value of the program, unless it is as short itself."""
        if isinstance(value, (Const, Var)):
            return value
        known = next((n for n, v in self.shared if v == value), None)
        if known is None:
            known = self.fresh("multiple")
            self.shared.append((known, value))
        return Var(known, "float")

    def product(self, e: Expr) -> Expr:
        """`e` with one shared factor in each of its products."""
        if not isinstance(e, Op):
            return e
        if e.op != "*" or e.type != "float" or level(e) == "program":
            return Op(e.op, tuple(map(self.product, e.args)), e.type)
        own, rest = _apart(e)
        inside = _times([self.product(f) for f in rest])
        return Op("*", (inside, self.name(_times(own))), "float") if own else inside


def gathered(scores: Sequence[Expr], fresh: Callable[[str], str], gains: bool) -> Gathered:
    """Of scores of the scaled s; `gains` where what is made of them multiplies them anyway."""
    made = Gathered(fresh)
    written = [cheaper(fold(e), lambda x: level(x) == "program") for e in scores]
    if written and sum(x == S for x in walk(written[0])) == 1:
        made.scaled = True
        written[0] = substitute(written[0], {"s": Op("*", (S, SCALE), "float")})
    if written and gains:
        written[-1] = _gain(written[-1], made)
    made.scores = tuple(map(made.product, written))
    return made


def _gain(e: Expr, made: Gathered) -> Expr:
    """The odd function in `e`, where it is one times what a program shares."""
    if not isinstance(e, Op) or e.op != "*":
        return e
    own, rest = _apart(e)
    if not own or len(rest) != 1 or not isinstance(rest[0], Op) or rest[0].op not in ODD or "s" not in names(rest[0]):
        return e
    whole, (inner,) = _times(own), rest[0].args
    positive = isinstance(whole, Const) and whole.value >= TINY.value
    gain = whole if positive else Op("max", (Op("abs", (whole,), "float"), TINY), "float")
    made.gain = gain
    if not positive:
        below = Op("<", (whole, Const(0.0)), "bool")
        inner = Op("*", (inner, Op("where", (below, Const(-1.0), Const(1.0)), "float")), "float")
    return Op(rest[0].op, (inner,), "float")


def _apart(e: Expr) -> tuple[list[Expr], list[Expr]]:
    """Factors of a product: those that a program shares, and the others."""
    if isinstance(e, Op) and e.op == "*":
        pairs = [_apart(a) for a in e.args]
        return [f for own, _ in pairs for f in own], [f for _, rest in pairs for f in rest]
    return ([e], []) if level(e) == "program" else ([], [e])


def _times(factors: Sequence[Expr]) -> Expr:
    whole = factors[0]
    for f in factors[1:]:
        whole = Op("*", (whole, f), "float")
    return whole
