# attention block_sparse(blocks: bool[h, q_blocks, k_blocks]) {
#     mask blocks[h, q // 64, k // 64] and k <= q
# }
#
# forward · fa2 · tile 64 × 32 · 3 stages · 4 warps · K and V by TMA · the running maximum
# sm_90, bf16, head size 128: 236 registers, no spills, 66 KB of shared memory
# HBM: Q and Out once, K and V once for each tile of rows that sees them. Rows without keys give 0, lse -inf.
# made by: attncc build block_sparse.attn --target sm_90     checked by: python block_sparse_forward_sm_90.py

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


@triton.jit
def floor_div(a, b):
    return a // b - tl.where(a % b < 0, 1, 0)


@triton.jit(
    do_not_specialize=[
        "q_len", "k_len", "b_len", "h_len", "group", "q_tiles", "k_tiles", "q_blocks", "k_blocks"
    ],
    do_not_specialize_on_alignment=[
        "blocks", "stride_blocks_0", "stride_blocks_1", "stride_blocks_2"
    ],
)
def block_sparse_forward_scans(
    blocks, Tables,
    stride_blocks_0: "i64", stride_blocks_1: "i64", stride_blocks_2,
    q_len: "i32", k_len: "i32", b_len: "i32", h_len: "i32", group: "i32",
    q_tiles: "i32", k_tiles: "i32",
    q_blocks: "i32", k_blocks: "i32",
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
):
    # ---- the tiles of keys that hold something for one tile of rows: whole ones from the front of a list, others from
    # its end
    slab, mine = tl.program_id(0) // q_tiles, tl.program_id(0) % q_tiles
    b, h = 0, slab
    row = mine * TILE_Q + tl.arange(0, TILE_Q)[:, None]
    q = row + (k_len - q_len)
    first_row, last_row = mine * TILE_Q, tl.minimum(mine * TILE_Q + TILE_Q, q_len) - 1
    Tables += slab.to(tl.int64) * ((k_tiles + 2) * q_tiles)
    q_high = last_row + k_len - q_len
    q_low = first_row + k_len - q_len
    Listed = Tables + mine.to(tl.int64) * (k_tiles + 2)
    wholes, others = 0, 0
    for lane_base in range(0, k_tiles, 128):
        lane = lane_base + tl.arange(0, 128)
        inner_first, inner_last = lane * TILE_K, tl.minimum(lane * TILE_K + TILE_K, k_len) - 1
        blocks_h = tl.load(
            blocks + h * stride_blocks_0 + floor_div(q_low, 64) * stride_blocks_1
            + tl.cast(inner_first // 64, tl.int64) * stride_blocks_2,
            mask=(0 <= floor_div(q_low, 64)) & (floor_div(q_low, 64) < q_blocks) & (inner_first // 64 < k_blocks),
            other=0,
        )
        blocks_h_ = tl.load(
            blocks + h * stride_blocks_0 + floor_div(q_low, 64) * stride_blocks_1
            + tl.cast(inner_last // 64, tl.int64) * stride_blocks_2,
            mask=(0 <= floor_div(q_low, 64)) & (floor_div(q_low, 64) < q_blocks) & (inner_last // 64 < k_blocks),
            other=0,
        )
        blocks_h__ = tl.load(
            blocks + h * stride_blocks_0 + floor_div(q_high, 64) * stride_blocks_1
            + tl.cast(inner_first // 64, tl.int64) * stride_blocks_2,
            mask=(0 <= floor_div(q_high, 64)) & (floor_div(q_high, 64) < q_blocks) & (inner_first // 64 < k_blocks),
            other=0,
        )
        blocks_h___ = tl.load(
            blocks + h * stride_blocks_0 + floor_div(q_high, 64) * stride_blocks_1
            + tl.cast(inner_last // 64, tl.int64) * stride_blocks_2,
            mask=(0 <= floor_div(q_high, 64)) & (floor_div(q_high, 64) < q_blocks) & (inner_last // 64 < k_blocks),
            other=0,
        )
        live = (
            (lane < k_tiles)
            & (
                blocks_h | blocks_h_ | blocks_h__ | blocks_h___ | (floor_div(q_low, 64) + 2 <= floor_div(q_high, 64))
                | (inner_first // 64 + 2 <= inner_last // 64)
            )
            & (inner_first <= q_high)
        )
        whole = (
            live & (floor_div(q_high, 64) <= floor_div(q_low, 64) + 1) & (inner_last // 64 <= inner_first // 64 + 1)
            & blocks_h & blocks_h_ & blocks_h__ & blocks_h___ & (inner_last <= q_low) & (inner_first + TILE_K <= k_len)
        )
        tl.store(Listed + wholes + tl.cumsum(whole.to(tl.int32)) - 1, lane, whole)
        wholes += tl.sum(whole.to(tl.int32))
        live = live & ~whole
        tl.store(Listed + k_tiles - others - tl.cumsum(live.to(tl.int32)), lane, live)
        others += tl.sum(live.to(tl.int32))
    tl.store(Listed + k_tiles, wholes)
    tl.store(Listed + k_tiles + 1, others)


@triton.jit(
    do_not_specialize=[
        "q_len", "k_len", "b_len", "h_len", "group", "together", "q_tiles", "k_tiles", "q_blocks", "k_blocks"
    ],
    do_not_specialize_on_alignment=[
        "blocks", "stride_blocks_0", "stride_blocks_1", "stride_blocks_2"
    ],
)
def block_sparse_forward(
    Q, K, V, Out, Lse, blocks, Tables,
    stride_qb: "i64", stride_qh: "i64", stride_qm: "i64", stride_qd,
    stride_blocks_0: "i64", stride_blocks_1: "i64", stride_blocks_2,
    q_len: "i32", k_len: "i32", b_len: "i32", h_len: "i32", group: "i32", together: "i32",
    q_tiles: "i32", k_tiles: "i32",
    q_blocks: "i32", k_blocks: "i32",
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

    # ---- the key tiles that these rows see
    Tables += h.to(tl.int64) * ((k_tiles + 2) * q_tiles)
    Listed = Tables + mine.to(tl.int64) * (k_tiles + 2)
    wholes, others = tl.load(Listed + k_tiles), tl.load(Listed + k_tiles + 1)

    # ---- Q, behind what the ranges wait for
    query = load(Q + row * stride_qm + d[None, :] * stride_qd, row < q_len, True)

    # ---- online softmax: running maximum, running sum, output
    m = tl.full([TILE_Q, 1], LOWEST, tl.float32)
    l = tl.zeros([TILE_Q, 1], tl.float32)
    out = tl.zeros([TILE_Q, 128], tl.float32)
    for masked in tl.static_range(2):  # whole tiles first, then those that need the mask
        for step in range(0, others if masked else wholes):
            if masked:
                tile = tl.load(Listed + k_tiles - 1 - step)
            else:
                tile = tl.load(Listed + step)
            k = tile * TILE_K + tl.arange(0, TILE_K)[None, :]
            key = K.load([b, h_kv, tile * TILE_K, 0]).reshape(TILE_K, 128).T
            s = tl.dot(query, key)
            if masked:
                blocks_h = tl.load(
                    blocks + h * stride_blocks_0 + floor_div(q, 64) * stride_blocks_1
                    + tl.cast(k // 64, tl.int64) * stride_blocks_2,
                    mask=(0 <= floor_div(q, 64)) & (floor_div(q, 64) < q_blocks) & (k // 64 < k_blocks),
                    other=0,
                )
                keep = blocks_h & (k <= q)
                s = tl.where(keep, s, float("-inf"))

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


def forward(q, k, v, *, blocks):
    """q [B, H, Q, 128], k [B, H_kv, K, 128], v [B, H_kv, K, 128] in bf16 → out [B, H, Q, 128] in bf16,
    lse [B, H, Q] in float32 (natural log)."""
    (b_len, h_len, q_len, _), (_, h_kv_len, k_len, _) = q.shape, k.shape
    q_blocks = blocks.shape[1]
    k_blocks = blocks.shape[2]
    out = q.new_empty((b_len, h_len, q_len, 128))
    lse = q.new_empty((b_len, h_len, q_len), dtype=torch.float32)
    if not b_len * h_len * q_len:
        return out, lse
    group, q_tiles = h_len // h_kv_len, -(-q_len // 64)
    together = 8 * group  # heads whose tiles run side by side
    q_tiles, k_tiles, slabs = triton.cdiv(q_len, 64), triton.cdiv(k_len, 32), h_len
    tables = torch.empty(slabs * ((k_tiles + 2) * q_tiles), dtype=torch.int32, device=q.device)
    block_sparse_forward_scans[(slabs * q_tiles,)](
        blocks, tables,
        *blocks.stride(),
        q_len, k_len, b_len, h_len, group,
        q_tiles, k_tiles,
        q_blocks, k_blocks,
        TILE_Q=64, TILE_K=32, num_warps=1,
    )
    # TMA takes keys and values at 16-byte-aligned addresses and strides;
    # block_sparse_forward_sm_90_any_stride.py takes the rest.
    block_sparse_forward[(b_len * h_len * q_tiles,)](
        q, TensorDescriptor(k, k.shape, k.stride(), [1, 1, 32, 128]),
        TensorDescriptor(v, v.shape, v.stride(), [1, 1, 32, 128]), out, lse, blocks, tables,
        *q.stride(),
        *blocks.stride(),
        q_len, k_len, b_len, h_len, group, together,
        q_tiles, k_tiles,
        q_blocks, k_blocks,
        TILE_Q=64, TILE_K=32, num_warps=4, num_stages=3,
    )
    return out, lse


def check():
    """The kernel on random tensors against the whole score matrix at once, in float64. Returns the exit status."""

    def read(table, *at):
        """Elements of a table; 0 or false outside an axis."""
        at = torch.broadcast_tensors(*map(torch.as_tensor, at))
        inside = torch.ones_like(at[0], dtype=torch.bool)
        for i, n in zip(at, table.shape):
            inside &= (i >= 0) & (i < n)
        if table.numel() == 0:
            return torch.zeros_like(inside, dtype=table.dtype)
        return table[tuple(i.clamp(0, n - 1) for i, n in zip(at, table.shape))].masked_fill(~inside, 0)

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
    blocks = torch.rand((4, 16, 16)) < 0.7
    out, lse = forward(Q.to(device), K.to(device), V.to(device), blocks=blocks.to(device))
    out, lse = out.cpu(), lse.cpu()

    (B, H, q_len, D), (H_kv, k_len), dtype = Q.shape, K.shape[1:3], torch.float64
    batch, heads, rows, keys, group = slice(None), slice(None), slice(None), slice(None), H // H_kv
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    row, k = torch.arange(q_len)[:, None], torch.arange(k_len)
    q = row + (k_len - q_len)
    s = Q.double() @ K.double().repeat_interleave(group, 1).mT * D**-0.5
    blocks_h = read(blocks, h, q // 64, k // 64)
    keep = blocks_h & (k <= q)
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
