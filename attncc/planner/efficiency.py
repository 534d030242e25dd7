"""What part of a target's reachable rate a plan attains: measured where it was measured, a rule of thumb elsewhere.

Both are data and plain factors, so that a plan's rank can be read off, and `explain` can say why another was turned
down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from attncc.ir import KernelPlan, pieces
from attncc.planner import hopper, registers
from attncc.planner.hopper_backward import ADDED
from attncc.planner.shared_memory import ELEMENT_BYTES, fa2_forward, padded
from attncc.planner.units import matrix_unit
from attncc.targets import Target


@dataclass(frozen=True)
class Measured:
    """TFLOP/s of one schedule at one head size, over kept pairs: without a mask, with a causal one, with a window of
    1024, with documents of 2048, whose tiles are classed, and over visited pairs where none is known to be whole (a
    neighbourhood on a grid). 0 where that was not measured."""

    head_dim: int
    tile_q: int
    tile_k: int
    warps: int
    stages: int
    loads: str
    max_registers: int
    full: float
    causal: float
    reference: str = "running"
    window: float = 0
    documents: float = 0
    scattered: float = 0
    algorithm: str = "fa2"
    key_bytes: int = 64  # of what is read of a key's tensors: with more, fewer blocks fit on an SM
    short: float = 1.0  # times its causal rate, beside the others of this head size, in calls of up to 1024 queries


# One H200, Triton 3.6.0, bf16, the generated kernels, medians of three in turns; D 64 and 256 at S 4096, D 128 the mean
# of S 1024, 4096 and 16384; schedules without a first-tile reference partly from an earlier kernel of this structure,
# 5% noise. Two blocks on an SM are worth more than larger tiles or more stages: hence the cap of 128 registers. Four
# warps at D 128 with the running maximum are as fast, but spill more the more a mask asks for, and are left out. Two
# blocks of 64 x 64 with three stages fill an SM to the byte; they were measured on documents alone.
MEASURED: dict[str, tuple[Measured, ...]] = {
    "sm_90": (
        Measured(64, 128, 64, 4, 3, "descriptor", 0, 499, 455, "first_tile"),
        Measured(64, 128, 128, 8, 2, "descriptor", 128, 430, 423, "first_tile"),
        Measured(64, 128, 64, 8, 3, "descriptor", 0, 412, 368),
        Measured(64, 128, 64, 8, 3, "pointer", 0, 400, 340),
        Measured(128, 128, 64, 8, 2, "descriptor", 128, 506, 472, "first_tile", 400, 377, 295),
        Measured(128, 128, 64, 4, 2, "descriptor", 0, 481, 445, "first_tile", 352, 293, 0),
        Measured(128, 64, 64, 4, 2, "descriptor", 0, 417, 397, "first_tile", 381, 407, 281),
        Measured(128, 64, 64, 4, 3, "descriptor", 0, 0, 0, "first_tile", 0, 437, 0, key_bytes=4),
        Measured(128, 64, 32, 4, 3, "descriptor", 0, 482, 449, "first_tile", 409, 354, 281),
        Measured(128, 64, 32, 4, 2, "descriptor", 128, 454, 425, "first_tile", 0, 397, 289),
        Measured(128, 128, 64, 8, 2, "descriptor", 128, 469, 423),
        Measured(128, 128, 64, 8, 3, "descriptor", 0, 440, 400),
        Measured(128, 128, 32, 8, 3, "descriptor", 128, 415, 390),
        Measured(128, 128, 128, 8, 2, "descriptor", 0, 371, 349),
        Measured(128, 64, 64, 4, 2, "descriptor", 0, 341, 333),
        Measured(128, 128, 64, 8, 2, "pointer", 128, 427, 387),
        Measured(128, 128, 64, 8, 3, "pointer", 0, 409, 390),
        Measured(128, 128, 32, 8, 3, "pointer", 128, 399, 382),
        Measured(256, 128, 64, 8, 2, "descriptor", 0, 494, 469, "first_tile"),
        Measured(256, 128, 32, 8, 4, "descriptor", 0, 519, 431, "first_tile"),
        Measured(256, 128, 64, 8, 2, "descriptor", 0, 512, 440),
        Measured(256, 128, 32, 8, 3, "descriptor", 0, 450, 430),
        Measured(256, 128, 64, 8, 2, "pointer", 0, 452, 446),
        # Kernels of warp groups, over several runs; those of first tiles in an earlier state. The running maximum at
        # D 64, and of full D 256, is that of a hand-written kernel of this structure. Two blocks on an SM at D 64 are
        # as fast as one under a causal mask at S 4096, 0.9 times as fast with prefixes at S 16384, 1.2 to 1.25 times
        # up to S 1024: the causal rate stands between the first two.
        Measured(64, 192, 128, 12, 4, "descriptor", 160, 564, 480, "whole_tile", 371, algorithm="fa3"),
        Measured(64, 192, 128, 12, 4, "descriptor", 160, 533, 459, "first_tile", algorithm="fa3"),
        Measured(64, 192, 128, 12, 4, "descriptor", 160, 461, 406, "running", algorithm="fa3"),
        Measured(64, 192, 128, 12, 4, "descriptor", 160, 0, 268, "none", algorithm="fa3"),
        Measured(64, 128, 128, 8, 4, "descriptor", 240, 496, 447, "whole_tile", 0, 369, algorithm="fa3"),
        Measured(64, 128, 64, 8, 4, "descriptor", 104, 477, 464, "whole_tile", 405, 302, algorithm="fa3", short=1.25),
        Measured(64, 128, 64, 8, 4, "descriptor", 104, 0, 365, "running", algorithm="fa3"),
        Measured(64, 128, 64, 8, 4, "descriptor", 104, 0, 374, "none", algorithm="fa3"),
        Measured(128, 128, 128, 8, 2, "descriptor", 240, 684, 613, "whole_tile", 512, 515, 241, "fa3"),
        Measured(128, 128, 64, 8, 4, "descriptor", 240, 666, 635, "whole_tile", 548, 540, 0, "fa3"),
        Measured(128, 128, 128, 8, 2, "descriptor", 240, 647, 584, "first_tile", 475, algorithm="fa3"),
        Measured(128, 128, 128, 8, 2, "descriptor", 240, 622, 559, algorithm="fa3"),
        Measured(256, 128, 64, 8, 2, "descriptor", 240, 712, 645, "whole_tile", algorithm="fa3"),
        Measured(256, 128, 64, 8, 2, "descriptor", 240, 720, 660, "first_tile", algorithm="fa3"),
        Measured(256, 128, 64, 8, 2, "descriptor", 240, 672, 587, algorithm="fa3"),
    ),
}
# TFLOP/s of the backward pass by head size, over every product of its kernels: results/backward.json, which counts five
# of the seven (D 256: of the eight) that are made. Causal calls reach as much of what they visit.
MEASURED_BACKWARD: dict[str, dict[int, float]] = {
    "sm_90": {64: 533, 128: 602, 256: 445}, "sm_90 added": {64: 499, 128: 585},
    "sm_90 apart": {64: 516, 128: 651, 256: 683},
}  # fmt: skip
LOCAL = 0.7  # of a causal mask's rate, where few tiles of a row are visited and that was not measured
GRAIN = 128  # rows and keys
UNMEASURED = 0.9  # of the slowest measured schedule: what was not tried does not outrank what was
TYPICAL = 0.6  # of the reachable rate, for a schedule without any fault below
FAULTS = {
    "tight": 0.8,  # registers may run out by a little
    "spills": 0.3,  # registers run out: the inner loop waits for local memory
    "half": 0.6,  # tcgen05 fills half of the tensor cores with 64 rows
    "across": 0.6,  # warps share out the columns: row maxima and P pass through shared memory
    "alone": 0.8,  # one block on an SM: nothing is multiplied while it works on its softmax
    "serial": 0.65,  # one stage: loads and products take turns
    "shallow": 0.92,  # two stages where three would do
    "deep": 0.97,  # more than three
}
STEP_ROWS, STEP_KEYS = 16, 12  # work of a step that does not grow with the tile, in rows and keys
FULL_WARPS = 8  # resident on an SM: enough to hide the softmax behind the products


def measured(plan: KernelPlan, target: Target) -> Measured | None:
    """The record of this schedule at the nearest head size that was measured."""
    for record in _nearest(plan, target):
        if plan.key_bytes <= record.key_bytes and all(getattr(record, name) == getattr(plan, name) for name in
               ("tile_q", "tile_k", "stages", "warps", "loads", "max_registers", "reference")):  # fmt: skip
            return record
    return None


@cache
def _records(algorithm: str, target: str) -> tuple[Measured, ...]:
    """Of a target by name."""
    return tuple(r for r in MEASURED.get(target, ()) if r.algorithm == algorithm)


def algorithms(target: Target) -> frozenset[str]:
    """Those that were measured on this target."""
    return frozenset(r.algorithm for r in MEASURED.get(target.name, ()))


def register_caps(target: Target) -> tuple[int, ...]:
    """Caps on registers worth trying: none, and those that were measured on this target."""
    return tuple(sorted({0, *(r.max_registers for r in _records("fa2", target.name))}))


# Which measured one they resemble.
UNMEASURED_REFERENCES = {
    "two_pass": "running", "threshold": "running", "fixed": "first_tile", "bounded": "whole_tile", "none": "whole_tile",
}  # fmt: skip


UNMEASURED_AT = 4096  # keys


def _as_measured(plan: KernelPlan) -> KernelPlan:
    """The plan as if it had the reference that was measured in place of its own."""
    other = UNMEASURED_REFERENCES.get(plan.reference)
    return plan if other is None else replace(plan, reference=other)


def lengths(plan: KernelPlan, target: Target) -> tuple[int, ...]:
    """Keys of the calls whose mean rate was measured, at the nearest head size that was."""
    near = _nearest(_as_measured(plan), target)
    return (1024, 4096, 16384) if near and near[0].head_dim == 128 else (UNMEASURED_AT,)


# Pairs whose packed bits an SM reads in a clock: one H200, Triton 3.6.0, D 64 to 256 at S 8192. fa2 passes their words
# through shared memory.
BITS = {"fa2": 0.8, "fa3": 3.8}


def references(target: Target) -> tuple[str, ...]:
    """References of the exponentials worth trying: the running maximum, and those that were measured on this target."""
    return tuple(dict.fromkeys(("running", *(r.reference for r in _records("fa2", target.name)))))


def measured_rate(plan: KernelPlan, target: Target, spread: str = "all") -> float:
    """TFLOP/s of the record of this schedule where tiles lie as `spread` says; 0 where there is none."""
    found, other = measured(plan, target), _as_measured(plan)
    if found is None and other is not plan:
        found = measured(other, target)
    return _rate(found, spread, plan.classed) if found is not None else 0.0


def short_gain(plan: KernelPlan, target: Target, spread: str) -> float:
    """What a short call gains by a schedule, beside others, where longer ones have more tiles in each row of tiles."""
    found = measured(plan, target)
    return found.short if found is not None and spread == "dense" else 1.0


def efficiency(plan: KernelPlan, target: Target, spread: str = "all") -> float:
    """Part of the reachable rate of the matrix unit, 0 to 1, where tiles lie as analysis.spread says."""
    own = _of_products(plan, target, spread)
    if not plan.pair_bits:
        return own
    pairs = BITS.get(plan.algorithm, BITS["fa2"]) / plan.pair_bits * target.units * target.clock_ghz  # in a nanosecond
    return 1 / (1 / own + target.reachable_tflops * 1e3 / (pairs * 2 * (plan.head_dim + plan.head_dim_v)))


def _of_products(plan: KernelPlan, target: Target, spread: str) -> float:
    rate = measured_rate(plan, target, spread)
    if rate:
        return rate / target.reachable_tflops
    plan = _as_measured(plan)
    guess = _rule(plan, target)
    rates = (_rate(r, spread, plan.classed) for r in _nearest(plan, target))
    slowest = min((r for r in rates if r), default=0.0)
    return min(guess, UNMEASURED * slowest / target.reachable_tflops) if slowest else guess


def _rate(record: Measured, spread: str, classed: bool) -> float:
    """On tiles that lie as `spread` says, which are classed one by one or not."""
    rates = {"all": record.full, "dense": record.causal, "scattered": record.scattered}
    local = record.documents if classed else record.window
    return rates.get(spread, local) or LOCAL * record.causal


def backward_efficiency(plan: KernelPlan, target: Target) -> float:
    """The same of the backward pass's kernels together, at the head size nearest in ratio that was measured."""
    kind = f"{target.name} {'added' if plan.sums in ADDED else plan.sums}".rstrip()
    found = MEASURED_BACKWARD.get(kind, {}) if ELEMENT_BYTES[plan.dtype] == 2 else {}
    mean = (padded(plan.head_dim) + padded(plan.head_dim_v)) / 2
    nearest = min(found, key=lambda d: max(d / mean, mean / d), default=0)
    return found[nearest] / target.reachable_tflops if found else TYPICAL


