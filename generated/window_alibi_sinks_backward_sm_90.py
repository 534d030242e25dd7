# attention window_alibi_sinks(window: int = 1024, slopes: f32[h], sinks: f32[h] grad) {
#     let distance = q - k
#     mask    0 <= distance < window
#     score   s - slopes[h] * distance
#     softmax sink(sinks[h])
# }
#
# backward · fa2 · deterministic · dQ: tile 64 × 32 · 3 stages · 4 warps · by TMA
# dK and dV: tile 32 × 64 · 3 stages · 4 warps · by TMA
# sm_90, bf16, head size 128: 255 registers, 8 spills, 81 KB of shared memory
# Weights are worked out again from lse, in each direction.
# A row that sees nothing: zero gradients.
# made by: attncc build window_alibi_sinks.attn --pass backward --target sm_90
# checked by: python window_alibi_sinks_backward_sm_90.py

import os

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load(pointers, inside, guarded: tl.constexpr):
    """A tile of a tensor, 0 outside it; where all of it lies inside, nothing is compared."""
    if guarded:
        return tl.load(pointers, mask=inside, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def stream(tiles, at, pointers, inside, guarded: tl.constexpr):
    """A tile that comes by: by TMA at those coordinates, or through pointers where there is no descriptor."""
    if tiles is not None:
        return tiles.load(at).reshape(pointers.shape)
    else:
        return load(pointers, inside, guarded)


@triton.jit
def padded(rows):
    """The rows of a head in Lse_2 and Delta: whole tiles, so that none need be compared."""
    return tl.cdiv(rows, 128) * 128


@triton.jit(
    do_not_specialize=[
        "q_len", "h_len"
    ],
)
def window_alibi_sinks_backward_delta(
    Out, D_out, D_lse, Lse, Lse_2, Delta,
    stride_ob: "i64", stride_oh: "i64", stride_om: "i64", stride_od,
    stride_gb: "i64", stride_gh: "i64", stride_gm: "i64", stride_gd,
    q_len: "i32", h_len: "i32",
    TILE_Q: tl.constexpr,
):
    # ---- the sum of d_out * out over each row, less the gradient of its lse; and the lse in units of log 2
    tiles = tl.cdiv(q_len, TILE_Q)
    head, mine = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    b, h = head // h_len, head % h_len
    row = mine * TILE_Q + tl.arange(0, TILE_Q)[:, None]
    Out += b * stride_ob + h * stride_oh
    D_out += b * stride_gb + h * stride_gh
    delta = tl.zeros([TILE_Q, 1], tl.float32)
    d = tl.arange(0, 128).to(tl.int64)
    out = load(Out + row * stride_om + d[None, :] * stride_od, row < q_len, True).to(tl.float32)
    d_out = load(D_out + row * stride_gm + d[None, :] * stride_gd, row < q_len, True).to(tl.float32)
    delta += tl.sum(d_out * out, 1, keep_dims=True)
    at = head.to(tl.int64) * q_len + row
    if D_lse is not None:
        delta -= tl.load(D_lse + at, mask=row < q_len, other=0.0)
    lse = tl.load(Lse + at, mask=row < q_len, other=float("-inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse)  # weights are 0 where rows see nothing, and below the last
    at = head.to(tl.int64) * padded(q_len) + row
    tl.store(Lse_2 + at, lse * LOG2E)
    tl.store(Delta + at, delta)


@triton.jit(
    do_not_specialize=[
        "q_len", "k_len", "b_len", "h_len", "group", "together", "window"
    ],
    do_not_specialize_on_alignment=[
        "slopes", "sinks", "stride_slopes", "stride_sinks"
    ],
)
def window_alibi_sinks_backward_dkdv(
    Q, K, V, D_out, Lse_2, Delta, Q_tiles, D_out_tiles, Lse_2_tiles, Delta_tiles, D_k, D_v, slopes, sinks,
    stride_qb: "i64", stride_qh: "i64", stride_qm: "i64", stride_qd,
    stride_kb: "i64", stride_kh: "i64", stride_kn: "i64", stride_kd,
    stride_vb: "i64", stride_vh: "i64", stride_vn: "i64", stride_vd,
    stride_gb: "i64", stride_gh: "i64", stride_gm: "i64", stride_gd,
    stride_slopes: "i64", stride_sinks: "i64",
    q_len: "i32", k_len: "i32", b_len: "i32", h_len: "i32", group: "i32", together: "i32",
    window: "i32",
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
):
    # ---- which keys are mine: heads in groups whose Q and d_out stay in L2, the first keys of all of them first
    tiles = tl.cdiv(k_len, TILE_K)
    kv_heads = b_len * (h_len // group)
    group_start = tl.program_id(0) // (together * tiles) * together
    group_size = tl.minimum(kv_heads - group_start, together)
    inside = tl.program_id(0) - group_start * tiles
    head_kv, mine = group_start + inside % group_size, inside // group_size
    b, h_kv = head_kv // (h_len // group), head_kv % (h_len // group)
    k = mine * TILE_K + tl.arange(0, TILE_K)[:, None]
    d = tl.arange(0, 128).to(tl.int64)
    K += b * stride_kb + h_kv * stride_kh
    V += b * stride_vb + h_kv * stride_vh
    key = load(K + k * stride_kn + d[None, :] * stride_kd, k < k_len, True)
    d_k = tl.zeros([TILE_K, 128], tl.float32)
    value = load(V + k * stride_vn + d[None, :] * stride_vd, k < k_len, True)
    d_v = tl.zeros([TILE_K, 128], tl.float32)
    scale = 0.08838834764831845

    for member in range(group):
        h = h_kv * group + member
        head = (b * h_len + h).to(tl.int64)
        queries = Q + b * stride_qb + h * stride_qh
        d_outs = D_out + b * stride_gb + h * stride_gh
        slopes_h = tl.load(slopes + h * stride_slopes)

        # ---- the tiles of rows that see these keys
        first_key, last_key = mine * TILE_K, tl.minimum(mine * TILE_K + TILE_K, k_len) - 1
        row_low = first_key + q_len - k_len
        begin = tl.maximum(row_low, 0) // TILE_Q
        row_high = last_key + q_len - k_len
        end = (tl.maximum(tl.minimum(q_len, row_high + window), 0) + TILE_Q - 1) // TILE_Q
        full_begin = tl.minimum(end, (tl.maximum(row_high, 0) + TILE_Q - 1) // TILE_Q)
        full_end = tl.maximum(tl.maximum(tl.minimum(q_len, row_low + window), 0) // TILE_Q, full_begin)
        full_0 = tl.maximum(full_end - full_begin, 0)
        masked_0 = tl.maximum(full_begin - begin, 0)
        masked_1 = masked_0 + tl.maximum(end - full_end, 0)
        for masked in tl.static_range(2):  # whole tiles first, then those that need the mask
            for step in range(0, masked_1 if masked else full_0):
                if masked:
                    tile = tl.where(step < masked_0, begin, full_end - masked_0) + step
                else:
                    tile = full_begin + step
                row = tile * TILE_Q + tl.arange(0, TILE_Q)[None, :]
                row_column = tile * TILE_Q + tl.arange(0, TILE_Q)[:, None]
                q = row + (k_len - q_len)
                query = stream(
                    Q_tiles, (b, h, tile * TILE_Q, 0),
                    queries + row_column * stride_qm + d[None, :] * stride_qd, row_column < q_len, masked,
                )
                s = tl.dot(key, tl.trans(query))
                d_out = stream(
                    D_out_tiles, (b, h, tile * TILE_Q, 0),
                    d_outs + row_column * stride_gm + d[None, :] * stride_gd, row_column < q_len, masked,
                )
                dp = tl.dot(value, tl.trans(d_out))
                lse = stream(
                    Lse_2_tiles, (b, h, tile * TILE_Q), Lse_2 + (head * padded(q_len) + row), row < q_len, False
                )
                delta = stream(
                    Delta_tiles, (b, h, tile * TILE_Q), Delta + (head * padded(q_len) + row), row < q_len, False
                )
                s = s * scale
                distance = q - k
                s = s - slopes_h * distance
                if masked:
                    keep = (0 <= distance) & (distance < window) & (row < q_len)
                    s = tl.where(keep, s, float("-inf"))
                p = tl.exp2(s * LOG2E - lse)
                ds = p * (dp - delta)
                d_v = tl.dot(p.to(d_out.dtype), d_out, d_v)
                d_k = tl.dot(ds.to(query.dtype), query, d_k)

    at = head_kv.to(tl.int64) * k_len + k
    tl.store(D_k + at * 128 + d[None, :], (d_k * scale).to(D_k.dtype.element_ty), k < k_len)
    tl.store(D_v + at * 128 + d[None, :], d_v.to(D_v.dtype.element_ty), k < k_len)


@triton.jit(
    do_not_specialize=[
        "q_len", "k_len", "b_len", "h_len", "group", "together", "window"
    ],
    do_not_specialize_on_alignment=[
        "slopes", "sinks", "stride_slopes", "stride_sinks"
    ],
)
def window_alibi_sinks_backward_dq(
    Q, K, V, D_out, Lse_2, Delta, K_tiles, V_tiles, D_q, D_sinks, slopes, sinks,
    stride_qb: "i64", stride_qh: "i64", stride_qm: "i64", stride_qd,
    stride_kb: "i64", stride_kh: "i64", stride_kn: "i64", stride_kd,
    stride_vb: "i64", stride_vh: "i64", stride_vn: "i64", stride_vd,
    stride_gb: "i64", stride_gh: "i64", stride_gm: "i64", stride_gd,
    stride_slopes: "i64", stride_sinks: "i64",
    q_len: "i32", k_len: "i32", b_len: "i32", h_len: "i32", group: "i32", together: "i32",
    window: "i32",
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
    d_out = load(D_out + b * stride_gb + h * stride_gh + row * stride_gm + d[None, :] * stride_gd, row < q_len, True)
    at = head.to(tl.int64) * q_len + row
    lse = tl.load(Lse_2 + (head.to(tl.int64) * padded(q_len) + row))
    delta = tl.load(Delta + (head.to(tl.int64) * padded(q_len) + row))
    slopes_h = tl.load(slopes + h * stride_slopes)
    sinks_h = tl.load(sinks + h * stride_sinks)
    scale = 0.08838834764831845

    # ---- the key tiles that these rows see
    first_row, last_row = mine * TILE_Q, tl.minimum(mine * TILE_Q + TILE_Q, q_len) - 1
    q_low = first_row + k_len - q_len
    begin = tl.maximum(q_low - window + 1, 0) // TILE_K
    q_high = last_row + k_len - q_len
    end = (tl.maximum(q_high + 1, 0) + TILE_K - 1) // TILE_K
    full_begin = tl.minimum(end, (tl.maximum(q_high - window + 1, 0) + TILE_K - 1) // TILE_K)
    full_end = tl.maximum(tl.maximum(q_low + 1, 0) // TILE_K, full_begin)
    full_0 = tl.maximum(full_end - full_begin, 0)
    masked_0 = tl.maximum(full_begin - begin, 0)
    masked_1 = masked_0 + tl.maximum(end - full_end, 0)

    # ---- ds again from lse, and its sums
    d_q = tl.zeros([TILE_Q, 128], tl.float32)
    d_sinks = tl.zeros([TILE_Q, 1], tl.float32)
    share = -tl.exp2(sinks_h * LOG2E - lse) * delta
    d_sinks += share
    for masked in tl.static_range(2):  # whole tiles first, then those that need the mask
        for step in range(0, masked_1 if masked else full_0):
            if masked:
                tile = tl.where(step < masked_0, begin, full_end - masked_0) + step
            else:
                tile = full_begin + step
            k = tile * TILE_K + tl.arange(0, TILE_K)[None, :]
            k_column = tile * TILE_K + tl.arange(0, TILE_K)[:, None]
            key = stream(
                K_tiles, (b, h_kv, tile * TILE_K, 0),
                K + k_column * stride_kn + d[None, :] * stride_kd, k_column < k_len, masked,
            )
            s = tl.dot(query, tl.trans(key))
            value = stream(
                V_tiles, (b, h_kv, tile * TILE_K, 0),
                V + k_column * stride_vn + d[None, :] * stride_vd, k_column < k_len, masked,
            )
            dp = tl.dot(d_out, tl.trans(value))
            s = s * scale
            distance = q - k
            s = s - slopes_h * distance
            if masked:
                keep = (0 <= distance) & (distance < window) & (k < k_len)
                s = tl.where(keep, s, float("-inf"))
            p = tl.exp2(s * LOG2E - lse)
            ds = p * (dp - delta)
            d_q = tl.dot(ds.to(key.dtype), key, d_q)

    tl.store(D_q + at * 128 + d[None, :], tl.where(d_q == 0, 0.0, d_q * scale).to(D_q.dtype.element_ty), row < q_len)
    tl.store(D_sinks + (head * tl.cdiv(q_len, TILE_Q) + mine), tl.sum(tl.where(row < q_len, d_sinks, 0.0)))


# The same for tensors whose strides or addresses are not multiples of 16.
window_alibi_sinks_backward_delta_any_stride = triton.jit(
    window_alibi_sinks_backward_delta.fn,
    do_not_specialize=[
        "stride_ob", "stride_oh", "stride_om", "stride_od", "stride_gb", "stride_gh", "stride_gm", "stride_gd",
        "q_len", "h_len"
    ],
    do_not_specialize_on_alignment=[
        "Out", "D_out"
    ],
)
window_alibi_sinks_backward_dkdv_any_stride = triton.jit(
    window_alibi_sinks_backward_dkdv.fn,
    do_not_specialize=[
        "stride_qb", "stride_qh", "stride_qm", "stride_qd", "stride_kb", "stride_kh", "stride_kn", "stride_kd",
        "stride_vb", "stride_vh", "stride_vn", "stride_vd", "stride_gb", "stride_gh", "stride_gm", "stride_gd",
        "q_len", "k_len", "b_len", "h_len", "group", "together", "window"
    ],
    do_not_specialize_on_alignment=[
        "Q", "K", "V", "D_out", "slopes", "sinks", "stride_slopes", "stride_sinks"
    ],
)
window_alibi_sinks_backward_dq_any_stride = triton.jit(
    window_alibi_sinks_backward_dq.fn,
    do_not_specialize=[
        "stride_qb", "stride_qh", "stride_qm", "stride_qd", "stride_kb", "stride_kh", "stride_kn", "stride_kd",
        "stride_vb", "stride_vh", "stride_vn", "stride_vd", "stride_gb", "stride_gh", "stride_gm", "stride_gd",
        "q_len", "k_len", "b_len", "h_len", "group", "together", "window"
    ],
    do_not_specialize_on_alignment=[
        "Q", "K", "V", "D_out", "slopes", "sinks", "stride_slopes", "stride_sinks"
    ],
)


def descriptor(x, *tile):
    """A TMA descriptor of x [B, H, S, ...], which brings so many rows, and columns of them."""
    return TensorDescriptor(x, x.shape, x.stride(), [1, 1, *tile])


def backward(q, k, v, out, lse, d_out, d_lse=None, *, window=1024, slopes, sinks):
    """q [B, H, Q, 128], k [B, H_kv, K, 128], v [B, H_kv, K, 128], out and d_out [B, H, Q, 128] in bf16,
    lse and d_lse [B, H, Q] in float32; any strides, d_lse may be None.

    Returns d_q, d_k, d_v, and the gradients of parameters by name. Equal calls give equal bits."""
    (b_len, h_len, q_len, _), (_, h_kv_len, k_len, _) = q.shape, k.shape
    if b_len * h_len * q_len == 0:
        gradients = {"sinks": torch.zeros_like(sinks)}
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), gradients
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    d_out, lse = d_out.to(q.dtype), lse.contiguous()
    d_lse = None if d_lse is None else d_lse.to(torch.float32).contiguous()
    group, row_tiles = h_len // h_kv_len, triton.cdiv(q_len, 64)
    statistics = (2, b_len, h_len, triton.cdiv(q_len, 128) * 128)
    lse_2, delta = torch.empty(statistics, dtype=torch.float32, device=q.device)
    d_sinks = torch.empty((b_len, h_len, row_tiles), dtype=torch.float32, device=q.device)
    aligned = all(
        x.stride(3) == 1 and (x.stride(0) | x.stride(1) | x.stride(2)) % 16 == 0 and x.data_ptr() % 16 == 0
        for x in (q, k, v, out, d_out)
    )
    by_tma = aligned and k_len > 0 and min(s for x in (q, k, v, d_out) for s in x.stride()) > 0

    kernel = window_alibi_sinks_backward_delta if aligned else window_alibi_sinks_backward_delta_any_stride
    kernel[(b_len * h_len * triton.cdiv(q_len, 128),)](
        out, d_out, d_lse, lse, lse_2, delta,
        *out.stride(),
        *d_out.stride(),
        q_len, h_len,
        TILE_Q=128, num_warps=8, num_stages=1,
    )
    together = 8 * group  # heads whose tiles run side by side
    kernel = window_alibi_sinks_backward_dq if aligned else window_alibi_sinks_backward_dq_any_stride
    kernel[(b_len * h_len * row_tiles,)](
        q, k, v, d_out, lse_2, delta, descriptor(k, 32, 128) if by_tma else None,
        descriptor(v, 32, 128) if by_tma else None, d_q, d_sinks, slopes, sinks,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *d_out.stride(),
        *slopes.stride(), *sinks.stride(),
        q_len, k_len, b_len, h_len, group, together,
        window,
        TILE_Q=64, TILE_K=32, num_warps=4, num_stages=3,
    )
    if k_len:
        together = 8
        kernel = window_alibi_sinks_backward_dkdv if aligned else window_alibi_sinks_backward_dkdv_any_stride
        kernel[(b_len * h_kv_len * triton.cdiv(k_len, 64),)](
            q, k, v, d_out, lse_2, delta, descriptor(q, 32, 128) if by_tma else None,
            descriptor(d_out, 32, 128) if by_tma else None, descriptor(lse_2, 32) if by_tma else None,
            descriptor(delta, 32) if by_tma else None, d_k, d_v, slopes, sinks,
            *q.stride(),
            *k.stride(),
            *v.stride(),
            *d_out.stride(),
            *slopes.stride(), *sinks.stride(),
            q_len, k_len, b_len, h_len, group, together,
            window,
            TILE_Q=32, TILE_K=64, num_warps=4, num_stages=3,
        )

    # ---- the second pass over what parameters get
    gradients = {
        "sinks": d_sinks.sum(2).sum(0).to(sinks.dtype),
    }
    return d_q, d_k, d_v, gradients


def check():
    """Each gradient along a random direction against a difference in float64. Returns the exit status."""

    def real(x, dtype):
        return x.to(dtype) if isinstance(x, torch.Tensor) else torch.tensor(float(x), dtype=torch.float64)

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    elsewhere = not torch.cuda.is_available() or torch.version.hip or torch.cuda.get_device_capability() != (9, 0)
    if elsewhere and not interpreted:
        print("this kernel is for sm_90, and there is none here; with TRITON_INTERPRET=1 it runs on the CPU")
        return 3
    torch.manual_seed(0)
    device = "cpu" if interpreted else "cuda"
    kind = torch.float16 if interpreted else torch.bfloat16  # the interpreter multiplies the bits of bfloat16
    sizes = (4, 300, 128), (2, 331, 128), (2, 331, 128)
    Q, K, V = (torch.randn(2, *size).to(kind) for size in sizes)
    window = 100
    slopes = torch.rand((4,)).to(torch.float32)
    sinks = torch.rand((4,)).to(torch.float32)

    def dense(Q, K, V, sinks):
        (B, H, q_len, D), (H_kv, k_len), dtype = Q.shape, K.shape[1:3], torch.float64
        batch, heads, rows, keys, group = slice(None), slice(None), slice(None), slice(None), H // H_kv
        b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
        row, k = torch.arange(q_len)[:, None], torch.arange(k_len)
        q = row + (k_len - q_len)
        slopes_h = slopes[heads, None, None].to(dtype)
        sinks_h = sinks[heads, None, None].to(dtype)
        s = Q.double() @ K.double().repeat_interleave(group, 1).mT * D**-0.5
        distance = q - k
        s = s - slopes_h * real(distance, dtype)
        keep = (0 <= distance) & (distance < window)
        s.masked_fill_(~keep, -torch.inf)
        want_lse = torch.logaddexp(torch.logsumexp(s, -1, keepdim=True), sinks_h)
        p = torch.where(s == -torch.inf, 0.0, torch.exp(s - want_lse))
        want = p @ V.double().repeat_interleave(group, 1)
        return want, want_lse[..., 0]

    inputs = [Q, K, V, sinks]
    out, lse = dense(*inputs)
    d_out, d_lse = torch.randn(out.shape).to(kind), torch.randn(lse.shape)
    given = (x.to(device) for x in (Q, K, V, out.to(kind), lse.float(), d_out, d_lse))
    d_q, d_k, d_v, more = backward(*given, window=window, slopes=slopes.to(device), sinks=sinks.to(device))
    failed = False
    for at, (name, gradient) in ((0, ("q", d_q)), (1, ("k", d_k)), (2, ("v", d_v)), (3, ("sinks", more["sinks"]))):
        limit = max(3e-2, torch.finfo(gradient.dtype).eps)
        gradient, losses = gradient.cpu().double(), []
        direction = torch.randn(gradient.shape, dtype=torch.float64)
        for step in (1e-5, -1e-5):
            out, lse = dense(*inputs[:at], inputs[at] + step * direction, *inputs[at + 1 :])
            losses.append((out * d_out).sum() + torch.where(lse == -torch.inf, 0.0, lse * d_lse).sum())
        error = ((gradient * direction).sum() - (losses[0] - losses[1]) / 2e-5).abs().item()
        part = error / (gradient.norm().item() + 0.1)
        print(f"gradient of {name}: {part:.1e} from float64")
        failed |= not part < limit
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(check())
