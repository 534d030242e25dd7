# attention entmax15 {
#     mask    k <= q
#     softmax entmax(1.5)
# }
#
# forward · fa2 · tile 128 × 64 · 2 stages · 8 warps · K and V by TMA · a threshold, found first
# sm_90, bf16, head size 128: 128 registers, 80 spills, 96 KB of shared memory
# HBM: Q and Out once, K and V once for each tile of rows that sees them. Rows without keys give 0.
# made by: attncc build entmax15.attn --target sm_90     checked by: python entmax15_forward_sm_90.py

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
def floor_log2(n):
    """Of an integer above 0 that float32 holds."""
    return (n.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def lowest(word):
    """The place of a word's lowest bit, 64 where it has none."""
    return tl.where(word == 0, 64, floor_log2(word & (0 - word)))


@triton.jit
def sharing_of(positions, TILE: tl.constexpr, UNIT: tl.constexpr):
    """The logarithm of how many neighbouring tiles share a bit of 64, each for whole UNITs of positions."""
    return tl.maximum(floor_log2(tl.cdiv(positions, UNIT)) - 5, 0) + floor_log2(tl.full([], UNIT // TILE, tl.int32))


@triton.jit
def bit_of(place):
    return tl.full([], 1, tl.uint64) << place.to(tl.uint64)


@triton.jit
def next_run(alive, sharing, tile):
    """From this tile on: the first whose bit is set, and the end of the run that it begins."""
    place = (tile >> sharing).to(tl.uint64)
    rest = alive >> place << place
    return tl.maximum(tile, lowest(rest) << sharing), lowest(rest + (rest & (0 - rest))) << sharing


@triton.jit
def either(one, other):
    return one | other


@triton.jit
def of_rows(held, inside):
    """The bits that any row has, but those below the last."""
    return tl.reduce(tl.where(inside, held, tl.zeros_like(held)), None, either)


@triton.jit(
    do_not_specialize=[
        "q_len", "k_len", "b_len", "h_len", "group", "together"
    ],
)
def entmax15_forward(
    Q, K, V, Out, Lse,
    stride_qb: "i64", stride_qh: "i64", stride_qm: "i64", stride_qd,
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
    scale = 0.08838834764831845 * 0.5

    # ---- the key tiles that these rows see
    first_row, last_row = mine * TILE_Q, tl.minimum(mine * TILE_Q + TILE_Q, q_len) - 1
    q_high = last_row + k_len - q_len
    end = (tl.maximum(q_high + 1, 0) + TILE_K - 1) // TILE_K
    q_low = first_row + k_len - q_len
    full_end = tl.maximum(q_low + 1, 0) // TILE_K

    # ---- Q, behind what the ranges wait for
    query = load(Q + row * stride_qm + d[None, :] * stride_qd, row < q_len, True)

    # ---- tau, the threshold of each row, which lies at most 1 below its maximum: what is not above it has the weight 0
    # In the loops a row's numbers have no second axis: with one of a single column they would be worked out twice.
    m = tl.full([TILE_Q], LOWEST, tl.float32)
    tau = tl.full([TILE_Q], LOWEST, tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)  # of weights, and of their slopes
    steepness = tl.zeros([TILE_Q], tl.float32)
    falloff = tl.zeros([TILE_Q], tl.float32)  # the second by the first
    held = tl.zeros([TILE_Q], tl.uint64)  # by row, the tiles that may have a weight
    alive, sharing = tl.full([], 0, tl.uint64) - 1, sharing_of(k_len, TILE_K, TILE_K)
    for masked in tl.static_range(2):  # whole tiles first, then those that need the mask
        here, stop = full_end if masked else 0, end if masked else full_end
        while here < stop:
            first, here = next_run(alive, sharing, here)
            for tile in range(first, tl.minimum(here, stop)):
                k = tile * TILE_K + tl.arange(0, TILE_K)[None, :]
                key = K.load([b, h_kv, tile * TILE_K, 0]).reshape(TILE_K, 128).T
                s = tl.dot(query, key)
                if masked:
                    keep = (k <= q)
                    s = tl.where(keep, s, float("-inf"))

                # Where tau rises, what came before falls like the tail of an exponential; at most to a quarter at a
                # time, whose
                # logarithm is (x - 1) (x + 5) / (4 x + 2) within a twelfth.
                top = tl.max(s, 1) * scale
                m = tl.maximum(m, top)
                least = tl.maximum(tau, m - 1)
                fall = tl.exp2((tau - least) * falloff * (2.0 * LOG2E))
                above = tl.maximum(s * scale - least[:, None], 0.0, propagate_nan=tl.PropagateNan.ALL)
                weights = tl.sum(above * above, 1)
                total = total * fall + weights
                falloff = (steepness * fall + tl.sum(above, 1)) / tl.maximum(total, 1e-30)
                excess = tl.minimum(tl.maximum(total, 1.0), 4.0)
                rise = (excess - 1) * (excess + 5) / tl.maximum((excess * 4 + 2) * (2.0 * falloff), 1e-30)
                tau = tl.minimum(least + rise, tl.maximum(m - 0.0625, least))
                total = tl.maximum(tl.minimum(total, 1.0), total * 0.25)
                steepness = falloff * total
                held |= tl.where((top <= m - 1) & (weights == weights), 0, bit_of(tile >> sharing))

    m, tau, total, steepness = m[:, None], tau[:, None], total[:, None], steepness[:, None]
    tau = tl.maximum(tau - 0.02, m - 1)  # a guess is more often too high
    held, proved = held[:, None], m - 1  # a threshold that is not too high
    alive = of_rows(held, row < q_len)
    left = 32
    while left > 0:
        total = tl.zeros([TILE_Q], tl.float32)
        steepness = tl.zeros([TILE_Q], tl.float32)
        count = tl.zeros([TILE_Q], tl.float32)
        found = tl.zeros([TILE_Q], tl.uint64)
        for masked in tl.static_range(2):  # whole tiles first, then those that need the mask
            here, stop = full_end if masked else 0, end if masked else full_end
            while here < stop:
                first, here = next_run(alive, sharing, here)
                for tile in range(first, tl.minimum(here, stop)):
                    k = tile * TILE_K + tl.arange(0, TILE_K)[None, :]
                    key = K.load([b, h_kv, tile * TILE_K, 0]).reshape(TILE_K, 128).T
                    s = tl.dot(query, key)
                    if masked:
                        keep = (k <= q)
                        s = tl.where(keep, s, float("-inf"))

                    beyond = s * scale - tau
                    top = tl.max(beyond, 1)
                    above = tl.maximum(beyond, 0.0, propagate_nan=tl.PropagateNan.ALL)
                    weights = tl.sum(above * above, 1)
                    found |= tl.where((top <= -0.0625) & (weights == weights), 0, bit_of(tile >> sharing))
                    total += weights
                    steepness += tl.sum(above, 1)
                    count += tl.sum(tl.minimum(above * 1e30, 1.0), 1)

        total, steepness = total[:, None], steepness[:, None]
        count = count[:, None]
        step = (total - tl.sqrt(total)) / tl.maximum(steepness, 1e-30)
        # the norm is convex: this step ends at or before the threshold, and so does a tile where nothing is close to
        # tau
        proves = (steepness > 0) & (step >= -0.0625)
        held, proved = tl.where(proves, found[:, None], held), tl.where(proves, tau + step, proved)
        alive = of_rows(held, row < q_len)
        # on its support tau solves an equation of second degree
        root = steepness * steepness - count * (total - 1)  # squared
        step = tl.where((root > 0) & (left > 28), (total - 1) / (steepness + tl.sqrt(tl.maximum(root, 0.0))), step)
        finite = total == total  # else the threshold of the row is NaN too
        step = tl.where((steepness == 0) & finite, tl.minimum(m - 1 - tau, 0.0), step)  # nothing is above it
        nothing = (m == LOWEST) & finite  # is seen
        step = tl.where(nothing, 0.0, step)
        tau = tl.where(nothing, float("inf"), tl.maximum(proved, tau + step, propagate_nan=tl.PropagateNan.ALL))

        far = tl.max(tl.where(row < q_len, tl.abs(step), 0.0)) > 5e-2
        left = tl.where(far, left - 1, 0)

    # ---- the output, again where the weights of a row do not add up to 1
    out = tl.zeros([TILE_Q, 128], tl.float32)
    left = 32
    while left > 0:
        total = tl.zeros([TILE_Q], tl.float32)
        steepness = tl.zeros([TILE_Q], tl.float32)
        out = tl.zeros([TILE_Q, 128], tl.float32)
        for masked in tl.static_range(2):  # whole tiles first, then those that need the mask
            here, stop = full_end if masked else 0, end if masked else full_end
            while here < stop:
                first, here = next_run(alive, sharing, here)
                for tile in range(first, tl.minimum(here, stop)):
                    k = tile * TILE_K + tl.arange(0, TILE_K)[None, :]
                    key = K.load([b, h_kv, tile * TILE_K, 0]).reshape(TILE_K, 128).T
                    s = tl.dot(query, key)
                    if masked:
                        keep = (k <= q)
                        s = tl.where(keep, s, float("-inf"))

                    above = tl.maximum(s * scale - tau, 0.0, propagate_nan=tl.PropagateNan.ALL)
                    p = above * above
                    total += tl.sum(p, 1)
                    steepness += tl.sum(above, 1)
                    value = V.load([b, h_kv, tile * TILE_K, 0]).reshape(TILE_K, 128)

                    out = tl.dot(p.to(value.dtype), value, out)

        total, steepness = total[:, None], steepness[:, None]
        step = (total - tl.sqrt(total)) / tl.maximum(steepness, 1e-30)
        finite = total == total  # else the threshold of the row is NaN too
        step = tl.where((steepness == 0) & finite, tl.minimum(m - 1 - tau, 0.0), step)  # nothing is above it
        nothing = (m == LOWEST) & finite  # is seen
        step = tl.where(nothing, 0.0, step)
        tau = tl.where(nothing, float("inf"), tl.maximum(proved, tau + step, propagate_nan=tl.PropagateNan.ALL))

        off = (tl.abs(total - 1) > 1.5e-2) & (tl.abs(step) > 5e-7 * tl.maximum(tl.abs(m), 1.0)) & (row < q_len)
        left = tl.where(tl.max(tl.where(off, 1, 0)) > 0, left - 1, 0)
    # what the weights lack to 1 is made up for, and the threshold has its last step
    out = out / tl.where(total == 0, 1.0, total)
    lse = tau
    at = head.to(tl.int64) * q_len + row
    tl.store(Out + at * 128 + d[None, :], out.to(Out.dtype.element_ty), row < q_len)
    tl.store(Lse + at, lse, row < q_len)


def forward(q, k, v):
    """q [B, H, Q, 128], k [B, H_kv, K, 128], v [B, H_kv, K, 128] in bf16 → out [B, H, Q, 128] in bf16,
    and an empty lse: there is none."""
    (b_len, h_len, q_len, _), (_, h_kv_len, k_len, _) = q.shape, k.shape
    out = q.new_empty((b_len, h_len, q_len, 128))
    lse = q.new_empty((b_len, h_len, q_len), dtype=torch.float32)
    if not b_len * h_len * q_len:
        return out, lse
    group, q_tiles = h_len // h_kv_len, -(-q_len // 128)
    together = 8 * group  # heads whose tiles run side by side
    # TMA takes keys and values at 16-byte-aligned addresses and strides;
    # entmax15_forward_sm_90_any_stride.py takes the rest.
    entmax15_forward[(b_len * h_len * q_tiles,)](
        q, TensorDescriptor(k, k.shape, k.stride(), [1, 1, 64, 128]),
        TensorDescriptor(v, v.shape, v.stride(), [1, 1, 64, 128]), out, lse,
        *q.stride(),
        q_len, k_len, b_len, h_len, group, together,
        TILE_Q=128, TILE_K=64, num_warps=8, num_stages=2, maxnreg=128,
    )
    return out, lse


def check():
    """The kernel on random tensors against the whole score matrix at once, in float64. Returns the exit status."""

    def sparse(s, alpha):
        """Weights of scores [..., K], and their threshold [..., 1], by bisection, for the check of a file."""
        x, power = (alpha - 1) * s, 1 / (alpha - 1)
        top = x.amax(-1, keepdim=True)
        low, high = top - 1, top
        for _ in range(60):
            middle = (low + high) / 2
            enough = (x - middle).clamp(min=0).pow(power).sum(-1, keepdim=True) >= 1
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        low = torch.where(top == -torch.inf, torch.inf, low)
        return (x - low).clamp(min=0).pow(power), low

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
    out, lse = forward(Q.to(device), K.to(device), V.to(device))
    out, lse = out.cpu(), lse.cpu()

    (B, H, q_len, D), (H_kv, k_len), dtype = Q.shape, K.shape[1:3], torch.float64
    batch, heads, rows, keys, group = slice(None), slice(None), slice(None), slice(None), H // H_kv
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    row, k = torch.arange(q_len)[:, None], torch.arange(k_len)
    q = row + (k_len - q_len)
    s = Q.double() @ K.double().repeat_interleave(group, 1).mT * D**-0.5
    keep = k <= q
    s.masked_fill_(~keep, -torch.inf)
    p, want_lse = sparse(s, 1.5)
    want = p @ V.double().repeat_interleave(group, 1)
    error = ((out - want).norm() / want.norm()).item()
    lse_error = torch.where(lse == want_lse[..., 0], 0.0, lse - want_lse[..., 0]).abs().max().item()
    print(f"output {error:.1e}, lse {lse_error:.1e} from float64")
    return 0 if error < 1e-2 and lse_error < 1e-3 else 1


if __name__ == "__main__":
    raise SystemExit(check())
