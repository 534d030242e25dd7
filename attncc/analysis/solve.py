"""Which inner tiles an outer tile visits, in closed form, from any mask."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from attncc.analysis.emit import Emitter
from attncc.analysis.interval import Domain, Unbounded, reads, residue
from attncc.analysis.lift import AXES, LENGTHS, Lift, spec_facts
from attncc.analysis.literals import tamed
from attncc.analysis.normal import Clause, Solver, merged, ordered
from attncc.analysis.rows import always
from attncc.analysis.segments import Ranges, cover, fuse, hull, longest, subtract, union
from attncc.analysis.terms import Algebra, Term, sure_le, visit
from attncc.analysis.words import opaque_parts
from attncc.ir import AttentionSpec, Expr, Segment, Visits, conjuncts

KEPT_APART = 3  # ranges of alternatives; what there is beyond is taken together


@dataclass(frozen=True)
class Span:
    """Positions low <= x < stop, both at least 0; only where `ok`."""

    low: Term
    stop: Term
    ok: Term
    exact: bool = True  # not narrowed by conditions on the outer tile
    tiles: tuple[Term, Term] | None = None  # further bounds, begin and end in inner tiles


@dataclass(frozen=True)
class Frame:
    """One tile of the outer side, in terms."""

    algebra: Algebra
    domain: Domain
    y: str  # the position of the outer side
    x: str  # the position of the inner side
    size: Term  # of an inner tile

    @property
    def length(self) -> Term:
        return self.algebra.var(LENGTHS[self.x])


def frame(spec: AttentionSpec, outer: str, use_tables: bool) -> Frame:
    algebra = Algebra(spec_facts(spec, outer))
    inner = "k" if outer == "q" else "q"
    y, x = AXES[outer], AXES[inner]
    v = algebra.var
    bounds = {y: (v("_first"), v("_last")), x: (v("_inner_first"), v("_inner_last"))}
    domain = Domain(algebra, bounds, {y: v("_tile"), x: v("_inner_tile")}, {}, use_tables)
    return Frame(algebra, domain, y, x, v("_TILE_K" if inner == "k" else "_TILE_Q"))


def visits(
    spec: AttentionSpec, outer: str, *, tables: bool = False, search: bool = False, ranges: int = 2, plain: bool = False
) -> Visits:
    """The inner tiles that a tile of the `outer` side ("q" or "k") visits.

    The tile is given by `first`, `last` (inclusive positions on its own axis: `row` numbers or keys, `last` clipped
    to the length) and `tile`, its number. `tables` allows summaries of tensors, made before the kernel; without them,
    what needs one is visited and masked. `search` allows Op("search", (Read(T, (.., x)), value)): the first position
    x with T[.., x] >= value in a tensor declared sorted, the axis' length where there is none. At most `ranges`
    ranges (1 or 2) hold something, and as many are full. `plain` asks for the tiles where the mask reads no tensor.
    """
    f = frame(spec, outer, tables)
    lift = Lift(spec, f.algebra)
    mask = tamed(lift.mask(), f.x)
    solver = Solver(f.x, search)
    clauses = merged(solver.clauses(mask), f.x)
    spans = [(_may(c, f), _must(c, f)) for c in clauses]
    emitter = Emitter(spec, _folds(spec, f))
    spans = [s for s in spans if s[0].ok is not f.algebra.false]
    simple = _in_order([_tiles(*s, f) for s in spans], spans) if 1 <= len(spans) <= ranges else None
    if simple is not None:
        (masked, full), widened = _segments(simple, emitter), False
    else:
        masked, full, widened = _many_ranges(spans, f, emitter, ranges)
    rest = _plain(spec, lift, f, clauses) if plain and simple is not None and len(spans) == 1 else ()
    plain_end = _plain_end(simple[0], spans[0][1], emitter) if rest and simple is not None else None
    may, must = _classes(f, mask, clauses, emitter, widened or solver.overflow)
    lets, summaries = tuple(emitter.lets.items()), tuple(emitter.summaries.values())
    made = Visits(outer, lets, masked, full, may, must, summaries, opaque_parts(spec), not always(mask, lift))
    return made if plain_end is None else replace(made, plain_end=plain_end, plain=rest)


def _folds(spec: AttentionSpec, f: Frame) -> list[tuple[str, Term]]:
    """Names of the tile's ends on the other axis: end alignment sets q = row + k_len - q_len."""
    if spec.align == "start":
        return []
    v = f.algebra.var
    shift = v("k_len") - v("q_len")
    if f.y == "row":
        return [("q_low", v("_first") + shift), ("q_high", v("_last") + shift)]
    return [("row_low", v("_first") - shift), ("row_high", v("_last") - shift)]


