"""The pass that quantises on a GPU: a block of 128 rows at a time, read once for scales of blocks, else twice."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attncc.ir import Precision

BLOCK = tl.constexpr(128)
ROUND = tl.constexpr(12582912.0)  # 1.5 · 2^23: added and taken away again, it leaves the nearest integer
OWN, LARGEST_ONLY, GIVEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # whose largest size makes the scale


@triton.jit(do_not_specialize=["h_len", "n", "groups", "blocks"])
def _eight_bits(
    X, Out, Largest, Scales, Matrix, Lengths, stride_b, stride_h, stride_n, stride_d, h_len, n, groups, blocks,
    LEAST: tl.constexpr, TOP: tl.constexpr, BITS: tl.constexpr, LOWEST: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, ROTATE: tl.constexpr, TURN: tl.constexpr, WHOSE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    block, head = program % blocks, program // blocks
    slot, d = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    row = block * BLOCK + slot
    if TURN:  # the key that stands at each place: see Quantised
        row = block * BLOCK + ((slot & -16) | ((slot & 2) << 2) | ((slot & 12) >> 1) | (slot & 1))
    at = X + (head // h_len).to(tl.int64) * stride_b + (head % h_len).to(tl.int64) * stride_h
    at += row[:, None].to(tl.int64) * stride_n + d[None, :].to(tl.int64) * stride_d
    x = tl.load(at, mask=(row < n)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    if ROTATE:
        largest = _largest(x)
        exponent = tl.maximum(((largest.to(tl.int32, bitcast=True) >> 23) & 255) - 126, LOWEST)
        down = ((BITS - exponent + 127) << 23).to(tl.float32, bitcast=True)
        up = ((exponent - BITS + 127) << 23).to(tl.float32, bitcast=True)
        whole = (x * down + ROUND) - ROUND
        matrix = tl.load(Matrix + d[:, None] * WIDTH + d[None, :])
        if X.dtype.element_ty.primitive_bitwidth == 16:  # no more bits than float16 has
            sums = tl.dot(whole.to(tl.float16), matrix)
        else:
            high = (whole * 0.00390625 + ROUND) - ROUND
            low = whole - high * 256.0
            sums = tl.dot(high.to(tl.float16), matrix) * 256.0 + tl.dot(low.to(tl.float16), matrix)
        x = sums * tl.load(Lengths + d)[None, :] * up
    largest = _largest(x)
    if WHOSE == LARGEST_ONLY:
        tl.store(Largest + program, largest)
    else:
        if WHOSE == GIVEN:
            largest = tl.load(Largest + program)
        else:
            largest = tl.maximum(largest, LEAST)
            tl.store(Scales + program, tl.div_rn(largest, TOP))
        made = (x * tl.div_rn(TOP, largest)).to(Out.dtype.element_ty)
        if TURN:
            place, n_out = block * BLOCK + slot, groups * GROUP
            out = Out + (head.to(tl.int64) * D + d[None, :]) * n_out + place[:, None]
            tl.store(out, made, mask=(place < n_out)[:, None] & (d < D)[None, :])
        else:
            out = Out + (head.to(tl.int64) * n + row[:, None]) * D + d[None, :]
            tl.store(out, made, mask=(row < n)[:, None] & (d < D)[None, :])


@triton.jit
def _largest(x):
    """The largest size, NaN aside."""
    return tl.max(tl.max(tl.abs(x), 1), 0)


def on_gpu(x: Tensor, precision: Precision, rotated: bool, turn: bool) -> tuple[Tensor, Tensor]:
    """Elements of x [B, H, n, D], turned where that is asked for, and scales [B, H, m]: see quantise."""
    from attncc.runtime.quantise import BITS, ELEMENTS, GROUP, LARGEST, LEAST, LEAST_EXPONENT, shared_largest

    b, h, n, d = x.shape
    blocks = max(1, -(-n // BLOCK.value))
    n_out = -(-n // GROUP) * GROUP if turn else n
    top, kind = LARGEST[precision.inputs or ""], ELEMENTS[precision.inputs or ""]
    width = max(16, triton.next_power_of_2(d))
    out = x.new_empty((b, h, d, n_out) if turn else (b, h, n, d), dtype=kind)
    scales = x.new_empty((b, h, blocks), dtype=torch.float32)
    matrix, lengths = _padded(d, width, x.device) if rotated else (x, x)
    given = x.float() if x.dtype == torch.float64 else x

    def run(whose: Any, largest: Tensor) -> None:
        _eight_bits[(b * h * blocks,)](
            given, out, largest, scales, matrix, lengths, *given.stride(), h, n, n_out // GROUP, blocks, LEAST, top,
            BITS, LEAST_EXPONENT, d, width, rotated, turn, whose, GROUP, num_warps=8,
        )  # fmt: skip

    if not b * h:
        return out, scales if precision.block else scales[..., :1]
    if precision.block:
        run(OWN, scales)
        return out, scales
    largest = torch.empty_like(scales)
    run(LARGEST_ONLY, largest)
    shared = shared_largest(largest, precision).contiguous()
    run(GIVEN, shared)
    return out, (shared[..., :1] / top).contiguous()


@cache
def _padded(d: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rotation's entries in float16 and its columns' lengths, filled up with 0."""
    from attncc.runtime.quantise import rotation_parts

    matrix, lengths = rotation_parts(d)
    whole, every = torch.zeros(width, width, dtype=torch.float16, device=device), torch.zeros(width, device=device)
    whole[:d, :d], every[:d] = matrix, lengths
    return whole, every
