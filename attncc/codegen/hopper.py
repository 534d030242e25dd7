"""What a warp-specialised kernel needs beside KernelView: the walk over tiles in steps, and what its roles hand on."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncc.analysis import prove
from attncc.codegen.loops import Walk
from attncc.codegen.signature import CONSUMER_ROWS, Argument
from attncc.ir import AttentionSpec, KernelPlan

if TYPE_CHECKING:
    from attncc.codegen.triton import KernelView

NARROW = 64  # columns of a head for whose short products the place of waits matters
CACHED_BYTES = 32 * 2**20  # of an L2 of 50 MB
SIDE = 100  # characters of such a side
VECTORS = 8  # registers that each consumer leaves to a producer that classes tiles
REGISTERS_SM, GROUP_THREADS = 65536, 128


@dataclass(frozen=True)
class Steps:
    """One class of tiles: how many there are, and the tile of the `nth`, counted from 0."""

    count: str
    tile: str


@dataclass(frozen=True)
class Result:
    """Where a part of the output leaves from: the buffer of a part of Q, which is as wide (`same`) or wider."""

    query_tag: str
    size: int
    same: bool


@dataclass(frozen=True)
class HopperView:
    """Finished values for templates/gluon."""

    rows: int  # of a consumer
    consumers: tuple[int, ...]
    consumer_registers: int
    producer_registers: int
    queries: int  # buffers of Q for each consumer
    key_size: int  # columns of a head, its parts together
    value_size: int
    arguments: str  # of the kernel, by name
    unpacked: str  # the same where a function takes them apart
    handed: str  # to the function that makes weights: what was computed for the whole tile of rows
    places: dict[str, int]  # of arguments among them
    masked: Steps | None
    full: Steps | None
    ahead: bool  # the wait for the next keys ends the block of instructions that makes weights
    results: tuple[Result, ...]
    key_bytes: int  # of a key and its value
    cached_bytes: int  # of K and V that L2 holds beside everything else


def hopper_view(plan: KernelPlan, args: Sequence[Argument], view: KernelView) -> HopperView:
    """`view` is that of the same plan; the kernel's other values."""
    lines = (*view.program_lines, *view.row_lines)
    names = dict.fromkeys(["b", "h", "h_kv", "row", "q", *(line.partition(" = ")[0] for line in lines)])
    names |= {"threshold": None} if view.dropout else {}
    consumers, parts = plan.tile_q // CONSUMER_ROWS, zip(view.k_parts, view.v_parts, strict=False)
    own = plan.max_registers - (VECTORS if plan.classed else 0)
    left = REGISTERS_SM // GROUP_THREADS - consumers * own
    return HopperView(
        rows=CONSUMER_ROWS, consumers=tuple(range(consumers)), consumer_registers=own,
        producer_registers=left // 8 * 8, queries=plan.queries, key_size=plan.head_dim, value_size=plan.head_dim_v,
        arguments=", ".join(a.name for a in args), unpacked=unpacked([a.name for a in args]),
        handed=", ".join(n for n in names if re.fullmatch(r"\w+", n)),
        places={a.name: i for i, a in enumerate(args)},
        masked=steps(view.visits.masked, view.visits.jumps), full=steps(view.visits.full, view.visits.jumps),
        results=tuple(Result(q.tag, v.size, q.size == v.size) for q, v in parts),
        ahead=plan.head_dim <= NARROW, key_bytes=2 * (plan.head_dim + plan.head_dim_v), cached_bytes=CACHED_BYTES,
    )  # fmt: skip


def unpacked(names: Sequence[str]) -> str:
    """The left side of an assignment at the head of a function, on lines of its own where one is too long."""
    text = ", ".join(names)
    if len(text) <= SIDE:
        return text
    return "\n".join(["(", *("        " + line for line in textwrap.wrap(text + ",", SIDE)), "    )"])


def tail(spec: AttentionSpec) -> str:
    """The condition that a key exists, where the mask does not say so: no row stands behind the last key."""
    behind = spec.align == "end" and bool(spec.masks) and prove(spec).causal == "k <= q"
    return "" if behind else "k < k_len"


def steps(walk: Walk | None, jumps: bool) -> Steps | None:
    if walk is None:
        return None
    if jumps:
        return Steps(walk.end, re.sub(r"\bstep\b", "nth", walk.tile))
    begin = walk.begin if re.fullmatch(r"\w+|\d+", walk.begin) else f"({walk.begin})"
    count = walk.end if begin == "0" else f"{walk.end} - {begin}"
    return Steps(f"gl.maximum({count}, 0)", "nth" if begin == "0" else f"{begin} + nth")