def _narrowed(c: Clause, f: Frame) -> tuple[Domain, list[Term], Term]:
    """The part of the outer tile that the clause's conditions leave, the conditions left over, and whether any part
    is left."""
    home = f.algebra
    first, last = f.domain.bounds[f.y]
    lows, highs, left = [first], [last], []
    for g in ordered(c.conditions):
        solved = Solver(f.y).clauses(g) if f.y in g.free else []
        if len(solved) == 1 and not solved[0].opaque and not solved[0].conditions:
            lows += ordered(solved[0].lower)
            highs += ordered(solved[0].upper)
        else:
            left.append(g)
    if len(lows) == len(highs) == 1:
        return f.domain, left, home.true
    some_left = home.every([a.le(b) for a in lows for b in highs])
    return f.domain.narrow(f.y, home.most(*lows), home.least(*highs)), left, some_left


def _may(c: Clause, f: Frame) -> Span:
    """No pair of the tile that the clause keeps lies outside."""
    home = f.algebra
    domain, left, ok = _narrowed(c, f)
    ok = home.every([ok, *(domain.holds(g)[1] for g in left)])
    low, stop = home.const(0), f.length
    exact = domain is f.domain
    for bound in ordered(c.lower):
        kept = _where_kept(c, bound, f, f.length)
        exact &= kept is bound
        with suppress(Unbounded):
            low = home.most(low, domain.extremes(kept)[0])
    for bound in ordered(c.upper):
        kept = _where_kept(c, bound, f, home.const(-1))
        exact &= kept is bound
        with suppress(Unbounded):
            stop = home.least(stop, _behind(domain.extremes(kept)[1], f))
    scan = _scanned(c, f, must=False)
    return Span(low, home.most(0, stop), ok, exact, scan)


def _scanned(c: Clause, f: Frame, must: bool) -> tuple[Term, Term] | None:
    """First inner tile, and one past the last, of those in which the clause's opaque atoms may hold; or of those in
    which they must, where these lie side by side.

    Only for atoms that read tensors: a pass before the kernel looks at every pair of tiles.
    """
    home, d = f.algebra, f.domain
    both = d.bounds.keys()
    if not d.use_tables or not any(reads(o, frozenset(both)) for o in c.opaque):
        return None
    test = home.every([d.holds(o)[0 if must else 1] for o in ordered(c.opaque)])
    if test.op == "bool":
        return None
    tile, label = d.tiles[f.y], "full_" if must else ""
    first, end = (d.table(kind, f.y, test, (0, None), tile, label) for kind in ("first", "run" if must else "stop"))
    return first, first + end if must else end


def _where_kept(c: Clause, bound: Term, f: Frame, otherwise: Term) -> Term:
    """A row that fails a condition on data must not widen the range: its bound is put out of reach."""
    data = [g for g in c.conditions if f.y in g.free and reads(g, frozenset((f.y,)))]
    if not data or not f.domain.use_tables or not reads(bound, frozenset((f.y,))):
        return bound
    return f.algebra.where(f.algebra.every(data), bound, otherwise)


def _must(c: Clause, f: Frame) -> Span:
    """Every pair of the tile inside is kept by the clause."""
    home, domain = f.algebra, f.domain
    ok = home.every([domain.holds(g)[0] for g in ordered(c.conditions)])
    scan = _scanned(c, f, must=True) if c.opaque else None
    if scan is not None:
        ok = ok & scan[0].lt(scan[1])  # there are some, and they lie side by side
    elif c.opaque:
        ok = home.false
    low, stop = home.const(0), f.length
    try:
        for bound in ordered(c.lower):
            highest = domain.extremes(bound)[1]
            low = home.most(low, home.least(highest, f.length) if _read(highest) else highest)
        for bound in ordered(c.upper):
            stop = home.least(stop, _behind(domain.extremes(bound)[0], f))
    except Unbounded:
        ok = home.false
    return Span(low, home.most(0, stop), ok, tiles=scan)


