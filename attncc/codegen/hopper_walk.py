"""The tiles that a producer of the warp-specialised backward pass walks over, and the tables that it reads there."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from attncc.codegen.hopper import Steps, steps
from attncc.codegen.loops import VisitsView, visits_view
from attncc.codegen.lower import Lowering
from attncc.codegen.prepass import TablesView, tables_view
from attncc.codegen.signature import Argument
from attncc.codegen.tables import Tables, tables_of
from attncc.ir import AttentionSpec, KernelPlan, PassPlan, Visits


@dataclass(frozen=True)
class Walk:
    """`lines` come first, then those that read the tile's own positions; the fields from `kernel` on are for the
    kernels before this one, which make its tables."""

    outer: str
    lines: tuple[str, ...]
    own_lines: tuple[str, ...]
    reads_h: bool
    visits: VisitsView
    masked: Steps | None
    full: Steps | None
    turns: bool  # each program begins at rows of its own: all see all rows
    places: Mapping[str, int]  # of tables among the kernel's arguments
    kernel: str
    tables: TablesView | None
    tile_q: int
    tile_k: int
    align: str
    seq: str
    position_open: str
    position_close: str


def walk(
    spec: AttentionSpec, visits: Visits, plan: KernelPlan, own: PassPlan, kernel: str,
    arguments: Callable[[KernelPlan], tuple[Argument, ...]], names: Mapping[str, str],
    lower: Callable[[Tables, str], Lowering], helpers: set[str],
) -> tuple[Walk, tuple[Argument, ...]]:  # fmt: skip
    """For the kernel of this schedule, and its arguments; `helpers` are joined by what expressions call."""
    tables = tables_of(visits)
    args = arguments(replace(plan, tables=tables.made))
    fresh = partial(lower, tables, "tl")
    made = tables_view(visits, tables, args, dict(names), plan.int_bits, fresh) if tables else None
    lowering = lower(tables, "gl")
    seen = visits_view(visits, lowering)
    lines, own_lines = lowering.take("program"), lowering.take("row" if visits.outer == "q" else "key")
    helpers |= lowering.printer.helpers
    read = (*lines, *own_lines, *seen.lines, *(seen.tested.lines if seen.tested else ()), made.program if made else "")
    return Walk(
        outer=visits.outer, lines=lines, own_lines=own_lines, reads_h=reads_h(read), visits=seen,
        masked=steps(seen.masked, seen.jumps), full=steps(seen.full, seen.jumps),
        turns=not spec.masks and visits.outer == "k", places={a.name: i for i, a in enumerate(args)}, kernel=kernel,
        tables=made, tile_q=own.tile_q, tile_k=own.tile_k, align=spec.align, seq="fixed", position_open="",
        position_close="",
    ), args  # fmt: skip


def reads_h(lines: Sequence[str]) -> bool:
    """Whether they read the number of the head."""
    return any(re.search(r"\bh\b", line) for line in lines)
