"""What multiplies: the matrix unit that takes the operands and the tile, or none."""

from __future__ import annotations

from attncc.ir import KernelPlan
from attncc.targets import Target


def matrix_unit(plan: KernelPlan, target: Target) -> str:
    """What multiplies: wgmma, tcgen05, mma, mfma, or fma where no matrix unit takes the operands or the tile."""
    return unit_of(plan.dtype, plan.products, plan.tile_q, plan.warps, target)


def unit_of(dtype: str, products: str, tile_q: int, warps: int, target: Target) -> str:
    if dtype == "f32" and products == "ieee":
        return "mfma" if target.caps.has_matrix_f32 else "fma"
    if target.caps.has_mfma:
        return "mfma"
    if not target.caps.has_tensor_core:
        return "fma"
    wide = tile_q >= 64 and warps >= 4  # the warp-group instructions take 64 rows and 4 warps at least
    if wide and target.caps.has_wgmma:
        return "wgmma"
    return "tcgen05" if wide and target.caps.has_tcgen05 else "mma"
