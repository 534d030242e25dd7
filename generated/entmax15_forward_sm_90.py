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
    m = tl.full([TILE_Q, 1], LOWEST, tl.float32)
    tau = tl.full([TILE_Q, 1], LOWEST, tl.float32)
    total = tl.zeros([TILE_Q, 1], tl.float32)  # of weights, and of their slopes
    steepness = tl.zeros([TILE_Q, 1], tl.float32)
    for masked in tl.static_range(2):  # whole tiles first, then those that need the mask
        for tile in range(full_end if masked else 0, end if masked else full_end):
            k = tile * TILE_K + tl.arange(0, TILE_K)[None, :]
            key = K.load([b, h_kv, tile * TILE_K, 0]).reshape(TILE_K, 128).T
            s = tl.dot(query, key)
            if masked:
                keep = (k <= q)
                s = tl.where(keep, s, float("-inf"))

            # Where tau rises, what came before falls like the tail of an exponential.
            score = s * scale
            m = tl.maximum(m, tl.max(score, 1, keep_dims=True))
            least = tl.maximum(tau, m - 1)
            fall = tl.exp(2.0 * steepness / tl.maximum(total, 1e-30) * (tau - least))
            above = tl.maximum(score - least, 0.0)
            total = total * fall + tl.sum(above * above, 1, keep_dims=True)
            steepness = steepness * fall + tl.sum(above, 1, keep_dims=True)
            excess = tl.maximum(total, 1.0)
            tau = tl.minimum(
                least + tl.log(excess) * total / tl.maximum(2.0 * steepness, 1e-30), tl.maximum(m - 0.0625, least)
            )
            total, steepness = total / excess, steepness / excess

    left = 32
    while left > 0:
        total = tl.zeros([TILE_Q, 1], tl.float32)
        steepness = tl.zeros([TILE_Q, 1], tl.float32)
        count = tl.zeros([TILE_Q, 1], tl.float32)
        for masked in tl.static_range(2):  # whole tiles first, then those that need the mask
            for tile in range(full_end if masked else 0, end if masked else full_end):
                k = tile * TILE_K + tl.arange(0, TILE_K)[None, :]
                key = K.load([b, h_kv, tile * TILE_K, 0]).reshape(TILE_K, 128).T
                s = tl.dot(query, key)
                if masked:
                    keep = (k <= q)
                    s = tl.where(keep, s, float("-inf"))

                above = tl.maximum(s * scale - tau, 0.0)
                total += tl.sum(above * above, 1, keep_dims=True)
                steepness += tl.sum(above, 1, keep_dims=True)
                count += tl.sum(tl.where(above > 0, 1.0, 0.0), 1, keep_dims=True)

        step = (total - tl.sqrt(total)) / tl.maximum(steepness, 1e-30)
        # on its support tau solves an equation of second degree
        root = steepness * steepness - count * (total - 1)  # squared
        step = tl.where((root > 0) & (left > 28), (total - 1) / (steepness + tl.sqrt(tl.maximum(root, 0.0))), step)
        step = tl.where(steepness > 0, step, tl.minimum(m - 1 - tau, 0.0))  # nothing is above it
        tau = tl.where(m == LOWEST, float("inf"), tau + step)

        far = tl.max(tl.where(row < q_len, tl.abs(step), 0.0)) > 5e-2
        left = tl.where(far, left - 1, 0)

    # ---- the output, again where the weights of a row do not add up to 1
    out = tl.zeros([TILE_Q, 128], tl.float32)
    left = 32
    while left > 0:
        total = tl.zeros([TILE_Q, 1], tl.float32)
        steepness = tl.zeros([TILE_Q, 1], tl.float32)
        out = tl.zeros([TILE_Q, 128], tl.float32)
        for masked in tl.static_range(2):  # whole tiles first, then those that need the mask
            for tile in range(full_end if masked else 0, end if masked else full_end):
                k = tile * TILE_K + tl.arange(0, TILE_K)[None, :]
                key = K.load([b, h_kv, tile * TILE_K, 0]).reshape(TILE_K, 128).T
                s = tl.dot(query, key)
                if masked:
                    keep = (k <= q)
                    s = tl.where(keep, s, float("-inf"))

                above = tl.maximum(s * scale - tau, 0.0, propagate_nan=tl.PropagateNan.ALL)
                p = above * above
                total += tl.sum(p, 1, keep_dims=True)
                steepness += tl.sum(above, 1, keep_dims=True)
                value = V.load([b, h_kv, tile * TILE_K, 0]).reshape(TILE_K, 128)

                out = tl.dot(p.to(value.dtype), value, out)

        step = (total - tl.sqrt(total)) / tl.maximum(steepness, 1e-30)
        step = tl.where(steepness > 0, step, tl.minimum(m - 1 - tau, 0.0))  # nothing is above it
        tau = tl.where(m == LOWEST, float("inf"), tau + step)

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
