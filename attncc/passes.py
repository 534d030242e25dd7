"""What a plan is for: the forward pass, or one of its derivatives. The plans of those, and the text of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncc.errors import NotBuilt

if TYPE_CHECKING:
    from attncc.ir import AttentionSpec, KernelPlan, Visits
    from attncc.pipeline import Planned
    from attncc.runtime.compile import Resources

FORWARD, BACKWARD, TANGENT = "forward", "backward", "tangent"


def backward(planned: Planned, deterministic: bool = False) -> Planned:
    """The backward pass of a plan's spec, for the same shape, target and width of integers; `deterministic` asks for
    equal bits of equal calls. Of what is returned of rows, it knows what has a gradient.

    Raises PlanError where no plan fits, NotBuilt for a parameter whose gradient is not built there.
    """
    from attncc import planner

    refuse_kept(planned.spec)
    chosen = planned.choice.plan
    planned = replace(planned, spec=planned.spec.reporting({"entropy"} & {*planned.spec.reports}))  # others have none
    if not planned.target.is_gpu:
        plan = planner.backward_of(chosen, planned.spec)
    else:
        from attncc.codegen.backward_sites import unbuilt

        for _, reason in unbuilt(planned.spec):
            raise NotBuilt(f"{planned.spec.name} on {planned.target.name}: {reason}")
        tuned = planned.tuned.get(BACKWARD, {})
        plan = planner.choose_backward(
            planned.spec, planned.shape, planned.target, chosen.int_bits, deterministic, tuned.get("algorithm")
        )
        if tuned and not (deterministic and plan.sums):  # where what was measured was another kernel
            plan = planner.with_choices(plan, tuned, planned.target) or plan
    return replace(planned, choice=replace(planned.choice, plan=plan, rejected=()))


def refuse_kept(spec: AttentionSpec) -> None:
    """NotBuilt for what is made of a call with 8-bit k and v beside a q of floats, but the call itself."""
    if spec.precision.kept is not None:
        raise NotBuilt(f"{spec.name}: derivatives, and transforms of functions, of {spec.precision.kept} k and v "
                       "beside a q of floats are not built yet")  # fmt: skip


def repeatable(planned: Planned) -> Planned:
    """`backward` with equal bits of equal calls."""
    return backward(planned, True)


def every_backward(planned: Planned) -> list[Planned]:
    """`backward`, and `repeatable` where that is another file."""
    first, second = backward(planned), repeatable(planned)
    return [first] if first.choice.plan == second.choice.plan else [first, second]


def tangent(planned: Planned) -> Planned:
    """The forward-mode derivative of a plan's spec, for the same shape, target and width of integers.

    Raises PlanError where no plan fits, NotBuilt for a softmax whose tangent is not built.
    """
    from attncc import planner
    from attncc.analysis.tangent import unbuilt

    refuse_kept(planned.spec)
    chosen = planned.choice.plan
    for what in unbuilt(planned.spec):
        raise NotBuilt(f"{planned.spec.name}: the forward-mode derivative of {what} is not built yet")
    if planned.target.is_gpu:
        plan = planner.choose_tangent(planned.spec, planned.shape, planned.target, chosen.int_bits)
    else:
        plan = replace(chosen, direction=TANGENT)
    return replace(planned, choice=replace(planned.choice, plan=plan, rejected=()))


def render(planned: Planned, resources: Any = None) -> str:
    """The source of a plan's kernel file."""
    from attncc import codegen, frontend

    text, spec, plan = frontend.canonical(planned.spec), planned.spec, planned.choice.plan
    if plan.direction == BACKWARD:
        return _render_backward(spec, planned, text, resources)
    if plan.direction == TANGENT:
        return _render_tangent(spec, planned, text, resources)
    if not planned.target.is_gpu:
        return codegen.render_cpu(spec, planned.visits, plan, text)
    return codegen.render(spec, walked(spec, plan, planned.visits), plan, text, resources)


def walked(spec: AttentionSpec, plan: KernelPlan, by_rows: Visits) -> Visits:
    """The visits that the forward kernel of a plan walks: those of queries, or where K and V are outside, of keys."""
    from attncc import analysis

    return by_rows if plan.loop == "q_outer" else analysis.kernel_visits(spec, "k")


def _render_backward(spec: AttentionSpec, planned: Planned, text: str, resources: Any) -> str:
    from attncc import analysis
    from attncc.codegen import hopper_backward
    from attncc.codegen.backward import render_backward
    from attncc.codegen.cpu_backward import render_cpu_backward

    if not planned.target.is_gpu:
        return render_cpu_backward(spec, planned.visits, planned.choice.plan, text)
    plan = planned.choice.plan
    made = hopper_backward.render if plan.algorithm == "fa3" else render_backward
    by_rows, by_keys = (analysis.kernel_visits(spec, outer) for outer in ("q", "k"))
    return made(spec, by_rows, by_keys, plan, text, resources)


def _render_tangent(spec: AttentionSpec, planned: Planned, text: str, resources: Any) -> str:
    from attncc import analysis
    from attncc.codegen.cpu_tangent import render_cpu_tangent
    from attncc.codegen.tangent import render_tangent

    if not planned.target.is_gpu:
        return render_cpu_tangent(spec, planned.visits, planned.choice.plan, text)
    return render_tangent(spec, analysis.kernel_visits(spec), planned.choice.plan, text, resources)


def compiled(planned: Planned, path: Path, aligned: bool = True) -> Resources:
    """What the file of a plan takes, compiled for its target: its largest kernel, and each of several. PlanError."""
    from attncc import analysis
    from attncc.runtime import compile as compiler
    from attncc.runtime import compile_backward as derivatives

    spec, plan = planned.spec, planned.choice.plan
    if plan.direction == FORWARD:
        return compiler.compile_kernel(path, spec, plan, aligned)
    if plan.direction == TANGENT:
        return derivatives.compile_tangent(path, spec, plan, aligned)
    by_rows, by_keys = (analysis.kernel_visits(spec, outer) for outer in ("q", "k"))
    found = derivatives.compile_backward(path, spec, by_rows, by_keys, plan, aligned)
    most = max(found, key=lambda kernel: (kernel.spills, kernel.registers, kernel.shared_bytes))
    return replace(most, parts=found)
