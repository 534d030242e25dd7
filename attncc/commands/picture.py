"""The picture of a mask with its tile grid: counted once, drawn for the terminal or as a PNG."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np

from attncc.errors import EnvironmentFault
from attncc.pipeline import RequestError

Array = np.ndarray[Any, Any]
Keep = Callable[[Array, Array], Array]  # rows [R], keys [C] -> bool [R, C]

SKIPPED, PARTIAL, FULL = 0, 1, 2
BLOCK = 1 << 21  # pairs evaluated at once
MOST = 1 << 28  # pairs that a picture may hold
LOOKS = {"skipped": " ", "full": "█", "none": "·", "some": "▒", "all": "▓", "row": "─", "column": "│", "cross": "┼"}
ASCII_LOOKS = {
    "skipped": " ",
    "full": "#",
    "none": ".",
    "some": "+",
    "all": "o",
    "row": "-",
    "column": "|",
    "cross": "+",
}
COLORS = {"full": "green", "some": "yellow", "all": "yellow"} | dict.fromkeys(
    ("none", "row", "column", "cross"), "bright_black"
)


@dataclass(frozen=True)
class Window:
    """Positions begin <= x < end on an axis of `length`, in tiles of `tile` and cells of `cell`, counted from 0."""

    begin: int
    end: int
    length: int
    tile: int
    cell: int

    @property
    def whole(self) -> tuple[int, int]:
        """The positions of all tiles and cells that the window touches, clipped to the axis."""
        step = max(self.tile, self.cell)
        return self.begin // step * step, min(self.length, -(-self.end // step) * step)

    def starts(self, step: int) -> Array:
        """The first positions of the steps in `whole`."""
        low, high = self.whole
        return np.arange(low, high, step)

    def sizes(self, step: int) -> Array:
        return np.diff(np.append(self.starts(step), self.whole[1]))


@dataclass(frozen=True)
class Survey:
    """Kept pairs in cells [rows, keys] of both windows' `whole`, with the state of the tiles that each cell touches."""

    rows: Window
    keys: Window
    kept: Array  # int64, of each cell
    pairs: Array  # int64, all pairs of each cell
    partial: Array  # bool: a partial tile is touched
    tiles: tuple[int, int, int]  # skipped, partial, full tiles in the windows


def windows(
    rows: tuple[int, int], keys: tuple[int, int], lengths: tuple[int, int], tile: tuple[int, int], room: tuple[int, int]
) -> tuple[Window, Window]:
    """Cells of powers of two so that `room` (lines, columns) holds the ranges. Raises RequestError for too much."""
    if (rows[1] - rows[0]) * (keys[1] - keys[0]) > MOST:
        raise RequestError(
            f"a picture holds at most {MOST:,} pairs: zoom in with --rows and --keys, or give a smaller --shape"
        )
    made = []
    for (begin, end), length, size, space in zip((rows, keys), lengths, tile, room, strict=True):
        cell = 1
        while _drawn(begin, end, cell, size) > max(space, 4):
            cell *= 2
        made.append(Window(begin, end, length, size, cell))
    return made[0], made[1]


