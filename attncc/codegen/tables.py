"""Summaries of tensors: which of them stand in a table made before the kernel, where, and how that table is made.

The least and greatest of a tile's own rows are worked out where they are read, by whoever has those rows. Tables hold
those of the other side's tiles (one kernel, a program for each), and what a scan over pairs of tiles finds (a second):
where something holds, or a list of the tiles that hold something. Where programs draw tiles of rows, a rank of these by
how much they see may come after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attncc.ir import MOST_INT, Const, Expr, Summary, Visits, names

SCANS = ("first", "stop", "run")
LARGEST = {32: 2**31 - 1, 64: MOST_INT}


@dataclass(frozen=True)
class Tables:
    """The tables of one kernel. `Tables` holds what is `reduced` over tiles of the inner axis and the lists; `Scans`
    what is `scanned` for tiles of the outer one, which are numbers of tiles and mostly fit 16 bits; `Ranked` the tiles
    of the outer one, those that see most first, and behind them how many tiles each sees."""

    outer: str  # q | k
    reduced: tuple[Summary, ...]
    scanned: tuple[Summary, ...]
    own: Mapping[str, Summary]  # of a tile's own side: no table
    over: tuple[str, ...]  # b, h: what any of them depends on; the slots of packed sequences tell these apart
    kv_heads: bool  # some do on h_kv
    listed: bool = False  # a list for each tile of the outer side: whole tiles from its front, masked ones from its end
    ranked: bool = False  # tiles of rows are drawn by how much they see
    ragged: bool = False  # the tiles of all sequences, in slots, take the place of those of one batch entry

    def __bool__(self) -> bool:
        return bool(self.reduced or self.scanned or self.listed or self.ranked)

    @property
    def program(self) -> str:
        """Which block of tables is that of batch entry b and head h; empty where there is one."""
        return {("b", "h"): "(b * h_len + h)", ("b",): "b", ("h",): "h"}.get(self.over, "")

    @property
    def programs(self) -> str:
        """How many blocks there are."""
        return " * ".join(f"{axis}_len" for axis in self.over) or "1"

    @property
    def unpack(self) -> str:
        """The batch entry and head of a block; of packed sequences, the head."""
        if self.ragged:
            return f"h = {'slab' if self.over else '0'}" + ("\n    h_kv = h // group" if self.kv_heads else "")
        forms = {("b", "h"): "slab // h_len, slab % h_len", ("b",): "slab, 0", ("h",): "0, slab"}
        return f"b, h = {forms.get(self.over, '0, 0')}" + ("\n    h_kv = h // group" if self.kv_heads else "")

    @property
    def counts(self) -> tuple[str, str]:
        """The numbers of tiles in a block, on the inner and the outer side."""
        q, k = ("q_slots", "k_slots") if self.ragged else ("q_tiles", "k_tiles")
        return (k, q) if self.outer == "q" else (q, k)

    def first(self, axis: str) -> str:
        """Where the tiles of a packed sequence begin among those of all."""
        return f"{axis}_slot" if self.ragged else ""

    @property
    def blocks(self) -> tuple[tuple[str, str], ...]:
        """What is made, and the elements in a block of it, by the numbers of tiles on both sides."""
        inner, outer = self.counts
        reduced = [f"{len(self.reduced)} * {inner}"] if self.reduced else []
        lists = [f"{self.list_size} * {outer}"] if self.listed else []
        tables = (("Tables", " + ".join([*reduced, *lists])),) if reduced or lists else ()
        scans = (("Scans", f"{len(self.scanned)} * {outer}"),) if self.scanned else ()
        return (*tables, *scans, *((("Ranked", f"2 * {outer}"),) if self.ranked else ()))

    @property
    def made(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.blocks)

    @property
    def list_size(self) -> str:
        """Elements of a list: a place for each tile of the inner side, and how many stand at its front and its end."""
        return f"({'k_tiles' if self.outer == 'q' else 'q_tiles'} + 2)"

    @property
    def list_place(self) -> str:
        """Where the lists begin in a block."""
        return _times(len(self.reduced), "k_tiles" if self.outer == "q" else "q_tiles")

    def place(self, summary: Summary) -> str:
        """Where a summary's table begins in its block."""
        inner, outer = self.counts
        if summary in self.reduced:
            return _times(self.reduced.index(summary), inner)
        return _times(self.scanned.index(summary), outer)

    @property
    def held(self) -> tuple[Expr, ...]:
        """The distinct conditions that the scan evaluates."""
        return tuple(dict.fromkeys(s.value for s in self.scanned))


def _times(count: int, unit: str) -> str:
    return "" if count == 0 else unit if count == 1 else f"{count} * {unit}"


def uneven(visits: Visits) -> bool:
    """Whether it is what a tile of rows itself reads that says how many of all tiles of keys it sees: some may see
    every one, wherever they stand, and others few."""
    ends = {n for s in (*visits.full, *visits.masked) for e in (s.begin, s.end) for n in names(e)}
    everywhere = all(s.begin == Const(0) for s in visits.masked) and not ends & {name for name, _ in visits.lets}
    own = any(s.axis == "q" for s in visits.summaries)
    return visits.outer == "q" and visits.may is not None and not visits.listed and everywhere and own


def tables_of(visits: Visits, ragged: bool = False, draws: bool = False) -> Tables:
    """`draws`: programs draw tiles of rows one after another, so that these can come in any order."""
    inner = "k" if visits.outer == "q" else "q"
    reduced = tuple(s for s in visits.summaries if s.axis == inner and s.reduce not in SCANS)
    scanned = tuple(s for s in visits.summaries if s.reduce in SCANS)
    if any(s.axis == inner for s in scanned):
        raise NotImplementedError(f"a scan over tiles of {inner} for an outer side {visits.outer}")
    own = {s.name: s for s in visits.summaries if s.axis == visits.outer and s.reduce not in SCANS}
    used = {axis for s in (*reduced, *scanned) for axis in s.over}
    ranked = draws and uneven(visits)
    if visits.listed or ranked:
        tests = (e for e in (visits.may, visits.must, *(e for _, e in visits.lets)) if e is not None)
        used |= {n for e in tests for n in names(e)} | {axis for s in visits.summaries for axis in s.over}
    over = tuple(a for a in ("b", "h") if (a in used or (a == "h" and "h_kv" in used)) and not (ragged and a == "b"))
    return Tables(visits.outer, reduced, scanned, own, over, "h_kv" in used, visits.listed, ranked, ragged)
