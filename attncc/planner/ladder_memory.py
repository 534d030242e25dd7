"""Shared memory of the kernels of standard attention and of FA1, in bytes a block: no less than Triton allocates."""

from __future__ import annotations

from attncc.ir import KernelPlan
from attncc.planner.shared_memory import fa2_forward
from attncc.targets import Target


def standard_forward(plan: KernelPlan, target: Target) -> int:
    """Of the kernel that takes most."""
    return fa2_forward(plan, target)


def fa1_forward(plan: KernelPlan, target: Target) -> int:
    return fa2_forward(plan, target)
