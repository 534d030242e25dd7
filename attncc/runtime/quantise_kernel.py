"""The pass that quantises on a GPU: blocks of rows of q, k and v in one launch, 128 for scales of blocks, read once,
else as many as three programs of an SM have room for, read twice.

A block stays in the registers that it is loaded to. Of the Hadamard product the matrix unit mixes bits 1 to 4 of the
columns' numbers, those of lanes among them, and sums and differences of registers the others. Eight keys of a column
of V stand in one thread, so that turning moves nothing either.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from attncc.errors import NotBuilt
from attncc.ir import Precision

BLOCK = 128  # rows that share a scale of blocks
ELEMENTS_OF_WARP = 2048  # of a program's, 64 to a thread
CHUNK = gl.constexpr(32)  # columns, of whose numbers the matrix unit mixes four bits
WIDEST_POWER = gl.constexpr(10)
ROUND = gl.constexpr(12582912.0)  # 1.5 · 2^23: added and taken away again, it leaves the nearest integer
LEAST_WARPS, MOST_WARPS, LEAST_ROWS = 4, 16, 64  # of a program
WARPS_OF_THREE, REGISTERS_OF_THREE = 8, 80  # of programs, three of which share an SM
OWN, LARGEST_ONLY, GIVEN = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # whose largest size makes the scale


@gluon.constexpr_function
def _powers(first: int, end: int, axis: int) -> list[list[int]]:
    """Steps of first, 2 first, ... below `end` along rows or columns."""
    found = []
    while first < end:
        found.append([0, first] if axis else [first, 0])
        first *= 2
    return found


@gluon.constexpr_function
def _layout(
    registers: list[list[int]], lanes: list[list[int]], more: list[list[int]], shape: list[int], warps: int
) -> Any:
    """`more` steps are those of warps, and of registers where there are too few of these."""
    own = warps.bit_length() - 1
    of_warps = (more + [[0, 0]] * own)[:own]
    return gl.DistributedLinearLayout(registers + more[own:], lanes, of_warps, [], shape)


@gluon.constexpr_function
def by_rows(rows, width, warps):
    """Eight columns, and every 32nd from there on, in a thread; four threads along a row."""
    columns = _powers(1, 8, 1) + _powers(32, width, 1)
    return _layout(columns, _powers(8, 32, 1) + _powers(1, 8, 0), _powers(8, rows, 0), [rows, width], warps)


@gluon.constexpr_function
def by_columns(rows, width, warps, places_first):
    """Eight columns of eight keys in a thread, one or the other side by side."""
    columns, places = _powers(1, 8, 1), _powers(1, 8, 0)
    registers = places + columns if places_first else columns + places
    more = _powers(64, rows, 0) + _powers(32, width, 1)
    return _layout(registers, _powers(8, 32, 1) + _powers(8, 64, 0), more, [rows, width], warps)


@gluon.constexpr_function
def of_products(warps):
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@gluon.jit
def _mixed(x, half: gl.constexpr, D: gl.constexpr):
    """Sums and differences of columns that are `half` apart, where one Hadamard matrix takes both."""
    rows: gl.constexpr = x.shape[0]
    width: gl.constexpr = x.shape[1]
    a, b = gl.split(gl.permute(gl.reshape(x, [rows, width // (2 * half), 2, half]), (0, 1, 3, 2)))
    made = gl.reshape(gl.permute(gl.join(a + b, a - b), (0, 1, 3, 2)), [rows, width])
    made = gl.convert_layout(made, x.type.layout)
    whole: gl.constexpr = D // (2 * half) * (2 * half)
    if D - whole > half:  # columns behind them belong to others; beside zeros they may be mixed
        d = gl.expand_dims(gl.arange(0, width, gl.SliceLayout(0, x.type.layout)), 0)
        made = gl.where(d < whole, made, x)
    return made


@gluon.jit
def _hadamard(warps: gl.constexpr):
    """The matrix of bits 1 to 4, signs before it: see rotation_parts. Bits 2, 3, 4 and 1 are in this order."""
    layout: gl.constexpr = gl.DotOperandLayout(1, of_products(warps), 2)
    i, j = gl.arange(0, 16, gl.SliceLayout(1, layout)), gl.arange(0, 16, gl.SliceLayout(0, layout))
    odd = gl.expand_dims(i, 1) & gl.expand_dims(j, 0)
    odd ^= odd >> 2
    odd ^= (odd >> 1) ^ gl.expand_dims((i >> 3 & i) ^ (i >> 1 & i) ^ (i >> 2 & i >> 1), 1)
    return (1 - 2 * (odd & 1)).to(gl.float16)


@gluon.jit
def _multiplied(x, matrix, warps: gl.constexpr):
    """Products over bits 1 to 4 of the columns' numbers."""
    block: gl.constexpr = x.shape[0]
    width: gl.constexpr = x.shape[1]
    rest: gl.constexpr = block // (8 * warps)
    layout: gl.constexpr = of_products(warps)
    bits = gl.reshape(x.to(gl.float16), [rest, warps, 8, width // CHUNK, 2, 2, 2, 2, 2])
    rows = gl.reshape(gl.permute(bits, (3, 0, 1, 8, 2, 7, 4, 5, 6)), [block * width // 16, 16])
    operand = gl.convert_layout(rows, gl.DotOperandLayout(0, layout, 2))
    sums = mma_v2(operand, matrix, gl.zeros([block * width // 16, 16], gl.float32, layout))
    bits = gl.reshape(sums, [width // CHUNK, rest, warps, 2, 8, 2, 2, 2, 2])
    return gl.convert_layout(gl.reshape(gl.permute(bits, (1, 2, 4, 0, 6, 7, 8, 5, 3)), [block, width]), x.type.layout)


@gluon.jit
def _transformed(x, Remainder, D: gl.constexpr, warps: gl.constexpr):
    """Integers that float16 has times the rotation's entries, exact."""
    width: gl.constexpr = x.shape[1]
    d = gl.expand_dims(gl.arange(0, width, gl.SliceLayout(0, x.type.layout)), 0)
    sums = _multiplied(x, _hadamard(warps), warps)
    if D % CHUNK & (D % CHUNK - 1) != 0:  # several matrices behind the last whole chunk
        layout: gl.constexpr = gl.DotOperandLayout(1, of_products(warps), 2)
        i, j = gl.arange(0, 16, gl.SliceLayout(1, layout)), gl.arange(0, 16, gl.SliceLayout(0, layout))
        matrix = gl.load(Remainder + gl.expand_dims(i, 1) * 16 + gl.expand_dims(j, 0))
        sums = gl.where(d < D // CHUNK * CHUNK, sums, _multiplied(x, matrix, warps))
    odd = (d & d >> 5) ^ (d >> 6 & d >> 7) ^ (d >> 8 & d >> 9)  # of registers: known when this is compiled
    sums *= (1 - 2 * (odd & 1)).to(gl.float32)
    sums = _mixed(sums, 1, D)
    for power in gl.static_range(5, WIDEST_POWER):
        if 2 << power <= D:
            sums = _mixed(sums, 1 << power, D)
    return sums


@gluon.jit
def _rotated(
    x, Remainder, BITS: gl.constexpr, LOWEST: gl.constexpr, D: gl.constexpr, short: gl.constexpr, warps: gl.constexpr
):
    """Rows times the rotation's entries, as integers, and the unit of each row. `short`: of floats of 16 bits, whose
    integers float16 has."""
    exponent = gl.maximum(((gl.max(gl.abs(x), 1).to(gl.int32, bitcast=True) >> 23) & 255) - 126, LOWEST)
    down = ((BITS - exponent + 127) << 23).to(gl.float32, bitcast=True)
    up = ((exponent - BITS + 127) << 23).to(gl.float32, bitcast=True)
    x = (x * gl.expand_dims(down, 1) + ROUND) - ROUND
    if short:
        sums = _transformed(x, Remainder, D, warps)
    else:
        high = (x * 0.00390625 + ROUND) - ROUND
        low = _transformed(x - high * 256.0, Remainder, D, warps)
        sums = _transformed(high, Remainder, D, warps) * 256.0 + low
    return sums, up


@gluon.jit
def _factor(largest, Scales, Largest, block, blocks, head, LEAST: gl.constexpr, TOP: gl.constexpr, WHOSE: gl.constexpr):
    """What numbers are multiplied by; the scale is kept. `largest`: of the block."""
    if WHOSE == OWN:
        largest = gl.maximum(largest, LEAST)
        gl.store(Scales + head * blocks + block, gl.div_rn(largest, TOP))
    else:
        largest = gl.maximum(gl.load(Largest), LEAST)
        gl.store(Scales + head, gl.div_rn(largest, TOP), mask=block == 0)
    return gl.div_rn(TOP, largest)


@gluon.jit
def _rows(
    X, Out, Scales, Largest, strides, Lengths, Remainder, block, blocks, head, h_len, n, LEAST: gl.constexpr,
    TOP: gl.constexpr, BITS: gl.constexpr, LOWEST: gl.constexpr, LENGTH: gl.constexpr, ROTATE: gl.constexpr,
    WHOSE: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr,
    warps: gl.constexpr,
):  # fmt: skip
    """A block of q or k."""
    stride_b, stride_h, stride_n, stride_d = strides
    layout: gl.constexpr = by_rows(ROWS, WIDTH, warps)
    row = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    d = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    X += (head // h_len).to(gl.int64) * stride_b + (head % h_len).to(gl.int64) * stride_h
    at = gl.expand_dims(row.to(gl.int64) * stride_n, 1) + gl.expand_dims(d.to(gl.int64) * stride_d, 0)
    there = gl.expand_dims(row < n, 1) & gl.expand_dims(d < D, 0)
    x = gl.load(X + at, mask=there, other=0.0).to(gl.float32)
    if ROTATE:
        x, up = _rotated(x, Remainder, BITS, LOWEST, D, X.dtype.element_ty.primitive_bitwidth == 16, warps)
        if LENGTH > 0:  # of all columns
            largest = gl.max(gl.max(gl.abs(x), 1) * LENGTH * up, 0)
        else:
            length = gl.load(Lengths + d)
            largest = gl.max(gl.max(gl.abs(x * gl.expand_dims(length, 0)), 1) * up, 0)
    else:
        largest = gl.max(gl.abs(x))
    if WHOSE == LARGEST_ONLY:
        gl.atomic_max(Largest, largest)
    else:
        factor = _factor(largest, Scales, Largest, block, blocks, head, LEAST, TOP, WHOSE)
        if ROTATE:
            if LENGTH > 0:
                x *= gl.expand_dims(factor * LENGTH * up, 1)
            else:
                x = x * gl.expand_dims(length * factor, 0) * gl.expand_dims(up, 1)
        else:
            x *= factor
        at = gl.expand_dims((head.to(gl.int64) * n + row) * D, 1) + gl.expand_dims(d, 0)
        gl.store(Out + at, x.to(Out.dtype.element_ty), mask=there)


@gluon.jit
def _columns(
    X, Out, Scales, Largest, strides, block, blocks, head, h_len, n, groups, LEAST: gl.constexpr, TOP: gl.constexpr,
    WHOSE: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr,
    warps: gl.constexpr,
):  # fmt: skip
    """A block of v, turned."""
    stride_b, stride_h, stride_n, stride_d = strides
    layout: gl.constexpr = by_columns(ROWS, WIDTH, warps, False)
    slot, d = gl.arange(0, ROWS, gl.SliceLayout(1, layout)), gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    # the key that stands at each place: see Quantised
    row = block * ROWS + ((slot & -16) | ((slot & 2) << 2) | ((slot & 12) >> 1) | (slot & 1))
    X += (head // h_len).to(gl.int64) * stride_b + (head % h_len).to(gl.int64) * stride_h
    at = gl.expand_dims(row.to(gl.int64) * stride_n, 1) + gl.expand_dims(d.to(gl.int64) * stride_d, 0)
    x = gl.load(X + at, mask=gl.expand_dims(row < n, 1) & gl.expand_dims(d < D, 0), other=0.0)
    by_places: gl.constexpr = by_columns(ROWS, WIDTH, warps, True)
    x = gl.convert_layout(x, by_places).to(gl.float32)
    largest = gl.max(gl.abs(x))
    if WHOSE == LARGEST_ONLY:
        gl.atomic_max(Largest, largest)
    else:
        factor = _factor(largest, Scales, Largest, block, blocks, head, LEAST, TOP, WHOSE)
        place = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, by_places))
        d = gl.arange(0, WIDTH, gl.SliceLayout(0, by_places))
        at = gl.expand_dims((head.to(gl.int64) * D + d) * (groups * GROUP), 0) + gl.expand_dims(place, 1)
        there = gl.expand_dims(place < groups * GROUP, 1) & gl.expand_dims(d < D, 0)
        gl.store(Out + at, (x * factor).to(Out.dtype.element_ty), mask=there)


@gluon.jit(
    do_not_specialize=["h_len", "h_kv_len", "q_len", "k_len", "groups", "q_blocks", "k_blocks", "q_heads", "k_heads"]
)
def _eight_bits(
    Q, K, V, Q8, K8, V8, Q_scales, K_scales, V_scales, Largest, Lengths, Remainder,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
    h_len, h_kv_len, q_len, k_len, groups, q_blocks, k_blocks, q_heads, k_heads,
    LEAST: gl.constexpr, TOP: gl.constexpr, BITS: gl.constexpr, LOWEST: gl.constexpr, GROUP: gl.constexpr,
    LENGTH: gl.constexpr, ROTATE: gl.constexpr, WHOSE: gl.constexpr, PER_HEAD: gl.constexpr, D: gl.constexpr,
    WIDTH: gl.constexpr, D_V: gl.constexpr, WIDTH_V: gl.constexpr, ROWS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """`q_heads` heads of q, then `k_heads` of k, then as many of v."""
    program = gl.program_id(0)
    if WHOSE == GIVEN:  # what was read last may still be in the cache
        program = gl.num_programs(0) - 1 - program
    before = q_heads * q_blocks
    if program < before:
        block, head = program % q_blocks, program // q_blocks
        Largest += head if PER_HEAD else 0
        _rows(Q, Q8, Q_scales, Largest, (q_b, q_h, q_n, q_d), Lengths, Remainder, block, q_blocks, head, h_len,
              q_len, LEAST, TOP, BITS, LOWEST, LENGTH, ROTATE, WHOSE, D, WIDTH, ROWS, num_warps)  # fmt: skip
    else:
        program -= before
        block, head = program % k_blocks, program // k_blocks
        Largest += q_heads + head if PER_HEAD else 1 + (head >= k_heads).to(gl.int32)
        if head < k_heads:
            _rows(K, K8, K_scales, Largest, (k_b, k_h, k_n, k_d), Lengths, Remainder, block, k_blocks, head, h_kv_len,
                  k_len, LEAST, TOP, BITS, LOWEST, LENGTH, ROTATE, WHOSE, D, WIDTH, ROWS, num_warps)  # fmt: skip
        else:
            _columns(V, V8, V_scales, Largest, (v_b, v_h, v_n, v_d), block, k_blocks, head - k_heads, h_kv_len, k_len,
                     groups, LEAST, TOP, WHOSE, GROUP, D_V, WIDTH_V, ROWS, num_warps)  # fmt: skip


def on_gpu(q: Tensor, k: Tensor, v: Tensor, precision: Precision) -> list[tuple[Tensor, Tensor]]:
    """Elements and scales of q, of k and of v, which is turned: see quantise."""
    if torch.version.hip:
        raise NotBuilt("8-bit inputs on AMD GPUs are not built yet")
    from attncc.runtime.quantise import BITS, ELEMENTS, GROUP, LARGEST, LEAST, LEAST_EXPONENT

    (b, h, n, d), (_, h_kv, m, d_v) = q.shape, v.shape
    if len({q.dtype, k.dtype, v.dtype}) > 1 or q.dtype == torch.float64:
        q, k, v = q.float(), k.float(), v.float()
    top, kind = LARGEST[precision.inputs or ""], ELEMENTS[precision.inputs or ""]
    own, per_head = precision.block is not None, precision.scales == "per_head"
    width, width_v = (max(CHUNK.value, triton.next_power_of_2(size)) for size in (d, d_v))
    widest = max(width, width_v)
    rows = BLOCK if own else max(LEAST_ROWS, min(BLOCK, ELEMENTS_OF_WARP * WARPS_OF_THREE // widest))
    blocks, kv_blocks, groups = max(1, -(-n // rows)), max(1, -(-m // rows)), -(-m // GROUP)
    outs = [q.new_empty(shape, dtype=kind) for shape in (q.shape, k.shape, (b, h_kv, d_v, groups * GROUP))]
    counts = (h, blocks), (h_kv, kv_blocks), (h_kv, kv_blocks)
    scales = [q.new_empty((b, heads, count if own else 1), dtype=torch.float32) for heads, count in counts]
    largest = q.new_zeros(0 if own else b * (h + 2 * h_kv) if per_head else 3, dtype=torch.float32)
    warps = min(MOST_WARPS, max(LEAST_WARPS, rows * widest // ELEMENTS_OF_WARP))
    few = warps == WARPS_OF_THREE and q.element_size() == 2
    programs = b * (h * blocks + 2 * h_kv * kv_blocks)
    for whose in (OWN,) if own else (LARGEST_ONLY, GIVEN):
        if programs:
            _eight_bits[(programs,)](
                q, k, v, *outs, *scales, largest, *_uneven(d, width, q.device), *q.stride(), *k.stride(), *v.stride(),
                h, h_kv, n, m, groups, blocks, kv_blocks, b * h, b * h_kv, LEAST, top, BITS, LEAST_EXPONENT, GROUP,
                0.0 if d & d - 1 else d**-0.5, precision.rotates, whose, per_head, d, width, d_v, width_v,
                rows, num_warps=warps, maxnreg=REGISTERS_OF_THREE if few else None,
            )  # fmt: skip
    return list(zip(outs, scales, strict=True))


@cache
def _uneven(d: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where d is no power of two: lengths of the rotation's columns, [width], and the matrix of bits 1 to 4 of the last
    32 columns' numbers, in the order of _hadamard, [16, 16]."""
    from attncc.runtime.quantise import rotation_parts

    entries, lengths = (torch.nn.functional.pad(x, (0, width - d) * x.dim()) for x in rotation_parts(d))
    i, start = torch.arange(16, device="cpu"), (d - 1) // CHUNK.value * CHUNK.value
    last = start + ((i & 7) << 2 | (i & 8) >> 2)
    return lengths.to(device), (entries[last][:, last] * entries[start, start]).half().to(device)
