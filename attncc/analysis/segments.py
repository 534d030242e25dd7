"""Ranges of inner tiles joined, split and bounded in number, by min and max alone.

Coverage at x is #{begins <= x} - #{ends <= x}: it depends only on the two multisets. So sorting begins and ends apart
keeps a union (and a difference) while no pair has to be moved together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from attncc.analysis.terms import Term

Ranges = list[tuple[Term, Term]]  # [begin, end)


def sort(values: Sequence[Term]) -> list[Term]:
    """Batcher's odd-even merge network, for any number of values."""
    xs = list(values)
    n = len(xs)
    p = 1
    while p < n:
        k = p
        while k >= 1:
            for j in range(k % p, n - k, 2 * k):
                for i in range(min(k, n - j - k)):
                    if (i + j) // (2 * p) == (i + j + k) // (2 * p):
                        a, b = xs[i + j], xs[i + j + k]
                        xs[i + j], xs[i + j + k] = a.home.least(a, b), a.home.most(a, b)
            k //= 2
        p *= 2
    return xs


def union(ranges: Ranges) -> Ranges:
    """The same tiles in order, each once. Empty ranges are [0, 0)."""
    begins, ends = sort([a for a, _ in ranges]), sort([b for _, b in ranges])
    return [(a if i == 0 else a.home.most(a, ends[i - 1]), b) for i, (a, b) in enumerate(zip(begins, ends))]


def fuse(ranges: Ranges) -> Ranges:
    """In order; where one begins within or just behind another both share a begin, so that rounding splits none."""
    begins, ends = sort([a for a, _ in ranges]), sort([b for _, b in ranges])
    shared = begins[:1]
    for i in range(1, len(begins)):
        shared.append(begins[i].home.where(begins[i].le(ends[i - 1]), shared[i - 1], begins[i]))
    return list(zip(shared, ends))


def subtract(may: Ranges, full: Ranges) -> Ranges:
    """may without full; both in order and disjoint, full inside may (or empty)."""
    begins = sort([a for a, _ in may] + [b for _, b in full])
    ends = sort([b for _, b in may] + [a for a, _ in full])
    return list(zip(begins, ends))


def longest(ranges: Ranges, n: int) -> Ranges:
    """The n longest."""
    if len(ranges) <= n:
        return ranges
    home = ranges[0][0].home
    zero = home.const(0)
    best = [(zero, zero, zero)] * n
    for a, b in ranges:
        new = (b - a, a, b)
        for i in range(n):
            wins = best[i][0].lt(new[0])
            kept = best[i]
            best[i] = tuple(home.where(wins, x, y) for x, y in zip(new, kept))  # type: ignore[assignment]
            new = tuple(home.where(wins, y, x) for x, y in zip(new, kept))  # type: ignore[assignment]
    return [(a, b) for _, a, b in best]


def cover(ranges: Ranges, most: Term) -> tuple[Term, Term]:
    """One range around all; `most` is at least every end. Empty ones are [0, 0), here and there."""
    home = most.home
    end = home.most(*(b for _, b in ranges))
    return home.least(end, *(home.where(a.lt(b), a, most) for a, b in ranges)), end


def hull(ranges: Ranges, n: int, most: Term) -> tuple[Ranges, bool]:
    """At most n (1 or 2) ranges that cover all, split at the widest gap, and whether that took in more.

    Ranges in order and disjoint, empty ones [0, 0) and so in front; `most` is at least every end.
    """
    if len(ranges) <= n:
        return ranges, False
    home = most.home
    last = ranges[-1][1]
    first, _ = cover(ranges, most)
    if n == 1:
        return [(first, last)], True
    widest, left, right = home.const(0), first, first
    for (_, b), (c, d) in pairwise(ranges):
        gap = home.where(b.ge(1) & c.lt(d), c - b, 0)
        wins = widest.lt(gap)
        widest, left, right = home.most(gap, widest), home.where(wins, b, left), home.where(wins, c, right)
    return [(first, left), (right, last)], True
