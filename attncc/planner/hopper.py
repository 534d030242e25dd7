"""Plans of the warp-specialised kernel: which specs it takes, which schedules are worth trying, what they hold.

A warp loads tiles of Q, K and V by TMA; tile_q / 64 warp groups multiply, each 64 rows; the output leaves by TMA
through the buffer of its rows' Q. So the matrix unit reads everything as it came from memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from attncc.analysis.bounded import bounded
from attncc.ir import SUM, AttentionSpec, KernelPlan, Op, Shape, Visits, names, pieces, walk
from attncc.ir import Schedule as Pins
from attncc.planner.classes import MAX_HEAD_DIM
from attncc.planner.operands import has_key_mask, operands
from attncc.planner.shared_memory import ALIGNMENT, ELEMENT_BYTES, Tiles, padded, parts
from attncc.targets import Target

GROUP_ROWS = 64  # of a warp group
WARPS_GROUP = 4
NARROWEST = 64
WIDEST = 256  # columns of a head: beyond that the sums of 64 rows fill a warp group's registers
NUMBERS = 128  # columns of a head up to which fa2 was faster where a number is read for each pair; with bits, never
POSITIONS = frozenset(("q", "k", "row"))
SOFTMAX = ("online", "sink", "off_by_one", "sigmoid", "relu", "none", "custom")
REGISTERS = {2: 240, 3: 160}  # of a thread, by the number of consumers; setmaxnreg gives them what the loader leaves
CACHED_BYTES = 32 * 2**20  # of K and V whose heads run side by side, in an L2 of 50 MB
REGISTERS_SM, GROUP_THREADS, LOADER = 65536, 128, 24  # the last of a thread that loads, at least


@dataclass(frozen=True)
class Schedule:
    """For heads of up to `head_dim` columns."""

    head_dim: int
    tile_q: int
    tile_k: int
    stages: int
    queries: int
    apart: tuple[str, ...] = ()  # references with which whole tiles are faster in a loop of their own
    registers: int = 0  # of a consumer's thread, where these tiles leave room for another block on the SM


SCHEDULES = (
    Schedule(64, 192, 128, 4, 2), Schedule(128, 128, 128, 2, 2, ("whole_tile", "bounded", "running", "none")),
    Schedule(192, 128, 64, 2, 2, ("running",)), Schedule(256, 128, 64, 2, 1, ("running",)),
)  # fmt: skip
# Beside those of the same heads, where there is a mask: of narrow tiles fewer pairs are masked. With 64 columns two
# blocks share an SM, and one multiplies while the other begins or ends a tile of rows; scores have no room there.
NARROW = {
    64: Schedule(64, 128, 64, 4, 2, ("whole_tile", "running", "none"), registers=104),
    128: Schedule(128, 128, 64, 4, 2, ("whole_tile", "running", "none")),
}


# Of 8 bits, whose output leaves through buffers of its own; a consumer's products and weights take turns.
EIGHT_BIT_SCHEDULES = (
    Schedule(64, 192, 128, 4, 2, ("running",)), Schedule(128, 192, 128, 3, 1, ("running",)),
    Schedule(192, 128, 128, 3, 1), Schedule(256, 128, 128, 2, 1),
)  # fmt: skip
EIGHT_BIT_SOFTMAX = ("online", "sink", "off_by_one")
UNITS = 8  # columns that sum weights up
STEP = 32  # columns that a product of 8 bits takes at a time


def unfit(spec: AttentionSpec) -> str | None:
    """Why no such kernel can be made of `spec`, in a sentence; None where one can."""
    if spec.precision.kept:
        return "fa3 takes q, k and v of one type"
    if spec.precision.is_eight_bit:
        if spec.softmax.policy not in EIGHT_BIT_SOFTMAX:
            return f"fa3 keeps weights in 8 bits, and those of softmax {spec.softmax.policy} can be of any size"
        if spec.weight is not None or spec.dropout is not None:
            return "fa3 with 8-bit inputs does not know a weight behind the softmax, nor dropout"
        if has_key_mask(spec):
            return "fa3 with 8-bit inputs does not know masks of keys alone, whose values may be anything"
    if spec.softmax.policy == "custom" and dict(spec.softmax.named)["divide"] == SUM:
        return "fa3 does not know sums of weights that are no exponentials"
    if spec.softmax.policy not in SOFTMAX:
        return f"fa3 does not know softmax {spec.softmax.policy}"
    if spec.ragged:
        return "fa3 does not know packed sequences"
    if spec.reports:
        return f"fa3 returns nothing of a row but its lse, and not {spec.layout.rows}"
    return None


SEEN = ("online", "sink", "off_by_one", "sigmoid", "none")  # normalisers that today's kernel was seen right with


def unwise(spec: AttentionSpec, shape: Shape, visits: Visits | None) -> str:
    """Why another kernel is taken where nobody asks for this one, in a sentence."""
    if spec.precision.is_eight_bit:  # which has no other kernel
        return ""
    if visits is not None and visits.listed:
        return "a mask's tiles are listed one by one, and fa3's are too large for such masks"
    if min(shape.head_dim, shape.head_dim_v) < NARROWEST:
        return f"fa3 was not measured with heads of less than {NARROWEST} columns"
    if spec.softmax.policy not in SEEN:
        return "fa3 was not seen right on a GPU with such weights since its kernel changed"
    read = operands(spec)
    numbers = read.pair or read.chain or read.gather
    narrow = max(shape.head_dim, shape.head_dim_v) <= NUMBERS
    return "the score or mask reads a number for each pair, which fa3 does not load ahead" if numbers and narrow else ""


def _divides(spec: AttentionSpec) -> bool:
    """Whether a tile's positions are divided: it takes registers for each of them."""
    found = (n for e in (*spec.masks, *spec.scores) for n in walk(e))
    return any(isinstance(n, Op) and n.op in ("//", "%") and names(n) & POSITIONS for n in found)


