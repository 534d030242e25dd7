"""What a warp-specialised kernel needs beside KernelView: the walk over tiles in steps, and what its roles hand on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attncc.codegen.loops import VisitsView, Walk
from attncc.codegen.parts import Part
from attncc.codegen.signature import CONSUMER_ROWS, Argument
from attncc.ir import KernelPlan

CACHED_BYTES = 32 * 2**20  # of an L2 of 50 MB
PRODUCER_REGISTERS = 24  # of a thread; setmaxnreg takes multiples of 8


@dataclass(frozen=True)
class Steps:
    """One class of tiles: how many there are, and the tile of `step`, counted from 0."""

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
    handed: str  # to the function that makes weights: what was computed for the whole tile of rows
    masked: Steps | None
    full: Steps | None
    results: tuple[Result, ...]
    key_bytes: int  # of a key and its value
    cached_bytes: int  # of K and V that L2 holds beside everything else


def hopper_view(
    plan: KernelPlan,
    args: Sequence[Argument],
    visits: VisitsView,
    lines: Iterable[str],
    k_parts: tuple[Part, ...],
    v_parts: tuple[Part, ...],
) -> HopperView:
    """`lines` are the statements of program and row, whose names the weights may use."""
    names = dict.fromkeys(["b", "h", "h_kv", "row", "q", *(line.partition(" = ")[0] for line in lines)])
    consumers = plan.tile_q // CONSUMER_ROWS
    return HopperView(
        rows=CONSUMER_ROWS, consumers=tuple(range(consumers)), consumer_registers=plan.max_registers,
        producer_registers=PRODUCER_REGISTERS, queries=plan.queries,
        key_size=plan.head_dim, value_size=plan.head_dim_v,
        arguments=", ".join(a.name for a in args), handed=", ".join(n for n in names if re.fullmatch(r"\w+", n)),
        masked=_steps(visits.masked, visits.jumps), full=_steps(visits.full, visits.jumps),
        results=tuple(Result(q.tag, v.size, q.size == v.size) for q, v in zip(k_parts, v_parts, strict=False)),
        key_bytes=2 * (plan.head_dim + plan.head_dim_v), cached_bytes=CACHED_BYTES,
    )  # fmt: skip


def _steps(walk: Walk | None, jumps: bool) -> Steps | None:
    if walk is None:
        return None
    if jumps:
        return Steps(walk.end, walk.tile)
    begin = walk.begin if re.fullmatch(r"\w+|\d+", walk.begin) else f"({walk.begin})"
    count = walk.end if begin == "0" else f"{walk.end} - {begin}"
    return Steps(f"gl.maximum({count}, 0)", "step" if begin == "0" else f"{begin} + step")
