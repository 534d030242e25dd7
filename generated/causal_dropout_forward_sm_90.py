# attention causal_dropout(p: float = 0.1) {
#     mask    k <= q
#     dropout p
# }
#
# forward · fa2 · tile 128 × 64 · 2 stages · 8 warps · K and V by TMA · the first tiles' maximum
# sm_90, bf16, head size 128: 128 registers, 72 spills, 96 KB of shared memory
# HBM: Q and Out once, K and V once for each tile of rows that sees them. Rows without keys give 0, lse -inf.
# made by: attncc build causal_dropout.attn --target sm_90     checked by: python causal_dropout_forward_sm_90.py

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
def halves(word, threshold):
    """Whether the lower 15 bits of each half are at least the threshold, which is on top of a word."""
    return tl.join(word << 17 >= threshold, word << 1 >= threshold)


@triton.jit
def survivors(seed, threshold, b, h, row, tile, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, by_keys: tl.constexpr):
    """Which weights of a tile are kept: those whose 15 bits are at least the threshold. Keys by rows where by_keys."""
    row, h, b = tl.cast(row, tl.uint32), tl.cast(h, tl.uint32), tl.cast(b, tl.uint32)
    if TILE_K >= 64:
        lane = tile * (TILE_K // 8) + tl.arange(0, TILE_K // 8)
    else:  # a counter serves keys of several tiles
        lane = tile * TILE_K // 64 * 8 + tile * TILE_K // 32 % 2 + 2 * tl.arange(0, 4)
    lane = lane[:, None] if by_keys else lane[None, :]
    w0, w1, w2, w3 = tl.philox(seed, lane.to(tl.uint32), row, h, b, n_rounds=7)
    if TILE_K == 16:
        former = tile % 2 == 0
        w0, w1 = tl.where(former, w0, w2), tl.where(former, w1, w3)
        kept = tl.join(halves(w0, threshold), halves(w1, threshold))
        kept = kept.permute(3, 0, 2, 1) if by_keys else kept.permute(0, 3, 1, 2)
    else:
        kept = tl.join(halves(w0, threshold), halves(w1, threshold))
        kept = tl.join(kept, tl.join(halves(w2, threshold), halves(w3, threshold)))
        if TILE_K == 32:
            kept = kept.permute(4, 3, 0, 2, 1) if by_keys else kept.permute(0, 4, 3, 1, 2)
        elif by_keys:
            kept = kept.reshape(TILE_K // 64, 4, 2, TILE_Q, 2, 2, 2).permute(0, 2, 6, 5, 1, 4, 3)
        else:
            kept = kept.reshape(TILE_Q, TILE_K // 64, 4, 2, 2, 2, 2).permute(0, 1, 3, 6, 5, 2, 4)
    return kept.reshape(TILE_K, TILE_Q) if by_keys else kept.reshape(TILE_Q, TILE_K)


@triton.jit(
    do_not_specialize=[
        "q_len", "k_len", "b_len", "h_len", "group", "together", "seed", "p__"
    ],
)
def causal_dropout_forward(
    Q, K, V, Out, Lse,
    stride_qb: "i64", stride_qh: "i64", stride_qm: "i64", stride_qd,
    q_len: "i32", k_len: "i32", b_len: "i32", h_len: "i32", group: "i32", together: "i32", seed: "i64",
    p__: "fp32",
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
    drop = tl.full([], p__, tl.float32)
    threshold = (drop * 32768.0 + 0.5).to(tl.int32).to(tl.uint32) << 17
    rescue = 1.0 / (1.0 - drop)

    # ---- the key tiles that these rows see
    first_row, last_row = mine * TILE_Q, tl.minimum(mine * TILE_Q + TILE_Q, q_len) - 1
    q_high = last_row + k_len - q_len
    end = (tl.maximum(q_high + 1, 0) + TILE_K - 1) // TILE_K
    q_low = first_row + k_len - q_len
    full_end = tl.maximum(q_low + 1, 0) // TILE_K
    reference_tile = tl.maximum(full_end - 1, 0)

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
                for tile in range(reference_tile if masked else 0, end if masked else reference_tile):
                    k = tile * TILE_K + tl.arange(0, TILE_K)[None, :]
                    key = K.load([b, h_kv, tile * TILE_K, 0]).reshape(TILE_K, 128).T
                    s = tl.dot(query, key)
                    if masked:
                        keep = (k <= q)
                        s = tl.where(keep, s, float("-inf"))

                    if masked or again:
                        m_new = tl.maximum(m, tl.max(s, 1, keep_dims=True) * scale)
                        rescale = tl.exp2(m - m_new)
                        m, l = m_new, l * rescale
                        out *= rescale
                    p = tl.exp2(s * scale - m)
                    l += tl.sum(p, 1, keep_dims=True)
                    p = tl.where(survivors(seed, threshold, b, h, row, tile, TILE_Q, TILE_K, False), p, 0.0)
                    value = V.load([b, h_kv, tile * TILE_K, 0]).reshape(TILE_K, 128)

                    out = tl.dot(p.to(value.dtype), value, out)

    # ---- normalise once, at the end
    divisor = tl.where(l == 0, 1.0, l)
    out = out / divisor
    lse = tl.where(l == 0, float("-inf"), (m + tl.log2(l)) / LOG2E)
    out = out * rescue
    at = head.to(tl.int64) * q_len + row
    tl.store(Out + at * 128 + d[None, :], out.to(Out.dtype.element_ty), row < q_len)
    tl.store(Lse + at, lse, row < q_len)


def forward(q, k, v, *, p__=0.1, seed):
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
    # causal_dropout_forward_sm_90_any_stride.py takes the rest.
    causal_dropout_forward[(b_len * h_len * q_tiles,)](
        q, TensorDescriptor(k, k.shape, k.stride(), [1, 1, 64, 128]),
        TensorDescriptor(v, v.shape, v.stride(), [1, 1, 64, 128]), out, lse,
        *q.stride(),
        q_len, k_len, b_len, h_len, group, together, seed,
        p__,
        TILE_Q=128, TILE_K=64, num_warps=8, num_stages=2, maxnreg=128,
    )
    return out, lse


def check():
    """The kernel on random tensors against the whole score matrix at once, in float64. Returns the exit status."""

    def survivors(seed, p, b, h, row, k):
        """Which weights a dropout with probability p keeps, [B, H, Q, K], k consecutive: Philox-4x32-7 (Salmon et al.
        2011) on (k // 64 * 8 + k // 2 % 4 * 2 + k // 32 % 2, row, h, b), whose 128 bits are 16 for each of 8 keys, of
        which 15 count: those of two neighbours lie in one word, those 8 apart in the next."""
        first, low = int(k[0]) // 64, 2**32 - 1
        lanes = torch.arange(first * 8, (int(k[-1]) // 64 + 1) * 8)
        c0, c1, c2, c3, k0, k1 = lanes, row, h, b, seed & low, seed >> 32 & low
        for _ in range(7):
            x, y = 0xD2511F53 * c0, 0xCD9E8D57 * c2
            c0, c1, c2, c3 = y >> 32 & low ^ c1 ^ k0, y & low, x >> 32 & low ^ c3 ^ k1, x & low
            k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
        words = torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), -1)
        bits = torch.stack((words & 0x7FFF, words >> 16 & 0x7FFF), -1)
        bits = bits.unflatten(3, (-1, 4, 2)).movedim(4, 6)  # [B, H, Q, K / 64, 2, 4, 4, 2]
        threshold = int(torch.tensor(p, dtype=torch.float32) * 32768.0 + 0.5)
        return (bits.flatten(3) >= threshold)[..., int(k[0]) - first * 64 :][..., : len(k)]

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
    p__ = 0.1
    out, lse = forward(Q.to(device), K.to(device), V.to(device), p__=p__, seed=1)
    out, lse = out.cpu(), lse.cpu()

    (B, H, q_len, D), (H_kv, k_len), dtype = Q.shape, K.shape[1:3], torch.float64
    batch, heads, rows, keys, group = slice(None), slice(None), slice(None), slice(None), H // H_kv
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    row, k = torch.arange(q_len)[:, None], torch.arange(k_len)
    q = row + (k_len - q_len)
    s = Q.double() @ K.double().repeat_interleave(group, 1).mT * D**-0.5
    keep = k <= q
    s.masked_fill_(~keep, -torch.inf)
    want_lse = torch.logsumexp(s, -1, keepdim=True)
    p = torch.where(s == -torch.inf, 0.0, torch.exp(s - want_lse))
    drop = float(p__)
    p = torch.where(survivors(1, drop, b, h, row, k), p / (1.0 - drop), 0.0)
    want = p @ V.double().repeat_interleave(group, 1)
    error = ((out - want).norm() / want.norm()).item()
    lse_error = torch.where(lse == want_lse[..., 0], 0.0, lse - want_lse[..., 0]).abs().max().item()
    print(f"output {error:.1e}, lse {lse_error:.1e} from float64")
    return 0 if error < 1e-2 and lse_error < 1e-3 else 1


if __name__ == "__main__":
    raise SystemExit(check())
