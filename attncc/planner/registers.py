"""Registers that a thread of the fa2 kernel holds at once, estimated without compiling.

Live at the height of a step, in 32-bit words spread over the block's threads: the output accumulator and the scores,
both float32, and the weights in the input's type; what the addresses, row statistics and the mask take is a constant.
"""

from __future__ import annotations

from attncc.ir import KernelPlan
from attncc.planner.shared_memory import ELEMENT_BYTES, padded
from attncc.targets import Target

OVERHEAD = 40


def limit(plan: KernelPlan, target: Target) -> int:
    """Registers that a thread can have when the whole block has to find room on one SM."""
    return min(target.registers_thread, target.registers_sm // (plan.warps * target.warp_size))


def fa2_forward(plan: KernelPlan, target: Target) -> int:
    """Estimated registers of a thread of the forward kernel."""
    threads = plan.warps * target.warp_size
    size = ELEMENT_BYTES[plan.dtype]
    scores = plan.tile_q * plan.tile_k
    words = plan.tile_q * padded(plan.head_dim_v) + scores + scores * size // 4
    if not (target.caps.has_wgmma or target.caps.has_tcgen05):
        words += plan.tile_q * padded(plan.head_dim) * size // 4
    return words // threads + OVERHEAD