def _behind(high: Term, f: Frame) -> Term:
    """high + 1, where high may be as large as integers get: what counts is at most the length."""
    stop = f.algebra.shifted(high, 1)
    sums = [n for n in visit(stop) if n.op == "sum" and any(t.op in ("load", "table") for t in n.args)]
    return f.algebra.least(high, f.length - 1) + 1 if sums else stop


def _read(e: Term) -> bool:
    """Does the value come out of a tensor, so that it may be any 32-bit integer?"""
    return any(n.op in ("load", "table") for n in visit(e))


@dataclass(frozen=True)
class Tiles:
    """begin <= full_begin <= full_end <= end (or all of it empty): tiles before and behind the full ones are masked."""

    begin: Term
    end: Term
    full_begin: Term
    full_end: Term


def _tiles(may: Span, must: Span, f: Frame) -> Tiles:
    """A span rounded outward, and its full part inward.

    The full part lies inside by itself, but where it is empty: then its place is anywhere, and is put inside.
    """
    home, t = f.algebra, f.size
    begin, end = may.low // t, home.ceiling(may.stop, t)
    if may.tiles is not None:
        begin, end = home.most(begin, may.tiles[0]), home.least(end, may.tiles[1])
    end = home.where(may.ok, end, 0)
    if must.ok is home.false:
        return Tiles(begin, end, end, end)
    full_begin, full_end = home.ceiling(must.low, t), must.stop // t
    if must.tiles is not None:
        full_begin, full_end = home.most(full_begin, must.tiles[0]), home.least(full_end, must.tiles[1])
    if full_begin is not begin:
        full_begin = home.least(full_begin if may.exact else home.most(full_begin, begin), end)
    full_end = home.most(home.where(must.ok, full_end, 0), full_begin)
    return Tiles(begin, end, full_begin, full_end)


def _segments(tiles: Sequence[Tiles], emitter: Emitter) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    masked, full = [], []
    for i, r in enumerate(tiles):
        tail = f"_{i + 1}" if i else ""
        begin, end = emitter.name("begin" + tail, r.begin), emitter.name("end" + tail, r.end)
        if r.full_begin is r.full_end:
            masked.append(Segment(begin, end))
            continue
        full_begin = emitter.name("full_begin" + tail, r.full_begin)
        full_end = emitter.name("full_end" + tail, r.full_end)
        full.append(Segment(full_begin, full_end))
        masked += [Segment(*s) for s in ((begin, full_begin), (full_end, end)) if s[0] != s[1]]
    return tuple(masked), tuple(full)


def _plain(spec: AttentionSpec, lift: Lift, f: Frame, clauses: Sequence[Clause]) -> tuple[Expr, ...]:
    """The conjuncts of the mask that are left where all opaque atoms hold; none where that cannot be told apart."""
    if len(clauses) != 1 or not clauses[0].opaque:
        return ()
    left = []
    for part in (c for m in spec.masks for c in conjuncts(m)):
        solved = Solver(f.x).clauses(tamed(lift(part), f.x))
        if not any(c.opaque for c in solved):
            left.append(part)
        elif solved != [Clause(opaque=solved[0].opaque)] or not solved[0].opaque <= clauses[0].opaque:
            return ()
    return tuple(left)


def _plain_end(tiles: Tiles, must: Span, emitter: Emitter) -> Expr | None:
    """Where, behind the full tiles, those end in which a scan has found all opaque atoms to hold."""
    if must.tiles is None or tiles.full_begin is tiles.full_end:
        return None
    home = tiles.end.home
    return emitter.name("plain_end", home.most(tiles.full_end, home.least(must.tiles[1], tiles.end)))


def _in_order(tiles: list[Tiles], spans: list[tuple[Span, Span]]) -> list[Tiles] | None:
    """Two ranges of which one is sure to begin and to end first: the first gives way where they meet."""
    if len(tiles) == 1:
        return tiles
    if len(tiles) != 2 or any(may.ok.op != "bool" for may, _ in spans):
        return None
    a, b = tiles
    if not (sure_le(a.begin, b.begin, 6) and sure_le(a.end, b.end, 6)):
        a, b = b, a
    if not (sure_le(a.begin, b.begin, 6) and sure_le(a.end, b.end, 6)):
        return None
    home = a.begin.home
    end = home.least(a.end, b.begin)
    if a.full_begin is a.full_end:
        return [Tiles(a.begin, end, end, end), b]
    full_begin = home.least(a.full_begin, end)
    full_end = home.most(home.least(a.full_end, end), full_begin)
    return [Tiles(a.begin, end, full_begin, full_end), b]


