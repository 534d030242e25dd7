# attention causal {
#     mask k <= q
# }
#
# tangent · fa2 · tile 128 × 64 · 2 stages · 8 warps
# sm_90, bf16, head size 128: 243 registers, no spills, 192 KB of shared memory
# x_t is the tangent of x. Weights are worked out again from lse. A row that sees nothing: zero tangents.
# made by: attncc build causal.attn --pass tangent --target sm_90     checked by: python causal_tangent_sm_90.py

import os

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load(pointers, inside, guarded: tl.constexpr):
    """A tile of a tensor, 0 outside it; where all of it lies inside, nothing is compared."""
    if guarded:
        return tl.load(pointers, mask=inside, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_lse(pointers, inside):
    """The lse in units of log 2; +inf, which makes every weight 0, outside and for rows that see nothing."""
    lse = tl.load(pointers, mask=inside, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E


@triton.jit(
    do_not_specialize=[
        "q_len", "k_len", "b_len", "h_len", "group", "together"
    ],
)
def causal_tangent(
    Q, K, V, Q_t, K_t, V_t, Out, Lse, Out_t, Lse_t,
    stride_qb: "i64", stride_qh: "i64", stride_qm: "i64", stride_qd, stride_qb_t: "i64", stride_qh_t: "i64",
    stride_qm_t: "i64", stride_qd_t,
    stride_kb: "i64", stride_kh: "i64", stride_kn: "i64", stride_kd, stride_kb_t: "i64", stride_kh_t: "i64",
    stride_kn_t: "i64", stride_kd_t,
    stride_vb: "i64", stride_vh: "i64", stride_vn: "i64", stride_vd, stride_vb_t: "i64", stride_vh_t: "i64",
    stride_vn_t: "i64", stride_vd_t,
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
    K += b * stride_kb + h_kv * stride_kh
    V += b * stride_vb + h_kv * stride_vh
    query = load(Q + row * stride_qm + d[None, :] * stride_qd, row < q_len, True)
    query_t = load(
        Q_t + b * stride_qb_t + h * stride_qh_t + row * stride_qm_t + d[None, :] * stride_qd_t, row < q_len, True
    )
    K_t += b * stride_kb_t + h_kv * stride_kh_t
    V_t += b * stride_vb_t + h_kv * stride_vh_t
    at = head.to(tl.int64) * q_len + row
    lse = load_lse(Lse + at, row < q_len)
    scale = 0.08838834764831845
    exponent = scale * LOG2E

    # ---- the key tiles that these rows see
    first_row, last_row = mine * TILE_Q, tl.minimum(mine * TILE_Q + TILE_Q, q_len) - 1
    q_high = last_row + k_len - q_len
    end = (tl.maximum(q_high + 1, 0) + TILE_K - 1) // TILE_K
    q_low = first_row + k_len - q_len
    full_end = tl.maximum(q_low + 1, 0) // TILE_K

    # ---- the weights again from lse, and the sums of what they and the values move by
    mean = tl.zeros([TILE_Q, 1], tl.float32)
    out_t = tl.zeros([TILE_Q, 128], tl.float32)
    for masked in tl.static_range(2):  # whole tiles first, then those that need the mask
        for tile in range(full_end if masked else 0, end if masked else full_end):
            k = tile * TILE_K + tl.arange(0, TILE_K)[None, :]
            k_column = tile * TILE_K + tl.arange(0, TILE_K)[:, None]
            key = load(K + k * stride_kn + d[:, None] * stride_kd, k < k_len, masked)
            key_t = load(K_t + k * stride_kn_t + d[:, None] * stride_kd_t, k < k_len, masked)
            s = tl.dot(query, key)
            s_t = tl.dot(query_t, key)
            s_t = tl.dot(query, key_t, s_t)
            s_t = s_t * scale
            if masked:
                keep = (k <= q) & (k < k_len)
                s, s_t = tl.where(keep, s, float("-inf")), tl.where(keep, s_t, 0.0)
            p = tl.exp2(s * exponent - lse)
            p_t = p * s_t
            mean += tl.sum(p_t, 1, keep_dims=True)
            value = load(V + k_column * stride_vn + d[None, :] * stride_vd, k_column < k_len, masked)
            value_t = load(V_t + k_column * stride_vn_t + d[None, :] * stride_vd_t, k_column < k_len, masked)
            out_t = tl.dot(p_t.to(value.dtype), value, out_t)
            out_t = tl.dot(p.to(value.dtype), value_t, out_t)

    # ---- the mean of what the scores move by, which is that of the lse, once for a row
    out = load(Out + at * 128 + d[None, :], row < q_len, True)
    tl.store(Out_t + at * 128 + d[None, :], (out_t - mean * out).to(Out_t.dtype.element_ty), row < q_len)
    tl.store(Lse_t + at, mean, row < q_len)


# The same for tensors whose strides or addresses are not multiples of 16.
causal_tangent_any_stride = triton.jit(
    causal_tangent.fn,
    do_not_specialize=[
        "stride_qb", "stride_qh", "stride_qm", "stride_qd", "stride_kb", "stride_kh", "stride_kn", "stride_kd",
        "stride_vb", "stride_vh", "stride_vn", "stride_vd", "stride_qb_t", "stride_qh_t", "stride_qm_t",
        "stride_qd_t", "stride_kb_t", "stride_kh_t", "stride_kn_t", "stride_kd_t", "stride_vb_t", "stride_vh_t",
        "stride_vn_t", "stride_vd_t", "q_len", "k_len", "b_len", "h_len", "group", "together"
    ],
    do_not_specialize_on_alignment=[
        "Q", "K", "V", "Q_t", "K_t", "V_t"
    ],
)


def tangent(q, k, v, out, lse, q_t=None, k_t=None, v_t=None):
    """q [B, H, Q, 128], k [B, H_kv, K, 128], v [B, H_kv, K, 128] and their out [B, H, Q, 128] in bf16,
    lse [B, H, Q] in float32; NAME_t is the tangent of NAME, zero where it is left out; any strides.

    Returns out_t and lse_t, the tangents of out and lse."""
    (b_len, h_len, q_len, _), (_, h_kv_len, k_len, _) = q.shape, k.shape
    q_t = torch.zeros_like(q) if q_t is None else q_t
    k_t = torch.zeros_like(k) if k_t is None else k_t
    v_t = torch.zeros_like(v) if v_t is None else v_t
    out, lse = out.contiguous(), lse.contiguous()
    out_t, lse_t = torch.empty_like(out), torch.empty_like(lse)
    if not out.numel():
        return out_t, lse_t
    group, q_tiles = h_len // h_kv_len, -(-q_len // 128)
    together = 8 * group  # heads whose tiles run side by side
    aligned = all(
        x.stride(3) == 1 and (x.stride(0) | x.stride(1) | x.stride(2)) % 16 == 0 and x.data_ptr() % 16 == 0
        for x in (q, k, v, q_t, k_t, v_t)
    )
    kernel = causal_tangent if aligned else causal_tangent_any_stride
    kernel[(b_len * h_len * q_tiles,)](
        q, k, v, q_t, k_t, v_t, out, lse, out_t, lse_t,
        *q.stride(), *q_t.stride(),
        *k.stride(), *k_t.stride(),
        *v.stride(), *v_t.stride(),
        q_len, k_len, b_len, h_len, group, together,
        TILE_Q=128, TILE_K=64, num_warps=8, num_stages=2,
    )
    return out_t, lse_t


def check():
    """The kernel on random tensors and directions against central differences in float64. Returns the exit status."""

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if (
        not interpreted
        and (not torch.cuda.is_available() or torch.version.hip or torch.cuda.get_device_capability() != (9, 0))
    ):
        print("this kernel is for sm_90, and there is none here; with TRITON_INTERPRET=1 it runs on the CPU")
        return 3
    torch.manual_seed(0)
    device = "cpu" if interpreted else "cuda"
    kind = torch.float16 if interpreted else torch.bfloat16  # the interpreter multiplies the bits of bfloat16
    sizes = (300, 4, 128), (331, 2, 128), (331, 2, 128)
    Q, K, V = (torch.randn(2, *size).to(kind).transpose(1, 2) for size in sizes)

    def dense(Q, K, V):
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
        want = p @ V.double().repeat_interleave(group, 1)
        return want, want_lse[..., 0]

    inputs = [Q, K, V]
    moves = [torch.randn_like(x) if isinstance(x, torch.Tensor) else 0.5 for x in inputs]
    out, lse = dense(*inputs)
    given = (x.to(device) for x in (Q, K, V, out.to(kind), lse.float(), *moves[:3]))
    out_t, lse_t = tangent(*given)
    out_t, lse_t = out_t.cpu(), lse_t.cpu()
    (out, lse), (out_back, lse_back) = (
        dense(*(x + step * torch.as_tensor(direction).double() for x, direction in zip(inputs, moves)))
        for step in (1e-5, -1e-5)
    )
    want = (out - out_back) / 2e-5
    error = ((out_t - want).norm() / want.norm()).item()
    want_lse = torch.where(lse == -torch.inf, 0.0, (lse - lse_back) / 2e-5)
    lse_error = ((lse_t - want_lse).norm() / (want_lse.norm() + 0.1)).item()
    print(f"tangent of the output {error:.1e}, of the lse {lse_error:.1e} from float64")
    return 0 if error < 2e-2 and lse_error < 2e-2 else 1


if __name__ == "__main__":
    raise SystemExit(check())
