# attention row_bounds(lo: i32[b, h, row], hi: i32[b, h, row]) {
#     mask lo[b, h, row] <= k < hi[b, h, row]
# }
#
# forward · fa2 · tile 128 × 64 · 2 stages · 8 warps · K and V by TMA · the first tiles' maximum
# sm_90, bf16, head size 128: 128 registers, 88 spills, 96 KB of shared memory
# HBM: Q and Out once, K and V once for each tile of rows that sees them. Rows without keys give 0, lse -inf.
# made by: attncc build row_bounds.attn --target sm_90     checked by: python row_bounds_forward_sm_90.py

import os

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32


@triton.jit
def load(pointers, inside, guarded: tl.constexpr):
    """A tile of a tensor, 0 outside it; where all of it lies inside, nothing is compared."""
    if guarded:
        return tl.load(pointers, mask=inside, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit(
    do_not_specialize=[
        "q_len", "k_len", "b_len", "h_len", "group", "together"
    ],
    do_not_specialize_on_alignment=[
        "lo", "hi", "stride_lo_0", "stride_lo_1", "stride_lo_2", "stride_hi_0", "stride_hi_1", "stride_hi_2"
    ],
)
def row_bounds_forward(
    Q, K, V, Out, Lse, lo, hi,
    stride_qb: "i64", stride_qh: "i64", stride_qm: "i64", stride_qd,
    stride_lo_0: "i64", stride_lo_1: "i64", stride_lo_2, stride_hi_0: "i64", stride_hi_1: "i64", stride_hi_2,
    q_len: "i32", k_len: "i32", b_len: "i32", h_len: "i32", group: "i32", together: "i32",
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
):
    # ---- which rows are mine, and where they stand on the key axis (align end)
    tiles = tl.cdiv(q_len, TILE_Q)
    group_start = tl.program_id(0) // (together * tiles) * together
    group_size = tl.minimum(b_len * h_len - group_start, together)
    inside = tl.program_id(0) - group_start * tiles
    head, mine = group_start + inside % group_size, tiles - 1 - inside // group_size
    b, h = head // h_len, head % h_len
    h_kv = h // group
    row = mine * TILE_Q + tl.arange(0, TILE_Q)[:, None]
    q = row + (k_len - q_len)
    d = tl.arange(0, 128).to(tl.int64)
    Q += b * stride_qb + h * stride_qh
    scale = 0.08838834764831845 * LOG2E
    lo_row = tl.load(
        lo + b * stride_lo_0 + h * stride_lo_1 + tl.cast(row, tl.int64) * stride_lo_2, mask=(row < q_len), other=0
    )
    hi_row = tl.load(
        hi + b * stride_hi_0 + h * stride_hi_1 + tl.cast(row, tl.int64) * stride_hi_2, mask=(row < q_len), other=0
    )
    lo_q_min = tl.min(tl.where(row < q_len, lo_row, 2147483647))
    hi_q_max = tl.max(tl.where(row < q_len, hi_row, -2147483647))
    lo_q_max = tl.max(tl.where(row < q_len, lo_row, -2147483647))
    hi_q_min = tl.min(tl.where(row < q_len, hi_row, 2147483647))

    # ---- the key tiles that these rows see
    begin = tl.maximum(lo_q_min, 0) // TILE_K
    end = (tl.maximum(tl.minimum(k_len, hi_q_max), 0) + TILE_K - 1) // TILE_K
    full_begin = tl.minimum(end, (tl.maximum(tl.minimum(k_len, lo_q_max), 0) + TILE_K - 1) // TILE_K)
    full_end = tl.maximum(tl.maximum(tl.minimum(k_len, hi_q_min), 0) // TILE_K, full_begin)
    reference_tile = tl.maximum(full_end - 1, full_begin)
    full_0 = tl.maximum(reference_tile - full_begin, 0)
    masked_0 = tl.maximum(full_begin - begin, 0)
    masked_1 = masked_0 + tl.maximum(end - reference_tile, 0)

    # ---- Q, behind what the ranges wait for
    query = load(Q + row * stride_qm + d[None, :] * stride_qd, row < q_len, True)

    # ---- online softmax: running maximum, running sum, output
    # The first tiles set the reference of each row's exponentials; later ones need no maximum and no rescaling. float32
    # has room for 2^±126: a row whose sum leaves the safe range is computed again with the running maximum.
    for again in tl.static_range(2):
        if again:
            safe = l < 2.0**60
            safe = safe & (tl.max(tl.abs(out), 1, keep_dims=True) < float("inf"))
        if tl.max(tl.where(safe | (row >= q_len), 0, 1)) if again else True:
            m = tl.full([TILE_Q, 1], LOWEST, tl.float32)
            l = tl.zeros([TILE_Q, 1], tl.float32)
            out = tl.zeros([TILE_Q, 128], tl.float32)
            # Two loops: with `masked`, over the tiles that need the mask and one whole tile, which give each row its
            # reference; then without, over the other whole ones.
            for masked in tl.static_range(1, -1, -1):
                for step in range(0, masked_1 if masked else full_0):
                    if masked:
                        tile = tl.where(step < masked_0, begin, reference_tile - masked_0) + step
                    else:
                        tile = full_begin + step
                    k = tile * TILE_K + tl.arange(0, TILE_K)[None, :]
                    key = K.load([b, h_kv, tile * TILE_K, 0]).reshape(TILE_K, 128).T
                    s = tl.dot(query, key)
                    if masked:
                        keep = (lo_row <= k) & (k < hi_row) & (k < k_len)
                        s = tl.where(keep, s, float("-inf"))

                    if masked or again:
                        m_new = tl.maximum(m, tl.max(s, 1, keep_dims=True) * scale)
                        rescale = tl.exp2(m - m_new)
                        m, l = m_new, l * rescale
                        out *= rescale
                    p = tl.exp2(s * scale - m)
                    l += tl.sum(p, 1, keep_dims=True)
                    value = V.load([b, h_kv, tile * TILE_K, 0]).reshape(TILE_K, 128)

                    out = tl.dot(p.to(value.dtype), value, out)

    # ---- normalise once, at the end
    divisor = tl.where(l == 0, 1.0, l)
    out = out / divisor
    lse = tl.where(l == 0, float("-inf"), (m + tl.log2(l)) / LOG2E)
    at = head.to(tl.int64) * q_len + row
    tl.store(Out + at * 128 + d[None, :], out.to(Out.dtype.element_ty), row < q_len)
    tl.store(Lse + at, lse, row < q_len)


def forward(q, k, v, *, lo, hi):
    """q [B, H, Q, 128], k [B, H_kv, K, 128], v [B, H_kv, K, 128] in bf16 → out [B, H, Q, 128] in bf16,
    lse [B, H, Q] in float32 (natural log)."""
    (b_len, h_len, q_len, _), (_, h_kv_len, k_len, _) = q.shape, k.shape
    out = q.new_empty((b_len, h_len, q_len, 128))
    lse = q.new_empty((b_len, h_len, q_len), dtype=torch.float32)
    if not b_len * h_len * q_len:
        return out, lse
    group, q_tiles = h_len // h_kv_len, -(-q_len // 128)
    together = 8 * group  # heads whose tiles run side by side
    # TMA takes keys and values at 16-byte-aligned addresses and strides;
    # row_bounds_forward_sm_90_any_stride.py takes the rest.
    row_bounds_forward[(b_len * h_len * q_tiles,)](
        q, TensorDescriptor(k, k.shape, k.stride(), [1, 1, 64, 128]),
        TensorDescriptor(v, v.shape, v.stride(), [1, 1, 64, 128]), out, lse, lo, hi,
        *q.stride(),
        *lo.stride(), *hi.stride(),
        q_len, k_len, b_len, h_len, group, together,
        TILE_Q=128, TILE_K=64, num_warps=8, num_stages=2, maxnreg=128,
    )
    return out, lse


def check():
    """The kernel on random tensors against the whole score matrix at once, in float64. Returns the exit status."""

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    elsewhere = not torch.cuda.is_available() or torch.version.hip or torch.cuda.get_device_capability() != (9, 0)
    if elsewhere and not interpreted:
        print("this kernel is for sm_90, and there is none here; with TRITON_INTERPRET=1 it runs on the CPU")
        return 3
    torch.manual_seed(0)
    device = "cpu" if interpreted else "cuda"
    kind = torch.float16 if interpreted else torch.bfloat16  # the interpreter multiplies the bits of bfloat16
    sizes = (300, 4, 128), (331, 2, 128), (331, 2, 128)
    Q, K, V = (torch.randn(2, *size).to(kind).transpose(1, 2) for size in sizes)
    lo = torch.randint(0, 100, (2, 4, 300)).to(torch.int32)
    hi = torch.randint(0, 100, (2, 4, 300)).to(torch.int32)
    out, lse = forward(Q.to(device), K.to(device), V.to(device), lo=lo.to(device), hi=hi.to(device))
    out, lse = out.cpu(), lse.cpu()

    (B, H, q_len, D), (H_kv, k_len), dtype = Q.shape, K.shape[1:3], torch.float64
    batch, heads, rows, keys, group = slice(None), slice(None), slice(None), slice(None), H // H_kv
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    row, k = torch.arange(q_len)[:, None], torch.arange(k_len)
    q = row + (k_len - q_len)
    lo_row = lo[batch, heads, rows, None].long()
    hi_row = hi[batch, heads, rows, None].long()
    s = Q.double() @ K.double().repeat_interleave(group, 1).mT * D**-0.5
    keep = (lo_row <= k) & (k < hi_row)
    s.masked_fill_(~keep, -torch.inf)
    want_lse = torch.logsumexp(s, -1, keepdim=True)
    p = torch.where(s == -torch.inf, 0.0, torch.exp(s - want_lse))
    want = p @ V.double().repeat_interleave(group, 1)
    error = ((out - want).norm() / want.norm()).item()
    lse_error = torch.where(lse == want_lse[..., 0], 0.0, lse - want_lse[..., 0]).abs().max().item()
    print(f"output {error:.1e}, lse {lse_error:.1e} from float64")
    return 0 if error < 1e-2 and lse_error < 1e-3 else 1


if __name__ == "__main__":
    raise SystemExit(check())
