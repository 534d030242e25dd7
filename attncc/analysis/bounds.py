"""Numeric ranges of terms: what is sure for every value that the facts allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attncc.analysis.terms import Algebra, Term

Range = tuple["int | None", "int | None"]  # inclusive; None is unbounded
ANY: Range = (None, None)


@dataclass(frozen=True)
class Facts:
    """What is known of the names.

    `ranges` gives numbers, inclusive. `above` names, for a variable, an affine upper bound ({name: coefficient},
    constant) that holds in every call, `below` a lower one: `k <= k_len - 1`, `first <= last`. `tensors` gives the
    range of elements.
    """

    ranges: Mapping[str, Range] = field(default_factory=dict)
    above: Mapping[str, tuple[Mapping[str, int], int]] = field(default_factory=dict)
    below: Mapping[str, tuple[Mapping[str, int], int]] = field(default_factory=dict)
    tensors: Mapping[str, Range] = field(default_factory=dict)
    sorted: frozenset[str] = frozenset()
    extents: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)  # of a tensor's axes: names or numbers


def numeric(e: Term) -> Range:
    """The range of an integer term."""
    known = e.home.ranges.get(e.id)
    if known is None:
        known = e.home.ranges[e.id] = _RULES[e.op](e)
    return known


def _const(e: Term) -> Range:
    return e.val, e.val


def _var(e: Term) -> Range:
    low, high = e.home.facts.ranges.get(e.val, ANY)
    return low, high


def _sum(e: Term) -> Range:
    parts, c = e.affine
    return _reach(parts, c, -1, e.home), _reach(parts, c, 1, e.home)


def _reach(parts: dict[Term, int], c: int, side: int, home: Algebra) -> int | None:
    """The bound of a sum on one side: of its terms one by one, or a variable is replaced by its own affine bound."""
    total: int | None = c
    for t, v in parts.items():
        ends = numeric(t)
        end = ends[1] if v * side > 0 else ends[0]
        if end is None:
            total = None
            break
        total = total + v * end if total is not None else None
    if total is not None:
        return total
    for t, v in parts.items():
        bound = (home.facts.above if v * side > 0 else home.facts.below).get(t.val) if t.op == "var" else None
        if bound is None:
            continue
        other = {k: x for k, x in parts.items() if k is not t}
        for name, factor in bound[0].items():
            k = home.var(name)
            other[k] = other.get(k, 0) + v * factor
        found = _reach({k: x for k, x in other.items() if x}, c + v * bound[1], side, home)
        if found is not None:
            return found
    return None


def _mul(e: Term) -> Range:
    for n, dv in (e.args, e.args[::-1]):  # n (X // n) lies in [X - n + 1, X]
        if dv.op == "div" and dv.args[1] is n:
            (low, high), widest = numeric(dv.args[0]), numeric(n)[1]
            if low is not None and low >= 0:
                return 0, high
            return None if low is None or widest is None else low - widest + 1, high
    (a, b), (c, d) = numeric(e.args[0]), numeric(e.args[1])
    if a is not None and c is not None and a >= 0 and c >= 0:
        return a * c, _times(b, d)
    if a is None or b is None or c is None or d is None:
        return ANY
    corners = (a * c, a * d, b * c, b * d)
    if e.args[0] is e.args[1]:
        return 0 if a <= 0 <= b else min(corners), max(corners)
    return min(corners), max(corners)


def _times(x: int | None, y: int | None) -> int | None:
    if x is None or y is None:
        return 0 if x == 0 or y == 0 else None
    return x * y


def _div(e: Term) -> Range:
    (a, b), (c, d) = numeric(e.args[0]), numeric(e.args[1])
    if c is None or c < 1:
        return ANY
    low = None if a is None else a // c if a < 0 else a // d if d is not None else 0
    high = None if b is None else b // c if b >= 0 else b // d if d is not None else -1
    return low, high


def _mod(e: Term) -> Range:
    (a, b), (c, d) = numeric(e.args[0]), numeric(e.args[1])
    if c is None or c < 1:
        return ANY
    top = None if d is None else d - 1
    if a is not None and a >= 0:
        high = b if top is None else top if b is None else min(b, top)
        return (a if b is not None and b < c else 0), high
    return 0, top


def _abs(e: Term) -> Range:
    a, b = numeric(e.args[0])
    return 0, None if a is None or b is None else max(-a, b)


def _min(e: Term) -> Range:
    (a, b), (c, d) = numeric(e.args[0]), numeric(e.args[1])
    return None if a is None or c is None else min(a, c), d if b is None else b if d is None else min(b, d)


def _max(e: Term) -> Range:
    (a, b), (c, d) = numeric(e.args[0]), numeric(e.args[1])
    return c if a is None else a if c is None else max(a, c), None if b is None or d is None else max(b, d)


def _where(e: Term) -> Range:
    (a, b), (c, d) = numeric(e.args[1]), numeric(e.args[2])
    return None if a is None or c is None else min(a, c), None if b is None or d is None else max(b, d)


def _load(e: Term) -> Range:
    return e.home.facts.tensors.get(e.val, ANY)


def _raw(e: Term) -> Range:
    return (0, 1) if e.val.type == "bool" else ANY


def _table(e: Term) -> Range:
    return e.val.range  # type: ignore[no-any-return]


def _search(e: Term) -> Range:
    return 0, None


_RULES = {
    "const": _const, "var": _var, "sum": _sum, "mul": _mul, "div": _div, "mod": _mod, "abs": _abs, "min": _min,
    "max": _max, "where": _where, "load": _load, "raw": _raw, "table": _table, "search": _search,
}  # fmt: skip
