"""What a tile knows of a term: its least and greatest value, and for a boolean whether it must or may hold somewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from attncc.analysis.bounds import Range, numeric
from attncc.analysis.terms import ATOMS, Algebra, Term, visit
from attncc.ir import tensors as _tensors

Pair = tuple[Term, Term]


class Unbounded(Exception):
    """Nothing is known of a term's range over a tile."""


@dataclass(frozen=True, eq=False)
class Table:
    """What a table node holds: the least or greatest `body` over the positions of one tile of `axis`, or a scan of tiles."""

    kind: str  # min | max | first | last | run_first | run_last
    axis: str  # row | k
    body: Term
    range: Range


@dataclass(frozen=True)
class Domain:
    """Positions with inclusive bounds, and the number of the tile that they make up (for tables; None: no tables)."""

    algebra: Algebra
    bounds: Mapping[str, Pair]
    tiles: Mapping[str, Term]
    tables: dict[tuple[str, str, int], Table]  # shared by all domains of one plan
    use_tables: bool
    memo: dict[tuple[str, int], Pair] = field(default_factory=dict)

    def narrow(self, x: str, low: Term, high: Term) -> Domain:
        return Domain(self.algebra, {**self.bounds, x: (low, high)}, self.tiles, self.tables, self.use_tables)

    def moves(self, e: Term) -> frozenset[str]:
        return e.free & self.bounds.keys()

    def extremes(self, e: Term) -> Pair:
        """(least, greatest) of an integer term, free of positions. Raises Unbounded."""
        if not self.moves(e):
            return e, e
        known = self.memo.get(("i", e.id))
        if known is None:
            known = self.memo["i", e.id] = self._extremes(e)
        return known

    def _extremes(self, e: Term) -> Pair:
        xs = self.moves(e)
        if len(xs) == 1 and e.op != "sum" and reads(e, xs):
            return self._tabled(e, next(iter(xs)))
        rule = {
            "var": self._var, "sum": self._sum, "mul": self._mul, "div": self._div, "mod": self._mod, "abs": self._abs,
            "min": self._min, "max": self._min, "where": self._where,
        }.get(e.op, self._unknown)  # fmt: skip
        return rule(e)

    def _var(self, e: Term) -> Pair:
        return self.bounds[e.val]

    def _unknown(self, e: Term) -> Pair:
        low, high = numeric(e)
        if low is None or high is None:
            raise Unbounded
        return self.algebra.const(low), self.algebra.const(high)

    def _tabled(self, e: Term, x: str) -> Pair:
        """One position, with reads: the two ends of sorted tensors, else tables."""
        a = self.algebra
        if e.op == "load" and e.val in a.facts.sorted and e.args[-1].free & {x}:
            if not any(x in i.free for i in e.args[:-1]):
                return self._ends(e)
        if not self.use_tables:
            return self._unknown(e)
        return tuple(self.table(kind, x, e, numeric(e), self.tiles[x]) for kind in ("min", "max"))  # type: ignore[return-value]

    def table(self, kind: str, x: str, body: Term, known: Range, index: Term) -> Term:
        low, high = known
        if low is not None and low == high:
            return self.algebra.const(low)
        key = (kind, x, body.id)
        table = self.tables.setdefault(key, Table(kind, x, body, known))
        free = (body.free - {x}) | index.free if kind in ("min", "max") else index.free
        return self.algebra.node("table", (index,), table, free)

    def _ends(self, e: Term) -> Pair:
        """A sorted tensor between two indices. Outside the axis a read gives 0, which order does not cover."""
        a = self.algebra
        low, high = self.extremes(e.args[-1])
        at = lambda i: a.node("load", (*e.args[:-1], i), e.val)
        inside = low is not None and (numeric(low)[0] or -1) >= 0 and self._on_axis(high)
        if inside or (numeric(low)[0] == 0 and self._on_axis(high)):
            return at(low), at(high)
        if self._on_axis(high):  # some first indices may be negative: their reads give 0
            return a.least(at(low), at(a.most(low, 0))), a.most(at(low), at(high))
        return self._unknown(e)

    def _on_axis(self, high: Term) -> bool:
        """Is the index sure to stay below the length of the key axis (tables over positions are [k])?"""
        top = numeric(high - self.algebra.var("k_len"))[1]
        return top is not None and top < 0

    def _sum(self, e: Term) -> Pair:
        """Terms of one position that read tensors share one table, and take the plain terms of that position in."""
        a = self.algebra
        groups: dict[str, list[tuple[int, Term]]] = {}
        rest: list[tuple[int, Term]] = []
        for c, t in zip(e.val[0], e.args):
            xs = self.moves(t)
            if len(xs) == 1 and reads(t, xs) and self.use_tables and not self._two_ends(t):
                groups.setdefault(next(iter(xs)), []).append((c, t))
            else:
                rest.append((c, t))
        lows, highs = [], []
        for x, group in groups.items():
            same = [(c, t) for c, t in rest if self.moves(t) == {x}]
            rest = [p for p in rest if p not in same]
            both = group + same
            rest.append(both[0] if len(both) == 1 else (1, a.total(both)))
        for c, t in rest:
            low, high = self._tabled(t, next(iter(self.moves(t)))) if t.op == "sum" else self.extremes(t)
            lows.append((c, low if c > 0 else high))
            highs.append((c, high if c > 0 else low))
        return a.total(lows, e.val[1]), a.total(highs, e.val[1])

    def _two_ends(self, t: Term) -> bool:
        return t.op == "load" and t.val in self.algebra.facts.sorted

    def _mul(self, e: Term) -> Pair:
        x, y = e.args
        (a, b), (c, d) = self.extremes(x), self.extremes(y)
        sure = lambda t: (numeric(t)[0] or -1) >= 0 or numeric(t)[0] == 0
        for (l1, h1), (l2, h2) in (((a, b), (c, d)), ((c, d), (a, b))):
            if sure(l1) and (l1 is h1 or sure(l2)):
                return l1 * l2, h1 * h2
        corners = (a * c, a * d, b * c, b * d)
        return self.algebra.least(*corners), self.algebra.most(*corners)

    def _div(self, e: Term) -> Pair:
        (a, b), (c, d) = self.extremes(e.args[0]), self.extremes(e.args[1])
        if c is d:
            return a // c, b // c
        if (numeric(c)[0] or 0) < 1:
            return self._unknown(e)
        corners = (a // c, a // d, b // c, b // d)
        return self.algebra.least(*corners), self.algebra.most(*corners)

    def _mod(self, e: Term) -> Pair:
        home = self.algebra
        (a, b), (c, d) = self.extremes(e.args[0]), self.extremes(e.args[1])
        if c is not d:
            return home.const(0), d - 1
        same = (a // c).eq(b // c)
        return home.where(same, a % c, 0), home.where(same, b % c, c - 1)

    def _abs(self, e: Term) -> Pair:
        a, b = self.extremes(e.args[0])
        return self.algebra.most(0, a, -b), self.algebra.most(-a, b)

    def _min(self, e: Term) -> Pair:
        join = self.algebra.least if e.op == "min" else self.algebra.most
        (a, b), (c, d) = self.extremes(e.args[0]), self.extremes(e.args[1])
        return join(a, c), join(b, d)

    def _where(self, e: Term) -> Pair:
        home = self.algebra
        must, may = self.holds(e.args[0])
        (a, b), (c, d) = self.extremes(e.args[1]), self.extremes(e.args[2])
        low = home.where(must, a, home.where(may, home.least(a, c), c))
        return low, home.where(must, b, home.where(may, home.most(b, d), d))

    def holds(self, e: Term) -> Pair:
        """(must, may) of a boolean: true on every pair of the tile; true on some pair, or unknown."""
        if e.op == "bool" or not self.moves(e):
            return e, e
        known = self.memo.get(("b", e.id))
        if known is None:
            known = self.memo["b", e.id] = self._holds(e)
        return known

    def _holds(self, e: Term) -> Pair:
        home = self.algebra
        if e.op in ("and", "or"):
            join = home.all if e.op == "and" else home.any
            pairs = [self.holds(x) for x in e.args]
            return join(a for a, _ in pairs), join(b for _, b in pairs)
        if e.op == "ne0":
            must, may = self.holds(home.node("eq0", e.args))
            return ~may, ~must
        try:
            circle = self._residue(e)
            if circle is not None:
                return circle
            low, high = self.extremes(e.args[0])
        except Unbounded:
            return home.false, home.true
        if e.op == "le0":
            return home.le0(high), home.le0(low)
        return home.le0(high) & home.le0(-low), home.le0(low) & home.le0(-high)

    def _residue(self, e: Term) -> Pair | None:
        """X % n against one bound that is the same for all pairs: exact on the circle.

        Some X in [lo, hi] has r1 <= X % n <= r2 exactly where floor((hi - r1) / n) >= ceil((lo - r2) / n).
        """
        split = residue(e, lambda t: bool(self.moves(t)))
        if split is None:
            return None
        inner, n, r1, r2 = split
        valid = r1.le(r2) & r1.ge(0) & r2.lt(n)
        low, high = self.extremes(inner)
        may = ((high - r1) // n).ge(-((r2 - low) // n))
        must = (high - r2).le(n * ((low - r1) // n))
        return valid & must, valid & may


def residue(e: Term, moves: Callable[[Term], bool]) -> tuple[Term, Term, Term, Term] | None:
    """(X, n, r1, r2) where the atom says r1 <= X % n <= r2, n and both bounds not moving; for `!= r` see the caller."""
    if e.op not in ATOMS or e.op == "ne0":
        return None
    home = e.home
    parts, c0 = e.args[0].affine
    found = [(t, c) for t, c in parts.items() if t.op == "mod" and moves(t)]
    if len(found) != 1 or abs(found[0][1]) != 1:
        return None
    t, c = found[0]
    rest = home.sum_of({k: v for k, v in parts.items() if k is not t}, c0)
    inner, n = t.args
    if moves(rest) or moves(n):
        return None
    s = -rest if c > 0 else rest
    if e.op == "eq0":
        return inner, n, s, s
    return (inner, n, home.const(0), home.least(s, n - 1)) if c > 0 else (inner, n, home.most(s, 0), n - 1)


def reads(e: Term, over: frozenset[str]) -> bool:
    """Does e read a tensor, or something raw that reads one, at an index that moves with a position in `over`?"""
    for n in visit(e):
        if n.op in ("load", "search") and n.free & over:
            return True
        if n.op == "raw" and n.free & over and _tensors(n.val):
            return True
    return False
