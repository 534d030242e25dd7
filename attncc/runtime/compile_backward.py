"""The kernels of derivatives, compiled for a target that need not be there: registers, spills, shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import triton

from attncc.codegen.backward import backward_view
from attncc.codegen.hopper_backward import hopper_backward_kernels
from attncc.codegen.tangent import kernel_name, tangent_arguments
from attncc.codegen.tangent_parts import spelled_names
from attncc.ir import AttentionSpec, KernelPlan, Visits
from attncc.runtime.compile import Resources, cross_compile, load_module, measure


def compile_backward(
    source: Path, spec: AttentionSpec, visits_q: Visits, visits_k: Visits, plan: KernelPlan, aligned: bool = True
) -> tuple[Resources, ...]:
    """One for each kernel of the generated file `source`, in its order. PlanError where Triton refuses one."""
    found = compiled_backward(source, spec, visits_q, visits_k, plan, aligned)
    return tuple(measure(kernel, name, own, aligned) for name, own, kernel in found)


def compiled_backward(
    source: Path, spec: AttentionSpec, visits_q: Visits, visits_k: Visits, plan: KernelPlan, aligned: bool = True,
    compile: Callable[..., Any] = triton.compile,
) -> Iterator[tuple[str, KernelPlan, Any]]:  # fmt: skip
    """Name, plan and Triton's CompiledKernel of each kernel of the file. PlanError where Triton refuses one."""
    module = load_module(source)
    if plan.algorithm == "fa3":
        for kernel in hopper_backward_kernels(spec, visits_q, visits_k, plan):
            compiled = cross_compile(getattr(module, kernel.name), kernel.arguments, kernel.plan, True, compile)
            yield kernel.name + kernel.form, kernel.plan, compiled
        return
    for part in backward_view(spec, visits_q, visits_k, plan, ()).passes:
        name = part.kernel + ("" if aligned else "_any_stride")
        own = replace(
            plan, tile_q=part.tile_q, tile_k=part.tile_k, stages=part.stages, warps=part.warps,
            max_registers=part.max_registers,
        )  # fmt: skip
        yield name, own, cross_compile(getattr(module, name), part.arguments, own, aligned, compile)


def compile_tangent(source: Path, spec: AttentionSpec, plan: KernelPlan, aligned: bool = True) -> Resources:
    """The kernel of the generated file `source` of a tangent. PlanError where Triton refuses it."""
    name = kernel_name(spec) + ("" if aligned else "_any_stride")
    compiled = cross_compile(
        getattr(load_module(source), name), tangent_arguments(spec, plan, spelled_names(spec)), plan, aligned
    )
    return measure(compiled, name, plan, aligned)
