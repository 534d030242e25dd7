"""Which plan: every candidate that a schedule allows, sifted by the legality predicate, ranked by predicted time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

from attncc import analysis
from attncc.analysis.normaliser import normaliser
from attncc.errors import PlanError
from attncc.ir import LOOP_OF, AttentionSpec, KernelPlan, Schedule, Shape, Visits
from attncc.planner import cpu, efficiency, hopper, ladder, shared_memory, units
from attncc.planner.classes import LONG, SHORT, class_of
from attncc.planner.io import Costs, costs, ranking_ms
from attncc.planner.legality import BUILT, Violation, violations
from attncc.planner.operands import has_key_mask, operands
from attncc.targets import Target

T = TypeVar("T")

TILES_Q = (128, 64, 32, 16)
TILES_K = (128, 64, 32, 16)
WARPS = (4, 8)
STAGES = (1, 2, 3, 4)
SHOWN = 12  # rejected plans of each kind that a Choice carries


@dataclass(frozen=True)
class Choice:
    """The plan, what was turned down with the reason in words (nearest first), and what the model says of the plan."""

    plan: KernelPlan
    rejected: tuple[tuple[KernelPlan, str], ...]
    predicted: Costs


def choose(
    spec: AttentionSpec, shape: Shape, target: Target, visits: Visits | None = None, any_stride: bool = False
) -> Choice:
    """The fastest plan by the model that fits `target` and keeps to what the spec pins; PlanError where none does.

    The plan depends on the head sizes, the dtype and the class of the query length (up to 16, 64, 1024, longer; the
    last two have most plans in common), on nothing else of the shape: other lengths and batches run the same kernels.
    `visits` says whether the mask leaves tiles out; without it the spec's mask does. `any_stride` asks for the kernel
    beside one that loads by descriptor, for calls whose K or V the TMA unit cannot address: what it shares with that
    one gives the same bits.
    """
    schedule = spec.schedule(target.name)
    if schedule.algorithm == "fa3" and any_stride:  # no kernel of that algorithm: what is pinned is not about it
        schedule = Schedule()
    usual = class_of(shape)
    candidates = [finish(plan, target) for plan in _candidates(spec, usual, target, schedule, visits, any_stride)]
    if any_stride and (main := choose(spec, shape, target, visits).plan).algorithm != "fa3":
        bits = _same_bits(main)
        candidates = [plan for plan in candidates if _same_bits(plan) == bits]
    judged = [(plan, violations(plan, target)) for plan in candidates]
    if not any_stride:
        judged = [*_hopper(spec, usual, target, schedule, visits), *judged]
    legal = [plan for plan, faults in judged if not faults]
    if not legal:
        raise PlanError(_nothing_fits(judged, spec, target, schedule))
    timed, spread = _timed(legal, spec, shape, target, visits)
    best, plan = timed[0]
    slower = [
        (p, f"predicted {ms / best:.2f} times the time{_why(p, target, spread)}") for ms, p in timed[1 : SHOWN + 1]
    ]
    unfit = sorted(  # what another algorithm lacks comes first
        ((p, _worst(f)) for p, f in judged if f), key=lambda pair: (pair[1].limit != "algorithm", pair[1].excess)
    )
    rejected = (*slower, *((p, v.sentence) for p, v in unfit[:SHOWN]))
    return Choice(plan, rejected, costs(plan, shape, target, spread=spread))


def _timed(
    plans: Sequence[KernelPlan], spec: AttentionSpec, shape: Shape, target: Target, visits: Visits | None
) -> tuple[list[tuple[float, KernelPlan]], str]:
    """The model's milliseconds of each plan, the fastest first; and how the mask spreads what it leaves.

    All tiles count, and more where larger ones hold more that is not needed. Where the memory alone decides the time,
    what leaves the most to spare comes first; then the smaller footprint.
    """
    spread = analysis.spread(spec, visits) if visits is not None else "dense" if spec.masks else "all"
    usual, timed = class_of(shape), []
    for plan in plans:
        rate = efficiency.efficiency(plan, target, spread) if target.is_gpu else 1.0
        rate *= efficiency.short_gain(plan, target, spread) if shape.q_len <= SHORT else 1.0
        ms = ranking_ms(plan, usual, target, rate) * efficiency.needless(plan, spread)
        timed.append(((ms, -rate, plan.shared_bytes, plan.stages, plan.warps, -plan.tile_q), plan))
    return [(rank[0], plan) for rank, plan in sorted(timed, key=lambda pair: pair[0])], spread


def ranked(
    spec: AttentionSpec, shape: Shape, target: Target, visits: Visits | None = None
) -> tuple[tuple[KernelPlan, float], ...]:
    """Every plan that `choose` may take, with the model's milliseconds for `shape`'s class, the fastest first."""
    schedule, usual = spec.schedule(target.name), class_of(shape)
    made = [finish(plan, target) for plan in _candidates(spec, usual, target, schedule, visits, False)]
    fit = [plan for plan, faults in _hopper(spec, usual, target, schedule, visits) if not faults]
    timed, _ = _timed([*fit, *(plan for plan in made if not violations(plan, target))], spec, shape, target, visits)
    return tuple((plan, ms) for ms, plan in timed)


def specialised(
    spec: AttentionSpec, shape: Shape, target: Target, visits: Visits | None = None
) -> tuple[KernelPlan, ...]:
    """Warp-specialised plans for long calls, where the spec leaves the algorithm open: the usual schedule first."""
    schedule, usual = spec.schedule(target.name), class_of(shape)
    if schedule.algorithm is not None or usual.q_len != LONG or not target.is_gpu or hopper.unfit(spec):
        return ()
    open_ = replace(schedule, algorithm="fa3", warps=None)  # whose warps follow from the rows
    tried = (
        replace(open_, tile_q=schedule.tile_q or q, tile_k=schedule.tile_k or k, stages=schedule.stages or n)
        for q, k, n in product((None, 128, 192), (None, 64, 128), (None, 2, 3, 4))
    )
    judged = (pair for one in tried for pair in _hopper(spec, usual, target, one, visits))
    made = tuple(dict.fromkeys(plan for plan, faults in judged if not faults))
    return (*made[:1], *(replace(plan, apart=not plan.apart) for plan in made[:1]), *made[1:])


def _same_bits(plan: KernelPlan) -> tuple[object, ...]:
    """The choices that decide in which order a row is summed up."""
    return (plan.tile_q, plan.tile_k, plan.warps, plan.reference)


def _candidates(
    spec: AttentionSpec, shape: Shape, target: Target, schedule: Schedule, visits: Visits | None, any_stride: bool
) -> Iterator[KernelPlan]:
    if schedule.algorithm == "fa3" and target.is_gpu:
        return
    algorithm = _algorithm(schedule, target)
    dtype = spec.precision.inputs or shape.dtype
    caps = efficiency.register_caps(target) if dtype != "f32" and algorithm == "fa2" else (0,)
    same = analysis.same_entry(spec) if algorithm == "fa2" else None
    late = same.reads if same is not None else ()
    reads = {apart: operands(spec, apart, late) for apart in (False, True)}
    bare = replace(spec, masks=()) if visits is not None and visits.full else spec
    loops = visits is None or bool(visits.full)  # over whole tiles, too
    in_full = {apart: operands(bare, apart, late) for apart in (False, True)}
    products, classed, key_mask = spec.precision.products, _classed(visits), has_key_mask(spec)
    for tile_q, tile_k, stages, warps in _tiles(spec, shape, target, schedule, algorithm):
        apart = units.unit_of(dtype, products, tile_q, warps, target) == "tcgen05"
        read = reads[apart]
        ways = ("pointer",) if any_stride or algorithm != "fa2" else _loads(spec, shape, dtype, target)
        for loads, cap, reference in product(ways, caps, references(spec, dtype, target, visits, algorithm)):
            yield KernelPlan(
                target=target.name, algorithm=algorithm, loop=(target.is_gpu and schedule.loop) or LOOP_OF[algorithm],
                tile_q=tile_q, tile_k=tile_k, stages=stages, warps=warps, head_dim=shape.head_dim,
                head_dim_v=shape.head_dim_v, dtype=dtype, products=products, loads=loads, max_registers=cap,
                reference=reference, any_stride=any_stride, classed=classed,
                key_mask=key_mask or (spec.ragged and loads == "descriptor"),
                layout="ragged" if spec.ragged else "dense", dropout=spec.dropout is not None,
                pair_bytes=read.pair, pair_bits=read.bits, key_bytes=read.keys, row_bytes=read.row,
                gather_bytes=read.gather, chain_bytes=read.chain, levels=read.levels,
                level_widths=read.widths, full_levels=in_full[apart].levels, full_key_bytes=in_full[apart].keys,
                full_reads=in_full[apart].passing if loops else (), narrow_bytes=read.narrow,
                narrow_key_bytes=read.narrow_keys, index_bytes=read.index,
                row_tests=read.tests, flag_bytes=read.flags, mask_levels=read.mask_levels, reads_down=read.down,
                least_bytes=read.least, kept=spec.precision.kept or "",
                listed=visits is not None and visits.listed,
            )  # fmt: skip


def _tiles(
    spec: AttentionSpec, shape: Shape, target: Target, schedule: Schedule, algorithm: str
) -> Iterator[tuple[int, int, int, int]]:
    """tile_q, tile_k, stages and warps worth trying, with what is pinned."""
    pins = (schedule.tile_q, schedule.tile_k, schedule.stages, schedule.warps)
    rows = [t for t in TILES_Q if t <= shape.q_len] or [TILES_Q[-1]]
    choices: tuple[Sequence[int], ...] = (rows, TILES_K, STAGES, WARPS)
    if not target.is_gpu:
        tile_q, tile_k = cpu.tiles(cpu.FORWARD, spec, shape.head_dim, shape.head_dim_v)
        fit = [t for t in (tile_q, *rows) if t <= min(tile_q, max(shape.q_len, rows[-1]))]
        choices = (fit[:1], (tile_k,), (1,), (1,))
    elif algorithm in ladder.ALGORITHMS:
        for known in ladder.schedules(algorithm, spec, shape, target, rows[0]):
            yield from product(*map(_pinned, pins, ((one,) for one in known)))
        return
    yield from product(*map(_pinned, pins, choices))


def _hopper(
    spec: AttentionSpec, shape: Shape, target: Target, schedule: Schedule, visits: Visits | None
) -> list[tuple[KernelPlan, tuple[Violation, ...]]]:
    """Warp-specialised kernels and what speaks against each: the usual schedules of the head size, changed by what is
    pinned. They are for long queries on hardware that was measured, where nothing is pinned that is not theirs; 8-bit
    inputs have no other kernel."""
    pinned = schedule.algorithm == "fa3" and target.is_gpu
    eight = spec.precision.is_eight_bit and schedule.algorithm is None and target.is_gpu
    usual = schedule == Schedule() and shape.q_len >= LONG and "fa3" in efficiency.algorithms(target)
    if not (pinned or eight or usual):
        return []
    dtype = spec.precision.inputs or shape.dtype
    plans = hopper.plans(spec, shape, target, schedule, references(spec, dtype, target, visits), visits)
    why = hopper.unfit(spec) or ("" if pinned else hopper.unwise(spec, shape, visits))
    refused = (Violation("algorithm", "fa3", "fa2", why),) if why else ()
    return [(plan, violations(plan, target) or refused) for plan in (finish(p, target) for p in plans)]


def _classed(visits: Visits | None) -> bool:
    return visits is not None and bool(visits.masked) and not (visits.may is None and visits.must is None)


def _pinned(pin: T | None, choices: Sequence[T]) -> Sequence[T]:
    return choices if pin is None else (pin,)


def _algorithm(schedule: Schedule, target: Target) -> str:
    """What is pinned, else fa2: fa3 has plans of its own. A CPU's program is tiled as fa2 is, whatever is pinned."""
    return schedule.asked if schedule.asked is not None and target.is_gpu else "fa2"


