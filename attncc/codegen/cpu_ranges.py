"""The visits of a mask as lines of Python: which key tiles a tile of rows sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from attncc.codegen.cpu_lower import BUILT_IN, CpuLowering
from attncc.codegen.naming import Names, reserved
from attncc.codegen.printer import ATOM, PYTHON, Printer
from attncc.ir import AttentionSpec, Const, Expr, Read, Segment, Summary, Var, Visits, children, names

SCALARS = {
    "b": "batch.start", "h": "heads.start", "h_kv": "kv_heads.start", **BUILT_IN,
    "_first": "first", "_last": "last", "_tile": "tile",
    "inner_first": "keys.start", "inner_last": "(keys.stop - 1)", "inner_tile": "key_tile",
    "_inner_first": "keys.start", "_inner_last": "(keys.stop - 1)", "_inner_tile": "key_tile",
}  # fmt: skip
LEADING = {"b": "B", "h": "H"}


@dataclass
class Ranges:
    """`programs`: spans of batch entries and heads that share their ranges. `lines` set `masked` and `full`."""

    programs: str
    is_masked: str = "step < len(masked)"
    lines: list[str] = field(default_factory=list)
    tile_class: list[str] = field(default_factory=list)
    summaries: list[str] = field(default_factory=list)
    helpers: set[str] = field(default_factory=set)


def programs(visits: Visits) -> str:
    """Batch entries and heads go together unless the ranges tell them apart."""
    found = {n for e in _expressions(visits) for n in names(e)}
    batch = "slice(i, i + 1)" if "b" in found else "slice(0, B)"
    heads = "slice(j, j + 1)" if found & {"h", "h_kv"} else "slice(0, H)"
    loops = (" for i in range(B)" if "b" in found else "") + (" for j in range(H)" if found & {"h", "h_kv"} else "")
    return f"[({batch}, {heads}){loops}]"


def _expressions(visits: Visits) -> list[Expr]:
    ends = [e for s in (*visits.masked, *visits.full) for e in (s.begin, s.end)]
    return [*(e for _, e in visits.lets), *ends, *(e for e in (visits.may, visits.must) if e is not None)]


class _Scalars:
    """Prints the scalars of a tile's ranges as Python numbers; an element of a tensor is read where it stands."""

    def __init__(self, spec: AttentionSpec, visits: Visits, spelled: Mapping[str, str]) -> None:
        self.spec, self.helpers = spec, set[str]()
        self._reads: dict[Read, str] = {}
        free = Names({*reserved(), *spelled.values()})
        self.names = {**spelled, **SCALARS}
        self.names |= {n: free.fresh(n) for n, _ in visits.lets}
        self.tables = {s.name: free.fresh(s.name) for s in visits.summaries}
        self._print = Printer(PYTHON, names=self.names, reads=self._reads, positive=self._positive)

    def _positive(self, e: Expr) -> bool:
        if isinstance(e, Const):
            return e.value >= 1
        return isinstance(e, Var) and (
            e.name in ("TILE_Q", "TILE_K") or any(e.name == p.name for p in self.spec.scalars)
        )

    def __call__(self, e: Expr, binds: int = 0) -> str:
        self._read_all(e)
        return self._print(e, binds)

    def _read_all(self, e: Expr) -> None:
        for child in children(e):
            self._read_all(child)
        if isinstance(e, Read) and e not in self._reads:
            table = self.tables.get(e.tensor) or self.names[e.tensor]
            self._reads[e] = f"element({', '.join([table, *map(self._print, e.indices)])})"
            self.helpers.add("element")


def ranges_of(spec: AttentionSpec, visits: Visits, spelled: Mapping[str, str]) -> Ranges:
    text = _Scalars(spec, visits, spelled)
    made = Ranges(programs(visits))
    made.lines = [f"{text.names[n]} = {text(e)}" for n, e in visits.lets]
    made.lines += [f"masked = {_tiles(visits.masked, text)}", f"full = {_tiles(visits.full, text)}"]
    if visits.may is not None:
        made.tile_class = [f"if step < len(masked) and not {text(visits.may, ATOM)}:", "    continue"]
    if visits.must is not None:
        made.is_masked = f"step < len(masked) and not {text(visits.must, ATOM)}"
    for s in visits.summaries:
        made.summaries += _summary(spec, s, text.tables[s.name], spelled, made.helpers)
    made.helpers |= text.helpers
    return made


def _tiles(segments: tuple[Segment, ...], text: _Scalars) -> str:
    parts = [f"range({text(s.begin)}, {text(s.end)})" for s in segments]
    if len(parts) == 1:
        return parts[0]
    return "(" + "".join(f"*{p}, " for p in parts).rstrip() + ")" if parts else "()"


def _summary(spec: AttentionSpec, s: Summary, table: str, spelled: Mapping[str, str], helpers: set[str]) -> list[str]:
    """One pass over a one-axis expression: its smallest or largest value in each tile, stored for b and h as needed."""
    low = CpuLowering(spec, spelled)
    lines: list[str] = []
    value = low.text(s.value, lines, ATOM)
    helpers |= low.printer.helpers | {"tile_ends"}
    if s.axis == "q":
        value += ".squeeze(-1)"
    shape = ", ".join([*(LEADING[a] for a in s.over), "-1"])
    tile = "TILE_Q" if s.axis == "q" else "TILE_K"
    return [*low.program, *low.row, *lines, f'{table} = tile_ends({value}, {tile}, "a{s.reduce}").reshape({shape})']
