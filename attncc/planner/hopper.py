"""Plans of the warp-specialised kernel: which specs it takes, which schedules are worth trying, what they hold.

A warp loads tiles of Q, K and V by TMA; tile_q / 64 warp groups multiply, each 64 rows; the output leaves by TMA
through the buffer of its rows' Q. So the matrix unit reads everything as it came from memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attncc.ir import AttentionSpec, Expr, KernelPlan, Op, Shape, Visits, names, pieces
from attncc.planner.shared_memory import ALIGNMENT, ELEMENT_BYTES, padded
from attncc.targets import Target

GROUP_ROWS = 64  # of a warp group
WARPS_GROUP = 4
WIDEST = 256  # columns of a head: beyond that the sums of 64 rows fill a warp group's registers
ROWS = frozenset(("q", "row"))
SOFTMAX = ("online", "sink", "off_by_one")
REGISTERS = {2: 240, 3: 160}  # of a thread, by the number of consumers; setmaxnreg gives them what the loader leaves


@dataclass(frozen=True)
class Schedule:
    """For heads of up to `head_dim` columns."""

    head_dim: int
    tile_q: int
    tile_k: int
    stages: int
    queries: int


SCHEDULES = (
    Schedule(64, 192, 128, 4, 2), Schedule(128, 128, 128, 2, 2), Schedule(192, 128, 64, 2, 2),
    Schedule(256, 128, 64, 2, 1),
)  # fmt: skip


def unfit(spec: AttentionSpec, visits: Visits | None) -> str | None:
    """Why no such kernel can be made of `spec`, in a sentence; None where one can. `visits` is of rows."""
    if spec.dropout is not None:
        return "fa3 does not know dropout"
    if spec.softmax.policy not in SOFTMAX:
        return f"fa3 does not know softmax {spec.softmax.policy}"
    if spec.ragged:
        return "fa3 does not know packed sequences"
    if any("k" in names(t) and not names(t) & ROWS for m in spec.masks for t in _terms(m)):
        return "fa3 multiplies values as they lie in memory, and the mask leaves out keys whose values may be anything"
    if visits is None:
        return None
    if visits.masked and not (visits.may is None and visits.must is None):
        return "fa3 walks over closed ranges of tiles, and this mask classes tiles one by one"
    if any(s.axis == visits.outer and s.reduce in ("min", "max") for s in visits.summaries):
        return "fa3 walks over closed ranges of tiles, and those of this mask follow from what its rows read"
    return None


def _terms(e: Expr) -> Iterator[Expr]:
    """What an `and` joins."""
    if isinstance(e, Op) and e.op == "and":
        for a in e.args:
            yield from _terms(a)
    else:
        yield e


def schedules(shape: Shape) -> Iterator[Schedule]:
    """The narrowest that holds a head of this size."""
    width = max(padded(shape.head_dim), padded(shape.head_dim_v))
    fitting = [s for s in SCHEDULES if width <= s.head_dim]
    return iter(fitting[:1] or SCHEDULES[-1:])


def faults(plan: KernelPlan, target: Target) -> Iterator[tuple[str, int | str, int | str, str]]:
    """What of `target` the plan lacks, or of the plan does not fit: limit, value, what is allowed, and the sentence."""
    d, dv = plan.head_dim, plan.head_dim_v
    if not (target.caps.has_wgmma and target.caps.has_tma):
        yield "algorithm", "fa3", "fa2", f"fa3 needs matrix products of warp groups and TMA, which {target.name} lacks"
    if plan.dtype not in ("bf16", "f16"):
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
    if plan.tile_k not in (64, 128):
        yield "tile_k", plan.tile_k, 128, f"tile_k of fa3 is 64 or 128, not {plan.tile_k}"
    if max(d, dv) > WIDEST:
        yield "head_dim", max(d, dv), WIDEST, f"head size {max(d, dv)}: the sums of fa3 hold {WIDEST} columns at most"
    if d % 16 or dv % 16:
        yield "head_dim", d if d % 16 else dv, "a multiple of 16", "fa3 takes head sizes that are multiples of 16"
    outputs, buffers = pieces(dv), pieces(d)
    if len(outputs) > len(buffers) or any(o > b for o, b in zip(outputs, buffers, strict=False)):
        yield "head_dim_v", dv, d, f"the output of fa3 leaves through the buffer of Q: head_dim_v {dv} does not fit {d}"


def shared_bytes(plan: KernelPlan) -> int:
    """Q and K and V in all their buffers, and the barriers."""
    size = ELEMENT_BYTES[plan.dtype]
    rows = plan.tile_q * plan.queries * padded(plan.head_dim)
    keys = plan.tile_k * plan.stages * (padded(plan.head_dim) + padded(plan.head_dim_v))
    return (rows + keys) * size + ALIGNMENT


def registers(plan: KernelPlan) -> int:
    """Of a thread, for its sums, the scores of a tile, and the weights that are being multiplied."""
    columns = padded(plan.head_dim_v) + plan.tile_k + plan.tile_k // 2
    return GROUP_ROWS * columns // (WARPS_GROUP * 32)
