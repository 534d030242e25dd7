# attention neighborhood_2d(height: int, width: int, radius: int) {
#     let y = min(max(q // width, radius), height - 1 - radius)
#     let x = min(max(q % width, radius), width - 1 - radius)
#     mask abs(k // width - y) <= radius and abs(k % width - x) <= radius
# }
#
# forward · fa2 · tile 64 × 32 · 2 stages · 4 warps · K and V by TMA · the first tiles' maximum
# sm_90, bf16, head size 128: 128 registers, 64 spills, 48 KB of shared memory
# HBM: Q and Out once, K and V once for each tile of rows that sees them. Rows without keys give 0, lse -inf.
# made by: attncc build neighborhood_2d.attn --target sm_90     checked by: python neighborhood_2d_forward_sm_90.py

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


@triton.jit
def floor_mod(a, b):
    return a % b + tl.where(a % b < 0, b, 0)


@triton.jit
def inverse(n):
    """Of a divisor: (2^32 - 1) // n."""
    return tl.full([], 4294967295, tl.uint32) // n.to(tl.uint32)


@triton.jit
def fast_div(a, n, inverse_n):
    """a // n without a division, for 0 <= a < 2^31: the product with the inverse is right or 1 too small."""
    guess = tl.umulhi(a.to(tl.uint32), inverse_n).to(tl.int32)
    return guess + tl.where(a - guess * n >= n, 1, 0)


@triton.jit
def fast_mod(a, n, inverse_n):
    return a - fast_div(a, n, inverse_n) * n