def needless(plan: KernelPlan, spread: str) -> float:
    """How many times the needed work the tiles hold, where what a mask keeps is scattered in patches of GRAIN."""
    return (1 + plan.tile_q / GRAIN) * (1 + plan.tile_k / GRAIN) if spread == "scattered" else 1.0


def _nearest(plan: KernelPlan, target: Target) -> tuple[Measured, ...]:
    """Records at the head size nearest in ratio; none for kernels unlike those measured: operands of more than 16 bits,
    or tiles of tensor parameters beside them."""
    records = tuple(r for r in _records(plan.algorithm, target.name) if r.reference == plan.reference)
    if not records or ELEMENT_BYTES[plan.dtype] != 2 or plan.pair_bytes or plan.gather_bytes or plan.chain_bytes:
        return ()
    mean = (padded(plan.head_dim) + padded(plan.head_dim_v)) / 2
    size = min({r.head_dim for r in records}, key=lambda d: max(d / mean, mean / d))
    return tuple(r for r in records if r.head_dim == size)


def _rule(plan: KernelPlan, target: Target) -> float:
    """TYPICAL times a factor for each fault, for the share of a step that is overhead, and for idle warps."""
    factors = [TYPICAL, plan.tile_q / (plan.tile_q + STEP_ROWS), plan.tile_k / (plan.tile_k + STEP_KEYS)]
    factors += [FAULTS[name] for name in faults(plan, target)]
    warps = resident_blocks(plan, target) * plan.warps
    return math.prod(factors) * math.sqrt(min(1.0, warps / FULL_WARPS))


