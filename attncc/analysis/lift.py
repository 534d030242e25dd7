"""From a spec's expressions to terms: positions are `row` and `k`; what the algebra does not know stays `raw`."""

from __future__ import annotations

from collections.abc import Mapping

from attncc.analysis.bounds import Facts, Range, numeric
from attncc.analysis.divisors import divisors
from attncc.analysis.terms import Algebra, Term, rebuild
from attncc.ir import (
    COMPARISON,
    LEAST_INT,
    MOST_INT,
    TILE_NAMES,
    AttentionSpec,
    Const,
    Expr,
    Op,
    Read,
    Var,
    conjunction,
    names,
    tile_names,
)  # fmt: skip

ELEMENT_RANGES: dict[str, Range] = {
    "bit": (0, 1), "bool": (0, 1), "u8": (0, 255), "i8": (-128, 127), "i16": (-(2**15), 2**15 - 1),
}  # fmt: skip
AXES = {"q": "row", "k": "k"}  # side of a tile -> the position that runs over it
LENGTHS = {"row": "q_len", "k": "k_len"}
EXTENTS = {**LENGTHS, "b": "b_len", "h": "h_len"}


def spec_facts(spec: AttentionSpec, outer: str | None = None) -> Facts:
    """Lengths are at least 1, positions lie inside them, tiles hold at least 16, checked divisors are at least 1.

    With `outer` ("q" or "k") the facts of a tile of that side and of an inner tile come in addition.
    """
    ranges: dict[str, Range] = dict.fromkeys(("b", "h", "h_kv", "row", "k"), (0, None))
    ranges |= dict.fromkeys(("b_len", "h_len", "q_len", "k_len"), (1, None))
    ranges |= dict.fromkeys(spec.free_axes, (0, None))
    ranges |= {n: (1, None) for n in divisors(spec) if n not in ranges or n in spec.free_axes}
    above = {"row": ({"q_len": 1}, -1), "k": ({"k_len": 1}, -1), "b": ({"b_len": 1}, -1), "h": ({"h_len": 1}, -1)}
    below: dict[str, tuple[dict[str, int], int]] = {}
    if outer is not None:
        ranges |= {f"_{n}": (16, None) if n.startswith("TILE") else (0, None) for n in TILE_NAMES}
        inner = "k" if outer == "q" else "q"
        for side, begin, end in ((outer, "_first", "_last"), (inner, "_inner_first", "_inner_last")):
            above[end] = ({LENGTHS[AXES[side]]: 1}, -1)
            above[begin] = ({end: 1}, 0)
            below[end] = ({begin: 1}, 0)
    tensors = {p.name: ELEMENT_RANGES[p.element] for p in spec.tensors if p.element in ELEMENT_RANGES}
    ordered = frozenset(p.name for p in spec.tensors if p.sorted)
    extents = {p.name: tuple(EXTENTS.get(a, a) if isinstance(a, str) else a for a in p.axes) for p in spec.tensors}
    return Facts(ranges, above, below, tensors, ordered, extents)


def taken(spec: AttentionSpec) -> frozenset[str]:
    """Names that the spec has given."""
    return frozenset((*(p.name for p in spec.params), *spec.free_axes))