def _placed(spec: AttentionSpec) -> bool:
    """Whether scores depend on positions."""
    return any(names(e) & POSITIONS for e in spec.scores)


def _sums_rows_up(visits: Visits | None) -> bool:
    """Whether the walk over tiles, or the kernels before, take what a tile of rows reads together."""
    return visits is not None and (visits.listed or any(s.axis == "q" for s in visits.summaries))


def _reference(spec: AttentionSpec, asked: str, classed: bool) -> str:
    """Scores that bound themselves need no maximum. A whole tile sets the reference where scores are products alone.
    What depends on positions can be far from where it is largest in any one tile: there all tiles that need the mask,
    the nearest among them, set it."""
    if asked == "running":
        return asked
    if bounded(spec) is not None:
        return "bounded"
    return "whole_tile" if not _placed(spec) else "running" if classed else "first_tile"


def plans(
    spec: AttentionSpec, shape: Shape, target: Target, pins: Pins, references: Iterable[str], visits: Visits | None
) -> Iterator[KernelPlan]:
    """The schedules of the narrowest heads that hold this size, changed by what is pinned."""
    width, eight = max(padded(shape.head_dim), padded(shape.head_dim_v)), spec.precision.is_eight_bit
    every = EIGHT_BIT_SCHEDULES if eight else SCHEDULES
    usual = next((s for s in every if width <= s.head_dim), every[-1])
    narrow = NARROW.get(usual.head_dim) if not eight and spec.masks and bounded(spec) is None else None
    known = (usual,) if narrow is None or not _has_room(narrow, spec, pins) else (usual, narrow)
    made = (p for schedule in known for p in _plans(schedule, spec, shape, target, pins, references, visits))
    yield from dict.fromkeys(made)


def _has_room(schedule: Schedule, spec: AttentionSpec, pins: Pins) -> bool:
    """Whether threads can do with a schedule's own share of the registers: in its own tiles, for a mask alone."""
    if not schedule.registers:
        return True
    own = (pins.tile_q, schedule.tile_q), (pins.tile_k, schedule.tile_k), (pins.stages, schedule.stages)
    plain = not (spec.scores or spec.dropout is not None or spec.weight is not None or has_key_mask(spec))
    return plain and spec.softmax.policy in SEEN and all(pin in (None, its) for pin, its in own)


def _plans(
    usual: Schedule, spec: AttentionSpec, shape: Shape, target: Target, pins: Pins, references: Iterable[str],
    visits: Visits | None,
) -> Iterator[KernelPlan]:  # fmt: skip
    classed = visits is not None and not visits.listed and not (visits.may is None and visits.must is None)
    eight = spec.precision.is_eight_bit
    if classed or (visits is not None and visits.summaries) or _divides(spec) or _placed(spec):
        # a third consumer would leave too few registers, and so would sums of 8 bits beside the next scores
        usual = replace(usual, tile_q=2 * GROUP_ROWS)
        usual = replace(usual, apart=()) if eight else usual
    whole = visits is not None and bool(visits.full or visits.must is not None)
    read, tile_q = operands(spec), pins.tile_q or usual.tile_q
    numbers = read.pair or read.gather or read.chain  # in a loop without branches their loads run ahead of their use
    if eight or numbers or (not whole and (visits is None or bounded(spec) is None)):
        references = ("running",)
    consumers = tile_q // GROUP_ROWS
    found = dict.fromkeys(_reference(spec, r, classed) for r in reversed(tuple(references)))
    for reference in ("none",) if spec.softmax.policy == "sigmoid" else found:
        yield KernelPlan(
            target=target.name, algorithm="fa3", loop=pins.loop or "q_outer", tile_q=tile_q,
            tile_k=pins.tile_k or usual.tile_k, stages=pins.stages or usual.stages,
            warps=pins.warps or consumers * WARPS_GROUP, head_dim=shape.head_dim, head_dim_v=shape.head_dim_v,
            dtype=spec.precision.inputs or shape.dtype, products=spec.precision.products, loads="descriptor",
            max_registers=usual.registers or REGISTERS.get(consumers, 0), classed=classed,
            reference=reference, queries=usual.queries,
            apart=whole and reference in usual.apart,
            scales="" if not eight else "block" if spec.precision.block else "whole",
            pair_bytes=read.pair, pair_bits=read.bits, key_bytes=read.keys, row_bytes=read.row,
            row_tests=read.tests, row_summaries=_sums_rows_up(visits),
            gather_bytes=read.gather, chain_bytes=read.chain,
        )  # fmt: skip


