"""Which tiles of the inner axis a tile of the outer axis visits: data, printed by every template.

The expressions are scalars over: the run-time scalars and free axes of the spec, lengths, b, h, h_kv, the tile's
first and last position on the outer axis and its tile number (`first`, `last`, `tile`), the tile sizes (`TILE_Q`,
`TILE_K`), names bound in `lets`, and Reads of summaries and of sorted tensors. Where a parameter or a free axis of the
spec has one of these names, the tile's gets a leading underscore (`_first`), which no spec can use: see `tile_names`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from attncc.ir.expr import Expr

TILE_NAMES = ("first", "last", "tile", "inner_first", "inner_last", "inner_tile", "TILE_Q", "TILE_K")


def tile_names(taken: Collection[str]) -> dict[str, str]:
    """How each of TILE_NAMES is called in the visits of a spec whose parameters and free axes are `taken`."""
    return {name: "_" + name if name in taken else name for name in TILE_NAMES}


@dataclass(frozen=True)
class Segment:
    """Tiles begin <= t < end of the inner axis; empty where end <= begin."""

    begin: Expr
    end: Expr


@dataclass(frozen=True)
class Summary:
    """A table made before the kernel, in tiles of the plan's own size: `name[b, h, t]` for tile t of `axis`.

    min, max: of the int `value` over the positions of the tile that are inside the length (`row` and `q`, or `k`).
    first, stop, run: of the inner tiles (of the other axis) for which the bool `value` holds: the least number (how
    many there are where none holds), the greatest plus 1 (0 where none), how many if they lie side by side (else 0).
    There `value` is over the same names as `may`, and may read summaries that stand before this one. `over` says which
    of b, h, h_kv the value depends on; others are not stored.
    """

    name: str
    axis: str  # q | k
    reduce: str  # min | max | first | stop | run
    value: Expr
    over: tuple[str, ...] = ()


@dataclass(frozen=True)
class Visits:
    """For one tile of the outer axis: the inner tiles to visit, each once, in two disjoint classes.

    `masked` tiles must evaluate the mask; `full` tiles hold only pairs that the mask keeps, and lie wholly inside the
    inner length. `may` and `must` refine masked tiles at run time: where `may` is false the tile holds nothing, where
    `must` is true it is full. They are over the outer tile and over the inner tile's number `inner_tile`, its
    `inner_first` and its `inner_last` (clipped to the length). Where tiles are `listed`, a kernel before this one has
    written down which of them may hold something, those that `must` is true of apart. Of the masked tiles right behind
    the last full ones, those before `plain_end` keep all that the mask reads of tensors: `plain`, the rest of its
    conjuncts, decides there.
    """

    outer: str  # q | k
    lets: tuple[tuple[str, Expr], ...] = ()
    masked: tuple[Segment, ...] = ()
    full: tuple[Segment, ...] = ()
    may: Expr | None = None
    must: Expr | None = None
    summaries: tuple[Summary, ...] = ()
    opaque: tuple[str, ...] = ()  # parts of the mask that no range could be derived from, in words
    empty_rows: bool = True  # False where every row is proved to see a key
    listed: bool = False
    plain_end: Expr | None = None
    plain: tuple[Expr, ...] = ()
