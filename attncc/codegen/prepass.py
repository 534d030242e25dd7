"""The kernels that make the tables of a mask's tensors, as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attncc.codegen import launch
from attncc.codegen.loops import LOCAL, local_names
from attncc.codegen.lower import Lowering
from attncc.codegen.printer import BIT_AND
from attncc.codegen.signature import Argument, table_arguments
from attncc.codegen.tables import Tables
from attncc.ir import Visits

NUMBERS = "torch.int16 if max({}, {}) < 32768 else torch.int32"  # the type of those of tiles
SIDES = {"q": ("row", "row < q_len"), "k": ("key", "k < k_len")}  # of a side: its level, what lies inside its length


@dataclass(frozen=True)
class Scan:
    """One condition, and what of it is stored where: (place, first | stop | run)."""

    value: str
    stores: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Listing:
    """Which tiles go on a list, and which of these are whole: conditions for one lane, empty where they always hold."""

    lines: tuple[str, ...]  # before the loop over tiles
    place: str
    size: str
    may: str
    must: str


@dataclass(frozen=True)
class TablesView:
    """Finished values for templates/triton/tables.jinja and the launcher."""

    outer: str  # the side whose tiles the kernel owns, q or k; the other one is `inner`
    inner: str
    first: str  # what the first and the last position of its own tile are called
    last: str
    signature: tuple[str, ...]
    jit_options: tuple[str, ...]
    launch: tuple[str, ...]
    program: str
    programs: str
    unpack: str
    blocks: tuple[tuple[str, str], ...]  # what is made, and the elements for one batch entry and head
    counts: tuple[str, str]  # the launcher's numbers of tiles in a block, inner and outer
    dtypes: dict[str, str]
    lines: tuple[str, ...]
    stores: tuple[tuple[str, str], ...]
    row_lines: tuple[str, ...]
    scan_lines: tuple[str, ...]
    scans: tuple[Scan, ...]
    listing: Listing | None
    ranked: bool  # where tiles are counted, and make no list


def tables_view(
    visits: Visits, tables: Tables, args: Sequence[Argument], names: dict[str, str], int_bits: int,
    fresh: Callable[[], Lowering],
) -> TablesView:  # fmt: skip
    """`fresh` starts a lowering: each of the two kernels has statements of its own."""
    inner, outer = fresh(), fresh()
    other, (own_level, _) = "k" if tables.outer == "q" else "q", SIDES[tables.outer]
    inner_level, inside = SIDES[other]
    stores = tuple((tables.place(s), inner.reduced(s, inside)) for s in tables.reduced)
    outer.names |= local_names(outer.spec, tables.outer)
    scans = tuple(
        Scan(outer.text(value, BIT_AND), tuple((tables.place(s), s.reduce) for s in tables.scanned if s.value == value))
        for value in tables.held
    )
    listing = _listing(visits, tables, outer) if tables.listed or tables.ranked else None
    used = table_arguments(tuple(args))
    own = LOCAL[tables.outer]
    return TablesView(
        outer=tables.outer, inner=other, first=own["first"], last=own["last"],
        signature=launch.signature_lines(used), jit_options=launch.jit_options(used),
        launch=launch.launch_lines(used, names), program=tables.program, programs=tables.programs, unpack=tables.unpack,
        blocks=tables.blocks, counts=tables.counts, stores=stores,
        dtypes={"Tables": f"torch.int{int_bits}", "Scans": NUMBERS.format(*tables.counts), "Ranked": "torch.int32"},
        lines=(*inner.take("program"), *inner.take(inner_level)),
        row_lines=outer.take(own_level), scan_lines=outer.take("program"), scans=scans,
        listing=listing, ranked=tables.ranked,
    )  # fmt: skip


def _listing(visits: Visits, tables: Tables, lowering: Lowering) -> Listing:
    """The tests of one tile, after the scalars of the tile that owns the list."""
    scanning = lowering.take("program")
    lines: list[str] = []
    for name, value in visits.lets:
        text = lowering.text(value)
        lowering.names[name] = lowering.fresh.fresh(name)
        lines += (*lowering.take("program"), f"{lowering.names[name]} = {text}")
    may = lowering.text(visits.may, BIT_AND) if visits.may is not None else ""
    must = lowering.text(visits.must, BIT_AND) if visits.must is not None and not tables.ranked else ""
    lowering.lines["program"] = [*scanning, *lowering.lines["program"]]
    return Listing(tuple(lines), tables.list_place, tables.list_size, may, must)
