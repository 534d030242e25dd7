"""Scores that read tensors at a clamped distance: far from the diagonal all pairs of a tile read the same entry.

Such a tile needs one load of a scalar, and one sum for the entry's gradient, where others gather and sort out a value
for each pair. Whether a tile is one of them follows from the corners of the tile; see analysis.alike_visits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from attncc.analysis.alike import alike_visits, clamped, entry_indices
from attncc.analysis.normaliser import normaliser
from attncc.codegen.backward_pairs import Pairs, pairs
from attncc.codegen.backward_sites import Site
from attncc.codegen.loops import local_names
from attncc.codegen.lower import Lowering
from attncc.ir import Expr, Read, Var, Visits, rewrite


@dataclass(frozen=True)
class Alike:
    """Lines of a step: `before` the products; `one` in tiles of one entry, `many` in others; the same after `chain`."""

    before: tuple[str, ...]
    one: tuple[str, ...]
    many: tuple[str, ...]
    chain: tuple[str, ...]
    chain_one: tuple[str, ...]
    chain_many: tuple[str, ...]


def alike(
    lowering: Lowering, sites: Sequence[Site], unit: str, which: str, found: Pairs, visits: Visits
) -> tuple[Alike, Visits] | None:
    """For a kernel whose `pairs` are `found`, with the visits that tell tiles of one entry from others; None where no
    score reads so, or the tiles are told apart by other tests."""
    spec = lowering.spec
    indices = tuple(dict.fromkeys(i for e in spec.scores for i in entry_indices(e)))
    plain = found.score == "s" and len(found.scores) == len(spec.scores) and spec.weight is None
    plain = plain and normaliser(spec).exponential
    closed = bool(visits.full) and visits.may is None and visits.must is None and not visits.summaries
    known = alike_visits(spec, visits, indices) if indices and plain and closed and all(map(clamped, indices)) else None
    if known is None:
        return None
    kept, own = dict(lowering.names), lowering.take("program")
    lowering.names |= {**local_names(spec, visits.outer), "inner_first": "tile_first", "inner_last": "tile_last"}
    before, values = [], {}
    for index, value in zip(indices, known[1], strict=True):
        name = lowering.fresh.fresh("same_index")
        before.append(f"{name} = {lowering.text(value)}")
        values[index] = Var(f"_{name}", "int")
        lowering.names[f"_{name}"] = name
    lowering.spec = replace(spec, scores=tuple(rewrite(e, values.get) for e in spec.scores))
    same = pairs(lowering, [_site(s, values) for s in sites], unit, which)
    before += lowering.take("program")
    lowering.spec, lowering.lines["program"] = spec, list(own)
    lowering.names.clear()
    lowering.names |= kept
    shared = len(_common(same.chain, found.chain))
    rest = found.chain[shared:]
    made = Alike(
        tuple(before), same.scores, (*found.lines, *found.scores), found.chain[:shared], same.chain[shared:],
        (*_needed(found.lines, rest), *rest),
    )  # fmt: skip
    return made, known[0]


def _common(a: Sequence[str], b: Sequence[str]) -> tuple[str, ...]:
    """The whole statements that both begin with."""
    same = tuple(x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    return same[:-1] if same and same[-1].endswith(":") else same


def _needed(loads: Sequence[str], users: Sequence[str]) -> tuple[str, ...]:
    """The statements `name = ...` whose names `users`, or those after them that are needed, hold."""
    kept: list[str] = []
    for line in reversed(loads):
        name = line.partition(" = ")[0]
        if any(name in re.findall(r"\w+", other) for other in (*kept, *users)):
            kept.append(line)
    return tuple(reversed(kept))


def _site(site: Site, values: dict[Expr, Var]) -> Site:
    """The site as the tile's one entry, where it was one for each pair."""
    at = rewrite(site.at, values.get)
    assert isinstance(at, Read | Var)
    return replace(site, at=at, kind="alike" if at != site.at and site.kind == "table" else site.kind)
