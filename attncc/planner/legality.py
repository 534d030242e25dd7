"""The one predicate that says whether a plan fits a target, used wherever a plan is made, read or pinned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from attncc.ir import EIGHT_BIT, LOOP_OF, KernelPlan, PassPlan
from attncc.planner import hopper, hopper_backward, ladder_memory, registers, shared_memory, units
from attncc.planner.backward_memory import fa2_pass
from attncc.planner.classes import MAX_HEAD_DIM
from attncc.planner.tangent_memory import fa2_tangent
from attncc.targets import Target

WHOLE = {"forward": shared_memory.fa2_forward, "tangent": fa2_tangent}  # directions of one kernel: its shared memory
BUILT: dict[str, Callable[..., int]] = {  # algorithms of the forward pass: its shared memory
    "standard": ladder_memory.standard_forward, "fa1": ladder_memory.fa1_forward,
    "fa2": shared_memory.fa2_forward, "fa3": hopper.shared_bytes,
}  # fmt: skip
TCGEN05_ROWS, WORD = 64, 4  # the least rows that it takes; bytes of a float32
MIN_TILE = 16  # the least side of a matrix product in Triton
TMA_ROWS = 32  # whose lse are 128 bytes, to multiples of which TMA writes
MAX_STAGES = 8
NO_BOOLS_AHEAD = (
    3,
    9,
)  # the Triton that began to fail an assertion on loops that load ahead and mask by bools, on mfma


@dataclass(frozen=True)
class Violation:
    """One limit that a plan breaks: what it needs, what the target allows, and a sentence with both."""

    limit: str  # shared_bytes, registers, threads, or a field of KernelPlan
    value: int | str
    allowed: int | str
    sentence: str

    @property
    def excess(self) -> float:
        """How many times too much; 1 and less is within the limit, infinity where no number says it."""
        if isinstance(self.value, int) and isinstance(self.allowed, int) and self.allowed > 0:
            return self.value / self.allowed
        return float("inf")


def violations(plan: KernelPlan, target: Target) -> tuple[Violation, ...]:
    """Every limit of `target` that `plan` breaks, none for a plan that fits."""
    found = _choices(plan, target) + _sizes(plan)
    for own in list(plan.passes.values())[1:]:
        keys = replace(plan, **{f.name: getattr(own, f.name) for f in fields(own)})
        found += [v for v in _choices(keys, target) + _sizes(keys) if v not in found]
    if found or not target.is_gpu:
        return tuple(found)  # the estimates below are of well-formed plans
    if plan.algorithm == "fa3":
        rules = hopper_backward if plan.direction == "backward" else hopper
        found = [Violation(*fault) for fault in rules.faults(plan, target)]
    return tuple(found or _resources(plan, target))


def _choices(plan: KernelPlan, target: Target) -> list[Violation]:
    found = []
    for limit, value, known in (
        ("algorithm", plan.algorithm, tuple(BUILT)),
        ("loop", plan.loop, (LOOP_OF.get(plan.algorithm, "q_outer"),)),
        ("dtype", plan.dtype, _dtypes(plan, target)),
        ("kept", plan.kept, _kept(plan, target)),
        ("products", plan.products, ("ieee", "tf32")),
        ("loads", plan.loads, ("pointer", "descriptor")),
        ("target", plan.target, (target.name,)),
        ("direction", plan.direction, (*WHOLE, "backward")),
    ):
        if value not in known:
            allowed = ", ".join(known)
            found.append(Violation(limit, value, allowed, _unknown(limit, value, allowed, target)))
    if plan.loads == "descriptor" and not target.caps.has_tma and plan.algorithm != "fa3":
        found.append(Violation("loads", "descriptor", "pointer", f"{target.name} has no TMA unit for descriptor loads"))
    if plan.products == "tf32" and plan.dtype == "f32" and target.is_gpu and not target.caps.has_tf32:
        found.append(Violation("products", "tf32", "ieee", f"{target.name} has no tf32 products"))
    if _falls_to_tf32(plan, target):
        words = (
            f"exact float32 products of {TCGEN05_ROWS} rows become tf32 in Triton where narrower values go into them"
        )
        found.append(Violation("tile_q", plan.tile_q, TCGEN05_ROWS // 2, words))
    return found


def _unknown(limit: str, value: str, allowed: str, target: Target) -> str:
    if limit == "kept":
        return f"{target.name} converts no {value} to the type of q" + (f", only{allowed[1:]}" if allowed else "")
    return f"{limit} {value} is not among what is built: {allowed}"


def _falls_to_tf32(plan: KernelPlan, target: Target) -> bool:
    """Whether Triton 3.6 and 3.7 give tcgen05 a product that is to be exact: weights into which narrow values go."""
    exact = plan.direction == "forward" and plan.dtype == "f32" and plan.products == "ieee"
    return exact and target.caps.has_tcgen05 and 0 < plan.least_bytes < WORD and plan.tile_q >= TCGEN05_ROWS


def _dtypes(plan: KernelPlan, target: Target) -> tuple[str, ...]:
    """float64 is the CPU program's alone, 8 bits the forward kernels' of warp groups."""
    eight = target.is_gpu and plan.algorithm == "fa3" and plan.direction == "forward"
    known = (d for d in shared_memory.ELEMENT_BYTES if d not in EIGHT_BIT or eight)
    return tuple(d for d in known if d != "f64" or not target.is_gpu)


def _kept(plan: KernelPlan, target: Target) -> tuple[str, ...]:
    """What K and V can be in memory, beside a float of Q: e5m2 is half of a float16, and converted anywhere."""
    if plan.algorithm != "fa2" or plan.direction != "forward" or plan.dtype in EIGHT_BIT:
        return ("",)
    return ("", *(e for e in EIGHT_BIT if e == "f8e5m2" or target.caps.has_fp8 or not target.is_gpu))


def _sizes(plan: KernelPlan) -> list[Violation]:
    found = []
    for limit, value, low, high in (
        ("head_dim", plan.head_dim, 1, MAX_HEAD_DIM),
        ("head_dim_v", plan.head_dim_v, 1, MAX_HEAD_DIM),
        ("stages", plan.stages, 1, MAX_STAGES),
        ("warps", plan.warps, 1, 32),
        ("tile_q", plan.tile_q, MIN_TILE, 1 << 20),
        ("tile_k", plan.tile_k, MIN_TILE, 1 << 20),
    ):
        if value > high:
            found.append(
                Violation(limit, value, high, f"{limit} is {value}, at most {high} goes: {value - high} too many")
            )
        elif value < low:
            found.append(Violation(limit, value, low, f"{limit} is {value}, at least {low} is needed"))
        elif limit in _powers(plan) and value & (value - 1):
            nearest = 1 << value.bit_length() - 1
            found.append(
                Violation(limit, value, nearest, f"{limit} is {value}, a power of two is needed, such as {nearest}")
            )
    return found


def _needs(plan: KernelPlan, target: Target) -> Iterator[tuple[KernelPlan | PassPlan, int, int]]:
    """Each kernel, its bytes of shared memory, and the registers of a thread that it cannot do without."""
    if plan.algorithm == "fa3" and plan.direction == "backward":
        yield plan, hopper_backward.shared_bytes(plan), hopper_backward.registers(plan)
        return
    if plan.algorithm == "fa3":
        yield plan, hopper.shared_bytes(plan, target), hopper.registers(plan)
        return
    if plan.direction in WHOLE:
        forward = BUILT[plan.algorithm] if plan.direction == "forward" else WHOLE[plan.direction]
        yield plan, forward(plan, target), registers.accumulators(plan, target)
        return
    for which, own in plan.passes.items():
        yield own, fa2_pass(plan, which, target), registers.backward_accumulators(plan, which, target)


def _powers(plan: KernelPlan) -> tuple[str, ...]:
    """Sizes that are powers of two; fa3 has a number of warp groups."""
    return ("tile_k",) if plan.algorithm == "fa3" else ("warps", "tile_q", "tile_k")


def _resources(plan: KernelPlan, target: Target) -> list[Violation]:
    found = []
    for own, shared, accumulators in _needs(plan, target):
        for limit, value, allowed, what in (
            ("threads", own.warps * target.warp_size, target.threads_block, "threads a block"),
            ("shared_bytes", shared, target.shared_bytes, "bytes of shared memory"),
            ("registers", accumulators, registers.limit(own, target), "registers a thread"),
        ):
            if value > allowed:
                sentence = f"needs {value} {what}, {target.name} has {allowed}: {value - allowed} too many"
                found.append(Violation(limit, value, allowed, sentence))
    return found + list(_compiler_faults(plan, target))


def _compiler_faults(plan: KernelPlan, target: Target) -> Iterator[Violation]:
    """What fails an assertion of Triton's, although it would fit, or as soon as it runs."""
    for which, own in plan.passes.items():
        if which != "dq" and own.loads == "descriptor" and own.stages > 2 and own.tile_q < TMA_ROWS:
            # what streams by has a buffer less than stages; Triton up to 3.8 puts those of the lse side by side
            what = f"the lse of {own.tile_q} rows by TMA have one buffer, since a second would begin at no 128 bytes"
            yield Violation("stages", own.stages, 2, f"stages is {own.stages}: {what}")
    if plan.direction != "forward" or plan.stages == 1:
        return
    unit, threads = units.matrix_unit(plan, target), plan.warps * target.warp_size
    bools = bool(plan.pair_bits) or plan.gather_bytes == shared_memory.FLAG
    if bools and unit == "mfma" and shared_memory.triton_release() >= NO_BOOLS_AHEAD:
        # the last step, which is peeled, wants such a mask in the layout of P, through shared memory that has no bits
        what = f"on {target.name} this Triton compiles masks of bools for each pair with 1 only"
        yield Violation("stages", plan.stages, 1, f"stages is {plan.stages}: {what}")
    read = plan.key_mask and plan.key_bytes and plan.loads == "descriptor"
    if read and unit == "mma" and plan.tile_k >= threads:
        # values by TMA are replaced by what is read of their keys, which no two threads hold then
        what = f"of {threads} threads; with masks that read keys alone, values by TMA take a tile of fewer keys"
        yield Violation("tile_k", plan.tile_k, threads // 2, f"tile_k is {plan.tile_k} {what}")
