"""The kernels that make the tables of a mask's tensors, as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attncc.codegen import launch
from attncc.codegen.loops import local_names
from attncc.codegen.lower import Lowering
from attncc.codegen.printer import BIT_AND
from attncc.codegen.signature import Argument, table_arguments
from attncc.codegen.tables import Tables


@dataclass(frozen=True)
class Scan:
    """One condition, and what of it is stored where: (place, first | stop | count)."""

    value: str
    stores: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class TablesView:
    """Finished values for templates/triton/tables.jinja and the launcher."""

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
    keys, rows = fresh(), fresh()
    stores = tuple((tables.place(s), keys.reduced(s, "k < k_len")) for s in tables.reduced)
    rows.names |= local_names(rows.spec)
    scans = tuple(
        Scan(rows.text(value, BIT_AND), tuple((tables.place(s), s.reduce) for s in tables.scanned if s.value == value))
        for value in tables.held
    )
    used = table_arguments(tuple(args))
    return TablesView(
        signature=launch.signature_lines(used), jit_options=launch.jit_options(used),
        launch=launch.launch_lines(used, names), program=tables.program, programs=tables.programs, unpack=tables.unpack,
        block=tables.block, dtype=f"torch.int{int_bits}", stores=stores,
        lines=(*keys.take("program"), *keys.take("key")),
        row_lines=rows.take("row"), scan_lines=rows.take("program"), scans=scans,
    )  # fmt: skip
