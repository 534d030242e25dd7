"""Plans of the warp-specialised backward pass: which specs it takes, its schedules, what they hold.

A warp loads tiles of Q and d_out by TMA; two warp groups have 64 keys each, and keep their dK and dV. Each makes one
half of every tile of dQ, which the TMA unit adds up in float32, in any order (`sums` is added), or a second kernel
over rows works scores out once more, and equal calls give equal bits (apart).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attncc.analysis import kernel_visits
from attncc.ir import AttentionSpec, Const, KernelPlan, PassPlan, Shape
from attncc.planner import hopper
from attncc.planner.operands import operands
from attncc.planner.shared_memory import ALIGNMENT, ELEMENT_BYTES
from attncc.targets import Target

KEYS = 64  # of a warp group
HEADS = (64, 128)  # sizes of a head that are built
REGISTERS = 240  # of a thread that multiplies
# Rows of a tile by the size of a head: two pieces of 64 x 64 of dQ, one for each warp group.
TILE_Q = {64: 128, 128: 64}
ROWS = PassPlan(128, 128, 2, 8, "descriptor", REGISTERS)  # of the kernel of dQ alone
PARTIAL = 2 * 4096 * 4  # bytes of dQ on its way to memory


def unfit(spec: AttentionSpec, shape: Shape, target: Target, int_bits: int = 32) -> str:
    """Why no such kernel can be made, in a sentence; "" where one can."""
    dtype = spec.precision.inputs or shape.dtype
    if not (target.caps.has_wgmma and target.caps.has_tma):
        return f"fa3 needs matrix products of warp groups and TMA, which {target.name} lacks"
    if dtype not in ("bf16", "f16"):
        return f"fa3 multiplies 16-bit types, not {dtype}"
    if (shape.head_dim, shape.head_dim_v) not in ((d, d) for d in HEADS):
        return f"the backward pass of fa3 is built for heads of {' and '.join(map(str, HEADS))} columns"
    if int_bits != 32:
        return "the backward pass of fa3 has no room for 64-bit positions"
    if spec.weight is not None:
        return "the backward pass of fa3 does not know weights yet"
    if spec.scale is not None and not isinstance(spec.scale, Const):
        return "the backward pass of fa3 takes a constant scale"
    if any(p.grad for p in spec.params):
        return "the backward pass of fa3 does not sum up gradients of parameters yet"
    return hopper.unfit(spec) or _reads(spec)


def _reads(spec: AttentionSpec) -> str:
    read = operands(spec)
    if read.pair or read.bits or read.gather or read.chain:
        return "the score or mask reads a tensor for each pair, which the backward pass of fa3 does not load ahead"
    if any(kernel_visits(spec, outer).summaries for outer in "qk"):
        return "the backward pass of fa3 does not make tables of a mask's tensors yet"
    return ""


def backward_refused(spec: AttentionSpec, shape: Shape, target: Target, int_bits: int = 32) -> str:
    """Why the planner takes another kernel, in a sentence; "" where it takes this one."""
    pinned = spec.schedule(target.name).algorithm
    if pinned not in (None, "fa3"):
        return f"the schedule asks for {pinned}"
    return unfit(spec, shape, target, int_bits) or ("" if pinned else unwise(spec, shape))


def unwise(spec: AttentionSpec, shape: Shape) -> str:
    """Why another kernel is taken where nobody asks for this one, in a sentence."""
    return "the backward pass of fa3 was not seen right on a GPU yet"


def plan(base: KernelPlan, deterministic: bool) -> KernelPlan:
    """`base` says everything but the schedule."""
    keys = PassPlan(TILE_Q[base.head_dim], 2 * KEYS, 2, 8, "descriptor", REGISTERS)
    own = ROWS if deterministic else keys
    made = replace(
        base, algorithm="fa3", tile_q=own.tile_q, tile_k=own.tile_k, stages=own.stages, warps=own.warps,
        loads=own.loads, max_registers=own.max_registers, dkdv=keys, sums="apart" if deterministic else "added",
    )  # fmt: skip
    return replace(made, shared_bytes=shared_bytes(made))


def faults(plan: KernelPlan, target: Target) -> Iterator[tuple[str, int | str, int | str, str]]:
    """What of the plan does not fit: limit, value, what is allowed, and the sentence."""
    keys, d = plan.dkdv, plan.head_dim
    if keys is None or d not in HEADS or d != plan.head_dim_v:
        yield "head_dim", d, HEADS[-1], f"the backward pass of fa3 is built for heads of {HEADS} columns"
    elif (keys.tile_q, keys.tile_k) != (TILE_Q[d], 2 * KEYS):
        sentence = f"tiles of the backward pass of fa3 are {TILE_Q[d]} x {2 * KEYS}"
        yield "tile_q", keys.tile_q, TILE_Q[d], sentence


def shared_bytes(plan: KernelPlan) -> int:
    """Of the kernel that takes most."""
    keys, size, columns = plan.dkdv, ELEMENT_BYTES[plan.dtype], plan.head_dim + plan.head_dim_v
    assert keys is not None
    taken = (keys.tile_k + keys.stages * keys.tile_q) * columns * size + keys.stages * keys.tile_q * 8
    if plan.sums == "added":
        return taken + 4 * KEYS * keys.tile_q * size + PARTIAL + ALIGNMENT
    rows = (plan.tile_q + plan.stages * plan.tile_k) * columns * size
    return max(taken, rows) + ALIGNMENT


def registers(plan: KernelPlan) -> int:
    """Of a thread, for the sums, and the scores of a tile and the derivative by its weights."""
    keys = plan.dkdv
    assert keys is not None
    return KEYS * (plan.head_dim + plan.head_dim_v + 2 * keys.tile_q) // 128
