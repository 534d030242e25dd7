"""q, k and v in 8 bits with scales: what an attention with 8-bit inputs computes with, the same bits on every device.

A value is an element times its scale. Where they are rotated, q and k are multiplied by one orthogonal matrix, signs
and then Hadamard's, which spreads outliers over a head's columns (Chee et al. 2023, "QuIP"; Shah et al. 2024,
"FlashAttention-3"). To give equal bits in any order of sums, that product is one of integers: each value is first
rounded to 2^-15 of the largest power of two in its row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from attncc.errors import NotBuilt
from attncc.ir import EIGHT_BIT, Precision
from attncc.runtime.autograd import transforms_are_active

BLOCK = 128  # rows or keys
GROUP = 16  # keys that a warp group's matrix instruction takes in an order of its own
ELEMENTS = {"f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2}
LARGEST = {"f8e4m3": 448.0, "f8e5m2": 57344.0}
LEAST = 2.0**-100  # taken for the largest value of a block of zeros
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
BITS = 15  # of the integers that are rotated: sums of 512 of them are exact in float32
LEAST_EXPONENT = -110
SIGNS = ((1, 2), (2, 3), (3, 4), (0, 5), (6, 7), (8, 9))  # bits of a column's number


@dataclass(frozen=True)
class Quantised:
    """q [B, H, Q, D] and k [B, H_kv, K, D] in 8 bits, rotated or not; v as the matrix unit reads it, [B, H_kv, D_v, n]
    with n = K rounded up to 16: key 8b + 2i + c of each 16 stands at 4i + 2b + c, and 0 behind the last.

    Scales are float32 [B, H, m] and [B, H_kv, m], one for each block of 128 rows or keys, or m = 1 for all of them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_scales: Tensor
    k_scales: Tensor
    v_scales: Tensor
    rotated: bool

    @property
    def values(self) -> Tensor:
        """v as [B, H_kv, K, D_v], elements without their scales."""
        b, h, d, n = self.v.shape
        rows = self.v.view(torch.uint8).view(b, h, d, n // GROUP, 4, 2, 2).transpose(4, 5)
        return rows.reshape(b, h, d, n)[..., : self.k.shape[2]].mT.contiguous().view(self.v.dtype)

    def dequantised(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
        """What is computed with: q, k (rotated ones stay rotated) and v as numbers, [B, H, Q, D] and so on."""
        parts = (self.q, self.q_scales), (self.k, self.k_scales), (self.values, self.v_scales)
        q, k, v = (_scaled(x, scales).to(dtype) for x, scales in parts)
        return q, k, v


def quantize(
    q: Tensor, k: Tensor, v: Tensor, *, inputs: str = "f8e4m3", scales: str = "per_block(128)",
    rotate: str = "hadamard",
) -> Quantised:  # fmt: skip
    """q [B, H, Q, D], k [B, H_kv, K, D] and v [B, H_kv, K, D_v], floats of any strides, in 8 bits.

    `inputs` is f8e4m3 or f8e5m2; `scales` per_tensor, per_head (of each batch entry) or per_block(128); `rotate` is
    hadamard, for q and k alike, or none. A scale is the largest size in what shares it, over 448 (e5m2: 57344). On an
    NVIDIA GPU it is a Gluon kernel, on a CPU PyTorch, with the same bits. NaN stays NaN in its element, or, where they
    are rotated, in those of its row that a Hadamard matrix mixes it with; infinity spoils what shares its scale. No
    gradients. TypeError or ValueError name a wrong argument; NotBuilt under torch.func.
    """
    if transforms_are_active():
        raise NotBuilt("quantize under torch.func (vmap, grad, jvp and the like) is not built yet: call it outside")
    precision = _precision(inputs, scales, rotate)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4 or x.dtype not in FLOATS:
            raise TypeError(f"{name} must be a float tensor of four dimensions")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, and is on {x.device}")
    return quantised(q, k, v, precision)


@torch.no_grad()
@torch.autocast("cpu", enabled=False)
def quantised(q: Tensor, k: Tensor, v: Tensor, precision: Precision) -> Quantised:
    """`quantize` as a spec's precision says, of checked tensors."""
    inputs, rotated = precision.inputs or "", precision.rotates
    assert inputs in EIGHT_BIT
    if q.is_cuda:
        from attncc.runtime.quantise_kernel import on_gpu

        (q8, qs), (k8, ks), (v8, vs) = on_gpu(q, k, v, precision)
    else:
        (q8, qs), (k8, ks), (v8, vs) = (_side(x, precision, rotated and x is not v) for x in (q, k, v))
        v8 = turned(v8)
    return Quantised(q8, k8, v8, qs, ks, vs, rotated)


def turned(v: Tensor) -> Tensor:
    """v [B, H, K, D_v] of 8 bits as the matrix unit reads it: see Quantised."""
    b, h, n, d = v.shape
    padded = -(-n // GROUP) * GROUP
    rows = v.new_zeros((b, h, d, padded), dtype=torch.uint8)
    rows[..., :n] = v.view(torch.uint8).mT
    return rows.view(b, h, d, padded // GROUP, 2, 4, 2).transpose(4, 5).reshape(b, h, d, padded).view(v.dtype)


def rotation(size: int, device: torch.device | str = "cpu") -> Tensor:
    """The orthogonal matrix [size, size], float32, by which rows of q and k are multiplied."""
    entries, lengths = rotation_parts(size)
    return (entries * lengths).to(device)


@lru_cache(maxsize=64)
def rotation_parts(size: int) -> tuple[Tensor, Tensor]:
    """Entries -1, 0 and 1, and each column's length: Hadamard matrices of powers of two along the diagonal, and signs.

    A sign is the parity of products of bits of a column's number, 1 with 2, 2 with 3, 3 with 4, 0 with 5, 6 with 7 and
    8 with 9: of as many bits as a head size of 32 or more has, one that is bent or nearly so (Rothaus 1976). Columns
    with a mean in common are spread by the matrix as evenly as one large column is, or within sqrt(2).
    """
    made, at = torch.zeros(size, size, device="cpu"), 0
    lengths = torch.empty(size, device="cpu")
    for bit in reversed(range(size.bit_length())):
        if size >> bit & 1:
            n = 1 << bit
            i = torch.arange(n, device="cpu")
            made[at : at + n, at : at + n] = _parity(i[:, None] & i, bit)
            lengths[at : at + n] = n**-0.5
            at += n
    i = torch.arange(size, device="cpu")
    chosen = [i >> low & i >> high & 1 for low, high in SIGNS]
    return made * (1.0 - 2.0 * (sum(chosen) & 1))[:, None], lengths


def _parity(x: Tensor, bits: int) -> Tensor:
    """1 where an even number of the lowest `bits` of x are set, else -1."""
    odd = torch.zeros_like(x)
    for bit in range(bits):
        odd ^= x >> bit & 1
    return 1.0 - 2.0 * odd


def _side(x: Tensor, precision: Precision, rotated: bool) -> tuple[Tensor, Tensor]:
    """Elements in the shape of x, and scales [B, H, m]."""
    b, h, n, d = x.shape
    blocks = x.float()
    if n % BLOCK or not n:
        blocks = torch.cat([blocks, blocks.new_zeros(b, h, -n % BLOCK or BLOCK, d)], 2)
    blocks = blocks.reshape(b, h, -1, BLOCK, d)
    lengths, units = blocks.new_ones(d), blocks.new_zeros(())
    if rotated:
        blocks, lengths, units = _rotated(blocks)
    largest = shared_largest(_largest(torch.ldexp(blocks * lengths, units)), precision)
    top = largest.new_full((), LARGEST[precision.inputs or ""])  # a number over a tensor is not rounded to the nearest
    made = torch.ldexp(blocks * (lengths * (top / largest)[..., None, None]), units)
    elements = made.to(ELEMENTS[precision.inputs or ""]).view(b, h, -1, d)[:, :, :n].contiguous()
    kept = largest if precision.block else largest[..., :1]
    return elements, (kept / top).contiguous()


def scale_count(length: int, precision: Precision) -> int:
    """How many scales so many rows or keys of a head have."""
    return 1 if precision.block is None else max(1, -(-length // BLOCK))


def shared_largest(largest: Tensor, precision: Precision) -> Tensor:
    """What scales are made of: `largest` [B, H, m] of each block, or of all that share a scale, at least LEAST."""
    if largest.numel() and precision.block is None:
        over = (0, 1, 2) if precision.scales == "per_tensor" else (2,)
        largest = largest.amax(over, keepdim=True).expand_as(largest)
    return largest.clamp(min=LEAST)


def _largest(blocks: Tensor) -> Tensor:
    """The largest size in each block [.., rows, columns], NaN aside."""
    sizes = torch.where(blocks.isnan(), 0.0, blocks.abs())
    return sizes.amax((-1, -2)) if sizes.numel() else sizes.new_zeros(sizes.shape[:-2])


def _rotated(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integers: rows times the rotation's entries; the lengths of its columns; exponents of each row's unit."""
    entries, lengths = rotation_parts(blocks.shape[-1])
    missing = blocks.isnan()
    blocks = torch.where(missing, 0.0, blocks)
    exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True)).exponent.clamp(min=LEAST_EXPONENT)
    sums = torch.ldexp(blocks, BITS - exponent).round() @ entries
    if missing.any():
        sums = torch.where(missing.float() @ entries.abs() > 0, torch.nan, sums)
    return sums, lengths, exponent - BITS


def _scaled(x: Tensor, scales: Tensor) -> Tensor:
    every = scales.repeat_interleave(BLOCK, 2)[:, :, : x.shape[2]] if scales.shape[2] > 1 else scales
    return x.float() * every[..., None]


def _precision(inputs: str, scales: str, rotate: str) -> Precision:
    known = {"inputs": (inputs, EIGHT_BIT), "scales": (scales, ("per_tensor", "per_head", "per_block(128)")),
             "rotate": (rotate, ("hadamard", "none"))}  # fmt: skip
    for name, (value, allowed) in known.items():
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, and is {value!r}")
    return Precision(inputs=inputs, scales=scales, rotate=rotate)
