"""The visits that a kernel prints: closed ranges where they are short enough to read, else tiles classed one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attncc.analysis.solve import visits
from attncc.ir import (
    TILE_NAMES,
    AttentionSpec,
    Const,
    Expr,
    Op,
    Read,
    Segment,
    Var,
    Visits,
    names,
    tensors,
    tile_names,
    walk,
)  # fmt: skip

LONGEST = 12  # scalars of a prologue: beyond that the ranges of a union of clauses hardly pay


def kernel_visits(spec: AttentionSpec, outer: str = "q", forward: bool = False) -> Visits:
    """As `visits`, with tables of tensors; a prologue of more than LONGEST scalars gives way to the test of every tile.

    Both are exact: the ranges only save the test, which costs a few instructions for 32 tiles. In the `forward` pass
    tiles whose test reads a table with an entry for each pair of blocks are listed: the list is about as large as the
    table, but of packed sequences much larger, and not made. And where ranges give whole tiles the test looks for no
    more: that loop would cost more than it finds.
    """
    found = visits(spec, outer, tables=True, plain=forward)
    if found.may is None and found.must is None:
        return found
    listed = forward and not spec.ragged and reads_blocks(spec, found)
    if not listed and len(found.lets) <= LONGEST:
        return pruned(replace(found, must=None)) if forward and found.full else found
    every = (every_tile(spec, outer),)
    return pruned(replace(found, masked=every, full=(), listed=listed, plain_end=None, plain=()))


def every_tile(spec: AttentionSpec, outer: str) -> Segment:
    """All tiles of the inner side."""
    inner, size = ("k_len", "TILE_K") if outer == "q" else ("q_len", "TILE_Q")
    called = tile_names({*(p.name for p in spec.params), *spec.free_axes})
    tile = Var(called[size], "int")
    end = Op("//", (Op("-", (Op("+", (Var(inner, "int"), tile), "int"), Const(1)), "int"), tile), "int")
    return Segment(Const(0), end)


def reads_blocks(spec: AttentionSpec, v: Visits) -> bool:
    """Do the tests of a tile read a tensor at the place of both tiles, so that it has an entry for each pair?"""
    called = tile_names({*(p.name for p in spec.params), *spec.free_axes})
    inner = {called[n] for n in TILE_NAMES if n.startswith("inner_")}
    outer = {called["first"], called["last"], called["tile"], *(name for name, _ in v.lets)}
    given = {p.name for p in spec.tensors}
    reads = (e for test in (v.may, v.must) if test is not None for e in walk(test) if isinstance(e, Read))
    at = (frozenset().union(*map(names, r.indices)) for r in reads if r.tensor in given)
    return any(n & inner and n & outer for n in at)


def constants(v: Visits) -> Iterator[int]:
    """Every int that stands in the expressions of `v`."""
    ends = (e for s in (*v.masked, *v.full) for e in (s.begin, s.end))
    tests = (e for e in (v.may, v.must, v.plain_end, *v.plain) if e is not None)
    for e in (*ends, *tests, *(e for _, e in v.lets), *(s.value for s in v.summaries)):
        yield from (int(n.value) for n in walk(e) if isinstance(n, Const) and n.type == "int")


def pruned(v: Visits) -> Visits:
    """Without the lets and summaries that nothing reads."""
    ends = [e for s in (*v.masked, *v.full) for e in (s.begin, s.end)]
    used: list[Expr] = [*ends, *(e for e in (v.may, v.must, v.plain_end) if e is not None)]
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
