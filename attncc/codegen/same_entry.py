"""Scores of the forward pass that read tensors at a clamped distance: a tile whose pairs all read the same entry takes
one number where others gather one for each pair. Whether it is one follows from its corners; see analysis.same_entry.
"""

from __future__ import annotations

from dataclasses import dataclass

from attncc.analysis import same_entry
from attncc.codegen.loops import local_names
from attncc.codegen.lower import Lowering
from attncc.codegen.passes import fold
from attncc.codegen.printer import BIT_AND
from attncc.ir import Expr, Op, Var, rewrite

HERE = {"inner_first": "tile_first", "inner_last": "tile_last"}  # what the template calls the tile's own keys


@dataclass(frozen=True)
class SameView:
    """`before`, for every tile; whether its pairs read the same entries; what such a tile reads, and what others do."""

    before: tuple[str, ...]
    test: str
    one: tuple[str, ...]
    many: tuple[str, ...]


def same_view(lowering: Lowering) -> SameView | None:
    """Taken before the scores themselves, which then have the reads and the lets at hand; None where no tile is one."""
    spec, kept = lowering.spec, dict(lowering.names)
    found = same_entry(spec)
    if found is None:
        return None
    for e in spec.scores:
        lowering.bind_lets(fold(e))
    lets, own = lowering.take("pair"), lowering.take("program")
    called = [lowering.text(r) for r in found.reads]
    many, needed = lowering.take("pair"), lowering.take("program")
    lowering.names |= {name: HERE.get(local, local) for name, local in local_names(spec).items()}
    values: dict[Expr, Expr] = {}
    before, tests = [], []
    for index, least, greatest in found.indices:
        name = lowering.fresh.fresh("same_index")
        before.append(f"{name} = {lowering.text(least)}")
        values[index] = Var(f"_{name}", "int")
        lowering.names[f"_{name}"] = name
        tests.append(
            lowering.text(Op("==", (values[index], greatest), "bool"), BIT_AND if len(found.indices) > 1 else 0)
        )
    before = [*lets, *lowering.take("program"), *before]
    alone = [lowering.text(rewrite(r, values.get)) for r in found.reads]
    tiles = (f"{tile} = tl.broadcast_to({one}, [TILE_Q, TILE_K])" for tile, one in zip(called, alone, strict=True))
    one = (*lowering.take("program"), *tiles)
    lowering.lines["program"] = [*own, *needed]
    lowering.names.clear()
    lowering.names |= kept
    return SameView(tuple(before), " & ".join(tests), one, many)
