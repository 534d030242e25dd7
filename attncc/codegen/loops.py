"""The walk over key tiles as text: closed ranges, one loop for each class, or tiles that are classed at run time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from attncc.codegen.lower import Lowering
from attncc.codegen.printer import BIT_AND, SUM
from attncc.ir import TILE_NAMES, AttentionSpec, Const, Expr, Op, Segment, Var, Visits, tensors, tile_names
from attncc.ir import names as names_of

LAST_TILE = 2**31 - 1

# What the templates call them, by the side whose tiles a program owns.
LOCAL = {
    "q": {"tile": "mine", "inner_tile": "lane", "first": "first_row", "last": "last_row"},
    "k": {"tile": "mine", "inner_tile": "lane", "first": "first_key", "last": "last_key"},
}


@dataclass(frozen=True)
class Walk:
    """One class of tiles as a loop: steps `begin` to `end`, and the tile of a step."""

    begin: str
    end: str
    tile: str
    latest: str = ""  # the first step of the last of several segments; `begin` where there is one
    parts: tuple[tuple[str, str], ...] = ()  # the segments' first tiles and ends, where they are not joined


@dataclass(frozen=True)
class Tested:
    """Tiles that are classed at run time: where `may` is false a tile is left out, where `must` is true it is whole."""

    begin: str
    end: str
    tile: str
    lines: tuple[str, ...]
    may: str
    must: str


@dataclass(frozen=True)
class VisitsView:
    lines: tuple[str, ...]
    late_lines: tuple[str, ...]  # of rows, which only the test of a tile needs: after what the ranges wait for
    bounds: bool  # the lines use the tile's first and last row
    order: tuple[str, ...]  # range, class, list: which walks come, in turn
    loops: tuple[str, ...]  # full, masked: classes that closed ranges give
    jumps: bool  # several segments are joined: the tile is worked out from the step
    begin: str
    end: str
    tile: str
    masked: Walk | None
    full: Walk | None
    tested: Tested | None
    parts: int = 1  # at most so many segments of a class are walked over one by one


def local_names(spec: AttentionSpec, outer: str = "q") -> dict[str, str]:
    """What the templates call the names that visits use for a tile."""
    called = tile_names({*(p.name for p in spec.params), *spec.free_axes})
    return {called[name]: LOCAL[outer].get(name, name) for name in TILE_NAMES}


@dataclass(frozen=True)
class Closed:
    """Visits as loops: `full` and `masked` tiles by their ranges, and those that are `tested` one by one."""

    full: tuple[Segment, ...]
    masked: tuple[Segment, ...]
    tested: tuple[Segment, ...]


def closed(visits: Visits) -> Closed:
    """Where tiles are classed, masked ones whose range is known all the same are those before `plain_end`."""
    if visits.may is None and visits.must is None:
        return Closed(visits.full, visits.masked, ())
    if visits.plain_end is None:
        return Closed(visits.full, (), visits.masked)
    behind = visits.full[-1].end
    tested = (Segment(visits.plain_end, s.end) if s.begin == behind else s for s in visits.masked)
    return Closed(visits.full, (Segment(behind, visits.plain_end),), tuple(tested))


def first_tile(visits: Visits) -> Visits:
    """One whole tile, which every row sees, joins those that need the mask and are visited first."""
    called = Var("reference_tile", "int")
    *before, last = visits.full
    value = Op("max", (Op("-", (last.end, Const(1)), "int"), last.begin), "int")
    joined = [Segment(called, s.end) if s.begin == last.end else s for s in visits.masked]
    if joined == list(visits.masked):
        joined.append(Segment(called, last.end))
    lets = (*visits.lets, ("reference_tile", value))
    return replace(visits, lets=lets, full=(*before, Segment(last.begin, called)), masked=tuple(joined))


def visits_view(
    visits: Visits, lowering: Lowering, forward: bool = False, tested_first: bool = False, in_parts: bool = False
) -> VisitsView:  # fmt: skip
    """The prologue's lines, one loop for each class of closed ranges, or `in_parts` one for each segment of a class,
    and the test of tiles that have none."""
    if visits.listed:
        return _listed(visits, lowering)
    local = local_names(lowering.spec, visits.outer)
    lowering.names |= local
    borders = {name for name, called in local.items() if called in (LOCAL[visits.outer][n] for n in ("first", "last"))}
    lines: list[str] = []
    before = lowering.take("program")

    def scalar(e: Expr, binds: int = 0) -> str:
        text = lowering.text(e, binds)
        lines.extend(lowering.take("program"))
        return text

    ends = {e.name for s in (*visits.full, *visits.masked) for e in (s.begin, s.end) if isinstance(e, Var)}
    wide: set[str] = set()
    for name, value in visits.lets:
        text, long_ = scalar(value), _wide(value, wide, lowering)
        lowering.names[name] = lowering.fresh.fresh(name)
        lines.append(f"{lowering.names[name]} = {_narrow(text, lowering) if long_ and name in ends else text}")
        wide |= {name} if long_ and name not in ends else set()
    split = closed(visits)
    ranges = {"full": split.full, "masked": split.masked}
    jumps = not in_parts and any(len(s) > 1 for s in ranges.values())
    walks = {c: _walk(c, s, scalar, lines, lowering, wide, jumps) for c, s in ranges.items() if s}
    tested = None
    late: tuple[str, ...] = ()
    if split.tested:
        walk = _walk("masked", split.tested, scalar, lines, lowering, wide, len(split.tested) > 1)
        early = lowering.take("row")
        may = lowering.text(visits.may, BIT_AND) if visits.may is not None else ""
        must = lowering.text(visits.must, BIT_AND) if visits.must is not None else ""
        late = lowering.take("row") if forward else ()
        lowering.lines["row"][:0] = early
        tested = Tested(walk.begin, walk.end, walk.tile, lowering.take("program"), may, must)
    lowering.lines["program"] = list(before)

    def either(part: str) -> str:
        texts = [getattr(w, part) for w in walks.values()]
        return "" if not texts else texts[0] if len(set(texts)) == 1 else f"{texts[1]} if masked else {texts[0]}"

    used = {n for _, e in visits.lets for n in names_of(e)}
    used |= {n for s in (*visits.full, *visits.masked) for e in (s.begin, s.end) for n in names_of(e)}
    used |= {n for e in (visits.may, visits.must) if e is not None for n in names_of(e)}
    order = (*(["range"] if walks else []), *(["class"] if tested else []))
    order = order[::-1] if tested_first else order
    return VisitsView(
        lines=tuple(lines), late_lines=late, bounds=bool(used & borders), order=order, loops=tuple(walks), jumps=jumps,
        begin=either("begin"), end=either("end"), tile=either("tile"), masked=walks.get("masked"),
        full=walks.get("full"), tested=tested, parts=max((len(w.parts) for w in walks.values()), default=1),
    )  # fmt: skip


def _listed(visits: Visits, lowering: Lowering) -> VisitsView:
    """Two loops over the list of this tile, which a kernel before this one has made."""
    tables = lowering.tables
    inner = "k_tiles" if visits.outer == "q" else "q_tiles"
    place, word = f"{tables.list_place} + " if tables.list_place else "", lowering.language
    lines = (
        f"Listed = Tables + {place}mine.to({word}.int64) * {tables.list_size}",
        f"wholes, others = {word}.load(Listed + {inner}), {word}.load(Listed + {inner} + 1)",
    )
    masked = Walk("0", "others", f"{word}.load(Listed + {inner} - 1 - step)")
    full = Walk("0", "wholes", f"{word}.load(Listed + step)") if visits.must is not None else None
    return VisitsView(
        lines=lines, late_lines=(), bounds=False, order=("list",), loops=("full", "masked") if full else ("masked",),
        jumps=True, begin="0", end="others if masked else wholes" if full else "others",
        tile=masked.tile, masked=masked, full=full, tested=None,
    )  # fmt: skip


def _wide(e: Expr, wide: Collection[str], lowering: Lowering) -> bool:
    """Whether `e` has 64 bits: of a tensor's elements, of parameters in a kernel of 64 bits, or of such a let."""
    params = {p.name: p.element for p in lowering.spec.tensors}
    if any(params.get(t, "i64" if lowering.int_bits == 64 else "") == "i64" for t in tensors(e)):
        return True
    scalars = {p.name for p in lowering.spec.scalars if p.type == "int"} if lowering.int_bits == 64 else set()
    return bool(names_of(e) & (scalars | set(wide)))


