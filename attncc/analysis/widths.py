"""How wide the integers of a kernel have to be: ranges of every intermediate value, as the kernel computes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from attncc.analysis.divisors import divisors, expressions
from attncc.analysis.lift import ELEMENT_RANGES, Lift, spec_facts, taken
from attncc.analysis.literals import literals, settled
from attncc.analysis.solve import visits
from attncc.analysis.terms import Algebra
from attncc.ir import LEAST_INT, MOST_INT, AttentionSpec, Const, Expr, Op, Read, Var, Visits, names, tile_names

NARROW, WIDE = (-(2**31), 2**31 - 1), (LEAST_INT, MOST_INT)
ROUNDED = 2.0**-21  # of a float32: more than three roundings make of it
PADDING = 1024  # how far the last tile may reach behind the end
Pair = tuple[float, float]  # of ints exact, since Python's ints stay ints

ELEMENTS: dict[str, Pair] = {
    **{n: (low, high) for n, (low, high) in ELEMENT_RANGES.items() if low is not None and high is not None},
    "i32": NARROW, "i64": WIDE,
}  # fmt: skip


@dataclass(frozen=True)
class Widths:
    """When 32-bit integers are exact.

    `limit`: the largest power of two L such that every integer of mask, score and visits stays inside 32 bits where
    all lengths (batch, heads and free axes too) and the magnitudes of all int parameters are at most L; 0 where there
    is none (an i32 element in a sum, say). `clamped`: int parameters that may be clamped to ±(q_len + k_len) on the
    host without a change of meaning.
    """

    limit: int
    clamped: frozenset[str]
    spec: AttentionSpec
    plans: tuple[Visits, ...]

    def fits(self, longest: int, values: Mapping[str, int]) -> bool:
        """Are 32-bit integers exact for lengths of at most `longest` and these int parameters (clamped before)?"""
        return _narrow(self.spec, self.plans, longest, {name: (value, value) for name, value in values.items()})


def widths(spec: AttentionSpec, plans: Iterable[Visits] | None = None) -> Widths:
    """What must hold for 32-bit arithmetic of mask, score and visits (`plans`; left out, those of the forward pass)."""
    found = tuple(plans) if plans is not None else (visits(spec, "q", tables=True),)
    low, high = -1, 30  # powers: `low` is safe, `high` + 1 is not tried
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _narrow(spec, found, 2**middle, {}) else (low, middle - 1)
    return Widths(2**low if low >= 0 else 0, clamped(spec), spec, found)


class _Overflow(Exception):
    pass


def _narrow(spec: AttentionSpec, plans: Iterable[Visits], longest: int, values: Mapping[str, Pair]) -> bool:
    try:
        for e in expressions(spec):
            _Ranges(spec, longest, values)(e)
        for v in plans:
            ranges = _Ranges(spec, longest, values)
            for s in v.summaries:
                ranges.elements[s.name] = _entry(ranges(s.value))
            for name, value in v.lets:
                ranges.names[name] = ranges(value)
            ends = [e for s in (*v.masked, *v.full) for e in (s.begin, s.end)]
            for e in (*ends, *(t for t in (v.may, v.must, v.plain_end) if t is not None)):
                ranges(e)
    except _Overflow:
        return False
    return True


def _entry(value: Pair) -> Pair:
    """What a table of the 32-bit kernel holds: i64 elements do not fit it, although they make arithmetic wide."""
    if not NARROW[0] <= value[0] <= value[1] <= NARROW[1]:
        raise _Overflow
    return value


class _Ranges:
    """Ranges of expressions by plain interval arithmetic, node by node. Raises _Overflow where 32 bits do not do."""

    def __init__(self, spec: AttentionSpec, longest: int, values: Mapping[str, Pair]) -> None:
        n, padded, checked = longest, longest + PADDING, divisors(spec)
        self.names: dict[str, Pair] = {
            **dict.fromkeys(("b", "h", "h_kv"), (0, n)), **dict.fromkeys(("b_len", "h_len", "q_len", "k_len"), (1, n)),
            **dict.fromkeys(("row", "k"), (0, padded)), "q": (-n, padded + n), **dict.fromkeys(spec.free_axes, (0, n)),
            **{p.name: (1 if p.name in checked else -n, n) for p in spec.scalars if p.type == "int"}, **values,
        }  # fmt: skip
        tiles = {"TILE_Q": (16, PADDING), "TILE_K": (16, PADDING), "tile": (0, padded), "inner_tile": (0, padded)}
        self.names |= {name: tiles.get(inner, (0, padded)) for inner, name in tile_names(taken(spec)).items()}
        self.elements = {p.name: ELEMENTS[p.element] for p in spec.tensors if p.element in ELEMENTS}
        self._wide = frozenset(p.name for p in spec.tensors if p.element == "i64")
        self._memo: dict[int, Pair] = {}

    def __call__(self, e: Expr) -> Pair:
        if isinstance(e, Const):
            value = (e.value, e.value)
            return self._checked(e, value) if e.type == "int" else value
        if isinstance(e, Var):
            return self.names.get(e.name, (-math.inf, math.inf))
        known = self._memo.get(id(e))
        if known is None:
            known = self._memo[id(e)] = self._node(e)
        return known

    def _node(self, e: Read | Op) -> Pair:
        if isinstance(e, Read):
            for i in e.indices:
                self(i)
            return self.elements.get(e.tensor, (-math.inf, math.inf))
        if e.op == "search":
            self(e.args[1])
            return 0, self.names["k_len"][1] + self.names["q_len"][1]
        inner = [self(a) for a in e.args]
        if e.type == "bool":
            return 0, 1
        rule = RULES.get(e.op)
        result = self._product(e, inner) if e.op == "*" else rule(inner) if rule else (-math.inf, math.inf)
        return self._checked(e, result) if e.type == "int" else result

    def _checked(self, e: Expr, result: Pair) -> Pair:
        if self._is_wide(e):  # as wide as integers get
            return max(result[0], WIDE[0]), min(result[1], WIDE[1])
        if not NARROW[0] <= result[0] <= result[1] <= NARROW[1]:
            raise _Overflow
        return result

    def _is_wide(self, e: Expr) -> bool:
        """Does an i64 element make the arithmetic 64 bits wide by itself?"""
        if isinstance(e, Read):
            return e.tensor in self._wide
        return isinstance(e, Op) and e.op in ("+", "-", "*", "//", "%", "neg", "abs", "min", "max", "where") and any(
            self._is_wide(a) for a in e.args
        )  # fmt: skip

    def _product(self, e: Op, inner: list[Pair]) -> Pair:
        for n, other in (e.args, e.args[::-1]):  # n (X // n) lies in (X - n, X]
            if isinstance(other, Op) and other.op == "//" and other.args[1] == n and self(n)[0] >= 1:
                low, high = self(other.args[0])
                return min(low - self(n)[1] + 1, 0), max(high, 0)
        return _corners(inner, lambda x, y: x * y)


def _corners(r: list[Pair], f: Callable[[float, float], float]) -> Pair:
    values = [0 if 0 in (x, y) else f(x, y) for x in r[0] for y in r[1]]
    return min(values), max(values)


def _abs(r: list[Pair]) -> Pair:
    a, b = r[0]
    return (0 if a <= 0 <= b else min(abs(a), abs(b))), max(abs(a), abs(b))


def _quotient(r: list[Pair]) -> Pair:
    """In float32, which rounds both and their quotient; anything where the divisor may be 0."""
    (low, high), (least, most) = r
    if least <= 0 <= most or not all(map(math.isfinite, (low, high))):
        return -math.inf, math.inf
    ends = [x / y for x in (low, high) for y in (least, most)]
    return min(e - ROUNDED * abs(e) for e in ends), max(e + ROUNDED * abs(e) for e in ends)


def _floor(r: list[Pair]) -> Pair:
    return tuple(math.floor(x) if math.isfinite(x) else x for x in r[0])  # type: ignore[return-value]


def _sqrt(r: list[Pair]) -> Pair:
    return 0.0, math.sqrt(max(r[0][1], 0)) + 1


RULES: dict[str, Callable[[list[Any]], Pair]] = {
    "+": lambda r: (r[0][0] + r[1][0], r[0][1] + r[1][1]),
    "-": lambda r: (r[0][0] - r[1][1], r[0][1] - r[1][0]),
    "neg": lambda r: (-r[0][1], -r[0][0]),
    "//": lambda r: (min(r[0][0], 0), max(r[0][1], 0)),
    "/": _quotient,
    "%": lambda r: (0, max(r[1][1] - 1, 0)),
    "abs": _abs,
    "min": lambda r: (min(r[0][0], r[1][0]), min(r[0][1], r[1][1])),
    "max": lambda r: (max(r[0][0], r[1][0]), max(r[0][1], r[1][1])),
    "where": lambda r: (min(r[1][0], r[2][0]), max(r[1][1], r[2][1])),
    "float": lambda r: r[0],
    "floor": _floor,
    "sqrt": _sqrt,
    "log": lambda r: (-math.inf if r[0][0] < 1 else 0.0, 90.0),  # of a float32
    "log2": lambda r: (-math.inf if r[0][0] < 1 else 0.0, 129.0),
    "tanh": lambda r: (-1.0, 1.0),
    "sigmoid": lambda r: (0.0, 1.0),
}


def clamped(spec: AttentionSpec) -> frozenset[str]:
    """Int parameters that only ever stand alone against positions: beyond -(q_len + k_len) and q_len + k_len nothing
    changes. One that stands anywhere else (inside a product, an index, a score) is left out.
    """
    elsewhere = {n for e in expressions(spec) if e not in spec.masks for n in names(e)}
    algebra = Algebra(spec_facts(spec))
    found = literals(Lift(spec, algebra).mask(), "k")
    safe = set()
    for p in spec.scalars:
        uses = [e for e in found if p.name in e.free]
        if p.type == "int" and uses and p.name not in elsewhere and all(settled(e, algebra.var(p.name)) for e in uses):
            safe.add(p.name)
    return frozenset(safe)
