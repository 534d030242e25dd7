"""Tiles in which an index has one value: known by its least and its greatest over the tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attncc.analysis.emit import Emitter
from attncc.analysis.interval import Unbounded
from attncc.analysis.kernel import every_tile
from attncc.analysis.lift import Lift
from attncc.analysis.solve import frame
from attncc.ir import AttentionSpec, Expr, Visits


def alike_visits(spec: AttentionSpec, v: Visits, indices: Sequence[Expr]) -> tuple[Visits, tuple[Expr, ...]] | None:
    """`v` with every tile tested, where `must` asks for more: that each of `indices` has one value in it. And these
    values (of a tile that passes), scalars over the names that tests have; None where nothing is known of an index."""
    f = frame(spec, v.outer, use_tables=False)
    lift = Lift(spec, f.algebra)
    must, may = f.domain.holds(lift.mask())
    must = must & (f.algebra.var("_inner_first") + f.size).le(f.length)
    try:
        ends = [f.domain.extremes(lift(i)) for i in indices]
    except Unbounded:
        return None
    for low, high in ends:
        must = must & low.eq(high)
    if must is f.algebra.false:
        return None
    emitter = Emitter(spec)
    tests = None if may is f.algebra.true else emitter(may), emitter(must)
    values = tuple(emitter(low) for low, _ in ends)
    found = replace(v, lets=(), masked=(every_tile(spec, v.outer),), full=(), may=tests[0], must=tests[1])
    return (found, values) if not emitter.lets else None
