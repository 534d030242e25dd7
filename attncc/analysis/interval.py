"""What a tile knows of a term: its least and greatest value, and whether a boolean must or may hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product

from attncc.analysis.bounds import Range, numeric
from attncc.analysis.terms import ATOMS, Algebra, Term, rebuild, visit
from attncc.ir import tensors as _tensors

Pair = tuple[Term, Term]


class Unbounded(Exception):
    """Nothing is known of a term's range over a tile."""


@dataclass(frozen=True, eq=False)
class Table:
    """What a table node holds for each tile of `axis`: an extreme of `body` over its positions, or a scan of inner
    tiles."""

    kind: str  # min | max of an integer; first | stop | run of the inner tiles for which a boolean holds
    axis: str  # row | k, of the tiles that it has an entry for
    body: Term
    range: Range
    label: str  # what people call it


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
        if self._two_ends(e) and x in e.args[-1].free and not any(x in i.free for i in e.args[:-1]):
            return self._ends(e)
        if not self.use_tables:
            return self._unknown(e)
        return tuple(self.table(kind, x, e, numeric(e), self.tiles[x]) for kind in ("min", "max"))  # type: ignore[return-value]

    def table(self, kind: str, x: str, body: Term, known: Range, index: Term, label: str = "") -> Term:
        low, high = known
        if low is not None and low == high:
            return self.algebra.const(low)
        key = (kind, x, body.id)
        table = self.tables.setdefault(key, Table(kind, x, body, known, label + kind))
        free = (body.free - {x}) | index.free if kind in ("min", "max") else index.free
        return self.algebra.node("table", (index,), table, free)

    def _ends(self, e: Term) -> Pair:
        """A sorted tensor between two indices. Outside its axis a read gives 0, which order does not cover."""
        home = self.algebra
        low, high = self.extremes(e.args[-1])
        extent = home.facts.extents[e.val][-1]
        beyond = home.var(extent) if isinstance(extent, str) else home.const(extent)
        ends = (home.most(low, 0), home.least(high, beyond - 1))
        least, greatest = (home.node("load", (*e.args[:-1], i), e.val) for i in ends)
        inside = low.ge(0) & high.lt(beyond)
        return home.where(inside, least, home.least(least, 0)), home.where(inside, greatest, home.most(greatest, 0))

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
        for (l1, h1), (l2, h2) in (((a, b), (c, d)), ((c, d), (a, b))):
            if l1.ge(0) is self.algebra.true and (l1 is h1 or l2.ge(0) is self.algebra.true):
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
            join = home.every if e.op == "and" else home.some
            pairs = [self.holds(x) for x in e.args]
            return join(a for a, _ in pairs), join(b for _, b in pairs)
        if e.op == "ne0":
            must, may = self.holds(home.node("eq0", e.args))
            return ~may, ~must
        try:
            special = self._residue(e) or self._cells(e)
            if special is not None:
                return special
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

    def _cells(self, e: Term) -> Pair | None:
        """One read that moves with both positions, and nothing else does: a table of blocks. Where the tile covers few
        blocks they are all looked at."""
        home = self.algebra
        moving = [t for t in e.args[0].affine[0] if self.moves(t)]
        if len(moving) != 1 or moving[0].op != "load" or len(self.moves(moving[0])) < 2:
            return None
        if pair_by_pair(moving[0], frozenset(self.bounds)):
            return home.false, home.true
        t = moving[0]
        few, choices = [], []
        for i in t.args:
            low, high = self.extremes(i)
            count = 1 if low is high else _blocks(i)
            few.append((high - low).lt(count))
            choices.append([low, high] if count == 2 else [home.least(low + j, high) for j in range(count)])
        atoms = [
            rebuild(e, (e.args[0] + _factor(e, t) * (home.node("load", at, t.val) - t),)) for at in product(*choices)
        ]
        known = home.every(few)
        return known & home.every(atoms), ~known | home.some(atoms)


def pair_by_pair(e: Term, positions: frozenset[str]) -> bool:
    """Does each position read an element of its own, on some axis? Then no few elements say what a tile holds."""
    indices = [i for i in e.args if i.free & positions]
    return any(t.op == "var" and t.val in positions for i in indices for t in i.affine[0])


def _factor(e: Term, t: Term) -> int:
    return e.args[0].affine[0][t]


def _blocks(index: Term) -> int:
    """How many blocks of an axis are looked at: those of constant size that 128 positions hold, at most 4."""
    divisor = index.args[1] if index.op == "div" else None
    size = divisor.val if divisor is not None and divisor.op == "const" else 64
    return max(2, min(4, -(-128 // size)))


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