def _narrow(text: str, lowering: Lowering) -> str:
    """The number of a tile, which counts in 32 bits wherever it ends."""
    word = lowering.language
    return f"{word}.minimum({word}.maximum({text}, -1), {LAST_TILE}).to({word}.int32)"


def _walk(
    name: str,
    segments: Sequence[Segment],
    scalar: Callable[..., str],
    lines: list[str],
    lowering: Lowering,
    wide: Collection[str],
    jumps: bool,
) -> Walk:
    """Segments end to end: `name_i` steps lie before segment i + 1; a tile is its segment's begin plus what is left."""

    def bound(e: Expr) -> str:
        return _narrow(scalar(e), lowering) if _wide(e, wide, lowering) else scalar(e, SUM)

    ends = [(bound(s.begin), bound(s.end)) for s in segments]
    if not jumps:
        return Walk(*ends[0], "step", parts=tuple(ends))
    steps = [lowering.fresh.fresh(f"{name}_{i}") for i in range(len(segments))]
    tile = ""
    for i, (begin, end) in reversed(list(enumerate(ends))):
        length = f"{lowering.language}.maximum({end} - {begin}, 0)"
        lines.insert(
            len(lines) - (len(segments) - 1 - i), f"{steps[i]} = " + (f"{steps[i - 1]} + {length}" if i else length)
        )
        start = f"{begin} - {steps[i - 1]}" if i else begin
        tile = f"{lowering.language}.where(step < {steps[i]}, {start}, {tile})" if tile else start
    return Walk("0", steps[-1], f"{tile} + step", steps[-2] if len(steps) > 1 else "0")