def references(
    spec: AttentionSpec, dtype: str, target: Target, visits: Visits | None, algorithm: str = "fa2"
) -> tuple[str, ...]:
    """A row's first tiles as reference: in bf16, which has float32's range. Where weights are no exponentials there is
    none, and it is as if it ran along. The older algorithms know a maximum only."""
    if algorithm != "fa2":
        return ("two_pass" if spec.softmax.policy == "two_pass" else "running",)
    apt = dtype == "bf16" and visits is not None and normaliser(spec).exponential
    given = {"two_pass": "two_pass", "unified": "fixed" if dtype != "f16" else "running"}.get(spec.softmax.policy)
    given = "threshold" if normaliser(spec).alpha is not None else given
    if given and target.is_gpu:  # f16 has no room for weights relative to anything but a maximum
        return (given,)
    return efficiency.references(target) if apt else ("running",)


def _loads(spec: AttentionSpec, shape: Shape, dtype: str, target: Target) -> tuple[str, ...]:
    """Descriptors where the target has a TMA unit, rows are whole 16 bytes, which it asks for, and a matrix unit reads
    what it brings: products without one make copies of it in registers and spill."""
    size = shared_memory.ELEMENT_BYTES.get(spec.precision.kept or dtype, 4)
    rows = all(d * size % 16 == 0 for d in (shape.head_dim, shape.head_dim_v))
    unit = dtype != "f32" or spec.precision.products == "tf32"
    return ("descriptor",) if target.caps.has_tma and rows and unit else ("pointer",)


