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

SIDES = {"q": ("row", "row < q_len"), "k": ("key", "k < k_len")}  # of a side: its level, what lies inside its length


@dataclass(frozen=True)
class Scan:
    """One condition, and what of it is stored where: (place, first | stop | run)."""

    value: str
    stores: tuple[tuple[str, str], ...]


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
    block: str
    dtype: str
    lines: tuple[str, ...]
    stores: tuple[tuple[str, str], ...]
    row_lines: tuple[str, ...]
    scan_lines: tuple[str, ...]
    scans: tuple[Scan, ...]


def tables_view(
    tables: Tables, args: Sequence[Argument], names: dict[str, str], int_bits: int, fresh: Callable[[], Lowering]
) -> TablesView:
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
    used = table_arguments(tuple(args))
    own = LOCAL[tables.outer]
    return TablesView(
        outer=tables.outer, inner=other, first=own["first"], last=own["last"],
        signature=launch.signature_lines(used), jit_options=launch.jit_options(used),
        launch=launch.launch_lines(used, names), program=tables.program, programs=tables.programs, unpack=tables.unpack,
        block=tables.block, dtype=f"torch.int{int_bits}", stores=stores,
        lines=(*inner.take("program"), *inner.take(inner_level)),
        row_lines=outer.take(own_level), scan_lines=outer.take("program"), scans=scans,
    )  # fmt: skip
