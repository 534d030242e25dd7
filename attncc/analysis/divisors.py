"""Divisors of `//` and `%` that a call settles: parameters, free axes, and what is computed of parameters alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from attncc.analysis.evaluate import Env, evaluate
from attncc.ir import NONE, SUM, AttentionSpec, Const, Expr, Op, Read, Var, names, walk


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


def _all(spec: AttentionSpec) -> Iterator[Expr]:
    for e in expressions(spec):
        yield from (n.args[1] for n in walk(e) if isinstance(n, Op) and n.op in ("//", "%"))


def expressions(spec: AttentionSpec) -> tuple[Expr, ...]:
    """Every expression that a kernel evaluates."""
    single = tuple(e for e in (spec.scale, spec.weight, spec.dropout) if e is not None)
    named = tuple(e for _, e in spec.softmax.named if e not in (SUM, NONE))
    return (*spec.masks, *spec.scores, *single, *spec.softmax.args, *named)