def _many_ranges(
    spans: list[tuple[Span, Span]], f: Frame, emitter: Emitter, most: int
) -> tuple[tuple[Segment, ...], tuple[Segment, ...], bool]:
    """Clauses joined: ranges in order and disjoint, the full ones taken out; and whether a gap was filled in."""
    home, t = f.algebra, f.size
    parts: Ranges = []
    whole: Ranges = []
    for may, must in sorted(spans, key=lambda s: s[1].ok is home.false):  # those that hold full tiles first
        begin, end = may.low // t, home.ceiling(may.stop, t)
        ok = may.ok & may.low.lt(may.stop)
        if may.tiles is not None:
            begin, end = home.most(begin, may.tiles[0]), home.least(end, may.tiles[1])
            ok = ok & begin.lt(end)
        if ok is not home.false:
            parts.append((home.where(ok, begin, 0), home.where(ok, end, 0)))
        low, stop = must.low, must.stop
        if must.tiles is not None:
            low, stop = home.most(low, must.tiles[0] * t), home.least(stop, must.tiles[1] * t)
        ok = must.ok & low.lt(stop)
        if ok is not home.false:
            whole.append((home.where(ok, low, 0), home.where(ok, stop, 0)))
    if not parts:
        return (), (), False
    tiles = home.ceiling(f.length, t)
    wide = len(parts) > KEPT_APART
    if wide:
        parts = [*parts[: KEPT_APART - 1], cover(parts[KEPT_APART - 1 :], tiles)]
    kept, widened = hull(union(parts), most, tiles)
    widened |= wide
    full = _full_ranges(whole[:KEPT_APART], f, most) if whole else []
    masked = subtract(kept, full) if full else kept
    everything = masked + full
    emitter.share([e for r in everything for e in r])
    segments = []
    for i, (a, b) in enumerate(everything):
        kind, n = ("", i) if i < len(masked) else ("full_", i - len(masked))
        number = f"_{n + 1}" if n else ""
        segments.append(Segment(emitter.name(f"{kind}begin{number}", a), emitter.name(f"{kind}end{number}", b)))
    return tuple(segments[: len(masked)]), tuple(segments[len(masked) :]), widened


def _full_ranges(whole: Ranges, f: Frame, most: int) -> Ranges:
    """Rounded inward to tiles after joining; the ragged last tile counts only where it ends at the length."""
    home, t = f.algebra, f.size
    tiles = [(home.ceiling(a, t), b // t) for a, b in fuse(whole)]
    tiles = [(a, home.most(a, b)) for a, b in tiles]
    apart = [(a if i == 0 else home.most(a, tiles[i - 1][1]), b) for i, (a, b) in enumerate(tiles)]
    return longest(apart, most)


def _hopeless(o: Term) -> bool:
    """A residue test whose period no tile can be shorter than: it would never skip one."""
    split = residue(o, lambda t: bool(t.on))
    if split is None:
        return False
    inner, n, _, _ = split
    moving = {t: c for t, c in inner.affine[0].items() if t.on}
    return (
        o.op == "eq0"
        and n.op == "const"
        and n.val <= 16
        and all(t.op == "var" and abs(c) == 1 for t, c in moving.items())
    )


def _classes(
    f: Frame, mask: Term, clauses: list[Clause], emitter: Emitter, wide: bool
) -> tuple[Expr | None, Expr | None]:
    """Tests for one inner tile, where ranges alone are loose."""
    if not (wide or any(not _hopeless(o) for c in clauses for o in c.opaque)):
        return None, None
    must, may = f.domain.holds(mask)
    must = must & (f.algebra.var("_inner_first") + f.size).le(f.length)
    no_may = may is f.algebra.true
    no_must = must is f.algebra.false
    return None if no_may else emitter(may), None if no_must else emitter(must)
