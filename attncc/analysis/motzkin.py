"""Proofs about linear inequalities: Fourier and Motzkin's elimination over the rationals, with what is known of `//`,
`%`, min."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction

from attncc.analysis.bounds import numeric
from attncc.analysis.normal import Clause, Solver
from attncc.analysis.terms import Term

Row = tuple[dict[int, Fraction], Fraction]  # sum of coefficients times terms (by id) plus a constant, at most 0
ROWS = 250  # beyond which a proof is given up


def impossible(terms: Iterable[Term]) -> bool:
    """Can no integers make every one of the terms at most 0? True is a proof, False means unknown."""
    rows: list[Row] = []
    seen: set[int] = set()
    todo = list(terms)
    while todo:
        parts, c = todo.pop().affine
        rows.append(({t.id: Fraction(v) for t, v in parts.items()}, Fraction(c)))
        for t in parts:
            if t.id not in seen:
                seen.add(t.id)
                todo += _known(t)
    while True:
        if any(not parts and c > 0 for parts, c in rows):
            return True
        rows = [r for r in rows if r[0]]
        left = sorted({v for parts, _ in rows for v in parts})
        if not left or len(rows) > ROWS:
            return False
        rows = _without(_cheapest(left, rows), rows)


def _cheapest(left: list[int], rows: list[Row]) -> int:
    """The variable whose elimination makes the fewest rows."""
    signs = {v: [0, 0] for v in left}
    for parts, _ in rows:
        for v, c in parts.items():
            signs[v][c > 0] += 1
    return min(left, key=lambda v: signs[v][0] * signs[v][1])


def _without(v: int, rows: list[Row]) -> list[Row]:
    above = [r for r in rows if r[0].get(v, 0) > 0]
    below = [r for r in rows if r[0].get(v, 0) < 0]
    fresh = [r for r in rows if v not in r[0]]
    for p, pc in above:
        for n, nc in below:
            a, b = 1 / p[v], -1 / n[v]
            parts = {k: a * p.get(k, Fraction(0)) + b * n.get(k, Fraction(0)) for k in {**p, **n}}
            fresh.append(({k: x for k, x in parts.items() if x}, a * pc + b * nc))
    strongest: dict[tuple[tuple[int, Fraction], ...], Fraction] = {}
    for parts, c in fresh:
        scale = abs(parts[min(parts)]) if parts else Fraction(1)
        key = tuple(sorted((k, x / scale) for k, x in parts.items()))
        strongest[key] = max(strongest.get(key, c / scale), c / scale)
    return [(dict(key), c) for key, c in strongest.items()]


def _known(t: Term) -> list[Term]:
    """Linear facts about a term that is no sum: each is at most 0."""
    found = []
    low, high = numeric(t)
    if low is not None:
        found.append(low - t)
    if high is not None:
        found.append(t - high)
    facts = t.home.facts
    for bounds, sign in ((facts.above, 1), (facts.below, -1)):
        if t.op == "var" and t.val in bounds:
            parts, c = bounds[t.val]
            found.append(sign * (t - t.home.sum_of({t.home.var(n): v for n, v in parts.items()}, c)))
    if t.op in _ABOUT:
        found += _ABOUT[t.op](t)
    return found


def _div(t: Term) -> list[Term]:
    x, n = t.args
    if n.op == "const":  # n t <= X <= n t + n - 1
        return [n * t - x, x - n * t - n + 1]
    return [t - x] if (numeric(x)[0] or -1) >= 0 or numeric(x)[0] == 0 else []


def _mul(t: Term) -> list[Term]:
    """n (X // n) lies in (X - n, X]."""
    pairs = ((n, d) for n, d in (t.args, t.args[::-1]) if d.op == "div" and d.args[1] is n)
    return [e for n, d in pairs for e in (t - d.args[0], d.args[0] - t - n + 1)]


def _mod(t: Term) -> list[Term]:
    x, n = t.args
    return [-t, t - n + 1, *([t - x] if x.ge(0) is t.home.true else [])]


_ABOUT: dict[str, Callable[[Term], list[Term]]] = {
    "div": _div,
    "mul": _mul,
    "mod": _mod,
    "min": lambda t: [t - a for a in t.args],
    "max": lambda t: [a - t for a in t.args],
    "abs": lambda t: [t.args[0] - t, -t.args[0] - t],
}


def refuted(b: Term) -> bool:
    """Is the boolean false for all positions and all parameters that the facts allow? True is a proof."""
    return all(impossible(literals(c, "k")) for c in alternatives(b))


def alternatives(b: Term) -> list[Clause]:
    """Clauses of the boolean in k, with conditions that are disjunctions split up too (as far as that stays small)."""
    found = []
    for c in Solver("k").clauses(b):
        ways: list[list[Term]] = [[]]
        for g in (*c.conditions, *c.opaque):
            options = [list(a.args) if a.op == "and" else [a] for a in (g.args if g.op == "or" else (g,))]
            ways = [w + o for w in ways for o in options] if len(ways) * len(options) <= 64 else ways
        found += [Clause(c.lower, c.upper, frozenset(w), frozenset()) for w in ways]
    return found


def literals(c: Clause, x: str) -> list[Term]:
    """The clause's linear part: each at most 0. What is not linear is left out, which only makes less of it
    provable."""
    found = []
    for e in c.lower:
        found.append(e - e.home.var(x))
    for e in c.upper:
        found.append(e.home.var(x) - e)
    for g in (*c.conditions, *c.opaque):
        if g.op == "le0":
            found.append(g.args[0])
        elif g.op == "eq0":
            found += [g.args[0], -g.args[0]]
    return found
