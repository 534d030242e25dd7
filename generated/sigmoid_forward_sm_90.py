# attention sigmoid(shift: f32[h] grad) {
#     mask    k <= q
#     softmax sigmoid(shift[h])
# }
#
# forward · fa2 · tile 128 × 64 · 2 stages · 8 warps · K and V by TMA · weights of the scores alone
# sm_90, bf16, head size 128: 128 registers, no spills, 96 KB of shared memory
# HBM: Q and Out once, K and V once for each tile of rows that sees them. Rows without keys give 0.
# made by: attncc build sigmoid.attn --target sm_90     checked by: python sigmoid_forward_sm_90.py

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
        "shift_", "stride_shift_"
    ],
)
def sigmoid_forward(
    Q, K, V, Out, shift_,
    stride_qb: "i64", stride_qh: "i64", stride_qm: "i64", stride_qd,
    stride_shift_: "i64",
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
    shift__h = tl.load(shift_ + h * stride_shift_)
    scale = 0.08838834764831845

    # ---- the key tiles that these rows see
    first_row, last_row = mine * TILE_Q, tl.minimum(mine * TILE_Q + TILE_Q, q_len) - 1
    q_high = last_row + k_len - q_len
    end = (tl.maximum(q_high + 1, 0) + TILE_K - 1) // TILE_K
    q_low = first_row + k_len - q_len
    full_end = tl.maximum(q_low + 1, 0) // TILE_K

    # ---- Q, behind what the ranges wait for
    query = load(Q + row * stride_qm + d[None, :] * stride_qd, row < q_len, True)

    # ---- weights of the scores alone: all that is added up is the output
    out = tl.zeros([TILE_Q, 128], tl.float32)
    for masked in tl.static_range(2):  # whole tiles first, then those that need the mask
        for tile in range(full_end if masked else 0, end if masked else full_end):
            k = tile * TILE_K + tl.arange(0, TILE_K)[None, :]
            key = K.load([b, h_kv, tile * TILE_K, 0]).reshape(TILE_K, 128).T
            s = tl.dot(query, key)
            if masked:
                keep = (k <= q)
                s = tl.where(keep, s, float("-inf"))

            s = s * scale
            p = tl.sigmoid(s + shift__h)
            value = V.load([b, h_kv, tile * TILE_K, 0]).reshape(TILE_K, 128)

            out = tl.dot(p.to(value.dtype), value, out)

    at = head.to(tl.int64) * q_len + row
    tl.store(Out + at * 128 + d[None, :], out.to(Out.dtype.element_ty), row < q_len)


def forward(q, k, v, *, shift_):
    """q [B, H, Q, 128], k [B, H_kv, K, 128], v [B, H_kv, K, 128] in bf16 → out [B, H, Q, 128] in bf16,
    and an empty lse: there is none."""
    (b_len, h_len, q_len, _), (_, h_kv_len, k_len, _) = q.shape, k.shape
    out = q.new_empty((b_len, h_len, q_len, 128))
    lse = q.new_empty(0, dtype=torch.float32)
    if not b_len * h_len * q_len:
        return out, lse
    group, q_tiles = h_len // h_kv_len, -(-q_len // 128)
    together = 8 * group  # heads whose tiles run side by side
    # TMA takes keys and values at 16-byte-aligned addresses and strides;
    # sigmoid_forward_sm_90_any_stride.py takes the rest.
    sigmoid_forward[(b_len * h_len * q_tiles,)](
        q, TensorDescriptor(k, k.shape, k.stride(), [1, 1, 64, 128]),
        TensorDescriptor(v, v.shape, v.stride(), [1, 1, 64, 128]), out, shift_,
        *q.stride(),
        *shift_.stride(),
        q_len, k_len, b_len, h_len, group, together,
        TILE_Q=128, TILE_K=64, num_warps=8, num_stages=2, maxnreg=128,
    )
    return out, lse


def check():
    """The kernel on random tensors against the whole score matrix at once, in float64. Returns the exit status."""

    def tensor(x):
        return (
            x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None)
        )

    def sigmoid(x):
        return torch.sigmoid(tensor(x))

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
    shift_ = torch.rand((4,)).to(torch.float32)
    out, lse = forward(Q.to(device), K.to(device), V.to(device), shift_=shift_.to(device))
    out, lse = out.cpu(), lse.cpu()

    (B, H, q_len, D), (H_kv, k_len), dtype = Q.shape, K.shape[1:3], torch.float64
    batch, heads, rows, keys, group = slice(None), slice(None), slice(None), slice(None), H // H_kv
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    row, k = torch.arange(q_len)[:, None], torch.arange(k_len)
    q = row + (k_len - q_len)
    shift__h = shift_[heads, None, None].to(dtype)
    s = Q.double() @ K.double().repeat_interleave(group, 1).mT * D**-0.5
    keep = k <= q
    s.masked_fill_(~keep, -torch.inf)
    p = sigmoid(s + shift__h)
    want = p @ V.double().repeat_interleave(group, 1)
    error = ((out - want).norm() / want.norm()).item()
    print(f"output {error:.1e} from float64")
    return 0 if error < 1e-2 else 1


if __name__ == "__main__":
    raise SystemExit(check())
