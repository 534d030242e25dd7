"""Tiles in which an index has one value: known by its least and its greatest over the tile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from attncc.analysis.emit import Emitter
from attncc.analysis.interval import Unbounded
from attncc.analysis.kernel import every_tile
from attncc.analysis.lift import Lift
from attncc.analysis.solve import frame
from attncc.ir import AttentionSpec, Expr, Op, Read, Visits, names, walk

CLAMPS = ("min", "max", "where")  # without one of these an index hardly ever stays the same over a tile
WORDS = ("f32", "i32")  # what Triton copies ahead number by number
ROWS, KEYS = frozenset(("q", "row")), frozenset(("k",))


@dataclass(frozen=True)
class SameEntry:
    """What scores read at clamped distances: far from the diagonal all pairs of a tile read the same entry."""

    # Each with its least and its greatest value in a tile, over the names that tests have: equal ones.
    indices: tuple[tuple[Expr, Expr, Expr], ...]
    reads: tuple[Read, ...]  # of pairs, but for those that are indices


@lru_cache
def same_entry(spec: AttentionSpec) -> SameEntry | None:
    """Of the tiles of keys that a tile of rows visits; None where a score reads tensors for each pair in other ways
    too, or not in words, which alone suffer where many threads want the same one, or something besides the scores
    reads the same."""
    indices = tuple(dict.fromkeys(i for e in spec.scores for i in entry_indices(e)))
    reads = tuple(dict.fromkeys(n for e in spec.scores for n in walk(e) if isinstance(n, Read) and of_pair(n)))
    inner = {n for r in reads for i in r.indices for n in walk(i)}
    others = (*spec.masks, *spec.softmax.args, *(e for e in (spec.weight, spec.dropout) if e is not None))
    used = {n for e in (*others, *(value for _, value in spec.lets)) for n in walk(e)}
    if not indices or not all(map(clamped, indices)) or used & {*reads}:
        return None
    if any(spec.param(r.tensor).element not in WORDS for r in reads):
        return None
    f = frame(spec, "q", use_tables=False)
    lift, emitter = Lift(spec, f.algebra), Emitter(spec)
    try:
        ends = [f.domain.extremes(lift(i)) for i in indices]
    except Unbounded:
        return None
    if any(low.eq(high) is f.algebra.false for low, high in ends):
        return None
    found = SameEntry(
        tuple((i, emitter(a), emitter(b)) for i, (a, b) in zip(indices, ends, strict=True)),
        tuple(r for r in reads if r not in inner),
    )
    return None if emitter.lets else found


def of_pair(e: Expr) -> bool:
    """Whether each pair of a row and a key has its own value."""
    return bool(names(e) & ROWS and names(e) & KEYS)


def entry_indices(e: Expr) -> Iterator[Expr]:
    """The indices of its reads of a pair's own entry that are no reads themselves."""
    for node in walk(e):
        if isinstance(node, Read):
            yield from (i for i in node.indices if of_pair(i) and not any(isinstance(n, Read) for n in walk(i)))
            if of_pair(node) and not any(map(of_pair, node.indices)):
                yield node  # at a row and a key: no clamp in it


def clamped(e: Expr) -> bool:
    return any(isinstance(n, Op) and n.op in CLAMPS for n in walk(e))


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
