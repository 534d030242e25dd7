"""Plans beside the model's own: which are worth measuring, and the model's plan with choices that were measured.

A choice is kept as the fields of a plan that a search decides, by name; what follows from the spec and the call is left
to the planner of the day. Choices that are not legal today are not taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from itertools import product, zip_longest
from typing import Any

from attncc.ir import AttentionSpec, KernelPlan, Shape, Visits
from attncc.planner.backward import choose_backward
from attncc.planner.backward_memory import fa2_backward
from attncc.planner.hopper_backward import shared_bytes
from attncc.planner.legality import violations
from attncc.planner.search import choose, finish, ranked, specialised
from attncc.targets import Target

DECIDED = (
    "algorithm", "tile_q", "tile_k", "stages", "warps", "loads", "max_registers", "reference", "queries", "apart",
    "sums", "dkdv",
)  # fmt: skip
SHARED_BITS = ("tile_q", "tile_k", "warps", "reference")  # which give the kernel for any strides the same bits
MOST, MOST_SPECIALISED, MOST_BACKWARD = 24, 8, 20  # plans of a pass that are worth a measurement

Choices = Mapping[str, Any]


@dataclass(frozen=True)
class Candidate:
    """A plan to measure, and what the model says of its time; None where there is no model."""

    plan: KernelPlan
    predicted_ms: float | None

    @property
    def choices(self) -> dict[str, Any]:
        return choices_of(self.plan)


def choices_of(plan: KernelPlan) -> dict[str, Any]:
    """What a search decided, in plain form."""
    known = {f.name for f in fields(plan)}
    found = {n: getattr(plan, n) for n in DECIDED if n in known}
    return {n: asdict(x) if is_dataclass(x) and not isinstance(x, type) else x for n, x in found.items()}


def with_choices(plan: KernelPlan, choices: Choices, target: Target) -> KernelPlan | None:
    """`plan` with these choices; None where they are of another kind of plan or break a limit of the target."""
    known = {f.name for f in fields(plan)}
    if set(choices) - known:
        return None
    made: dict[str, Any] = dict(choices)
    for name, value in choices.items():
        now = getattr(plan, name)
        if isinstance(value, Mapping) != (is_dataclass(now)):
            return None
        if isinstance(value, Mapping):
            if set(value) != {f.name for f in fields(now)}:
                return None
            made[name] = type(now)(**value)
    return legal(replace(plan, **made), target)


def legal(plan: KernelPlan, target: Target) -> KernelPlan | None:
    """The plan with the shared memory that it takes; None where it breaks a limit."""
    try:
        if plan.direction == "backward":
            hopper = plan.algorithm == "fa3"
            made = replace(plan, shared_bytes=shared_bytes(plan) if hopper else fa2_backward(plan, target))
        else:
            made = finish(plan, target)
    except (KeyError, ValueError):  # sizes that the estimate knows nothing of
        return None
    return None if violations(made, target) else made


def beside(plan: KernelPlan, tuned: KernelPlan, target: Target) -> KernelPlan | None:
    """`plan`, the kernel for any strides, with what gives it the bits of `tuned`; fewer stages where they need it.

    Kernels of different algorithms share nothing: there `plan` stays what it is.
    """
    if plan.algorithm != tuned.algorithm:
        return plan
    bits = {n: getattr(tuned, n) for n in SHARED_BITS}
    made = (legal(replace(plan, **bits, stages=stages), target) for stages in range(plan.stages, 0, -1))
    return next((p for p in made if p is not None), None)


def candidates(spec: AttentionSpec, shape: Shape, target: Target, visits: Visits | None) -> tuple[Candidate, ...]:
    """The forward plans worth measuring, the model's choice first; each has, or needs no, kernel for any strides."""
    found = ranked(spec, shape, target, visits)
    if found and found[0][0].loads == "descriptor":
        other = choose(spec, shape, target, visits, any_stride=True).plan
        found = tuple((plan, ms) for plan, ms in found if beside(other, plan, target) is not None)
    modelled = [Candidate(plan, ms) for plan, ms in found]
    others = [Candidate(plan, None) for plan in specialised(spec, shape, target, visits)[:MOST_SPECIALISED]]
    return tuple({c.plan: c for c in (*modelled[:1], *others, *modelled)}.values())[:MOST]


def backward_candidates(spec: AttentionSpec, shape: Shape, target: Target, int_bits: int = 32) -> tuple[Candidate, ...]:
    """The planner's choice for the backward pass, and its neighbours: other tiles, stages and warps of each kernel.
    Where heads may use the sums of dQ in turns, the form too in which each has its own."""
    chosen = choose_backward(spec, shape, target, int_bits)
    other = choose_backward(spec, shape, target, int_bits, algorithm="fa2")  # that of warp groups has one schedule
    own = (legal(replace(p, sums="added"), target) for p in (chosen,) if p.sums == "turns")
    near = (*own, *(legal(p, target) for p in _neighbours(other)))
    found = dict.fromkeys([chosen, other, *(p for p in near if p is not None)])
    return tuple(Candidate(p, None) for p in list(found)[:MOST_BACKWARD])


def crossed(measured: Mapping[KernelPlan, float], target: Target) -> KernelPlan | None:
    """Of backward plans and their times, the first of which is the planner's: the best dQ with the best dK and dV.

    None where one plan has both, or the two together break a limit.
    """
    measured = {p: t for p, t in measured.items() if getattr(p, "algorithm", "fa2") == "fa2"}
    own = next(iter(measured), None)
    if own is None or getattr(own, "dkdv", None) is None:
        return None
    time = measured.__getitem__
    best: Any = min((p for p in measured if _second(p) == _second(own)), key=time)
    other: Any = min((p for p in measured if _first(p) == _first(own)), key=time)
    made = legal(replace(best, **{"dkdv": _second(other)}), target)
    return None if made is None or made in measured else made


def _second(plan: Any) -> Any:
    return plan.dkdv


def _first(plan: Any) -> Any:
    return plan.passes["dq"]


def _neighbours(plan: KernelPlan) -> Iterator[KernelPlan]:
    """Steps of dQ and of dK and dV by turns, the small ones first."""
    second: Any = getattr(plan, "dkdv", None)
    both = zip_longest(_steps(plan), _steps(second) if second is not None else ())
    for change, other in both:
        if change is not None:
            yield replace(plan, **change)
        if other is not None:
            part: Any = replace(second, **other)
            yield replace(plan, **{"dkdv": part})


def _steps(part: Any) -> Sequence[dict[str, Any]]:
    """One step away, then two: sizes halved or doubled, a stage more or less, half or twice the warps."""
    sizes: list[dict[str, Any]] = [
        {},
        *({n: v} for n in ("tile_q", "tile_k") for v in (getattr(part, n) // 2, getattr(part, n) * 2)),
    ]
    stages: list[dict[str, Any]] = [{}, *({"stages": s} for s in (part.stages - 1, part.stages + 1) if s > 0)]
    warps: list[dict[str, Any]] = [{}, {"warps": 4 if part.warps == 8 else 8}]
    steps = [{**a, **b, **c} for a, b, c in product(sizes, stages, warps)]
    valid = (s for s in steps if min(s.get("tile_q", 16), s.get("tile_k", 16)) >= 16)
    return sorted((s for s in valid if s), key=len)