def faults(plan: KernelPlan, target: Target) -> Iterator[tuple[str, int | str, int | str, str]]:
    """What of `target` the plan lacks, or of the plan does not fit: limit, value, what is allowed, and the sentence."""
    d, dv = plan.head_dim, plan.head_dim_v
    if not (target.caps.has_wgmma and target.caps.has_tma):
        yield "algorithm", "fa3", "fa2", f"fa3 needs matrix products of warp groups and TMA, which {target.name} lacks"
    if plan.dtype not in ("bf16", "f16") and not plan.scales:
        yield "dtype", plan.dtype, "bf16, f16", f"fa3 multiplies 16-bit types, not {plan.dtype}"
    if plan.loads != "descriptor":
        yield "loads", plan.loads, "descriptor", "fa3 loads by descriptor"
    if plan.tile_q not in (GROUP_ROWS * n for n in REGISTERS):
        yield (
            "tile_q",
            plan.tile_q,
            128,
            f"fa3 has 2 or 3 consumers of 64 rows: tile_q is 128 or 192, not {plan.tile_q}",
        )
    if plan.row_summaries and plan.tile_q & (plan.tile_q - 1):
        words = "what the mask reads of rows is summed up for a power of two of them"
        yield "tile_q", plan.tile_q, 128, f"{words}, such as 128, and not for {plan.tile_q}"
    if plan.tile_k not in (64, 128):
        yield "tile_k", plan.tile_k, 128, f"tile_k of fa3 is 64 or 128, not {plan.tile_k}"
    if max(d, dv) > WIDEST:
        yield "head_dim", max(d, dv), WIDEST, f"head size {max(d, dv)}: the sums of fa3 hold {WIDEST} columns at most"
    if d % 16 or dv % 16:
        yield "head_dim", d if d % 16 else dv, "a multiple of 16", "fa3 takes head sizes that are multiples of 16"
    if plan.scales and (d % STEP or dv % STEP):
        yield "head_dim", d if d % STEP else dv, STEP, f"fa3 takes heads of 8 bits in multiples of {STEP} columns"
    outputs, buffers = pieces(dv), pieces(d)
    if plan.scales:
        return
    if len(outputs) > len(buffers) or any(o > b for o, b in zip(outputs, buffers, strict=False)):
        yield "head_dim_v", dv, d, f"the output of fa3 leaves through the buffer of Q: head_dim_v {dv} does not fit {d}"


def shared_bytes(plan: KernelPlan, target: Target, tiles_of: Tiles = parts) -> int:
    """Q and K and V in all their buffers, the output of 8-bit inputs, what two tiles of rows judge of themselves, and
    the barriers."""
    tiles = tiles_of(plan, target)
    results = tiles.out * ELEMENT_BYTES["bf16"] + UNITS * plan.tile_k if plan.scales else 0
    verdicts = 2 * plan.tile_q if plan.reference != "running" else 0
    return plan.queries * tiles.query + plan.stages * (tiles.key + tiles.value) + results + verdicts + ALIGNMENT


def blocks(plan: KernelPlan) -> int:
    """Blocks of a plan's kernel that share an SM, by their registers."""
    if plan.direction != "forward" or not plan.max_registers:
        return 1
    own = plan.tile_q // GROUP_ROWS * plan.max_registers + LOADER
    return max(1, REGISTERS_SM // (GROUP_THREADS * own))


def register_cap(plan: KernelPlan) -> int:
    """Registers of each thread when a block begins, before its roles share them out; 0 where it has the SM alone."""
    share = REGISTERS_SM // (blocks(plan) * GROUP_THREADS * (plan.tile_q // GROUP_ROWS + 1))
    return share // 8 * 8 if blocks(plan) > 1 else 0


def value_columns(plan: KernelPlan) -> int:
    """The widest part of a head's values: in 8 bits, sums of a tile stand beside all others."""
    if not plan.scales:
        return MAX_HEAD_DIM
    return 2 * NARROWEST


def registers(plan: KernelPlan) -> int:
    """Of a thread, for its sums, the scores of a tile, and the weights that are being multiplied."""
    weights = plan.tile_k // (4 if plan.scales else 2)
    joined = min(padded(plan.head_dim_v), value_columns(plan)) if plan.scales else 0
    columns = max(plan.tile_k, weights + joined) if plan.scales else plan.tile_k + weights
    columns += padded(plan.head_dim_v)
    return GROUP_ROWS * columns // (WARPS_GROUP * 32)
