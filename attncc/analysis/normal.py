"""Bounds normal form: a mask as clauses `max(lower) <= x <= min(upper)`, conditions free of x, and opaque atoms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from attncc.analysis.bounds import numeric
from attncc.analysis.lift import LENGTHS
from attncc.analysis.terms import ATOMS, Term

CLAUSES = 12  # beyond this many a disjunction stays opaque
STEPS = 400  # beyond this many nodes looked at, what is left stays opaque
Terms = frozenset[Term]
NONE: Terms = frozenset()


@dataclass(frozen=True)
class Clause:
    """A conjunction solved for one position x."""

    lower: Terms = NONE  # x >= each
    upper: Terms = NONE  # x <= each
    conditions: Terms = NONE  # free of x
    opaque: Terms = NONE  # hold x in a way that is not solved

    def __and__(self, other: Clause) -> Clause:
        return Clause(
            self.lower | other.lower,
            self.upper | other.upper,
            self.conditions | other.conditions,
            self.opaque | other.opaque,
        )

    def atoms(self) -> frozenset[tuple[str, int]]:
        groups = (("L", self.lower), ("U", self.upper), ("C", self.conditions), ("O", self.opaque))
        return frozenset((kind, e.id) for kind, group in groups for e in group)


@dataclass
class Solver:
    """Solves booleans for the position `x`; `overflow` tells that a disjunction was left opaque."""

    x: str
    search: bool = False  # may sorted tensors be inverted by binary search?
    overflow: bool = field(default=False)
    steps: int = field(default=0)

    def clauses(self, b: Term) -> list[Clause]:
        """Disjunctive normal form; the clauses may overlap."""
        home = b.home
        self.steps += 1
        if b.op == "bool":
            return [Clause()] if b.val else []
        if self.x not in b.free:
            return [Clause(conditions=frozenset(b.args if b.op == "and" else (b,)))]
        if self.steps > STEPS:
            self.overflow = True
            return [Clause(opaque=frozenset((b,)))]
        if b.op == "or":
            return simplify([c for a in b.args for c in self.clauses(a)])
        if b.op == "and":
            return self._product(b)
        e = b.args[0]
        if b.op == "le0":
            return self._le(e)
        if self._splits(e):
            halves = (home.le0(e), home.le0(-e)) if b.op == "eq0" else (home.le0(e + 1), home.le0(1 - e))
            return self.clauses(home.every(halves) if b.op == "eq0" else home.some(halves))
        return [Clause(opaque=frozenset((b,)))]

    def _product(self, b: Term) -> list[Clause]:
        whole = [Clause()]
        for part, a in sorted(((self.clauses(a), a) for a in b.args), key=lambda p: len(p[0])):
            if len(part) * len(whole) > CLAUSES:
                self.overflow = True
                part = [Clause(opaque=frozenset((a,)))]
            whole = simplify([u & v for u in whole for v in part])
        return whole

    def _splits(self, e: Term) -> bool:
        """Is an equality on e better as two inequalities?"""
        inner, _ = self._inner(e)
        if any(t.op in ("abs", "min", "max", "where") for t, _ in inner):
            return True
        if len(inner) != 1:
            return False
        t = inner[0][0]
        return t.op in ("var", "div", "mul") or (t.op == "load" and self._ordered(t))

    def _inner(self, e: Term) -> tuple[list[tuple[Term, int]], Term]:
        """The terms of a sum that hold x, with coefficients, and the rest."""
        parts, c = e.affine
        inner = [(t, v) for t, v in parts.items() if self.x in t.free]
        return inner, e.home.sum_of({t: v for t, v in parts.items() if self.x not in t.free}, c)

    def _le(self, e: Term) -> list[Clause]:
        """e <= 0."""
        home = e.home
        inner, rest = self._inner(e)
        if not inner:
            return self.clauses(home.le0(e))
        for t, c in inner:
            if t.op in ("abs", "min", "max", "where"):
                return self.clauses(_opened(t, c, e - c * t))
        t, c = inner[0]
        solved = None
        if len(inner) == 1:
            solved = self._upper(t, (-rest) // c) if c > 0 else self._lower(t, -((-rest) // -c))
        return [Clause(opaque=frozenset((home.le0(e),)))] if solved is None else solved

    def _upper(self, t: Term, u: Term) -> list[Clause] | None:
        """t <= u."""
        if t.op == "var":
            return [Clause(upper=frozenset((u,)))]
        if t.op == "div" and self.x not in t.args[1].free:  # X // n <= u  is  X <= n u + n - 1
            n = t.args[1]
            return self.clauses(t.args[0].le(n * u + n - 1))
        if t.op == "mul":
            s, inner = self._factor(t)
            return None if s is None or inner is None else self.clauses(inner.le(u // s))
        if t.op == "load" and self._ordered(t):  # T[x] <= u  is  x < the first position with T > u
            return [Clause(upper=frozenset((self._first(t, u + 1) - 1,)))]
        return None

    def _lower(self, t: Term, u: Term) -> list[Clause] | None:
        """t >= u."""
        if t.op == "var":
            return [Clause(lower=frozenset((u,)))]
        if t.op == "div" and self.x not in t.args[1].free:  # X // n >= u  is  X >= n u
            return self.clauses(t.args[0].ge(t.args[1] * u))
        if t.op == "mul":
            s, inner = self._factor(t)
            return None if s is None or inner is None else self.clauses(inner.ge(-((-u) // s)))
        if t.op == "load" and self._ordered(t):
            return [Clause(lower=frozenset((self._first(t, u),)))]
        return None

    def _factor(self, t: Term) -> tuple[Term, Term] | tuple[None, None]:
        for s, inner in (t.args, t.args[::-1]):
            low = numeric(s)[0]
            if not s.on and self.x in inner.free and low is not None and low >= 1:
                return s, inner
        return None, None

    def _ordered(self, t: Term) -> bool:
        """A sorted tensor over just the positions x, read at x itself, the other indices free of positions."""
        facts, last = t.home.facts, t.args[-1]
        if not self.search or t.val not in facts.sorted or facts.extents[t.val][-1] != LENGTHS[self.x]:
            return False
        return last.op == "var" and last.val == self.x and not any(a.on for a in t.args[:-1])

    def _first(self, t: Term, value: Term) -> Term:
        """The first x with T[.., x] >= value, the length where there is none."""
        return t.home.node("search", (*t.args[:-1], value), (t.val, self.x))


def _opened(t: Term, c: int, others: Term) -> Term:
    """others + c t <= 0 for a piecewise t, without it."""
    home = t.home
    if t.op == "where":
        g, a, b = t.args
        return (g & home.le0(others + c * a)) | (~g & home.le0(others + c * b))
    a, b = (t.args[0], -t.args[0]) if t.op == "abs" else t.args
    join = home.every if (c > 0) == (t.op != "min") else home.some  # c max(a, b) <= r: both for c > 0, either for c < 0
    return join((home.le0(others + c * a), home.le0(others + c * b)))


def _contradictory(c: Clause) -> bool:
    free = c.conditions | c.opaque
    ids = {e.id for e in free}
    if any((e.op == "bool" and not e.val) or (e.op in ATOMS and (~e).id in ids) for e in free):
        return True
    return any((numeric(low - high)[0] or 0) > 0 for low in c.lower for high in c.upper)


def _tidy(c: Clause) -> Clause:
    """Without bounds that others dominate."""

    def least_needed(group: Terms, sign: int) -> Terms:
        def beats(a: Term, b: Term) -> bool:
            gap = numeric(sign * (a - b))[0]
            return gap is not None and (gap > 0 or (gap == 0 and a.id < b.id))

        return frozenset(b for b in group if not any(a is not b and beats(a, b) for a in group))

    known = lambda e: e.op != "bool"
    return Clause(
        least_needed(c.lower, 1), least_needed(c.upper, -1),
        frozenset(filter(known, c.conditions)), frozenset(filter(known, c.opaque)),
    )  # fmt: skip


def simplify(clauses: Sequence[Clause]) -> list[Clause]:
    """Without contradictions, and without clauses inside others."""
    kept = [_tidy(c) for c in clauses if not _contradictory(c)]
    atoms = [c.atoms() for c in kept]
    return [
        c
        for i, c in enumerate(kept)
        if not any(atoms[j] < atoms[i] or (atoms[j] == atoms[i] and j < i) for j in range(len(kept)) if j != i)
    ]


def ordered(group: Terms) -> list[Term]:
    """The same order in every run."""
    return sorted(group, key=lambda e: e.id)


def _most(group: Terms) -> Term:
    first, *others = ordered(group)
    return first.home.most(first, *others)


def _least(group: Terms) -> Term:
    first, *others = ordered(group)
    return first.home.least(first, *others)


Merge = Callable[[Clause, Clause], "Clause | None"]


def merged(clauses: list[Clause], x: str) -> list[Clause]:
    """Fewer clauses with exactly the same union."""
    clauses = _merge_all(clauses, lambda a, b: _same_side(a, b, x))
    return _merge_all(clauses, lambda a, b: _guarded(a, b, x))


def _merge_all(clauses: list[Clause], merge: Merge) -> list[Clause]:
    clauses = list(clauses)
    while True:
        pairs = combinations(range(len(clauses)), 2)
        found = next(((i, j, m) for i, j in pairs if (m := merge(clauses[i], clauses[j])) is not None), None)
        if found is None:
            return clauses
        i, j, m = found
        clauses[i] = m
        del clauses[j]


def _select(g: Term, a: Clause, b: Clause, conditions: Terms, x: str) -> Clause:
    """a where g, else b, as one clause whose bounds are selects."""
    home = g.home
    last = home.var(LENGTHS[x]) - 1
    lower = home.where(g, _most(a.lower) if a.lower else 0, _most(b.lower) if b.lower else 0)
    upper = home.where(g, _least(a.upper) if a.upper else last, _least(b.upper) if b.upper else last)
    return Clause(frozenset((lower,)), frozenset((upper,)), conditions, a.opaque)


def _guarded(a: Clause, b: Clause, x: str) -> Clause | None:
    """One clause holds under one more condition g, and whenever g holds it covers the other."""
    if a.opaque != b.opaque:
        return None
    for wide, narrow in ((a, b), (b, a)):
        extra = wide.conditions - narrow.conditions
        covers = narrow.conditions <= wide.conditions and wide.lower <= narrow.lower and wide.upper <= narrow.upper
        if len(extra) == 1 and covers:
            return _select(next(iter(extra)), wide, narrow, narrow.conditions, x)
    return None


def _same_side(a: Clause, b: Clause, x: str) -> Clause | None:
    """The same upper bounds: the lesser lower bound; and so on. Complementary scalar conditions: a select."""
    if a.opaque != b.opaque:
        return None
    home = next((e.home for c in (a, b) for g in (c.lower, c.upper, c.conditions) for e in g), None)
    if a.conditions == b.conditions and home is not None:
        if a.lower == b.lower:
            upper = frozenset((home.most(_least(a.upper), _least(b.upper)),)) if a.upper and b.upper else NONE
            return Clause(a.lower, upper, a.conditions, a.opaque)
        if a.upper == b.upper:
            lower = frozenset((home.least(_most(a.lower), _most(b.lower)),)) if a.lower and b.lower else NONE
            return Clause(lower, a.upper, a.conditions, a.opaque)
        return None
    mine, others = a.conditions - b.conditions, b.conditions - a.conditions
    if len(mine) == 1 and len(others) == 1:
        (g,), (h,) = mine, others
        if g.op in ATOMS and not g.on and ~g is h:
            return _select(g, a, b, a.conditions & b.conditions, x)
    return None
