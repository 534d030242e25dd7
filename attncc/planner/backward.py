"""The plan of the backward pass: for each of its kernels a short list of schedules for each matrix unit.

The kernel of dQ keeps tile_q rows of Q and d_out and streams tile_k keys; that of dK and dV keeps tile_k keys of K and
V and streams tile_q rows. backward_memory.py foretells their shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from attncc.analysis.alike import clamped
from attncc.errors import PlanError
from attncc.ir import AttentionSpec, KernelPlan, PassPlan, Shape, Var, names, walk
from attncc.planner import hopper_backward
from attncc.planner.backward_memory import fa2_backward
from attncc.planner.classes import MAX_HEAD_DIM
from attncc.planner.legality import violations
from attncc.planner.operands import KEYS, ROWS, WORD, has_key_mask, operands
from attncc.planner.shared_memory import ELEMENT_BYTES, padded
from attncc.planner.units import matrix_unit
from attncc.targets import Target


@dataclass(frozen=True)
class Schedule:
    """For heads of up to `head_dim` columns: the sides that a program keeps and that streams by, in rows or keys."""

    head_dim: int
    outer: int
    inner: int
    warps: int
    stages: int
    max_registers: int = 0  # of a thread, so that a third block fits on the SM; for scores of s alone


# The widest that do not spill for causal attention, but for a few words at the edge of a loop. tcgen05 keeps sums in a
# memory of its own, which costs registers as soon as the loop is pipelined; mfma has no asynchronous copies.
BY_POINTER = {
    "wgmma": (Schedule(64, 128, 64, 8, 3), Schedule(128, 64, 64, 4, 2), Schedule(192, 64, 32, 8, 2),
              Schedule(512, 64, 16, 8, 2), Schedule(512, 64, 16, 8, 1)),
    "tcgen05": (Schedule(64, 128, 64, 8, 1), Schedule(128, 128, 32, 8, 1), Schedule(512, 64, 16, 8, 1)),
    "mma": (Schedule(32, 128, 64, 8, 2), Schedule(64, 128, 32, 8, 2), Schedule(96, 64, 16, 8, 2),
            Schedule(128, 64, 32, 8, 2), Schedule(192, 32, 32, 8, 1), Schedule(256, 32, 16, 8, 1),
            Schedule(512, 16, 16, 8, 1)),
    "mfma": (Schedule(64, 128, 32, 8, 1), Schedule(128, 64, 32, 4, 1), Schedule(256, 64, 16, 8, 1),
             Schedule(512, 32, 16, 8, 1), Schedule(512, 16, 16, 4, 1)),
    "fma": (Schedule(64, 32, 32, 8, 1), Schedule(512, 16, 16, 8, 1)),
}  # fmt: skip
# For wgmma, with what streams by brought by TMA: no addresses in registers. The first of each head size is the fastest
# of 11 to 17 that were measured on one H200, Triton 3.6.0, bf16, S 1024 to 16384, with and without a causal mask (D 64,
# 128 and 256): two blocks of one warp group on an SM beat one of two. The others have room for what a score asks for.
BY_DESCRIPTOR = {
    "dq": (Schedule(128, 64, 64, 4, 2), Schedule(128, 64, 32, 4, 3), Schedule(128, 64, 16, 4, 2),
           Schedule(256, 128, 32, 8, 3), Schedule(512, 64, 16, 8, 2), Schedule(512, 64, 16, 8, 1)),
    "dkdv": (Schedule(64, 64, 64, 4, 2, 168), Schedule(128, 64, 64, 4, 2), Schedule(128, 64, 32, 4, 3),
             Schedule(128, 64, 16, 4, 2)),
    "dk": (Schedule(256, 128, 32, 8, 3), Schedule(512, 64, 16, 8, 2), Schedule(512, 64, 16, 8, 1)),
    "dv": (Schedule(256, 128, 64, 8, 2), Schedule(256, 128, 32, 8, 2), Schedule(512, 64, 16, 8, 2)),
}  # fmt: skip
APART = ("dq", "dv", "dkdv")  # with dV by itself, the last makes dK alone
TOGETHER = 128  # columns of a head up to which registers have room for dK and dV of a tile
WALKED = 8 * 2**20  # bytes that programs side by side walk over: a sixth of a Hopper's L2, of which some is used twice
PROGRAMS = 256  # that fill a GPU: the longest of them first, they end together
PAIRS = {"pair": 8, "gather": 32, "positions": 16}  # of a thread, at most, by what a score asks for
WIDE_PAIRS = 16  # the same beside a sum of a head wider than TOGETHER, of p, and of dp in kernels that make it


def choose_backward(
    spec: AttentionSpec, shape: Shape, target: Target, int_bits: int = 32, deterministic: bool = False,
    algorithm: str | None = None,
) -> KernelPlan:  # fmt: skip
    """For each kernel the first schedule that fits `target`; PlanError where none does.

    It depends on the head sizes and the dtype alone. The warp-specialised kernels come first where they are built and
    were seen right, and where the spec's schedule pins their algorithm; the rest of a schedule is about the forward
    pass. `deterministic` asks for equal bits of equal calls, `algorithm` for one of fa2 and fa3 where it is built.
    """
    if algorithm != "fa2" and not hopper_backward.backward_refused(spec, shape, target, int_bits):
        return hopper_backward.plan(replace(_base(spec, shape, int_bits), target=target.name), deterministic)
    reasons: list[str] = []
    plan = replace(_base(spec, shape, int_bits), target=target.name)
    apart = _loads(plan, target) == "descriptor" and _width(plan) > TOGETHER
    for kernels in (APART,) if apart else (("dq", "dkdv"), APART):
        found: KernelPlan | None = plan
        for which in kernels:
            found = found and _first(spec, found, target, which, reasons)
        if found is not None:
            return replace(found, shared_bytes=fa2_backward(found, target))
    sizes = f"head_dim {shape.head_dim}, head_dim_v {shape.head_dim_v}, {shape.dtype}"
    why = "; ".join(dict.fromkeys(reasons)) or f"head sizes up to {MAX_HEAD_DIM} are planned"
    raise PlanError(f"no plan of the backward pass of {spec.name} fits {target.name} ({sizes}): {why}")


def walked(plan: KernelPlan) -> int:
    """Rows or keys of heads side by side that stay in the L2 while programs walk over them."""
    return WALKED // ((plan.head_dim + plan.head_dim_v) * ELEMENT_BYTES[plan.dtype])


def side_by_side(plan: KernelPlan, which: str, shape: Shape) -> int:
    """Heads of K whose programs of a kernel run side by side: as launchers have it (triton/seq_fixed.jinja)."""
    if plan.layout == "ragged":
        return plan.together
    own = plan.passes[which]
    if which == "dq":
        length, programs = shape.k_len, shape.heads // shape.kv_heads * -(-shape.q_len // own.tile_q)
    else:
        length, programs = shape.q_len, -(-shape.k_len // own.tile_k)
    return max(1, min(plan.together, max(walked(plan) // max(1, length), PROGRAMS // max(1, programs))))


def _first(spec: AttentionSpec, plan: KernelPlan, target: Target, which: str, reasons: list[str]) -> KernelPlan | None:
    """`plan` with the first schedule of one kernel that fits; why others did not goes to `reasons`."""
    loads = _loads(plan, target)
    fitting = [
        s
        for s in _schedules(plan, target, which)
        if _width(plan) <= s.head_dim and (_of_s_alone(spec, which) or not s.max_registers)
    ]
    most = _pairs_of_a_thread(spec, loads, which, _width(plan) > TOGETHER)
    fitting.sort(key=lambda s: s.outer * s.inner > most * s.warps * target.warp_size)  # keeps the order otherwise
    for s in fitting:
        made = _with(plan, s, which, loads)
        faults = violations(made, target)
        if not faults:
            return made
        reasons.append(f"tile {s.outer} x {s.inner}: " + "; ".join(v.sentence for v in faults))
    return None


def _with(plan: KernelPlan, s: Schedule, which: str, loads: str) -> KernelPlan:
    outer_inner = (s.outer, s.inner) if which == "dq" else (s.inner, s.outer)
    own = PassPlan(*outer_inner, s.stages, s.warps, loads, s.max_registers)
    if which == "dq":
        return replace(plan, **{f.name: getattr(own, f.name) for f in fields(own)})
    return replace(plan, dv=own) if which == "dv" else replace(plan, dkdv=own)


def _pairs_of_a_thread(spec: AttentionSpec, loads: str, which: str, wide: bool) -> int:
    """How many pairs a thread can hold: those for which a tensor is read take addresses and values too."""
    read = operands(spec)
    if loads == "pointer":
        return 4 if read.pair or read.bits else 8 if read.gather else 64
    if read.pair or read.bits:
        return PAIRS["pair"]
    if read.gather or read.chain:
        return PAIRS["gather"] if not wide else WIDE_PAIRS // (1 if which == "dv" else 2)
    return 64 if _of_s_alone(spec, which) else PAIRS["positions"]


def _of_s_alone(spec: AttentionSpec, which: str) -> bool:
    """Whether no score and no weight needs more of a pair than s, nor, where a program keeps two sums, dropout."""
    if spec.dropout is not None and which != "dq":
        return False
    asked = (*spec.scores, *((spec.weight,) if spec.weight is not None else ()))
    return not any({"q", "row", "k"} & names(e) for e in asked)


def _schedules(plan: KernelPlan, target: Target, which: str) -> tuple[Schedule, ...]:
    if _loads(plan, target) == "pointer":
        return BY_POINTER[_unit(plan, target)]
    return BY_DESCRIPTOR["dk" if which == "dkdv" and plan.dv is not None else which]


def _loads(plan: KernelPlan, target: Target) -> str:
    """TMA asks for rows of whole 16 bytes; wgmma reads float32 one way round only."""
    size = ELEMENT_BYTES.get(plan.dtype, 4)
    rows = all(d * size % 16 == 0 for d in (plan.head_dim, plan.head_dim_v))
    dense = plan.layout == "dense"  # TMA would go on into the next of packed sequences
    ours = _unit(plan, target) == "wgmma" and target.caps.has_tma
    return "descriptor" if ours and dense and rows and size == 2 else "pointer"


def _unit(plan: KernelPlan, target: Target) -> str:
    return matrix_unit(replace(plan, tile_q=128, warps=8), target)


def _width(plan: KernelPlan) -> int:
    return max(padded(plan.head_dim), padded(plan.head_dim_v))


def _base(spec: AttentionSpec, shape: Shape, int_bits: int) -> KernelPlan:
    """Everything but the schedules."""
    read = operands(spec)
    return KernelPlan(
        target="", algorithm="fa2", loop="q_outer", tile_q=0, tile_k=0, stages=0, warps=0, head_dim=shape.head_dim,
        head_dim_v=shape.head_dim_v, dtype=spec.precision.inputs or shape.dtype, products=spec.precision.products,
        int_bits=int_bits, pair_bytes=read.pair, pair_bits=read.bits, key_bytes=read.key,
        row_bytes=read.row + WORD * bool(spec.reports),  # beside lse and delta, what entropy asks for
        gather_bytes=read.gather, chain_bytes=read.chain, levels=read.levels, level_widths=read.widths,
        narrow_bytes=read.narrow, narrow_key_bytes=read.narrow_keys, index_bytes=read.index, flag_bytes=read.flags,
        reads_down=read.down, reads_along=read.along, grads=tuple(sorted(set(_grads(spec)))),
        dropout=spec.dropout is not None, direction="backward", key_mask=has_key_mask(spec),
        layout="ragged" if spec.ragged else "dense",
    )  # fmt: skip


def _grads(spec: AttentionSpec) -> Iterator[str]:
    """Of KernelPlan."""
    grad = {p.name for p in spec.params if p.grad}
    expressions = (*spec.scores, *((spec.weight,) if spec.weight is not None else ()))
    for node in (n for e in expressions for n in walk(e)):
        if not grad & {getattr(node, "tensor", None), getattr(node, "name", None)}:
            continue
        plain = {i.name for i in getattr(node, "indices", ()) if isinstance(i, Var)}
        if not names(node) & KEYS:
            yield "row"
        elif not names(node) & ROWS:
            yield "key"
        elif plain & ROWS and plain & KEYS:
            yield "own" if "b" in plain and plain & {"h", "h_kv"} else "shared"
        else:
            yield "table"
            if clamped(node):
                yield "alike"
