"""The visits of a mask as lines of Python: which key tiles a tile of rows sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from attncc.codegen.cpu_lower import BUILT_IN, TILES, CpuLowering, bit_extent, numbers_of
from attncc.codegen.printer import ATOM, PYTHON, Printer
from attncc.ir import (
    AttentionSpec,
    Const,
    Expr,
    Read,
    Segment,
    Summary,
    Var,
    Visits,
    children,
    names,
    substitute,
    tile_names,
)

PROGRAM = {"b": "batch.start", "h": "heads.start", "h_kv": "kv_heads.start", **BUILT_IN}
ONE_TILE = {
    "first": "first", "last": "last", "tile": "tile", "TILE_Q": "TILE_Q", "TILE_K": "TILE_K",
    "inner_first": "keys.start", "inner_last": "(keys.stop - 1)", "inner_tile": "key_tile",
}  # fmt: skip
ALL_TILES = {**ONE_TILE, "first": "firsts", "last": "lasts", "tile": "tiles",
             "inner_first": "key_firsts", "inner_last": "key_lasts", "inner_tile": "key_tiles"}  # fmt: skip
EVERY_TILE = (
    'tiles = torch.arange(-(-q_len // TILE_Q), device="cpu")[:, None]',
    'key_tiles = torch.arange(-(-k_len // TILE_K), device="cpu")',
    "firsts, lasts = tiles * TILE_Q, ((tiles + 1) * TILE_Q).clamp(max=q_len) - 1",
    "key_firsts, key_lasts = key_tiles * TILE_K, ((key_tiles + 1) * TILE_K).clamp(max=k_len) - 1",
)


@dataclass
class Ranges:
    """`programs`: spans of batch entries and heads that share their ranges. `lines` set `masked` and `full`."""

    programs: str
    is_masked: str = "step < len(masked)"
    lines: list[str] = field(default_factory=list)
    tile_class: list[str] = field(default_factory=list)
    summaries: list[str] = field(default_factory=list)
    helpers: set[str] = field(default_factory=set)


class _Scalars:
    """Prints what ranges are made of, an element of a tensor read where it stands: Python numbers for one tile, tensors
    for all tiles at once. `names` spells every Var, `tables` every summary."""

    def __init__(self, spec: AttentionSpec, names: Mapping[str, str], tables: Mapping[str, str], one: bool) -> None:
        self.spec, self.names, self.tables, self.one = spec, names, tables, one
        self._reads: dict[Read, str] = {}
        self.printer = Printer(
            PYTHON if one else TILES, names=names, reads=self._reads, positive=self._positive,
            number=(lambda e: True) if one else numbers_of(spec),
        )  # fmt: skip

    def _positive(self, e: Expr) -> bool:
        """Constants, and what the spec or the file names, which the call refuses below 1 where it divides."""
        if isinstance(e, Const):
            return e.value >= 1
        sizes = ("TILE_Q", "TILE_K")
        return isinstance(e, Var) and (self.names.get(e.name) in sizes or e.name in {p.name for p in self.spec.scalars})

    def __call__(self, e: Expr, binds: int = 0) -> str:
        self._read_all(e)
        return self.printer(e, binds)

    def _read_all(self, e: Expr) -> None:
        for child in children(e):
            self._read_all(child)
        if isinstance(e, Read) and e not in self._reads:
            self._reads[e] = self._read(e)

    def _read(self, e: Read) -> str:
        at = [self.printer(i) for i in e.indices]
        if e.tensor in self.tables:  # a table is that of its program: only the tile tells its elements apart
            helper, text = ("element" if self.one else "read"), f"{self.tables[e.tensor]}, {at[-1]}"
        else:
            p, text = self.spec.param(e.tensor), ", ".join([self.names[e.tensor], *at])
            helper = "element" if self.one else "read"
            if p.element == "bit":
                helper, text = "read_bit", ", ".join([self.names[e.tensor], bit_extent(p.axes[-1], self.names), *at])
        self.printer.helpers.add(helper)
        if helper == "read_bit":
            return f"bool(read_bit({text}))" if self.one else f"read_bit({text})"
        return f"{helper}({text})" + (".long()" if helper == "read" and e.type == "int" else "")


def ranges_of(spec: AttentionSpec, visits: Visits, low: CpuLowering) -> Ranges:
    """Lines for `visits` of outer "q"; names keep clear of those that `low` has given."""
    called = tile_names({*low.spelled})
    spelled = {**low.spelled, **PROGRAM, **{called[n]: text for n, text in ONE_TILE.items()}}
    spelled |= {n: low.free.fresh(n) for n, _ in visits.lets}
    tables = {s.name: low.free.fresh(s.name) for s in visits.summaries}
    text = _Scalars(spec, spelled, tables, one=True)
    made = Ranges(_programs(visits, spec.ragged))
    made.lines = [f"{spelled[n]} = {text(e)}" for n, e in visits.lets]
    made.lines += [f"masked = {_tiles(visits.masked, text)}", f"full = {_tiles(visits.full, text)}"]
    if visits.may is not None:
        made.tile_class = [f"if step < len(masked) and not {text(visits.may, ATOM)}:", "    continue"]
    if visits.must is not None:
        made.is_masked = f"step < len(masked) and not {text(visits.must, ATOM)}"
    every = _Scalars(spec, {**spelled, **{called[n]: t for n, t in ALL_TILES.items()}}, tables, one=False)
    for s in visits.summaries:
        reduced = s.reduce in ("min", "max")
        made.summaries += _reduced(s, tables[s.name], low, made) if reduced else _scanned(s, visits, every, made)
    made.helpers |= text.printer.helpers | every.printer.helpers
    return made


def _programs(visits: Visits, ragged: bool) -> str:
    """Batch entries and heads go together unless the ranges tell them apart; packed sequences come one by one."""
    ends = [e for s in (*visits.masked, *visits.full) for e in (s.begin, s.end)]
    classes = [e for e in (visits.may, visits.must) if e is not None]
    found = {n for e in (*(e for _, e in visits.lets), *ends, *classes) for n in names(e)}
    found |= {n for s in visits.summaries for n in (*s.over, *names(s.value))}
    batch = "slice(i, i + 1)" if "b" in found else "slice(0, B)"
    heads = "slice(j, j + 1)" if found & {"h", "h_kv"} else "slice(0, H)"
    if ragged:
        batch, found = "slice(entry, entry + 1)", found - {"b"}
    loops = (" for i in range(B)" if "b" in found else "") + (" for j in range(H)" if found & {"h", "h_kv"} else "")
    return f"[({batch}, {heads}){loops}]"


def _tiles(segments: tuple[Segment, ...], text: _Scalars) -> str:
    parts = [f"range({text(s.begin)}, {text(s.end)})" for s in segments]
    if len(parts) == 1:
        return parts[0]
    return "(" + "".join(f"*{p}, " for p in parts).rstrip() + ")" if parts else "()"


def _reduced(s: Summary, table: str, low: CpuLowering, made: Ranges) -> list[str]:
    """The least or greatest value of each tile, by one pass over the axis."""
    inner = CpuLowering(low.spec, low.spelled, low.free)
    lines: list[str] = []
    value = inner.text(s.value, lines)
    made.helpers |= inner.printer.helpers | {"tile_ends"}
    length, tile = ("q_len", "TILE_Q") if s.axis == "q" else ("k_len", "TILE_K")
    return [*inner.program, *inner.row, *lines, f'{table} = tile_ends({value}, {length}, {tile}, "a{s.reduce}")']


def _scanned(s: Summary, visits: Visits, every: _Scalars, made: Ranges) -> list[str]:
    """For each tile of rows, what is found on its way through all key tiles."""
    if s.axis != "q":
        raise ValueError(f"a scan for tiles of {s.axis} in visits of outer q")
    lets: dict[str, Expr] = {}
    for n, e in visits.lets:
        lets[n] = substitute(e, lets)
    made.helpers.add("tile_scan")
    head = [] if any(line in made.summaries for line in EVERY_TILE) else [*EVERY_TILE]
    value = every(substitute(s.value, lets))
    return [*head, f'{every.tables[s.name]} = tile_scan({value}, len(tiles), len(key_tiles), "{s.reduce}")']
