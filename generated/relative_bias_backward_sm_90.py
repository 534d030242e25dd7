# attention relative_bias(bucket_of: i32[distances], table: f32[buckets, h] grad) {
#     let far      = distances // 2
#     let distance = min(max(k - q, -far), far)
#     scale 1
#     score s + table[bucket_of[distance + far], h]
# }
#
# backward · fa2 · deterministic · dQ: tile 64 × 64 · 2 stages · 4 warps · by TMA
# dK and dV: tile 64 × 64 · 2 stages · 4 warps · by TMA
# sm_90, bf16, head size 128: 255 registers, 200 spills, 112 KB of shared memory
# Weights are worked out again from lse, in each direction.
# A row that sees nothing: zero gradients.
# made by: attncc build relative_bias.attn --pass backward --target sm_90
# checked by: python relative_bias_backward_sm_90.py

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


@triton.jit
def tally(entries, entry, value, inside):
    """Add the values to the entries that they belong to: 32 entries between the least and the greatest at a time, each
    summed over its row, then all of them over the rows."""
    least = tl.min(tl.where(inside, entry, 2147483647))
    entry = tl.where(inside, entry, -1)
    greatest = tl.max(entry)
    for first in range(least // 32 * 32, greatest + 1, 32):
        lane = first + tl.arange(0, 32)[None, :]
        totals = tl.zeros([value.shape[0], 32], tl.float32)
        for one in range(tl.maximum(first, least), tl.minimum(first + 31, greatest) + 1):
            of_rows = tl.sum(tl.where(entry == one, value, 0.0), 1, keep_dims=True)
            totals += tl.where(lane == one, of_rows, 0.0)
        hit = (least <= lane) & (lane <= greatest)
        total = tl.sum(totals, 0, keep_dims=True)
        tl.debug_barrier()
        tl.store(entries + lane, tl.load(entries + lane, mask=hit, other=0.0) + total, hit)


@triton.jit
def tally_one(entry, value, inside):
    """Add all values to one entry. The sum over the warps waits for what others stored there before."""
    total = tl.sum(value)
    tl.store(entry, tl.load(entry, mask=inside, other=0.0) + total, inside)


@triton.jit(
    do_not_specialize=[
        "q_len", "h_len"
    ],
)
def relative_bias_backward_delta(
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
        "q_len", "k_len", "b_len", "h_len", "group", "together", "distances", "buckets"
    ],
    do_not_specialize_on_alignment=[
        "bucket_of", "table", "stride_bucket_of", "stride_table_0", "stride_table_1"
    ],
)
def relative_bias_backward_dkdv(
    Q, K, V, D_out, Lse_2, Delta, Q_tiles, D_out_tiles, Lse_2_tiles, Delta_tiles, D_k, D_v, bucket_of, table,
    stride_qb: "i64", stride_qh: "i64", stride_qm: "i64", stride_qd,
    stride_kb: "i64", stride_kh: "i64", stride_kn: "i64", stride_kd,
    stride_vb: "i64", stride_vh: "i64", stride_vn: "i64", stride_vd,
    stride_gb: "i64", stride_gh: "i64", stride_gm: "i64", stride_gd,
    stride_bucket_of, stride_table_0: "i64", stride_table_1: "i64",
    q_len: "i32", k_len: "i32", b_len: "i32", h_len: "i32", group: "i32", together: "i32",
    distances: "i32", buckets: "i32",
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
    scale = 1.0

    for member in range(group):
        h = h_kv * group + member
        head = (b * h_len + h).to(tl.int64)
        queries = Q + b * stride_qb + h * stride_qh
        d_outs = D_out + b * stride_gb + h * stride_gh
        far_ = distances // 2

        # ---- the tiles of rows that see these keys
        first_key, last_key = mine * TILE_K, tl.minimum(mine * TILE_K + TILE_K, k_len) - 1
        for lane_base in range(0, (q_len + TILE_Q - 1) // TILE_Q, 32):  # 32 tiles at a time are classed, one to a lane
            step = lane_base + tl.arange(0, 32)
            lane = step
            inner_first, inner_last = lane * TILE_Q, tl.minimum(lane * TILE_Q + TILE_Q, q_len) - 1
            live = (step < (q_len + TILE_Q - 1) // TILE_Q)
            whole = (
                live & (inner_first + TILE_Q <= q_len)
                & (
                    tl.minimum(far_, tl.maximum(-far_, first_key + q_len - inner_last - k_len))
                    == tl.minimum(far_, tl.maximum(-far_, last_key + q_len - inner_first - k_len))
                )
            )
            for masked in tl.static_range(2):  # whole tiles of one entry first, then the others
                if masked:
                    chosen = live & ~whole
                else:
                    chosen = whole
                rank = tl.cumsum(chosen.to(tl.int32))
                for turn in range(tl.max(rank)):
                    tile = tl.sum(tl.where(chosen & (rank == turn + 1), lane, 0))
                    row = tile * TILE_Q + tl.arange(0, TILE_Q)[None, :]
                    row_column = tile * TILE_Q + tl.arange(0, TILE_Q)[:, None]
                    q = row + (k_len - q_len)
                    tile_first, tile_last = tile * TILE_Q, tile * TILE_Q + TILE_Q - 1
                    same_index = far_ + tl.minimum(far_, tl.maximum(-far_, first_key + q_len - tile_last - k_len))
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
                    if masked:
                        distance = tl.minimum(tl.maximum(k - q, -far_), far_)
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
                    else:
                        s = s + table_h_
                    if masked:
                        keep = row < q_len
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
        "q_len", "k_len", "b_len", "h_len", "group", "together", "distances", "buckets", "cells_d_table", "slots",
        "slots_before"
    ],
    do_not_specialize_on_alignment=[
        "bucket_of", "table", "stride_bucket_of", "stride_table_0", "stride_table_1"
    ],
)
def relative_bias_backward_dq(
    Q, K, V, D_out, Lse_2, Delta, K_tiles, V_tiles, D_q, D_table, bucket_of, table,
    stride_qb: "i64", stride_qh: "i64", stride_qm: "i64", stride_qd,
    stride_kb: "i64", stride_kh: "i64", stride_kn: "i64", stride_kd,
    stride_vb: "i64", stride_vh: "i64", stride_vn: "i64", stride_vd,
    stride_gb: "i64", stride_gh: "i64", stride_gm: "i64", stride_gd,
    stride_bucket_of, stride_table_0: "i64", stride_table_1: "i64",
    q_len: "i32", k_len: "i32", b_len: "i32", h_len: "i32", group: "i32", together: "i32",
    distances: "i32", buckets: "i32",
    cells_d_table: "i32", slots: "i32", slots_before: "i32",
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
):
    # ---- which rows are mine, and where they stand on the key axis (align end)
    tiles = tl.minimum(slots, tl.cdiv(q_len, TILE_Q) - slots_before)  # of a head, in this launch
    group_start = tl.program_id(0) // (together * tiles) * together
    group_size = tl.minimum(b_len * h_len - group_start, together)
    inside = tl.program_id(0) - group_start * tiles
    head, mine = group_start + inside % group_size, slots_before + tiles - 1 - inside // group_size
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
    far_ = distances // 2
    scale = 1.0

    # ---- the key tiles that these rows see
    first_row, last_row = mine * TILE_Q, tl.minimum(mine * TILE_Q + TILE_Q, q_len) - 1

    # ---- ds again from lse, and its sums
    d_q = tl.zeros([TILE_Q, 128], tl.float32)
    D_table += (head * slots + mine - slots_before).to(tl.int64) * cells_d_table
    for lane_base in range(0, (k_len + TILE_K - 1) // TILE_K, 32):  # 32 tiles at a time are classed, one to a lane
        step = lane_base + tl.arange(0, 32)
        lane = step
        inner_first, inner_last = lane * TILE_K, tl.minimum(lane * TILE_K + TILE_K, k_len) - 1
        live = (step < (k_len + TILE_K - 1) // TILE_K)
        whole = (
            live & (inner_first + TILE_K <= k_len)
            & (
                tl.minimum(far_, tl.maximum(-far_, inner_first + q_len - last_row - k_len))
                == tl.minimum(far_, tl.maximum(-far_, inner_last + q_len - first_row - k_len))
            )
        )
        for masked in tl.static_range(2):  # whole tiles of one entry first, then the others
            if masked:
                chosen = live & ~whole
            else:
                chosen = whole
            rank = tl.cumsum(chosen.to(tl.int32))
            for turn in range(tl.max(rank)):
                tile = tl.sum(tl.where(chosen & (rank == turn + 1), lane, 0))
                k = tile * TILE_K + tl.arange(0, TILE_K)[None, :]
                k_column = tile * TILE_K + tl.arange(0, TILE_K)[:, None]
                tile_first, tile_last = tile * TILE_K, tile * TILE_K + TILE_K - 1
                same_index = far_ + tl.minimum(far_, tl.maximum(-far_, tile_first + q_len - last_row - k_len))
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
                if masked:
                    distance = tl.minimum(tl.maximum(k - q, -far_), far_)
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
                else:
                    s = s + table_h_
                if masked:
                    keep = k < k_len
                    s = tl.where(keep, s, float("-inf"))
                p = tl.exp2(s * LOG2E - lse)
                ds = p * (dp - delta)
                if masked:
                    distance = tl.minimum(tl.maximum(k - q, -far_), far_)
                    bucket_of_at = tl.load(
                        bucket_of + tl.cast(distance + far_, tl.int64) * stride_bucket_of,
                        mask=(0 <= distance + far_) & (distance + far_ < distances),
                        other=0,
                    )
                    tally(
                        D_table,
                        bucket_of_at,
                        ds,
                        (row < q_len) & (k < k_len) & (0 <= bucket_of_at) & (bucket_of_at < buckets),
                    )
                else:
                    tally_one(
                        D_table + bucket_of_same_index,
                        ds,
                        (0 <= bucket_of_same_index) & (bucket_of_same_index < buckets),
                    )
                d_q = tl.dot(ds.to(key.dtype), key, d_q)

    tl.store(D_q + at * 128 + d[None, :], tl.where(d_q == 0, 0.0, d_q * scale).to(D_q.dtype.element_ty), row < q_len)


# The same for tensors whose strides or addresses are not multiples of 16.
relative_bias_backward_delta_any_stride = triton.jit(
    relative_bias_backward_delta.fn,
    do_not_specialize=[
        "stride_ob", "stride_oh", "stride_om", "stride_od", "stride_gb", "stride_gh", "stride_gm", "stride_gd",
        "q_len", "h_len"
    ],
    do_not_specialize_on_alignment=[
        "Out", "D_out"
    ],
)
relative_bias_backward_dkdv_any_stride = triton.jit(
    relative_bias_backward_dkdv.fn,
    do_not_specialize=[
        "stride_qb", "stride_qh", "stride_qm", "stride_qd", "stride_kb", "stride_kh", "stride_kn", "stride_kd",
        "stride_vb", "stride_vh", "stride_vn", "stride_vd", "stride_gb", "stride_gh", "stride_gm", "stride_gd",
        "q_len", "k_len", "b_len", "h_len", "group", "together", "distances", "buckets"
    ],
    do_not_specialize_on_alignment=[
        "Q", "K", "V", "D_out", "bucket_of", "table", "stride_bucket_of", "stride_table_0", "stride_table_1"
    ],
)
relative_bias_backward_dq_any_stride = triton.jit(
    relative_bias_backward_dq.fn,
    do_not_specialize=[
        "stride_qb", "stride_qh", "stride_qm", "stride_qd", "stride_kb", "stride_kh", "stride_kn", "stride_kd",
        "stride_vb", "stride_vh", "stride_vn", "stride_vd", "stride_gb", "stride_gh", "stride_gm", "stride_gd",
        "q_len", "k_len", "b_len", "h_len", "group", "together", "distances", "buckets", "cells_d_table", "slots",
        "slots_before"
    ],
    do_not_specialize_on_alignment=[
        "Q", "K", "V", "D_out", "bucket_of", "table", "stride_bucket_of", "stride_table_0", "stride_table_1"
    ],
)


def descriptor(x, *tile):
    """A TMA descriptor of x [B, H, S, ...], which brings so many rows, and columns of them."""
    return TensorDescriptor(x, x.shape, x.stride(), [1, 1, *tile])


def side_by_side(rows, tiles):
    """Heads of K whose tiles run side by side: so many that L2 holds what they walk over, or have 256 tiles."""
    return max(1, min(8, max(16384 // max(1, rows), 256 // tiles)))


def backward(q, k, v, out, lse, d_out, d_lse=None, *, bucket_of, table):
    """q [B, H, Q, 128], k [B, H_kv, K, 128], v [B, H_kv, K, 128], out and d_out [B, H, Q, 128] in bf16,
    lse and d_lse [B, H, Q] in float32; any strides, d_lse may be None.

    Returns d_q, d_k, d_v, and the gradients of parameters by name. Equal calls give equal bits."""
    (b_len, h_len, q_len, _), (_, h_kv_len, k_len, _) = q.shape, k.shape
    distances = bucket_of.shape[0]
    buckets = table.shape[0]
    if b_len * h_len * q_len == 0:
        gradients = {"table": torch.zeros_like(table)}
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), gradients
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    d_out, lse = d_out.to(q.dtype), lse.contiguous()
    d_lse = None if d_lse is None else d_lse.to(torch.float32).contiguous()
    group, row_tiles = h_len // h_kv_len, triton.cdiv(q_len, 64)
    statistics = (2, b_len, h_len, triton.cdiv(q_len, 128) * 128)
    lse_2, delta = torch.empty(statistics, dtype=torch.float32, device=q.device)
    cells_d_table = table.shape[0]
    slots = min(row_tiles, max(2 * q_len // (cells_d_table + 1), 1))  # row tiles at a time
    d_table = torch.zeros((b_len, h_len, slots, cells_d_table), dtype=torch.float32, device=q.device)
    aligned = all(
        x.stride(3) == 1 and (x.stride(0) | x.stride(1) | x.stride(2)) % 16 == 0 and x.data_ptr() % 16 == 0
        for x in (q, k, v, out, d_out)
    )
    by_tma = aligned and k_len > 0 and min(s for x in (q, k, v, d_out) for s in x.stride()) > 0

    kernel = relative_bias_backward_delta if aligned else relative_bias_backward_delta_any_stride
    kernel[(b_len * h_len * triton.cdiv(q_len, 128),)](
        out, d_out, d_lse, lse, lse_2, delta,
        *out.stride(),
        *d_out.stride(),
        q_len, h_len,
        TILE_Q=128, num_warps=8, num_stages=1,
    )
    together = side_by_side(k_len, group * row_tiles) * group
    # more than one where tables for all tiles of rows would take more than 8 bytes a row
    for slots_before in range(0, row_tiles, slots):
        kernel = relative_bias_backward_dq if aligned else relative_bias_backward_dq_any_stride
        kernel[(b_len * h_len * min(slots, row_tiles - slots_before),)](
            q, k, v, d_out, lse_2, delta, descriptor(k, 64, 128) if by_tma else None,
            descriptor(v, 64, 128) if by_tma else None, d_q, d_table, bucket_of, table,
            *q.stride(),
            *k.stride(),
            *v.stride(),
            *d_out.stride(),
            *bucket_of.stride(), *table.stride(),
            q_len, k_len, b_len, h_len, group, together,
            distances, buckets,
            cells_d_table, slots, slots_before,
            TILE_Q=64, TILE_K=64, num_warps=4, num_stages=2,
        )
    if k_len:
        together = side_by_side(q_len, triton.cdiv(k_len, 64))
        kernel = relative_bias_backward_dkdv if aligned else relative_bias_backward_dkdv_any_stride
        kernel[(b_len * h_kv_len * triton.cdiv(k_len, 64),)](
            q, k, v, d_out, lse_2, delta, descriptor(q, 64, 128) if by_tma else None,
            descriptor(d_out, 64, 128) if by_tma else None, descriptor(lse_2, 64) if by_tma else None,
            descriptor(delta, 64) if by_tma else None, d_k, d_v, bucket_of, table,
            *q.stride(),
            *k.stride(),
            *v.stride(),
            *d_out.stride(),
            *bucket_of.stride(), *table.stride(),
            q_len, k_len, b_len, h_len, group, together,
            distances, buckets,
            TILE_Q=64, TILE_K=64, num_warps=4, num_stages=2,
        )

    # ---- the second pass over what parameters get
    gradients = {
        "table": d_table.sum(2).sum(0).permute(1, 0).to(table.dtype),
    }
    return d_q, d_k, d_v, gradients


def check():
    """Each gradient along a random direction against a difference in float64. Returns the exit status."""

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
    sizes = (4, 300, 128), (2, 331, 128), (2, 331, 128)
    Q, K, V = (torch.randn(2, *size).to(kind) for size in sizes)
    bucket_of = torch.randint(0, 100, (16,)).to(torch.int32)
    table = torch.rand((16, 4)).to(torch.float32)

    def dense(Q, K, V, table):
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
        return want, want_lse[..., 0]

    inputs = [Q, K, V, table]
    out, lse = dense(*inputs)
    d_out, d_lse = torch.randn(out.shape).to(kind), torch.randn(lse.shape)
    given = (x.to(device) for x in (Q, K, V, out.to(kind), lse.float(), d_out, d_lse))
    d_q, d_k, d_v, more = backward(*given, bucket_of=bucket_of.to(device), table=table.to(device))
    failed = False
    for at, (name, gradient) in ((0, ("q", d_q)), (1, ("k", d_k)), (2, ("v", d_v)), (3, ("table", more["table"]))):
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