def faults(plan: KernelPlan, target: Target) -> tuple[str, ...]:
    """Keys of FAULTS that apply; they are of fa2."""
    if plan.algorithm == "fa3":
        return ()
    unit = matrix_unit(plan, target)
    stages = plan.stages + 1 if unit == "mfma" else plan.stages  # there, one stage of loads waits in registers
    applies = {
        registers.pressure(plan, target): True,
        "half": unit == "tcgen05" and plan.tile_q < 128,
        "across": unit == "mma" and plan.tile_q < pieces(plan.head_dim_v)[-1],
        "alone": resident_blocks(plan, target) == 1,
        "serial": stages == 1,
        "shallow": stages == 2 and unit != "fma",  # there, products take longer than any load
        "deep": stages > 3,
    }
    return tuple(name for name, holds in applies.items() if holds and name in FAULTS)


def resident_blocks(plan: KernelPlan, target: Target) -> int:
    """Blocks that one SM holds at once, by shared memory, registers and threads."""
    if plan.algorithm == "fa3":
        return hopper.blocks(plan)
    threads = plan.warps * target.warp_size
    own = min(plan.max_registers or registers.fa2_forward(plan, target), target.registers_thread)
    blocks = min(
        target.shared_bytes_sm // max(1, plan.shared_bytes or fa2_forward(plan, target)),
        target.registers_sm // (own * threads),
        target.threads_sm // threads,
    )
    return max(1, blocks)
