"""Plans of the warp-specialised backward pass: which specs it takes, its schedules, what they hold.

A warp loads tiles of Q and d_out by TMA; two warp groups have 64 keys each, and keep their dK and dV. Each makes one
half of every tile of dQ, which the TMA unit adds up in float32, in any order (`sums` is turns: heads may use the same
sums one after another, and two more warps convert those of earlier heads; or added: each has its own, which a search
tries), or a second kernel over rows works scores out once more, and equal calls give equal bits (apart). Of heads wider
than 128 a warp group can hold only one sum: one has the weights and dV of 64 keys, the other their dK, and dQ is always
made apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attncc.ir import AttentionSpec, KernelPlan, PassPlan, Read, Shape, Var, names, tensors, walk
from attncc.planner import hopper
from attncc.planner.operands import has_key_mask, operands
from attncc.planner.shared_memory import ALIGNMENT, ELEMENT_BYTES
from attncc.targets import Target

KEYS = 64  # of a warp group
SOFTMAX = ("online", "sink", "off_by_one")
WIDTHS = (64, 128, 256)  # of a head as it is multiplied
JOINT = 128  # the widest of which a warp group holds dK and dV
REGISTERS = 240  # of a thread that multiplies
# Rows of a tile by the width of a head: two pieces of 64 x 64 of dQ, one for each warp group.
TILE_Q = {64: 128, 128: 64, 256: 64}
ROWS = PassPlan(128, 128, 2, 8, "descriptor", REGISTERS)  # of the kernel of dQ alone
WIDE_ROWS = replace(ROWS, tile_k=64)  # one buffer of V beside two of K
ADDED = ("added", "turns")  # `sums` of which dQ is added up as it comes
RING_BYTES = 30 * 2**20  # of sums that heads use in turns; four of 8 MB are slower than sums for each head
PARTIAL = 2 * 4096 * 4  # bytes of dQ on its way to memory
BACK = 4096 * 4  # and on its way back


def unfit(spec: AttentionSpec, shape: Shape, target: Target, int_bits: int = 32) -> str:
    """Why no such kernel can be made, in a sentence; "" where one can."""
    dtype = spec.precision.inputs or shape.dtype
    if not (target.caps.has_wgmma and target.caps.has_tma):
        return f"fa3 needs matrix products of warp groups and TMA, which {target.name} lacks"
    if dtype not in ("bf16", "f16"):
        return f"fa3 multiplies 16-bit types, not {dtype}"
    if why := _sizes(shape.head_dim, shape.head_dim_v):
        return why
    if int_bits != 32:
        return "the backward pass of fa3 has no room for 64-bit positions"
    if spec.dropout is not None:
        return "the backward pass of fa3 does not know dropout yet"
    if spec.softmax.policy not in SOFTMAX:
        return f"the backward pass of fa3 does not know softmax {spec.softmax.policy} yet"
    if spec.weight is not None:
        return "the backward pass of fa3 does not know weights yet"
    if has_key_mask(spec):
        return "the mask leaves out keys by themselves, which the backward pass of fa3 does not know yet"
    scale = () if spec.scale is None else (spec.scale,)
    learned = {p.name for p in spec.params if p.grad}
    if any(learned & (names(e) | tensors(e)) for e in (*spec.scores, *scale)):
        return "the backward pass of fa3 does not sum up gradients of parameters of scores yet"
    if any(not _of_rows(n) for e in spec.softmax.args for n in walk(e) if isinstance(n, Read) and n.tensor in learned):
        return "the backward pass of fa3 sums up gradients of sinks for heads and rows alone"
    return hopper.unfit(spec) or _reads(spec)


def _of_rows(read: Read) -> bool:
    """Whether it is one value for each head, or each row of it."""
    plain = [i.name if isinstance(i, Var) else "" for i in read.indices]
    return all(n in ("b", "h", "h_kv", "row", "q") for n in plain) and sum(n in ("row", "q") for n in plain) <= 1


def width(head_dim: int) -> int:
    """Of a head as it is multiplied: TMA brings zeros for the columns that it has not."""
    return next((w for w in WIDTHS if head_dim <= w), 0)


def widths(d: int, dv: int) -> tuple[int, int]:
    """Of Q and K, and of V, as they are multiplied: wide ones alike, since dV and dK leave through their buffers."""
    widest = width(max(d, dv))
    return (widest, widest) if widest > JOINT else (width(d), width(dv))


def wide(plan: KernelPlan) -> bool:
    """Whether each warp group holds one sum of the same keys."""
    return width(max(plan.head_dim, plan.head_dim_v)) > JOINT


def _schedules(d: int, dv: int) -> tuple[PassPlan, PassPlan]:
    """Of the kernel over keys, and of that over rows."""
    first = widths(d, dv)[0]
    keys = PassPlan(TILE_Q[first], KEYS if first > JOINT else 2 * KEYS, 2, 8, "descriptor", REGISTERS)
    return keys, WIDE_ROWS if first > JOINT else ROWS


def keys_plan(plan: KernelPlan) -> PassPlan:
    """The schedule of the kernel over keys."""
    assert plan.dkdv is not None
    return plan.dkdv


def _sizes(d: int, dv: int) -> str:
    if not width(max(d, dv)):
        return f"the backward pass of fa3 is built for heads of up to {WIDTHS[-1]} columns"
    if d % 8 or dv % 8:
        return "TMA takes head sizes that are multiples of 8"
    if JOINT >= width(dv) > width(d):
        return f"the backward pass of fa3 has no room for values wider than keys: {dv} and {d} columns"
    return ""


def _reads(spec: AttentionSpec) -> str:
    read = operands(spec)
    if read.pair or read.bits or read.gather or read.chain:
        return "the score or mask reads a tensor for each pair, which the backward pass of fa3 does not load ahead"
    return ""


def backward_refused(spec: AttentionSpec, shape: Shape, target: Target, int_bits: int = 32) -> str:
    """Why the planner takes another kernel, in a sentence; "" where it takes this one."""
    pinned = spec.schedule(target.name).algorithm
    if pinned not in (None, "fa3"):
        return f"the schedule asks for {pinned}"
    return unfit(spec, shape, target, int_bits) or ("" if pinned else unwise(shape))


def unwise(shape: Shape) -> str:
    """Why another kernel is taken where nobody asks for this one, in a sentence."""
    d, dv = shape.head_dim, shape.head_dim_v
    if 3 * min(d, dv) < 2 * (widest := widths(d, dv)[0]):
        return f"heads of {d} and {dv} columns would be multiplied as {widest}"
    return ""


def plan(base: KernelPlan, deterministic: bool) -> KernelPlan:
    """`base` says everything but the schedule."""
    keys, rows = _schedules(base.head_dim, base.head_dim_v)
    apart = deterministic or wide(base)
    own = rows if apart else keys
    made = replace(
        base, algorithm="fa3", tile_q=own.tile_q, tile_k=own.tile_k, stages=own.stages, warps=own.warps,
        loads=own.loads, max_registers=own.max_registers, dkdv=keys, sums="apart" if apart else "turns",
    )  # fmt: skip
    return replace(made, shared_bytes=shared_bytes(made))


def faults(plan: KernelPlan, target: Target) -> Iterator[tuple[str, int | str, int | str, str]]:
    """What of the plan does not fit: limit, value, what is allowed, and the sentence."""
    keys, d, dv = plan.dkdv, plan.head_dim, plan.head_dim_v
    if why := _sizes(d, dv):
        yield "head_dim", max(d, dv), WIDTHS[-1], why
        return
    wanted, rows = _schedules(d, dv)
    if keys is None or (keys.tile_q, keys.tile_k) != (wanted.tile_q, wanted.tile_k):
        tile = keys.tile_q if keys is not None else 0
        sentence = f"tiles of the backward pass of fa3 are {wanted.tile_q} x {wanted.tile_k} here"
        yield "tile_q", tile, wanted.tile_q, sentence
    if wide(plan) and plan.sums != "apart":
        yield "sums", plan.sums, "apart", "dQ of wide heads is made apart"
    if plan.sums not in (*ADDED, "apart"):
        yield "sums", plan.sums, "added, turns, apart", f"dQ of fa3 is not made as {plan.sums!r} says"
    own = rows if plan.sums == "apart" else keys
    if own is not None and plan.passes["dq"] != own:
        yield "sums", plan.sums, "added, turns, apart", f"dQ of fa3 is made in tiles of {own.tile_q} x {own.tile_k}"


def shared_bytes(plan: KernelPlan) -> int:
    """Of the kernel that takes most."""
    keys, size = keys_plan(plan), ELEMENT_BYTES[plan.dtype]
    first, second = widths(plan.head_dim, plan.head_dim_v)
    columns = first + second
    taken = (keys.tile_k + keys.stages * keys.tile_q) * columns * size + keys.stages * keys.tile_q * 8
    if plan.sums in ADDED:
        passing = PARTIAL + (BACK if plan.sums == "turns" else 0)
        return taken + 4 * KEYS * keys.tile_q * size + passing + ALIGNMENT
    if wide(plan):
        taken += 2 * KEYS * keys.tile_q * size
    buffers = plan.stages * first + (1 if wide(plan) else plan.stages) * second
    rows = (plan.tile_q * columns + plan.tile_k * buffers) * size
    return max(taken, rows) + ALIGNMENT


def registers(plan: KernelPlan) -> int:
    """Of a thread, for the sums, and the scores of a tile and the derivative by its weights."""
    first, second = widths(plan.head_dim, plan.head_dim_v)
    return KEYS * (first + (0 if wide(plan) else second) + 2 * keys_plan(plan).tile_q) // 128
