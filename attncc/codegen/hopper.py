"""What a warp-specialised kernel needs beside KernelView: the walk over tiles in steps, and what its roles hand on."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attncc.analysis.prove import sees_no_future
from attncc.codegen.loops import VisitsView, Walk, visits_view
from attncc.codegen.lower import Lowering, conjoin, level
from attncc.codegen.signature import CONSUMER_ROWS, Argument
from attncc.ir import AttentionSpec, Const, KernelPlan, Op, Segment, Visits, conjuncts, names, tile_names
from attncc.planner.hopper import CACHED_BYTES, GROUP_THREADS, REGISTERS_SM, blocks, register_cap
from attncc.planner.shared_memory import ELEMENT_BYTES

if TYPE_CHECKING:
    from attncc.codegen.triton import KernelView

NARROW = 64  # columns of a head for whose short products the place of waits matters
NEAR = 2048  # positions that a local mask's tiles reach at a time, about
TOGETHER = 32  # heads of more than NARROW columns whose tiles run side by side, at most: short ones take turns
LEAST, WIDEST = "2.0**-40", 100.0  # within float32's, and bf16's, 2**±126
SIDE = 100  # characters of such a side
HEADROOM = "8.0"  # of e4m3, which ends at 448
UNIT = 1.75  # 448 and 57344, which equal values are quantised to, are powers of 2 of it
UNIT_BITS = {"f8e4m3": 0x3E, "f8e5m2": 0x3F}
VECTORS = 8  # registers that each consumer leaves to a producer that classes tiles

Reached = tuple[tuple[str, ...], str] | None


@dataclass(frozen=True)
class Steps:
    """One class of tiles: how many there are, and the tile of the `nth`, counted from 0."""

    count: str
    tile: str


@dataclass(frozen=True)
class Reach:
    """Where the tiles end that a consumer's rows see, which may be before those of all consumers' rows do."""

    lines: tuple[str, ...]
    end: str
    since: str  # steps up to the last segment, whose tiles come last and in order


@dataclass(frozen=True)
class Seen:
    """Which keys of a tile anybody sees, where keys alone say so."""

    lines: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Result:
    """Where a part of the output leaves from: the buffer of a part of Q, which is as wide (`same`) or wider."""

    query_tag: str
    size: int
    same: bool


@dataclass(frozen=True)
class EightBit:
    """Of 8-bit inputs with scales."""

    block: bool  # scales are those of 128 rows or keys, else one of a head
    scaled: str  # what a tile's own scale multiplies: the scale of scores, or where it is in the scores already, they
    unit: float  # what weights are summed up times: products with equal values are rounded as its own are
    unit_bits: int  # its bits in the type of values
    headroom: str  # log2 of the greatest weight: weights down to 2^-9, the least of e4m3, are kept


@dataclass(frozen=True)
class HopperView:
    """Finished values for templates/gluon."""

    rows: int  # of a consumer
    consumers: tuple[int, ...]
    consumer_registers: int
    producer_registers: int
    register_cap: int  # of each thread when a block begins; 0 where it has the SM alone
    blocks: int  # that share an SM
    queries: int  # buffers of Q for each consumer
    key_size: int  # columns of a head, its parts together
    value_size: int
    arguments: str  # of the kernel, by name
    unpacked: str  # the same where a function takes them apart
    handed: str  # to the function that makes weights: what was computed for the whole tile of rows
    places: dict[str, int]  # of arguments among them
    masked: Steps | None
    full: Steps | None
    apart: bool  # whole tiles have a loop of their own
    again: bool  # rows that leave the safe range are computed again
    even: bool  # all tiles of rows see as many keys
    reach: Reach | None
    seen: Seen | None
    least: str  # sum of a row's weights that is not too small beside any value, where no maximum is the reference
    widest: float  # radius of scores, in powers of 2, up to which their exponentials are not too far from 1
    last: str  # what says that a consumer is done
    ahead: bool  # the wait for the next keys ends the block of instructions that makes weights
    results: tuple[Result, ...]
    depth: int  # columns that a product takes at a time
    packed: int  # elements of it that a register has
    eight: EightBit | None
    key_bytes: int  # of a key and its value
    cached_bytes: int  # of K and V that L2 holds beside everything else
    near: int  # keys of a head that tiles which run side by side see, at most; 0 where they see all
    together: int  # heads of K and V whose tiles run side by side, at most; 0 where only L2 bounds them


def hopper_view(
    plan: KernelPlan, args: Sequence[Argument], view: KernelView, reach: Reached, seen: Seen | None, local: bool
) -> HopperView:
    """`view` is that of the same plan; the kernel's other values. `reach` is what `reached` gives, `seen` seen_keys;
    `local` says that longer sequences have no more tiles in each row of tiles."""
    lines = (*view.program_lines, *view.row_lines)
    whole = dict.fromkeys(["b", "h", "h_kv", "row", "q", *(line.partition(" = ")[0] for line in lines)])
    whole |= {"threshold": None} if view.dropout else {}
    consumers, parts = plan.tile_q // CONSUMER_ROWS, zip(view.k_parts, view.v_parts, strict=False)
    own = plan.max_registers - (VECTORS if plan.classed else 0)
    cap = register_cap(plan)
    left = (cap * (consumers + 1) if cap else REGISTERS_SM // GROUP_THREADS) - consumers * own
    masked, full = (steps(w, view.visits.jumps) for w in (view.visits.masked, view.visits.full))
    size = ELEMENT_BYTES[plan.dtype]
    whole_reach = None if reach is None or masked is None or plan.scales else Reach(*reach, _since(view.visits, full))
    return HopperView(
        rows=CONSUMER_ROWS, consumers=tuple(range(consumers)), consumer_registers=own,
        producer_registers=left // 8 * 8, register_cap=cap, blocks=blocks(plan),
        queries=plan.queries, key_size=plan.head_dim, value_size=plan.head_dim_v,
        arguments=", ".join(a.name for a in args), unpacked=unpacked([a.name for a in args]),
        handed=", ".join(n for n in whole if re.fullmatch(r"\w+", n)),
        places={a.name: i for i, a in enumerate(args)},
        masked=masked, full=full, apart=plan.apart, again=plan.reference not in ("running", "none"),
        even="range" in view.visits.order and not (view.visits.bounds or view.visits.tested),
        reach=whole_reach, seen=seen, least=LEAST, widest=WIDEST,
        last="(ENOUGH << mine_of)" if whole_reach else "LAST",
        results=tuple(Result(q.tag, v.size, q.size == v.size) for q, v in parts),
        ahead=plan.head_dim <= NARROW or (plan.apart and plan.reference == "bounded"),
        depth=32 // size, packed=4 // size, eight=_eight_bit(plan, view),
        key_bytes=size * (plan.head_dim + plan.head_dim_v), cached_bytes=CACHED_BYTES,
        near=NEAR if local else 0, together=TOGETHER if plan.head_dim > NARROW else 0,
    )  # fmt: skip


def _eight_bit(plan: KernelPlan, view: KernelView) -> EightBit | None:
    if not plan.scales:
        return None
    scaled = "scale" if view.unit == "scale" or view.scale_first else "s"
    return EightBit(plan.scales == "block", scaled, UNIT, UNIT_BITS[plan.dtype], HEADROOM)


def unpacked(names: Sequence[str]) -> str:
    """The left side of an assignment at the head of a function, on lines of its own where one is too long."""
    text = ", ".join(names)
    if len(text) <= SIDE:
        return text
    return "\n".join(["(", *("        " + line for line in textwrap.wrap(text + ",", SIDE)), "    )"])


def tail(spec: AttentionSpec) -> str:
    """The condition that a key exists, where the mask does not say so: no row stands behind the last key."""
    behind = spec.align == "end" and bool(spec.masks) and sees_no_future(spec)
    return "" if behind else "k < k_len"


def reached(spec: AttentionSpec, visits: Visits, plan: KernelPlan, lowering: Lowering) -> Reached:
    """Lines and value of the end of what any rows see, of their first and last; None where tiles of masked keys do not
    come last, or where the ends are of whole tiles of rows."""
    if plan.reference == "first_tile" or visits.listed or visits.summaries or not visits.masked:
        return None
    if visits.may is not None or visits.must is not None:
        return None
    segments = (*visits.masked, *visits.full)
    end, *others = dict.fromkeys(s.end for s in segments if all(s.end != t.begin for t in segments))
    for other in others:
        end = Op("max", (end, other), "int")
    needed, used = [], names(end)
    for name, value in reversed(visits.lets):
        if name in used:
            needed.append((name, value))
            used |= names(value)
    called = tile_names({*(p.name for p in spec.params), *spec.free_axes})
    if used & {called["tile"], called["TILE_Q"]} or not used & {called["first"], called["last"]}:
        return None
    found = visits_view(replace(visits, lets=tuple(needed[::-1]), masked=(Segment(Const(0), end),), full=()), lowering)
    assert found.masked is not None
    return found.lines, found.masked.end


def seen_keys(spec: AttentionSpec, lowering: Lowering) -> Seen | None:
    """The terms of the mask that are about keys alone."""
    by_key = [t for m in spec.masks for t in conjuncts(m) if level(t) == "key"]
    if not by_key:
        return None
    text = conjoin(lowering, by_key, "")
    return Seen((*lowering.take("program"), *lowering.take("key")), text)


def _since(visits: VisitsView, full: Steps | None) -> str:
    """Steps before the last segment of tiles that need the mask."""
    latest = visits.masked.latest if visits.masked is not None and visits.jumps else "0"
    parts = [p for p in ("full_steps" if full is not None else "0", latest) if p != "0"]
    return " + ".join(parts) or "0"


def steps(walk: Walk | None, jumps: bool) -> Steps | None:
    if walk is None:
        return None
    if jumps:
        return Steps(walk.end, re.sub(r"\bstep\b", "nth", walk.tile))
    begin = walk.begin if re.fullmatch(r"\w+|\d+", walk.begin) else f"({walk.begin})"
    count = walk.end if begin == "0" else f"{walk.end} - {begin}"
    return Steps(f"gl.maximum({count}, 0)", "nth" if begin == "0" else f"{begin} + nth")