@triton.jit(
    do_not_specialize=[
        "q_len", "k_len", "b_len", "h_len", "group", "together", "height", "width", "radius"
    ],
)
def neighborhood_2d_forward(
    Q, K, V, Out, Lse,
    stride_qb: "i64", stride_qh: "i64", stride_qm: "i64", stride_qd,
    q_len: "i32", k_len: "i32", b_len: "i32", h_len: "i32", group: "i32", together: "i32",
    height: "i32", width: "i32", radius: "i32",
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
    inverse_width = inverse(width)
    scale = 0.08838834764831845 * LOG2E
    y = tl.minimum(tl.maximum(floor_div(q, width), radius), height - 1 - radius)
    x_ = tl.minimum(tl.maximum(floor_mod(q, width), radius), width - 1 - radius)

    # ---- the key tiles that these rows see
    first_row, last_row = mine * TILE_Q, tl.minimum(mine * TILE_Q + TILE_Q, q_len) - 1
    q_low = first_row + k_len - q_len
    begin = (
        tl.maximum(
            width * tl.minimum(height - radius - 1, tl.maximum(radius, floor_div(q_low, width))) - width * radius, 0
        )
        // TILE_K
    )
    q_high = last_row + k_len - q_len
    end = (
        (
            tl.maximum(
                tl.minimum(
                    k_len,
                    width * radius
                    + width * tl.minimum(height - radius - 1, tl.maximum(radius, floor_div(q_high, width))) + width,
                ),
                0,
            )
            + TILE_K - 1
        )
        // TILE_K
    )

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
            for lane_base in range(begin, end, 32):  # 32 tiles at a time are classed, one to a lane
                step = lane_base + tl.arange(0, 32)
                lane = step
                inner_first, inner_last = lane * TILE_K, tl.minimum(lane * TILE_K + TILE_K, k_len) - 1
                live = (
                    (step < end)
                    & (
                        tl.maximum(
                            tl.minimum(height - radius - 1, tl.maximum(radius, floor_div(q_low, width)))
                            - inner_last // width,
                            tl.maximum(
                                inner_first // width
                                - tl.minimum(height - radius - 1, tl.maximum(radius, floor_div(q_high, width))),
                                0,
                            ),
                        )
                        <= radius
                    )
                    & (
                        tl.maximum(
                            tl.minimum(
                                width - radius - 1,
                                tl.maximum(
                                    radius,
                                    tl.where(
                                        floor_div(q_low, width) == floor_div(q_high, width), floor_mod(q_low, width), 0
                                    ),
                                ),
                            )
                            - tl.where(inner_first // width == inner_last // width, inner_last % width, width - 1),
                            tl.maximum(
                                tl.where(inner_first // width == inner_last // width, inner_first % width, 0)
                                - tl.minimum(
                                    width - radius - 1,
                                    tl.maximum(
                                        radius,
                                        tl.where(
                                            floor_div(q_low, width) == floor_div(q_high, width),
                                            floor_mod(q_high, width),
                                            width - 1,
                                        ),
                                    ),
                                ),
                                0,
                            ),
                        )
                        <= radius
                    )
                )
                whole = (
                    live
                    & (
                        tl.maximum(
                            inner_last // width
                            - tl.minimum(height - radius - 1, tl.maximum(radius, floor_div(q_low, width))),
                            tl.minimum(height - radius - 1, tl.maximum(radius, floor_div(q_high, width)))
                            - inner_first // width,
                        )
                        <= radius
                    )
                    & (
                        tl.maximum(
                            tl.where(inner_first // width == inner_last // width, inner_last % width, width - 1)
                            - tl.minimum(
                                width - radius - 1,
                                tl.maximum(
                                    radius,
                                    tl.where(
                                        floor_div(q_low, width) == floor_div(q_high, width), floor_mod(q_low, width), 0
                                    ),
                                ),
                            ),
                            tl.minimum(
                                width - radius - 1,
                                tl.maximum(
                                    radius,
                                    tl.where(
                                        floor_div(q_low, width) == floor_div(q_high, width),
                                        floor_mod(q_high, width),
                                        width - 1,
                                    ),
                                ),
                            )
                            - tl.where(inner_first // width == inner_last // width, inner_first % width, 0),
                        )
                        <= radius
                    )
                    & (inner_first + TILE_K <= k_len)
                )
                for masked in tl.static_range(2):  # whole tiles first, then those that need the mask
                    if masked:
                        chosen = live & ~whole
                    else:
                        chosen = whole
                    rank = tl.cumsum(chosen.to(tl.int32))
                    for turn in range(tl.max(rank)):
                        tile = tl.sum(tl.where(chosen & (rank == turn + 1), lane, 0))
                        k = tile * TILE_K + tl.arange(0, TILE_K)[None, :]
                        key = K.load([b, h_kv, tile * TILE_K, 0]).reshape(TILE_K, 128).T
                        s = tl.dot(query, key)
                        if masked:
                            keep = (
                                (tl.abs(fast_div(k, width, inverse_width) - y) <= radius)
                                & (tl.abs(fast_mod(k, width, inverse_width) - x_) <= radius) & (k < k_len)
                            )
                            s = tl.where(keep, s, float("-inf"))

                        if again:
                            m_new = tl.maximum(m, tl.max(s, 1, keep_dims=True) * scale)
                            rescale = tl.exp2(m - m_new)
                            m, l = m_new, l * rescale
                            out *= rescale

                        else:
                            m = tl.where(m == LOWEST, tl.maximum(tl.max(s, 1, keep_dims=True) * scale, LOWEST), m)
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


def forward(q, k, v, *, height, width, radius):
    """q [B, H, Q, 128], k [B, H_kv, K, 128], v [B, H_kv, K, 128] in bf16 → out [B, H, Q, 128] in bf16,
    lse [B, H, Q] in float32 (natural log)."""
    (b_len, h_len, q_len, _), (_, h_kv_len, k_len, _) = q.shape, k.shape
    out = q.new_empty((b_len, h_len, q_len, 128))
    lse = q.new_empty((b_len, h_len, q_len), dtype=torch.float32)
    if not b_len * h_len * q_len:
        return out, lse
    group, q_tiles = h_len // h_kv_len, -(-q_len // 64)
    together = 8 * group  # heads whose tiles run side by side
    # TMA takes keys and values at 16-byte-aligned addresses and strides;
    # neighborhood_2d_forward_sm_90_any_stride.py takes the rest.
    neighborhood_2d_forward[(b_len * h_len * q_tiles,)](
        q, TensorDescriptor(k, k.shape, k.stride(), [1, 1, 32, 128]),
        TensorDescriptor(v, v.shape, v.stride(), [1, 1, 32, 128]), out, lse,
        *q.stride(),
        q_len, k_len, b_len, h_len, group, together,
        height, width, radius,
        TILE_Q=64, TILE_K=32, num_warps=4, num_stages=2, maxnreg=128,
    )
    return out, lse


def check():
    """The kernel on random tensors against the whole score matrix at once, in float64. Returns the exit status."""

    def tensor(x):
        return (
            x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None)
        )

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
    height = 7
    width = 7
    radius = 7
    out, lse = forward(Q.to(device), K.to(device), V.to(device), height=height, width=width, radius=radius)
    out, lse = out.cpu(), lse.cpu()

    (B, H, q_len, D), (H_kv, k_len), dtype = Q.shape, K.shape[1:3], torch.float64
    batch, heads, rows, keys, group = slice(None), slice(None), slice(None), slice(None), H // H_kv
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    row, k = torch.arange(q_len)[:, None], torch.arange(k_len)
    q = row + (k_len - q_len)
    y = minimum(maximum(q // width, radius), height - 1 - radius)
    x_ = minimum(maximum(q % width, radius), width - 1 - radius)
    s = Q.double() @ K.double().repeat_interleave(group, 1).mT * D**-0.5
    keep = (abs(k // width - y) <= radius) & (abs(k % width - x_) <= radius)
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