class Lift:
    """Reads expressions of one spec into one algebra; there the values of a tile have a leading underscore."""

    def __init__(self, spec: AttentionSpec, algebra: Algebra) -> None:
        self.spec, self.algebra = spec, algebra
        self._inner = {name: "_" + inner for inner, name in tile_names(taken(spec)).items()}
        self._memo: dict[Expr, Term] = {}
        row = algebra.var("row")
        self.q = row if spec.align == "start" else row + algebra.var("k_len") - algebra.var("q_len")

    def mask(self) -> Term:
        """All masks and-ed; true where there is none."""
        whole = conjunction(self.spec.masks)
        return self.algebra.true if whole is None else self(whole)

    def __call__(self, e: Expr) -> Term:
        found = self._memo.get(e)
        if found is None:
            found = self._memo[e] = self._bool(e) if e.type == "bool" else self._int(e)
        return found

    def _raw(self, e: Expr) -> Term:
        """A part that only its numbers are known of; a bool counts 0 or 1."""
        free = names(e)
        if "q" in free:
            free = (free - {"q"}) | self.q.free
        return self.algebra.node("raw", (), e, free)

    def _int(self, e: Expr) -> Term:
        a = self.algebra
        if isinstance(e, Const):
            return a.const(int(e.value)) if e.type == "int" else self._raw(e)
        if isinstance(e, Var):
            if e.type == "float":
                return self._raw(e)
            return self.q if e.name == "q" else a.var(self._inner.get(e.name, e.name))
        if isinstance(e, Read):
            return self._raw(e) if e.type == "float" else a.node("load", tuple(map(self, e.indices)), e.tensor)
        if e.type == "float" or e.op == "floor":
            return self._raw(e)
        if e.op in ("//", "%"):
            return self._division(e.op, self(e.args[0]), self(e.args[1]))
        args = [self(x) for x in e.args]
        if e.op == "where":
            return a.where(*args)
        if e.op in ("min", "max"):
            return (a.least if e.op == "min" else a.most)(*args)
        if e.op == "abs":
            return a.absolute(args[0])
        if e.op == "neg":
            return -args[0]
        if e.op in ("+", "-"):
            return args[0] + args[1] if e.op == "+" else args[0] - args[1]
        return args[0] * args[1] if e.op == "*" else self._raw(e)

    def _division(self, op: str, x: Term, n: Term) -> Term:
        """A divisor below 1 (an element of a tensor, an expression) gives 0."""
        a = self.algebra
        make = a.quotient if op == "//" else a.remainder
        valid = n.ge(1)
        return a.where(valid, make(x, a.most(n, 1)), 0) if valid is not a.false else a.const(0)

    def _bool(self, e: Expr) -> Term:
        a = self.algebra
        if isinstance(e, Const):
            return a.truth(bool(e.value))
        if isinstance(e, Read):
            return a.node("load", tuple(map(self, e.indices)), e.tensor).ge(1)
        if not isinstance(e, Op):
            return self._raw(e).ge(1)
        if e.op in ("and", "or"):
            return (a.every if e.op == "and" else a.some)(tuple(map(self, e.args)))
        if e.op == "not":
            return ~self(e.args[0])
        if e.op == "where":
            return a.where(*map(self, e.args))
        if e.op in COMPARISON and e.args[0].type == "bool":
            x, y = map(self, e.args)
            same = (x & y) | (~x & ~y)
            return same if e.op == "==" else ~same
        if e.op in COMPARISON and e.args[0].type == e.args[1].type == "int":
            x, y = map(self, e.args)
            return _compare(e.op, x, y)
        return self._raw(e).ge(1)


def _compare(op: str, x: Term, y: Term) -> Term:
    if op in (">", ">="):
        op, x, y = op.replace(">", "<"), y, x
    home = x.home  # what 64 bits settle gives no bound beyond them
    if op == "<=" and (x is home.const(LEAST_INT) or y is home.const(MOST_INT)):
        return home.true
    if op == "<" and (x is home.const(MOST_INT) or y is home.const(LEAST_INT)):
        return home.false
    if op in ("<", "<="):
        return x.lt(y) if op == "<" else x.le(y)
    return x.eq(y) if op == "==" else x.home.ne0(x - y)


def nonnegative(e: Expr, spec: AttentionSpec, lets: tuple[tuple[str, Expr], ...] = ()) -> bool:
    """Is the int expression proved to be at least 0? True is a proof for every call; False means unknown."""
    return at_least(e, 0, spec, lets)


def at_least(e: Expr, bound: int, spec: AttentionSpec, lets: tuple[tuple[str, Expr], ...] = ()) -> bool:
    """Is the int expression proved to be at least `bound`, for every call? For more than one question see Prover."""
    return Prover(spec, lets).at_least(e, bound)


class Prover:
    """Answers about the int expressions of one spec. True is a proof for every call; False means unknown.

    Names of `lets` (those of Visits) stand for their values; `first`, `last`, `tile` may be of a tile of either side.
    """

    def __init__(self, spec: AttentionSpec, lets: tuple[tuple[str, Expr], ...] = ()) -> None:
        self._sides: list[tuple[Lift, dict[str, Term]]] = []
        for outer in ("q", "k"):
            lift = Lift(spec, Algebra(spec_facts(spec, outer)))
            known: dict[str, Term] = {}
            for name, value in lets:
                known[name] = _put(lift(value), known)
            self._sides.append((lift, known))

    def at_least(self, e: Expr, bound: int) -> bool:
        for lift, known in self._sides:
            low = numeric(_put(lift(e), known))[0]
            if low is None or low < bound:
                return False
        return True

    def nonnegative(self, e: Expr) -> bool:
        return self.at_least(e, 0)


def _put(e: Term, values: Mapping[str, Term]) -> Term:
    """Terms in place of variables; raw parts keep theirs."""
    if not e.free & values.keys():
        return e
    if e.op == "var":
        return values[e.val]
    return rebuild(e, tuple(_put(a, values) for a in e.args))