def finish(plan: KernelPlan, target: Target) -> KernelPlan:
    """The plan with the shared memory that it is predicted to take."""
    if plan.dtype not in shared_memory.ELEMENT_BYTES:
        return plan
    return replace(plan, shared_bytes=BUILT[plan.algorithm](plan, target))


def _why(plan: KernelPlan, target: Target, spread: str) -> str:
    """What the prediction rests on: a measured rate, or what is known to slow such a plan down."""
    names = {
        "spills": "registers run out", "tight": "registers may run out", "across": "rows are shared out over warps",
        "serial": "loads are not overlapped", "half": "half of the tensor cores idle", "alone": "one block on an SM",
        "shallow": "two stages of loads",
    }  # fmt: skip
    if not target.is_gpu:
        return ""
    rate = efficiency.measured_rate(plan, target, spread)
    if rate and not plan.kept:  # of K and V as Q is
        return f" (measured at {rate:.0f} TFLOP/s)"
    found = [names[f] for f in efficiency.faults(plan, target) if f in names]
    return f" (not measured{''.join(f', {text}' for text in found)})"


def _worst(faults: tuple[Violation, ...]) -> Violation:
    return max(faults, key=lambda v: v.excess)


def _nothing_fits(
    judged: list[tuple[KernelPlan, tuple[Violation, ...]]], spec: AttentionSpec, target: Target, schedule: Schedule
) -> str:
    plan, faults = min(judged, key=lambda pair: _worst(pair[1]).excess)
    pins = [n for n in ("tile_q", "tile_k", "stages", "warps") if getattr(schedule, n) is not None]
    text = (
        f"no plan of {spec.name} fits {target.name} (head_dim {plan.head_dim}, head_dim_v {plan.head_dim_v}, "
        f"{plan.dtype}); "
        f"the nearest, tile {plan.tile_q} x {plan.tile_k}, {plan.stages} stages, {plan.warps} warps: "
        + "; ".join(v.sentence for v in faults)
    )
    return text + (f". The schedule pins {', '.join(pins)}: pin less, or smaller" if pins else "")
