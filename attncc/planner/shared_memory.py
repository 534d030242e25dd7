"""Shared memory that Triton gives to the fa2 kernel, in bytes a block, worked out without compiling.

Triton keeps `stages` copies of the K and V tiles, and Q where the matrix unit reads its left operand
from shared memory.
"""

from __future__ import annotations

from attncc.ir import KernelPlan
from attncc.targets import Target

ELEMENT_BYTES = {"f16": 2, "bf16": 2, "f32": 4}


def pieces(head_dim: int) -> tuple[int, ...]:
    """Powers of two, largest first, whose sum is `head_dim` rounded up to a multiple of 16: 96 is 64 + 32, 31 is 32."""
    padded = -(-head_dim // 16) * 16
    return tuple(1 << bit for bit in reversed(range(padded.bit_length())) if padded >> bit & 1)


def padded(head_dim: int) -> int:
    """Elements that a head takes in a tile: the sum of its pieces."""
    return sum(pieces(head_dim))


def fa2_forward(plan: KernelPlan, target: Target) -> int:
    """Shared memory of the forward kernel in bytes a block; 0 on a CPU."""
    if not target.is_gpu:
        return 0
    size = ELEMENT_BYTES[plan.dtype]
    d, dv = padded(plan.head_dim), padded(plan.head_dim_v)
    query, key, value = plan.tile_q * d * size, plan.tile_k * d * size, plan.tile_k * dv * size
    buffers = plan.stages * (key + value) if plan.stages > 1 else key + value
    if target.backend == "hip":
        return max(query, (plan.stages - 1) * (key + value), key + value)
    if target.caps.has_wgmma or target.caps.has_tcgen05:
        return query + buffers + 1024
    return max(query, buffers + plan.tile_q * plan.tile_k * size)
