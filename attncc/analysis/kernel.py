"""The visits that a kernel prints: closed ranges where they are short enough to read, else tiles classed one by one."""

from __future__ import annotations

from dataclasses import replace

from attncc.analysis.solve import visits
from attncc.ir import AttentionSpec, Const, Expr, Op, Segment, Var, Visits, names, tensors, tile_names

LONGEST = 12  # scalars of a prologue: beyond that the ranges of a union of clauses hardly pay


def kernel_visits(spec: AttentionSpec, outer: str = "q") -> Visits:
    """As `visits`, with tables of tensors; a prologue of more than LONGEST scalars gives way to the test of every tile.

    Both are exact: the ranges only save the test, which costs a few instructions for 32 tiles.
    """
    found = visits(spec, outer, tables=True)
    if len(found.lets) <= LONGEST or (found.may is None and found.must is None):
        return found
    inner, size = ("k_len", "TILE_K") if outer == "q" else ("q_len", "TILE_Q")
    called = tile_names({*(p.name for p in spec.params), *spec.free_axes})
    tile = Var(called[size], "int")
    end = Op("//", (Op("-", (Op("+", (Var(inner, "int"), tile), "int"), Const(1)), "int"), tile), "int")
    return pruned(replace(found, masked=(Segment(Const(0), end),), full=()))


def pruned(v: Visits) -> Visits:
    """Without the lets and summaries that nothing reads."""
    ends = [e for s in (*v.masked, *v.full) for e in (s.begin, s.end)]
    used: list[Expr] = [*ends, *(e for e in (v.may, v.must) if e is not None)]
    kept: list[tuple[str, Expr]] = []
    for name, value in reversed(v.lets):
        if any(name in names(e) for e in used):
            kept.append((name, value))
            used.append(value)
    summaries = []
    for summary in reversed(v.summaries):
        if any(summary.name in tensors(e) for e in used):
            summaries.append(summary)
            used.append(summary.value)
    return replace(v, lets=tuple(reversed(kept)), summaries=tuple(reversed(summaries)))
