# attention relative_bias(bucket_of: i32[distances], table: f32[buckets, h] grad) {
#     let far      = distances // 2
#     let distance = min(max(k - q, -far), far)
#     scale 1
#     score s + table[bucket_of[distance + far], h]
# }
#
# forward · fa2 · tile 64 × 32 · 3 stages · 4 warps · K and V by TMA · the running maximum
# sm_90, bf16, head size 128: 143 registers, no spills, 73 KB of shared memory
# HBM: Q and Out once, K and V once for each tile of rows that sees them. Rows without keys give 0, lse -inf.
# made by: attncc build relative_bias.attn --target sm_90     checked by: python relative_bias_forward_sm_90.py

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
        "q_len", "k_len", "b_len", "h_len", "group", "together", "distances", "buckets"
    ],
    do_not_specialize_on_alignment=[
        "bucket_of", "table", "stride_bucket_of", "stride_table_0", "stride_table_1"
    ],
)
def relative_bias_forward(
    Q, K, V, Out, Lse, bucket_of, table,
    stride_qb: "i64", stride_qh: "i64", stride_qm: "i64", stride_qd,
    stride_bucket_of, stride_table_0: "i64", stride_table_1: "i64",
    q_len: "i32", k_len: "i32", b_len: "i32", h_len: "i32", group: "i32", together: "i32",
    distances: "i32", buckets: "i32",
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
    far_ = distances // 2
    scale = 1.0

    # ---- the key tiles that these rows see
    first_row, last_row = mine * TILE_Q, tl.minimum(mine * TILE_Q + TILE_Q, q_len) - 1
    end = (k_len + TILE_K - 1) // TILE_K
    full_end = k_len // TILE_K

    # ---- Q, behind what the ranges wait for
    query = load(Q + row * stride_qm + d[None, :] * stride_qd, row < q_len, True)

    # ---- online softmax: running maximum, running sum, output
    m = tl.full([TILE_Q, 1], LOWEST, tl.float32)
    l = tl.zeros([TILE_Q, 1], tl.float32)
    out = tl.zeros([TILE_Q, 128], tl.float32)
    for masked in tl.static_range(2):  # whole tiles first, then those that need the mask
        for tile in range(full_end if masked else 0, end if masked else full_end):
            k = tile * TILE_K + tl.arange(0, TILE_K)[None, :]
            key = K.load([b, h_kv, tile * TILE_K, 0]).reshape(TILE_K, 128).T
            s = tl.dot(query, key)
            s = s * scale
            tile_first, tile_last = tile * TILE_K, tile * TILE_K + TILE_K - 1
            distance = tl.minimum(tl.maximum(k - q, -far_), far_)
            same_index = far_ + tl.minimum(far_, tl.maximum(-far_, tile_first + q_len - last_row - k_len))
            # all pairs read the same entries
            if same_index == far_ + tl.minimum(far_, tl.maximum(-far_, tile_last + q_len - first_row - k_len)):
                bucket_of_same_index = tl.load(
                    bucket_of + tl.cast(same_index, tl.int64) * stride_bucket_of,
                    mask=(0 <= same_index) & (same_index < distances),
                    other=0,
                )
                table_h_ = tl.load(
                    table + bucket_of_same_index * stride_table_0 + h * stride_table_1,
                    mask=(0 <= bucket_of_same_index) & (bucket_of_same_index < buckets),
                    other=0,
                )
                table_h = tl.broadcast_to(table_h_, [TILE_Q, TILE_K])
            else:
                bucket_of_at = tl.load(
                    bucket_of + tl.cast(distance + far_, tl.int64) * stride_bucket_of,
                    mask=(0 <= distance + far_) & (distance + far_ < distances),
                    other=0,
                )
                table_h = tl.load(
                    table + bucket_of_at * stride_table_0 + h * stride_table_1,
                    mask=(0 <= bucket_of_at) & (bucket_of_at < buckets),
                    other=0,
                )
            s = s + table_h
            if masked:
                keep = k < k_len
                s = tl.where(keep, s, float("-inf"))

            m_new = tl.maximum(m, tl.max(s, 1, keep_dims=True) * LOG2E)
            rescale = tl.exp2(m - m_new)
            m, l = m_new, l * rescale
            out *= rescale
            p = tl.exp2(s * LOG2E - m)
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


def forward(q, k, v, *, bucket_of, table):
    """q [B, H, Q, 128], k [B, H_kv, K, 128], v [B, H_kv, K, 128] in bf16 → out [B, H, Q, 128] in bf16,
    lse [B, H, Q] in float32 (natural log)."""
    (b_len, h_len, q_len, _), (_, h_kv_len, k_len, _) = q.shape, k.shape
    distances = bucket_of.shape[0]
    buckets = table.shape[0]
    out = q.new_empty((b_len, h_len, q_len, 128))
    lse = q.new_empty((b_len, h_len, q_len), dtype=torch.float32)
    if not b_len * h_len * q_len:
        return out, lse
    group, q_tiles = h_len // h_kv_len, -(-q_len // 64)
    together = 8 * group  # heads whose tiles run side by side
    # TMA takes keys and values at 16-byte-aligned addresses and strides;
    # relative_bias_forward_sm_90_any_stride.py takes the rest.
    relative_bias_forward[(b_len * h_len * q_tiles,)](
        q, TensorDescriptor(k, k.shape, k.stride(), [1, 1, 32, 128]),
        TensorDescriptor(v, v.shape, v.stride(), [1, 1, 32, 128]), out, lse, bucket_of, table,
        *q.stride(),
        *bucket_of.stride(), *table.stride(),
        q_len, k_len, b_len, h_len, group, together,
        distances, buckets,
        TILE_Q=64, TILE_K=32, num_warps=4, num_stages=3,
    )
    return out, lse


def check():
    """The kernel on random tensors against the whole score matrix at once, in float64. Returns the exit status."""

    def tensor(x):
        return (
            x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None)
        )

    def read(table, *at):
        """Elements of a table; 0 or false outside an axis."""
        at = torch.broadcast_tensors(*map(torch.as_tensor, at))
        inside = torch.ones_like(at[0], dtype=torch.bool)
        for i, n in zip(at, table.shape):
            inside &= (i >= 0) & (i < n)
        if table.numel() == 0:
            return torch.zeros_like(inside, dtype=table.dtype)
        return table[tuple(i.clamp(0, n - 1) for i, n in zip(at, table.shape))].masked_fill(~inside, 0)

    def minimum(x, y):
        return torch.minimum(tensor(x), tensor(y))

    def maximum(x, y):
        return torch.maximum(tensor(x), tensor(y))

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
    bucket_of = torch.randint(0, 100, (16,)).to(torch.int32)
    table = torch.rand((16, 4)).to(torch.float32)
    out, lse = forward(Q.to(device), K.to(device), V.to(device), bucket_of=bucket_of.to(device), table=table.to(device))
    out, lse = out.cpu(), lse.cpu()

    (B, H, q_len, D), (H_kv, k_len), dtype = Q.shape, K.shape[1:3], torch.float64
    batch, heads, rows, keys, group = slice(None), slice(None), slice(None), slice(None), H // H_kv
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    row, k = torch.arange(q_len)[:, None], torch.arange(k_len)
    q = row + (k_len - q_len)
    distances = bucket_of.shape[0]
    far_ = distances // 2
    s = Q.double() @ K.double().repeat_interleave(group, 1).mT * 1.0
    distance = minimum(maximum(k - q, -far_), far_)
    bucket_of_at = read(bucket_of, distance + far_).long()
    table_h = read(table, bucket_of_at, h).to(dtype)
    s = s + table_h
    want_lse = torch.logsumexp(s, -1, keepdim=True)
    p = torch.where(s == -torch.inf, 0.0, torch.exp(s - want_lse))
    want = p @ V.double().repeat_interleave(group, 1)
    error = ((out - want).norm() / want.norm()).item()
    lse_error = torch.where(lse == want_lse[..., 0], 0.0, lse - want_lse[..., 0]).abs().max().item()
    print(f"output {error:.1e}, lse {lse_error:.1e} from float64")
    return 0 if error < 1e-2 and lse_error < 1e-3 else 1


if __name__ == "__main__":
    raise SystemExit(check())
