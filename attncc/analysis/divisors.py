"""Ints that a call settles: divisors of `//` and `%`, and what has to fit 64 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from attncc.analysis.evaluate import OPERATIONS, Env, evaluate
from attncc.ir import LEAST_INT, MOST_INT, NONE, SUM, AttentionSpec, Const, Expr, Op, Read, Var, children, names, walk


def divisors(spec: AttentionSpec) -> frozenset[str]:
    """Scalars and free axes that are a divisor of `//` or `%`: every call checks that they are at least 1."""
    return frozenset(e.name for e in _all(spec) if isinstance(e, Var))


def computed_divisors(spec: AttentionSpec) -> tuple[Expr, ...]:
    """Divisors that are computed of scalar parameters, and of nothing else that differs from call to call: every call
    checks that they are at least 1. Any other (of lengths, positions, elements of tensors) may be less, and gives 0."""
    scalars = {p.name for p in spec.params if not p.is_tensor}
    found = dict.fromkeys(e for e in _all(spec) if not isinstance(e, (Var, Const)))
    return tuple(e for e in found if names(e) <= scalars and not any(isinstance(n, Read) for n in walk(e)))


def below_one(divisors: Iterable[Expr], values: Mapping[str, int | float]) -> tuple[Expr, int] | None:
    """The first of these divisors that is below 1, with what it is; one that `values` does not settle is passed by."""
    for e in divisors:
        if names(e) <= values.keys():
            value = int(evaluate(e, Env(values)))
            if value < 1:
                return e, value
    return None


def computed_ints(spec: AttentionSpec, of_sequence: bool = False) -> tuple[Expr, ...]:
    """The largest expressions that a call settles, of scalars, lengths, free axes and constants, in which an int is
    worked out that may be beyond 64 bits: of scalars, or by `floor`. Packed sequences have lengths of their own, which
    are known of one alone: `of_sequence`."""
    scalars = {p.name for p in spec.params if not p.is_tensor}
    each = () if spec.ragged and not of_sequence else ("q_len", "k_len")
    known = {"b_len", "h_len", *each, *spec.free_axes, *scalars}

    def largest(e: Expr) -> Iterator[Expr]:
        if names(e) <= known and not any(isinstance(n, Read) for n in walk(e)):
            yield e
        else:
            for part in children(e):
                yield from largest(part)

    found = dict.fromkeys(part for e in expressions(spec) for part in largest(e))
    ints = {e: [n for n in walk(e) if isinstance(n, Op) and n.type == "int"] for e in found}
    return tuple(e for e, inner in ints.items() if any(n.op == "floor" or names(n) & scalars for n in inner))


def beyond(ints: Iterable[Expr], values: Mapping[str, int | float]) -> tuple[Expr, int | float] | None:
    """The first int in these expressions that 64 bits do not hold, with what it is; names as for `below_one`."""
    for e in ints:
        if names(e) <= values.keys():
            try:
                _exact(e, values)
            except _Beyond as fault:
                return fault.args[0], fault.args[1]
    return None


class _Beyond(Exception):
    pass


def _exact(e: Expr, values: Mapping[str, int | float]) -> Any:
    """The value of `e`, its ints as Python's. _Beyond tells of one that 64 bits do not hold."""
    memo: dict[int, Any] = {}

    def value(x: Expr) -> Any:
        if isinstance(x, Const):
            return x.value
        if isinstance(x, Var):
            return values[x.name]
        assert isinstance(x, Op)
        if id(x) not in memo:
            args = [value(a) for a in x.args]
            found = EXACT[x.op](*args) if x.type == "int" else OPERATIONS[x.op](*args)
            if x.type == "int" and not LEAST_INT <= found <= MOST_INT:  # NaN too
                raise _Beyond(x, found)
            memo[id(x)] = found
        return memo[id(x)]

    with np.errstate(all="ignore"):
        return value(e)


EXACT: dict[str, Callable[..., Any]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "neg": lambda a: -a,
    "//": lambda a, b: a // b if b >= 1 else 0, "%": lambda a, b: a % b if b >= 1 else 0,
    "abs": abs, "min": min, "max": max, "where": lambda c, a, b: a if c else b,
    "floor": lambda a: math.floor(a) if math.isfinite(a) else a,
}  # fmt: skip


def _all(spec: AttentionSpec) -> Iterator[Expr]:
    for e in expressions(spec):
        yield from (n.args[1] for n in walk(e) if isinstance(n, Op) and n.op in ("//", "%"))


def expressions(spec: AttentionSpec) -> tuple[Expr, ...]:
    """Every expression that a kernel evaluates."""
    single = tuple(e for e in (spec.scale, spec.weight, spec.dropout) if e is not None)
    named = tuple(e for _, e in spec.softmax.named if e not in (SUM, NONE))
    return (*spec.masks, *spec.scores, *single, *spec.softmax.args, *named)
