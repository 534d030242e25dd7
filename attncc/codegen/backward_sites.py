"""Where the gradients of parameters come from, and who adds them up: every cell is written by one program, or its
partial sums are added in a second pass, so that nothing is atomic and equal calls give equal bits.

A site is one Read of a tensor, or one scalar. What is summed where follows from the finest thing that its indices name:

program    one value for a batch entry and head (slopes[h]): rows of a tile together, tiles in the second pass
row, key   one for each row (c[b, h, row], c[b, h, q]) or key: over the keys of a row, or over the rows of a key
cells      one for each pair (bias[b, h, row, k]): tile by tile; without b or h by a kernel of its own
table      any other index (table[bucket[q - k], h]): a table for each program, of the entries that a tile can hit
row_table  such a table for each row (relative[b, h, row, x], pairs[row, k, x])
key_table  and for each key (relative[k, x])
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from attncc.analysis.derivative import ZERO, derivative, differentiable, variables
from attncc.codegen.lower import level
from attncc.codegen.naming import Names
from attncc.ir import AttentionSpec, Param, Read, Var

Variable = Read | Var
ROWS = ("row", "q")
HEADS = {"b": "b", "h": "h", "h_kv": "h"}  # which of a program's two numbers an axis is about


@dataclass(frozen=True)
class Site:
    """`own` are axes of the program's batch entry and head: (position, b | h | h_kv); `rest` are the others."""

    param: Param
    at: Variable
    kind: str
    own: tuple[tuple[int, str], ...] = ()
    rest: tuple[int, ...] = ()
    name: str = ""  # of the sums in the kernel and on the host
    pointer: str = ""

    @property
    def whole(self) -> bool:
        """Whether each batch entry and head has cells of its own."""
        return {axis for _, axis in self.own} == {"b", "h"}

    @property
    def apart(self) -> bool:
        """Whether a kernel of its own sums it: cells that batch entries or heads share."""
        return self.kind == "cells" and not self.whole

    @property
    def gathers(self) -> bool:
        """Whether a sum for each row is kept in the loop: for these, and for tables whose index is the row's own."""
        return self.kind in ("program", "row") or (self.kind == "table" and self.finest in ("program", "row"))

    @property
    def finest(self) -> str:
        """The level of the index: program, row, key or pair."""
        return level(self.at)

    @property
    def entries(self) -> tuple[int, ...]:
        """The axes that a table runs over: of one for each row or key, all but the first that its number indexes."""
        lines = {"row_table": ROWS, "key_table": ("k",)}.get(self.kind, ())
        line = next((i for i in self.rest if self.index(i) in lines), None)
        return tuple(i for i in self.rest if i != line)

    @property
    def of_keys(self) -> bool:
        """Whether the kernel over keys sums it."""
        return self.kind in ("key", "key_table")

    def index(self, position: int) -> str:
        """The plain name that indexes an axis, empty for another expression."""
        index = self.at.indices[position] if isinstance(self.at, Read) else None
        return index.name if isinstance(index, Var) else ""


def sites(spec: AttentionSpec) -> tuple[Site, ...]:
    """One for each variable of a `grad` parameter that an expression depends on, in the order of the spec."""
    found: dict[Variable, Site] = {}
    for p in spec.params:
        for e in differentiable(spec) if p.grad else ():
            for at in variables(e, p):
                if at not in found and isinstance(at, Read | Var) and derivative(e, at) != ZERO:
                    found[at] = _site(p, at)
    return tuple(found.values())


def unbuilt(spec: AttentionSpec) -> list[tuple[Param, str]]:
    """Parameters whose gradient the Triton kernels cannot sum yet, each with the reason in words."""
    found = ((s.param, _unbuilt(spec, s)) for s in sites(spec))
    return [(p, f"a gradient of {p.name}, {why}, is not built yet") for p, why in found if why]


def _unbuilt(spec: AttentionSpec, s: Site) -> str:
    """What it is about a site, in words; empty where it is built."""
    if not spec.ragged or s.kind == "program":
        return ""
    if s.kind == "table":
        return "of packed sequences a table for each" if any(axis == "b" for _, axis in s.own) else ""
    return "" if spec.packed_axis(s.param) else "of packed sequences one for the positions of all"


def _site(p: Param, at: Variable) -> Site:
    if isinstance(at, Var):
        return Site(p, at, "program")
    own: dict[str, int] = {}
    for i, (axis, index) in enumerate(zip(p.axes, at.indices, strict=True)):
        name = index.name if isinstance(index, Var) else ""
        if name == axis and name in HEADS and not any(HEADS[name] == HEADS[other] for other in own):
            own[name] = i
    rest = tuple(i for i in range(len(p.axes)) if i not in own.values())
    plain = [at.indices[i].name if isinstance(at.indices[i], Var) else "" for i in rest]  # type: ignore[union-attr]
    return Site(p, at, _kind(at, rest, plain), tuple((i, a) for a, i in own.items()), rest)


def _kind(at: Read, rest: tuple[int, ...], plain: list[str]) -> str:
    rows, keys = sum(n in ROWS for n in plain), plain.count("k")
    if not rest:
        return "program"
    if len(rest) == 1 and rows + keys == 1:
        return "row" if rows else "key"
    if len(rest) == 2 and rows == keys == 1:
        return "cells"
    return "row_table" if rows else "key_table" if keys else "table"


def named(found: Iterable[Site], fresh: Names) -> tuple[Site, ...]:
    """With names for their sums, and for the pointers to them."""
    return tuple(
        replace(s, name=fresh.fresh(f"d_{s.param.name}"), pointer=fresh.fresh(f"D_{s.param.name}")) for s in found
    )