def _drawn(begin: int, end: int, cell: int, tile: int) -> int:
    """Characters that a range takes, grid lines with it."""
    cells = -(-end // cell) - begin // cell
    return cells + (-(-end // tile) - begin // tile - 1 if has_grid(cell, tile) else 0)


def has_grid(cell: int, tile: int) -> bool:
    """Lines between tiles are worth their place where a tile has several cells."""
    return tile >= 4 * cell


def survey(keep: Keep, rows: Window, keys: Window) -> Survey:
    """Count, block by block; memory stays small whatever the lengths."""
    fine = min(rows.cell, rows.tile), min(keys.cell, keys.tile)
    kept = _counts(keep, rows, keys, fine)
    pairs = np.multiply.outer(rows.sizes(fine[0]), keys.sizes(fine[1]))
    state = _fold(kept, rows, keys, fine, (rows.tile, keys.tile))
    total = np.multiply.outer(rows.sizes(rows.tile), keys.sizes(keys.tile))
    state = np.where(state == 0, SKIPPED, np.where(state == total, FULL, PARTIAL))
    of_fine = state[np.ix_(_owner(rows, fine[0], rows.tile), _owner(keys, fine[1], keys.tile))]
    cell = rows.cell, keys.cell
    tiles = tuple(int((state == s).sum()) for s in (SKIPPED, PARTIAL, FULL))
    return Survey(
        rows, keys, _fold(kept, rows, keys, fine, cell), _fold(pairs, rows, keys, fine, cell),
        _fold((of_fine == PARTIAL).astype(np.int64), rows, keys, fine, cell) > 0, (tiles[0], tiles[1], tiles[2]),
    )  # fmt: skip


def _counts(keep: Keep, rows: Window, keys: Window, fine: tuple[int, int]) -> Array:
    (low, high), (first, last) = rows.whole, keys.whole
    columns = np.arange(first, last)
    at = keys.starts(fine[1]) - first
    step = max(1, BLOCK // max(1, last - first) // fine[0]) * fine[0]
    parts = []
    for begin in range(low, high, step):
        block = np.arange(begin, min(begin + step, high))
        seen = np.broadcast_to(keep(block, columns), (len(block), len(columns))).astype(np.int64)
        lines = np.add.reduceat(seen, at, axis=1)
        parts.append(np.add.reduceat(lines, np.arange(0, len(block), fine[0]), axis=0))
    return np.concatenate(parts)


def _owner(window: Window, fine: int, coarse: int) -> Array:
    """For each fine step, the number of the coarse step that it lies in."""
    return (window.starts(fine) - window.whole[0]) // coarse


def _fold(values: Array, rows: Window, keys: Window, fine: tuple[int, int], coarse: tuple[int, int]) -> Array:
    """Sums over the fine steps of each coarse step."""
    for axis, (window, a, b) in enumerate(((rows, fine[0], coarse[0]), (keys, fine[1], coarse[1]))):
        if a != b:
            at = np.searchsorted(window.starts(a), window.starts(b))
            values = np.add.reduceat(values, at, axis=axis)
    return values


Piece = tuple[str, str]  # a character and the name of its look


def draw(found: Survey, looks: dict[str, str] = LOOKS) -> list[str]:
    """Lines of text: key numbers on top, row numbers at the left, a character for each cell, coloured."""
    down, across = _marks(found.rows), _marks(found.keys)
    margin = len(str(max(found.rows.end - 1, 0)))
    lines = [" " * (margin + 1) + _ruler(across, found.keys)]
    for i, row in down:
        pieces = [_piece(found, i, j, looks) for j, _ in across]
        label = str(row) if row is not None else ""
        lines.append(label.rjust(margin) + " " + _colored(pieces))
    return lines


def _marks(window: Window) -> list[tuple[int | None, int | None]]:
    """What an axis shows, in order: (number of a cell, its label where it has one), or (None, None) for a grid line."""
    marks: list[tuple[int | None, int | None]] = []
    labelled = window.tile if window.tile > window.cell else 4 * window.cell
    for i, start in enumerate(map(int, window.starts(window.cell))):
        if start + window.cell <= window.begin or start >= window.end:
            continue  # only in `whole`
        if marks and has_grid(window.cell, window.tile) and start % window.tile == 0:
            marks.append((None, None))
        marks.append((i, max(start, window.begin) if not marks or start % labelled == 0 else None))
    return marks


def _piece(found: Survey, i: int | None, j: int | None, looks: dict[str, str]) -> Piece:
    if i is None or j is None:
        name = "cross" if i is j else "row" if i is None else "column"
        return looks[name], name
    kept, pairs = int(found.kept[i, j]), int(found.pairs[i, j])
    if found.partial[i, j]:
        name = "none" if kept == 0 else "all" if kept == pairs else "some"
    else:
        name = "skipped" if kept == 0 else "full" if kept == pairs else "some"
    return looks[name], name


def _colored(pieces: list[Piece]) -> str:
    """Characters of one colour in a row share one escape sequence."""
    runs = groupby(pieces, key=lambda p: COLORS.get(p[1]))
    return "".join(
        click.style(text, fg=c) if c else text for c, text in ((c, "".join(t for t, _ in r)) for c, r in runs)
    )


def _ruler(across: list[tuple[int | None, int | None]], keys: Window) -> str:
    """Key numbers over the cells that they name, evenly spaced, as many as have room."""
    places = [(at, str(label)) for at, (_, label) in enumerate(across) if label is not None]
    longest = max(len(text) for _, text in places) + 2
    every = 1
    while any(b - a < longest for (a, _), (b, _) in pairwise(places[1::every])):
        every *= 2
    line = ""
    for at, text in (places[0], *places[every if every > 1 else 1 :: every]):
        if at >= len(line) + (2 if line else 0) and at + len(text) <= max(len(across), len(text)):
            line = line.ljust(at) + text
    return line


def save_png(found: Survey, path: Path, title: str) -> None:
    """Write the picture as a PNG. Raises EnvironmentFault without matplotlib or where the file cannot be written."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
        from matplotlib.colors import ListedColormap
    except ImportError:
        raise EnvironmentFault("--png needs matplotlib: pip install 'attncc[plot]'") from None
    share = found.kept / np.maximum(found.pairs, 1)
    shade = np.where(found.partial, 1 + np.rint(share * 8), np.where(share == 1, 11, np.where(share == 0, 0, 10)))
    ramp = [pyplot.get_cmap("Oranges")(0.08 + 0.07 * i) for i in range(9)]
    colors = ListedColormap([(1, 1, 1, 1), *ramp, (0.6, 0.75, 0.6, 1), (0.15, 0.5, 0.3, 1)])
    (low, high), (first, last) = found.rows.whole, found.keys.whole
    figure, axes = pyplot.subplots(figsize=(8, 8), dpi=150, layout="constrained")
    axes.imshow(
        shade, cmap=colors, vmin=0, vmax=11, extent=(first, last, high, low), interpolation="nearest", aspect="auto"
    )
    for lines, window in ((axes.axhline, found.rows), (axes.axvline, found.keys)):
        starts = window.starts(window.tile)
        if len(starts) <= 160:
            for start in starts[1:]:
                lines(start, color="0.75", linewidth=0.4)
    xlim, ylim = (found.keys.begin, found.keys.end), (found.rows.end, found.rows.begin)
    axes.set(xlim=xlim, ylim=ylim, xlabel="key", ylabel="row")
    axes.set_title(textwrap.fill(title, 80), fontsize="medium")
    figure.supxlabel(
        "green: full tiles; orange: partial tiles, the darker the more is kept; white: skipped", fontsize="small"
    )
    try:
        figure.savefig(path, format="png", metadata={"Software": None})
    except OSError as fault:
        raise EnvironmentFault(f"{path} cannot be written: {fault.strerror}") from None
    finally:
        pyplot.close(figure)
