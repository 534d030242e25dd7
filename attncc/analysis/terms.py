"""The form in which masks are solved: integers affine, booleans over `e <= 0`, `e == 0`, `e != 0`, no negation.

Every term belongs to one `Algebra`, which interns it: equal terms are the same object, so cancelling (`q - w <= k -
w`) and shared parts come for free. Division and modulo floor, and their divisors are at least 1 (the way in, lift.py,
sees to it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, Union

from attncc.analysis.bounds import Facts, numeric

POSITIONS = frozenset(("row", "k"))
ATOMS = ("le0", "eq0", "ne0")
Like = Union["Term", int]


@dataclass(frozen=True, eq=False)
class Term:
    """A node. `val` is what is not a term: a number, a name, the coefficients of a sum, a tensor, a raw expression.

    Integers: const var sum mul div mod abs min max where load raw table search. Booleans: bool le0 eq0 ne0 and or.
    """

    op: str
    args: tuple[Term, ...]
    val: Any
    free: frozenset[str]  # names of variables inside
    id: int
    home: Algebra

    def __add__(self, other: Like) -> Term:
        return self.home.total(((1, self), (1, other)))

    __radd__ = __add__

    def __sub__(self, other: Like) -> Term:
        return self.home.total(((1, self), (-1, other)))

    def __rsub__(self, other: Like) -> Term:
        return self.home.total(((-1, self), (1, other)))

    def __neg__(self) -> Term:
        return self.home.total(((-1, self),))

    def __mul__(self, other: Like) -> Term:
        return self.home.product(self, other)

    __rmul__ = __mul__

    def __floordiv__(self, other: Like) -> Term:
        return self.home.quotient(self, other)

    def __mod__(self, other: Like) -> Term:
        return self.home.remainder(self, other)

    def __and__(self, other: Term) -> Term:
        return self.home.every((self, other))

    def __or__(self, other: Term) -> Term:
        return self.home.some((self, other))

    def __invert__(self) -> Term:
        return self.home.negation(self)

    def le(self, other: Like) -> Term:
        return self.home.le0(self - other)

    def lt(self, other: Like) -> Term:
        return self.home.le0(self - other + 1)

    def ge(self, other: Like) -> Term:
        return self.home.le0(other - self)

    def eq(self, other: Like) -> Term:
        return self.home.eq0(self - other)

    @property
    def on(self) -> frozenset[str]:
        """The positions that the value moves with."""
        return self.free & POSITIONS

    @property
    def affine(self) -> tuple[dict[Term, int], int]:
        """({term: coefficient}, constant)."""
        if self.op == "const":
            return {}, self.val
        if self.op == "sum":
            return dict(zip(self.args, self.val[0])), self.val[1]
        return {self: 1}, 0


class Algebra:
    """Builders of terms under one set of facts."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.ranges: dict[int, tuple[int | None, int | None]] = {}
        self.order: dict[tuple[int, int, int], bool] = {}
        self._table: dict[tuple[Any, ...], Term] = {}
        self.true, self.false = self.node("bool", (), True), self.node("bool", (), False)

    def node(self, op: str, args: tuple[Term, ...] = (), val: Any = None, free: frozenset[str] | None = None) -> Term:
        key = (op, val, *(a.id for a in args))
        found = self._table.get(key)
        if found is None:
            if free is None:
                free = frozenset((val,)) if op == "var" else frozenset().union(*(a.free for a in args))
            found = self._table[key] = Term(op, args, val, free, len(self._table), self)
        return found

    def const(self, value: int) -> Term:
        return self.node("const", (), int(value))

    def var(self, name: str) -> Term:
        return self.node("var", (), name)

    def truth(self, value: bool) -> Term:
        return self.true if value else self.false

    def term(self, value: Like) -> Term:
        return value if isinstance(value, Term) else self.const(value)

    # -- integers

    def sum_of(self, parts: Mapping[Term, int], constant: int) -> Term:
        """The affine form with these coefficients; x - x % n in it is n * (x // n), which never falls where x grows."""
        for t, factor in parts.items():
            if t.op == "mod" and factor:
                inner, c = t.args[0].affine
                if inner and all(parts.get(u) == -factor * v for u, v in inner.items()):
                    rest = {u: v for u, v in parts.items() if u is not t and u not in inner}
                    whole = self.product(t.args[1], self.quotient(*t.args))
                    return self.total(((1, self.sum_of(rest, constant + factor * c)), (-factor, whole)))
        items = sorted(((t, c) for t, c in parts.items() if c), key=lambda p: p[0].id)
        if not items:
            return self.const(constant)
        if len(items) == 1 and items[0][1] == 1 and constant == 0:
            return items[0][0]
        return self.node("sum", tuple(t for t, _ in items), (tuple(c for _, c in items), constant))

    def total(self, pairs: Iterable[tuple[int, Like]], constant: int = 0) -> Term:
        """The sum of coefficient times term."""
        parts: dict[Term, int] = {}
        for factor, e in pairs:
            inner, c = self.term(e).affine
            constant += factor * c
            for t, v in inner.items():
                parts[t] = parts.get(t, 0) + factor * v
        return self.sum_of(parts, constant)

    def product(self, a: Term, b: Like) -> Term:
        b = self.term(b)
        for x, y in ((a, b), (b, a)):
            if x.op == "const":
                return self.total(((x.val, y),))
        for x, y in ((a, b), (b, a)):
            if y.op == "sum" and not x.on:  # a scalar is spread over a sum
                return self.total(((c, self.product(x, t)) for t, c in y.affine[0].items())) + self.product(x, y.val[1])
        return self.node("mul", (a, b) if a.id <= b.id else (b, a))

    def quotient(self, a: Like, b: Like) -> Term:
        """floor(a / b), b at least 1."""
        a, b = self.term(a), self.term(b)
        if b.op == "const":
            return self._quotient_by(a, b.val)
        parts, c = a.affine
        if b.op == "var":  # (b x + y) // b = x + y // b
            for t, factor in parts.items():
                if t is b or (t.op == "mul" and b in t.args):
                    other = self.const(1) if t is b else t.args[0] if t.args[1] is b else t.args[1]
                    rest = self.sum_of({k: v for k, v in parts.items() if k is not t}, c)
                    return factor * other + self.quotient(rest, b)
        if self._inside(a, b):
            return self.const(0)
        return self.node("div", (a, b))

    def _quotient_by(self, a: Term, n: int) -> Term:
        if n == 1:
            return a
        if a.op == "const":
            return self.const(a.val // n)
        parts, c = a.affine
        outer = {t: v // n for t, v in parts.items() if v % n == 0}
        inner = self.sum_of({t: v for t, v in parts.items() if v % n}, c % n)
        if outer or c // n:
            return self.sum_of(outer, c // n) + self._quotient_by(inner, n)
        if a.op == "div" and a.args[1].op == "const":
            return self._quotient_by(a.args[0], a.args[1].val * n)
        if self._inside(a, self.const(n)):
            return self.const(0)
        return self.node("div", (a, self.const(n)))

    def ceiling(self, a: Term, b: Term) -> Term:
        """ceil(a / b), written (a + b - 1) // b so that the numerator stays out of the negative."""
        return a if a.op == "const" and a.val == 0 else self.node("div", (a + b - 1, b))

    def remainder(self, a: Term, b: Like) -> Term:
        b = self.term(b)
        if b.op == "const":
            n = b.val
            if n == 1:
                return self.const(0)
            parts, c = a.affine
            a = self.sum_of({t: v % n if abs(v) >= n else v for t, v in parts.items()}, c % n if abs(c) >= n else c)
            if a.op == "const":
                return self.const(a.val % n)
        return a if self._inside(a, b) else self.node("mod", (a, b))

    def _inside(self, a: Term, b: Term) -> bool:
        """Is 0 <= a < b sure?"""
        low, high = numeric(a)
        if low is None or low < 0:
            return False
        gap = numeric(b - a)[0]
        return (high is not None and high < (numeric(b)[0] or 0)) or (gap is not None and gap > 0)

    def absolute(self, a: Term) -> Term:
        if a.op == "const":
            return self.const(abs(a.val))
        low, high = numeric(a)
        if low is not None and low >= 0:
            return a
        if high is not None and high <= 0:
            return -a
        parts = a.affine[0]
        first = min(parts, key=lambda t: t.id)
        return self.node("abs", (a if parts[first] > 0 else -a,))

    def least(self, *terms: Like) -> Term:
        return self._extreme("min", terms)

    def most(self, *terms: Like) -> Term:
        return self._extreme("max", terms)

    def _extreme(self, op: str, terms: tuple[Like, ...]) -> Term:
        whole = self.term(terms[0])
        for e in terms[1:]:
            whole = self._extreme2(op, whole, self.term(e))
        return whole

    def _extreme2(self, op: str, a: Term, b: Term) -> Term:
        if sure_le(a, b):
            return a if op == "min" else b
        if sure_le(b, a):
            return b if op == "min" else a
        return self.node(op, (a, b) if a.id <= b.id else (b, a))

    def shifted(self, e: Term, c: int) -> Term:
        """e + c with the constant put inside: min(a, b) + 1 is min(a + 1, b + 1), where the constants may cancel."""
        if e.op in ("min", "max"):
            return self._extreme(e.op, tuple(self.shifted(a, c) for a in e.args))
        if e.op == "where":
            return self.where(e.args[0], self.shifted(e.args[1], c), self.shifted(e.args[2], c))
        return e + c

    def where(self, c: Term, a: Like, b: Like) -> Term:
        a, b = self.term(a), self.term(b)
        if c is self.true or a is b:
            return a
        if c is self.false:
            return b
        if is_bool(a):
            return (c & a) | (~c & b)
        return self.node("where", (c, a, b))

    # -- booleans

    def le0(self, e: Like) -> Term:
        e = self.term(e)
        low, high = numeric(e)
        if high is not None and high <= 0:
            return self.true
        if low is not None and low > 0:
            return self.false
        parts, c = e.affine
        g = gcd(*parts.values())
        if g > 1:
            e = self.sum_of({t: v // g for t, v in parts.items()}, -((-c) // g))
        return self.node("le0", (e,))

    def eq0(self, e: Like) -> Term:
        e = self.term(e)
        low, high = numeric(e)
        if (high is not None and high < 0) or (low is not None and low > 0):
            return self.false
        if low == 0 and high == 0:
            return self.true
        parts, c = e.affine
        g = gcd(*parts.values())
        if c % g:
            return self.false
        if parts[min(parts, key=lambda t: t.id)] < 0:
            g = -g
        return self.node("eq0", (self.sum_of({t: v // g for t, v in parts.items()}, c // g),))

    def ne0(self, e: Like) -> Term:
        same = self.eq0(e)
        return self.truth(not same.val) if same.op == "bool" else self.node("ne0", same.args)

    def negation(self, a: Term) -> Term:
        if a.op == "bool":
            return self.truth(not a.val)
        if a.op == "le0":
            return self.le0(1 - a.args[0])
        if a.op in ("eq0", "ne0"):
            return self.node("ne0" if a.op == "eq0" else "eq0", a.args)
        return (self.some if a.op == "and" else self.every)(tuple(self.negation(x) for x in a.args))

    def every(self, parts: Iterable[Term]) -> Term:
        return self._joined("and", parts, self.true, self.false)

    def some(self, parts: Iterable[Term]) -> Term:
        return self._joined("or", parts, self.false, self.true)

    def _joined(self, op: str, parts: Iterable[Term], unit: Term, zero: Term) -> Term:
        kept: dict[int, Term] = {}
        for x in parts:
            for y in x.args if x.op == op else (x,):
                if y is zero:
                    return zero
                if y is not unit:
                    kept[y.id] = y
        for y in list(kept.values()):
            if y.op in ATOMS and self.negation(y).id in kept:
                return zero
        ordered = tuple(kept[i] for i in sorted(kept))
        if not ordered:
            return unit
        return ordered[0] if len(ordered) == 1 else self.node(op, ordered)


def is_bool(e: Term) -> bool:
    return e.op in ("bool", "le0", "eq0", "ne0", "and", "or")


def sure_le(a: Term, b: Term, depth: int = 3) -> bool:
    """Is a <= b for everything that the facts allow? False means unknown."""
    if a is b:
        return True
    key = (a.id, b.id, depth)
    known = a.home.order.get(key)
    if known is None:
        known = a.home.order[key] = _sure_le(a, b, depth)
    return known


def _sure_le(a: Term, b: Term, depth: int) -> bool:
    gap = numeric(b - a)[0]
    if gap is not None:
        return gap >= 0
    if not depth:
        return False
    if a.op in ("min", "max") and (any if a.op == "min" else all)(sure_le(x, b, depth - 1) for x in a.args):
        return True
    if b.op in ("min", "max") and (any if b.op == "max" else all)(sure_le(a, y, depth - 1) for y in b.args):
        return True
    if a.op == b.op == "div" and a.args[1] is b.args[1]:
        return sure_le(a.args[0], b.args[0], depth - 1)
    parts, c = (b - a).affine  # x + y <= x + z
    if len(parts) != 2 or c < 0 or set(parts.values()) != {1, -1}:
        return False
    small, large = sorted(parts, key=lambda t: parts[t])
    return (small, large) != (a, b) and sure_le(small, large, depth - 1)


def visit(*roots: Term) -> Iterator[Term]:
    """Every distinct term, parts before wholes."""
    seen: set[int] = set()
    stack = [(r, False) for r in reversed(roots)]
    while stack:
        e, ready = stack.pop()
        if ready:
            yield e
        elif e.id not in seen:
            seen.add(e.id)
            stack.append((e, True))
            stack += [(a, False) for a in reversed(e.args)]


def rebuild(e: Term, args: tuple[Term, ...]) -> Term:
    """The same operator on other arguments, simplified anew."""
    home = e.home
    if e.op == "sum":
        return home.total(zip(e.val[0], args), e.val[1])
    if e.op in ("and", "or"):
        return (home.every if e.op == "and" else home.some)(args)
    makers: dict[str, Callable[..., Term]] = {
        "mul": home.product, "div": home.quotient, "mod": home.remainder, "abs": home.absolute, "min": home.least,
        "max": home.most, "where": home.where, "le0": home.le0, "eq0": home.eq0, "ne0": home.ne0,
    }  # fmt: skip
    if e.op in makers:
        return makers[e.op](*args)
    return home.node(e.op, args, e.val) if args else e
