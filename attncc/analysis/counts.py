"""Numbers of one shape: pairs kept, rows empty, tiles visited, the balance of work. None where contents are missing.

Exact up to a bound of work; beyond, estimated from rows or query tiles that are drawn evenly, which is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from attncc.analysis.emit import Emitter
from attncc.analysis.evaluate import Array, Env, Value, evaluate
from attncc.analysis.interval import residue
from attncc.analysis.lift import Lift, spec_facts, taken
from attncc.analysis.normal import Clause, Solver, merged, ordered
from attncc.analysis.prepass import tables
from attncc.analysis.solve import visits
from attncc.analysis.terms import Algebra, Term
from attncc.ir import AttentionSpec, Segment, Shape, Visits, conjunction, names, tensors, tile_names

GRID = 2**26  # pairs that are looked at one by one, where no formula is known
TESTED = 2**23  # pairs of tiles that a test decides on, of all programs
ROWS = 2**24  # rows, or query tiles, that a formula is evaluated for, of all programs; beyond, as many as DRAWN
DRAWN = 2**20
SLICE = 2**16  # of them at a time
CLAUSES = 5  # whose unions are counted by inclusion and exclusion
Residue = tuple[Array, Array, Array, Array]  # n, z, r1, r2: the keys with r1 <= (k + z) % n <= r2
Part = tuple[Array, Array, "Residue | None"]  # low, high (inclusive) and residue, for each row


@dataclass(frozen=True)
class RowCounts:
    """Summed over batch and heads; `drawn` is how many rows that was worked out from, None where from all."""

    pairs: int
    empty: int
    drawn: int | None = None


def kept_pairs(spec: AttentionSpec, shape: Shape, values: Mapping[str, Value]) -> int | None:
    """Pairs that the mask keeps, as row_counts has them."""
    found = row_counts(spec, shape, values)
    return None if found is None else found.pairs


def row_counts(spec: AttentionSpec, shape: Shape, values: Mapping[str, Value]) -> RowCounts | None:
    """Pairs that the mask keeps, and rows that see none: a sum over rows of closed forms.

    `values`: scalars, extents of free axes, numpy arrays of tensors. None where one is missing that the mask needs,
    and where the mask has no closed form and the grid is too large to be looked at.
    """
    if missing(spec, values):
        return None
    rows, every = _Rows(spec), list(programs(spec, shape, values))
    at = drawn(shape.q_len, len(every), ROWS)
    pairs = empty = 0
    for env, times in every:
        for part in _slices(at):
            counts = rows.counts(env, part)
            if counts is None:
                return None
            pairs += times * int(counts.sum())
            empty += times * int((counts == 0).sum())
    n, seen = shape.q_len, len(at)
    return RowCounts(pairs, empty) if seen == n else RowCounts(pairs * n // seen, empty * n // seen, seen * len(every))


def drawn(n: int, programs: int, most: int, some: int = DRAWN) -> Array:
    """All of n places, or where those of all programs are more than `most`, `some` for all: one of each of as many
    stretches, anywhere in it, so that what comes round again in a mask does not fall on them all."""
    if n * programs <= most:
        return np.arange(n)
    number = min(n, max(1, some // programs))
    edges = np.linspace(0, n, number + 1)
    within = np.random.default_rng(0).random(number)
    return np.minimum((edges[:-1] + within * np.diff(edges)).astype(np.int64), n - 1)


def _slices(at: Array, size: int = SLICE) -> list[Array]:
    return np.array_split(at, max(1, -(-len(at) // size)))


def missing(spec: AttentionSpec, values: Mapping[str, Value]) -> tuple[str, ...]:
    """Parameters and free axes that the mask needs and `values` lack."""
    mask = conjunction(spec.masks)
    if mask is None:
        return ()
    read = tensors(mask)
    extents = {a for p in spec.tensors if p.name in values for a in p.free_axes}
    scalars = {p.name for p in spec.scalars} | set(spec.free_axes) - extents
    return tuple(sorted((read | (names(mask) & scalars)) - values.keys()))


def programs(spec: AttentionSpec, shape: Shape, values: Mapping[str, Value]) -> Iterator[tuple[Env, int]]:
    """The batch entries and heads that may differ, each with how many are like it."""
    mask = conjunction(spec.masks)
    used = names(mask) if mask is not None else frozenset()
    by_batch, by_head = "b" in used, bool(used & {"h", "h_kv"})
    arrays = {p.name: np.asarray(values[p.name]) for p in spec.tensors if p.name in values}
    bits = frozenset(
        p.name for p in spec.tensors if p.element == "bit" and p.name in arrays and arrays[p.name].dtype != bool
    )
    free = {a: _extent(p.axes.index(a), arrays[p.name], p.name in bits)
            for p in spec.tensors if p.name in arrays for a in p.free_axes}  # fmt: skip
    scalars = {n: v for n, v in values.items() if n not in arrays}
    lengths = {"q_len": shape.q_len, "k_len": shape.k_len, "b_len": shape.batch, "h_len": shape.heads}
    group = shape.heads // shape.kv_heads
    times = (1 if by_batch else shape.batch) * (1 if by_head else shape.heads)
    for b in range(shape.batch if by_batch else 1):
        for h in range(shape.heads if by_head else 1):
            yield Env({**free, **scalars, **lengths, "b": b, "h": h, "h_kv": h // group}, arrays, bits), times


def _extent(axis: int, array: Array, packed: bool) -> int:
    return int(array.shape[axis]) * (32 if packed and axis == array.ndim - 1 else 1)


class _Rows:
    """Kept keys of every row of one program."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        algebra = Algebra(spec_facts(spec))
        solver = Solver("k", search=True)
        self.clauses = merged(solver.clauses(Lift(spec, algebra).mask()), "k")
        self.solved = not solver.overflow and len(self.clauses) <= CLAUSES
        self.emitter = Emitter(spec)

    def counts(self, env: Env, rows: Array) -> Array | None:
        """For each of these rows, int64; None where there is neither a formula nor a small grid."""
        n = len(rows)
        shift = int(env.names["k_len"]) - int(env.names["q_len"]) if self.spec.align == "end" else 0
        here = env.plus(row=rows, q=rows + shift)
        parts = [self._part(c, here, n) for c in self.clauses] if self.solved else [None]
        known = [p for p in parts if p is not None]
        found = _union(known, n) if len(known) == len(parts) else None
        return self._by_grid(env, rows, shift) if found is None else found

    def _value(self, e: Term, env: Env, n: int) -> Array:
        return np.broadcast_to(np.asarray(evaluate(self.emitter(e), env)), (n,)).astype(np.int64)

    def _part(self, c: Clause, env: Env, n: int) -> Part | None:
        """The keys of one clause in every row, or None where it is of another form."""
        low, high = np.zeros(n, np.int64), np.full(n, int(env.names["k_len"]) - 1)
        for e in ordered(c.lower):
            low = np.maximum(low, self._value(e, env, n))
        for e in ordered(c.upper):
            high = np.minimum(high, self._value(e, env, n))
        ok = np.ones(n, bool)
        for e in ordered(c.conditions):
            ok &= self._value(e, env, n).astype(bool)
        found: Residue | None = None
        for e in ordered(c.opaque):
            around = key_residue(e)
            if around is None:
                return None
            period, shift, r1, r2, valid = (self._value(x, env, n) for x in around)
            ok &= valid.astype(bool)
            found = _both(found, (period, shift, r1, r2))
            if found is None:
                return None
        return low, np.where(ok, high, low - 1), found

    def _by_grid(self, env: Env, rows: Array, shift: int) -> Array | None:
        """Every pair, some rows at a time."""
        m = int(env.names["k_len"])
        mask = conjunction(self.spec.masks)
        if int(env.names["q_len"]) * m > GRID or mask is None:
            return None
        counts = []
        for at in np.array_split(rows, max(1, len(rows) * m // 2**20)):
            here = env.plus(row=at[:, None], q=at[:, None] + shift, k=np.arange(m)[None, :])
            counts.append(np.broadcast_to(np.asarray(evaluate(mask, here), bool), (len(at), m)).sum(1))
        return np.concatenate(counts)


def key_residue(e: Term) -> tuple[Term, Term, Term, Term, Term] | None:
    """n, z, r1, r2, valid where the atom says valid and r1 <= (k + z) % n <= r2."""
    home = e.home
    split = residue(home.node("eq0", e.args) if e.op == "ne0" else e, lambda t: "k" in t.free)
    if split is None:
        return None
    x, n, r1, r2 = split
    valid = r1.le(r2) & r1.ge(0) & r2.lt(n)
    k = home.var("k")
    factor = x.affine[0].get(k, 0)
    z = x - factor * k
    if abs(factor) != 1 or "k" in z.free or "k" in n.free:
        return None
    if factor < 0:  # (z - k) % n in [r1, r2] is (k - z + r2) % n in [0, r2 - r1]
        z, r1, r2 = r2 - z, home.const(0), r2 - r1
    if e.op != "ne0":
        return n, z, r1, r2, valid
    # != r is (k + z - r - 1) % n in [0, n - 2]; what no remainder equals holds for every key: n = 1
    n = home.where(valid, n, 1)
    return n, z - r1 - 1, home.const(0), home.where(valid, n - 2, 0), home.true


def _both(a: Residue | None, b: Residue | None) -> Residue | None:
    """The keys in both; None where the circles differ."""
    if a is None or b is None:
        return a if b is None else b
    if (a[0] != b[0]).any() or ((a[1] - b[1]) % a[0]).any():
        return None
    return a[0], a[1], np.maximum(a[2], b[2]), np.minimum(a[3], b[3])


def _union(parts: list[Part], n: int) -> Array | None:
    """Keys in at least one part, row by row, by inclusion and exclusion."""
    total = np.zeros(n, np.int64)
    for size in range(1, len(parts) + 1):
        for chosen in combinations(parts, size):
            low = np.maximum.reduce([p[0] for p in chosen])
            high = np.minimum.reduce([p[1] for p in chosen])
            around: Residue | None = None
            for _, _, r in chosen:
                if r is not None:
                    around = _both(around, r)
                    if around is None:
                        return None
            total += (1 if size % 2 else -1) * _size(low, high, around)
    return total


def _size(low: Array, high: Array, around: Residue | None) -> Array:
    if around is None:
        return np.asarray(np.maximum(0, high - low + 1))
    n, z, r1, r2 = around
    inside = _up_to(high + z, n, r1, r2) - _up_to(low - 1 + z, n, r1, r2)
    return np.asarray(np.where(high >= low, inside, 0))


def _up_to(y: Array, n: Array, r1: Array, r2: Array) -> Array:
    """How many t <= y, counted from one fixed origin, have r1 <= t % n <= r2."""
    width = np.maximum(0, r2 - r1 + 1)
    return np.asarray(np.floor_divide(y - r1, n) * width + np.minimum(np.mod(y - r1, n) + 1, width))


# ---- tiles


@dataclass(frozen=True)
class Balance:
    """Visited tiles of the programs of one batch entry and head, taken over all: the slowest against the mean."""

    least: int
    most: int
    mean: float

    @property
    def ratio(self) -> float:
        """1.0 where all programs have the same work."""
        return self.most / self.mean if self.mean else 1.0


@dataclass(frozen=True)
class TileCounts:
    """Summed over batch and heads. Full tiles evaluate no mask; skipped ones are not read at all, or ruled out by the
    tile's test. `drawn` is how many query tiles that was worked out from, None where from all."""

    skipped: int
    partial: int
    full: int
    balance: Balance
    drawn: int | None = None


def tile_counts(
    spec: AttentionSpec, shape: Shape, tile_q: int, tile_k: int, values: Mapping[str, Value],
    found: Visits | None = None,
) -> dict[str, int] | None:  # fmt: skip
    """Tiles {skipped, partial, full}, as visited_tiles has them."""
    made = visited_tiles(spec, shape, tile_q, tile_k, values, found)
    return None if made is None else {"skipped": made.skipped, "partial": made.partial, "full": made.full}


def visited_tiles(
    spec: AttentionSpec, shape: Shape, tile_q: int, tile_k: int, values: Mapping[str, Value],
    found: Visits | None = None,
) -> TileCounts | None:  # fmt: skip
    """What the visits `found` (of queries) make of the tiles of a shape; None where a value is missing."""
    plan = found if found is not None else visits(spec, "q")
    if missing(spec, values):
        return None
    every = list(programs(spec, shape, values))
    n, m = -(-shape.q_len // tile_q), -(-shape.k_len // tile_k)
    tested = plan.may is not None or plan.must is not None
    at = drawn(n, len(every), TESTED // m, TESTED // m) if tested else drawn(n, len(every), ROWS)
    seen, partial, full = len(at), 0, 0
    least, most, work, heads = n * m, 0, 0, 0
    for env, times in every:
        some, whole = _tiles(plan, spec, env, tile_q, tile_k, at)
        partial, full = partial + times * int(some.sum()), full + times * int(whole.sum())
        least, most = min(least, int((some + whole).min())), max(most, int((some + whole).max()))
        work, heads = work + times * int((some + whole).sum()), heads + times
    partial, full = partial * n // seen, full * n // seen
    even = Balance(least, most, work / (seen * heads))
    return TileCounts(heads * n * m - partial - full, partial, full, even, None if seen == n else seen * len(every))


def _tiles(plan: Visits, spec: AttentionSpec, env: Env, tile_q: int, tile_k: int, tiles: Array) -> tuple[Array, Array]:
    """Partial and full key tiles of each of these query tiles."""
    called = tile_names(taken(spec))
    q_len, k_len = int(env.names["q_len"]), int(env.names["k_len"])
    m = -(-k_len // tile_k)
    env = tables(plan, spec, env.plus(**{called["TILE_Q"]: tile_q, called["TILE_K"]: tile_k}))
    tested = plan.may is not None or plan.must is not None
    found = []
    for at in _slices(tiles, max(1, 2**18 // m) if tested else SLICE):
        first = at[:, None] * tile_q
        outer = {"tile": at[:, None], "first": first, "last": np.minimum(first + tile_q, q_len) - 1}
        here = env.plus(**{called[k]: v for k, v in outer.items()})
        for name, value in plan.lets:
            here = here.plus(**{name: evaluate(value, here)})
        found.append(_classes(plan, here, called, len(at), m, tile_k, k_len))
    partial, full = zip(*found, strict=True)
    return np.concatenate(partial), np.concatenate(full)


def _classes(
    plan: Visits, env: Env, called: Mapping[str, str], n: int, m: int, tile_k: int, k_len: int
) -> tuple[Array, Array]:
    if plan.may is None and plan.must is None:
        return _sizes(plan.masked, env, n), _sizes(plan.full, env, n)
    tile = np.arange(m)[None, :]
    masked = np.zeros((n, m), bool)
    for s in plan.masked:
        masked |= (tile >= evaluate(s.begin, env)) & (tile < evaluate(s.end, env))
    inner = {"inner_tile": tile, "inner_first": tile * tile_k, "inner_last": np.minimum((tile + 1) * tile_k, k_len) - 1}
    here = env.plus(**{called[k]: v for k, v in inner.items()})
    if plan.may is not None:
        masked &= np.asarray(evaluate(plan.may, here), bool)
    full = masked & np.asarray(evaluate(plan.must, here), bool) if plan.must is not None else np.zeros_like(masked)
    return np.asarray((masked & ~full).sum(1)), np.asarray(_sizes(plan.full, env, n) + full.sum(1))


def _sizes(segments: Sequence[Segment], env: Env, n: int) -> Array:
    """Tiles in the segments of each of n query tiles."""
    total = np.zeros(n, np.int64)
    for s in segments:
        size = np.maximum(np.asarray(evaluate(s.end, env)) - evaluate(s.begin, env), 0)
        total += np.broadcast_to(size, (n, 1))[:, 0]
    return total
