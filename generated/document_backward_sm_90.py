# attention document(doc: i32[b, k]) {
#     mask k <= q and doc[b, q] == doc[b, k]
# }
#
# backward · fa2 · deterministic · dQ: tile 64 × 64 · 2 stages · 4 warps · by TMA
# dK and dV: tile 64 × 64 · 2 stages · 4 warps · by TMA
# sm_90, bf16, head size 128: 255 registers, 168 spills, 97 KB of shared memory
# Weights are worked out again from lse, in each direction.
# A row that sees nothing: zero gradients.
# made by: attncc build document.attn --pass backward --target sm_90     checked by: python document_backward_sm_90.py

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
def document_backward_delta(
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
        "q_len", "k_len", "b_len", "h_len", "group", "q_tiles", "k_tiles"
    ],
    do_not_specialize_on_alignment=[
        "doc", "stride_doc_0", "stride_doc_1"
    ],
)
def document_backward_dkdv_tables(
    doc, Tables, Scans,
    stride_doc_0: "i64", stride_doc_1,
    q_len: "i32", k_len: "i32", b_len: "i32", h_len: "i32", group: "i32",
    q_tiles: "i32", k_tiles: "i32",
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
):
    # ---- the least and greatest of what the mask reads, over one tile of rows
    slab, tile = tl.program_id(0) // q_tiles, tl.program_id(0) % q_tiles
    b, h = slab, 0
    row = tile * TILE_Q + tl.arange(0, TILE_Q)
    q = row + (k_len - q_len)
    Tables += slab.to(tl.int64) * (2 * q_tiles) + tile
    doc_q = tl.load(doc + b * stride_doc_0 + tl.cast(q, tl.int64) * stride_doc_1, mask=(0 <= q) & (q < k_len), other=0)
    tl.store(Tables, tl.min(tl.where(row < q_len, doc_q, 2147483647)))
    tl.store(Tables + q_tiles, tl.max(tl.where(row < q_len, doc_q, -2147483647)))


@triton.jit(
    do_not_specialize=[
        "q_len", "k_len", "b_len", "h_len", "group", "q_tiles", "k_tiles"
    ],
    do_not_specialize_on_alignment=[
        "doc", "stride_doc_0", "stride_doc_1"
    ],
)
def document_backward_dkdv_scans(
    doc, Tables, Scans,
    stride_doc_0: "i64", stride_doc_1,
    q_len: "i32", k_len: "i32", b_len: "i32", h_len: "i32", group: "i32",
    q_tiles: "i32", k_tiles: "i32",
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
):
    # ---- where among the tiles of rows something holds for one tile of keys: first, end, the run of them
    slab, mine = tl.program_id(0) // k_tiles, tl.program_id(0) % k_tiles
    b, h = slab, 0
    k = mine * TILE_K + tl.arange(0, TILE_K)[:, None]
    first_key, last_key = mine * TILE_K, tl.minimum(mine * TILE_K + TILE_K, k_len) - 1
    Tables += slab.to(tl.int64) * (2 * q_tiles)
    Scans += slab.to(tl.int64) * (4 * k_tiles)
    doc_k = tl.load(doc + b * stride_doc_0 + tl.cast(k, tl.int64) * stride_doc_1, mask=(k < k_len), other=0)
    doc_k_max = tl.max(tl.where(k < k_len, doc_k, -2147483647))
    doc_k_min = tl.min(tl.where(k < k_len, doc_k, 2147483647))
    first_1, stop_1, count_1 = q_tiles, 0, 0
    first_2, stop_2, count_2 = q_tiles, 0, 0
    for lane_base in range(0, q_tiles, 128):
        lane = lane_base + tl.arange(0, 128)
        inner_first, inner_last = lane * TILE_Q, tl.minimum(lane * TILE_Q + TILE_Q, q_len) - 1
        doc_q_min = tl.load(Tables + lane, mask=lane < q_tiles, other=0)
        doc_q_max = tl.load(Tables + q_tiles + lane, mask=lane < q_tiles, other=0)
        holds = (lane < q_tiles) & (doc_q_min <= doc_k_max) & (doc_k_min <= doc_q_max)
        first_1 = tl.minimum(first_1, tl.min(tl.where(holds, lane, q_tiles)))
        stop_1 = tl.maximum(stop_1, tl.max(tl.where(holds, lane + 1, 0)))
        count_1 += tl.sum(holds.to(tl.int32))
        holds = (lane < q_tiles) & (doc_q_max <= doc_k_min) & (doc_k_max <= doc_q_min)
        first_2 = tl.minimum(first_2, tl.min(tl.where(holds, lane, q_tiles)))
        stop_2 = tl.maximum(stop_2, tl.max(tl.where(holds, lane + 1, 0)))
        count_2 += tl.sum(holds.to(tl.int32))
    tl.store(Scans + mine, first_1)
    tl.store(Scans + k_tiles + mine, stop_1)
    tl.store(Scans + 2 * k_tiles + mine, first_2)
    tl.store(Scans + 3 * k_tiles + mine, tl.where(stop_2 - first_2 == count_2, count_2, 0))


@triton.jit(
    do_not_specialize=[
        "q_len", "k_len", "b_len", "h_len", "group", "together", "q_tiles", "k_tiles"
    ],
    do_not_specialize_on_alignment=[
        "doc", "stride_doc_0", "stride_doc_1"
    ],
)
def document_backward_dkdv(
    Q, K, V, D_out, Lse_2, Delta, Q_tiles, D_out_tiles, Lse_2_tiles, Delta_tiles, D_k, D_v, doc, Tables, Scans,
    stride_qb: "i64", stride_qh: "i64", stride_qm: "i64", stride_qd,
    stride_kb: "i64", stride_kh: "i64", stride_kn: "i64", stride_kd,
    stride_vb: "i64", stride_vh: "i64", stride_vn: "i64", stride_vd,
    stride_gb: "i64", stride_gh: "i64", stride_gm: "i64", stride_gd,
    stride_doc_0: "i64", stride_doc_1,
    q_len: "i32", k_len: "i32", b_len: "i32", h_len: "i32", group: "i32", together: "i32",
    q_tiles: "i32", k_tiles: "i32",
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
    exponent = scale * LOG2E

    every_tables = Tables
    every_scans = Scans
    for member in range(group):
        h = h_kv * group + member
        head = (b * h_len + h).to(tl.int64)
        queries = Q + b * stride_qb + h * stride_qh
        d_outs = D_out + b * stride_gb + h * stride_gh
        doc_k = tl.load(doc + b * stride_doc_0 + tl.cast(k, tl.int64) * stride_doc_1, mask=(k < k_len), other=0)
        doc_k_max = tl.max(tl.where(k < k_len, doc_k, -2147483647))
        doc_k_min = tl.min(tl.where(k < k_len, doc_k, 2147483647))

        # ---- the tiles of rows that see these keys
        Tables = every_tables + b.to(tl.int64) * (2 * q_tiles)
        Scans = every_scans + b.to(tl.int64) * (4 * k_tiles)
        first_key, last_key = mine * TILE_K, tl.minimum(mine * TILE_K + TILE_K, k_len) - 1
        row_low = first_key + q_len - k_len
        doc_k_first = tl.load(Scans + mine).to(tl.int32)
        begin = tl.maximum(doc_k_first, tl.maximum(row_low, 0) // TILE_Q)
        doc_k_stop = tl.load(Scans + k_tiles + mine).to(tl.int32)
        end = tl.minimum(doc_k_stop, (q_len + TILE_Q - 1) // TILE_Q)
        row_high = last_key + q_len - k_len
        doc_k_full_first = tl.load(Scans + 2 * k_tiles + mine).to(tl.int32)
        full_begin = tl.minimum(end, tl.maximum(doc_k_full_first, (tl.maximum(row_high, 0) + TILE_Q - 1) // TILE_Q))
        doc_k_full_run = tl.load(Scans + 3 * k_tiles + mine).to(tl.int32)
        full_end = tl.maximum(
            full_begin, tl.where(0 < doc_k_full_run, tl.minimum(doc_k_full_first + doc_k_full_run, q_len // TILE_Q), 0)
        )
        masked_0 = tl.maximum(full_begin - begin, 0)
        masked_1 = masked_0 + tl.maximum(end - full_end, 0)
        for masked in tl.static_range(1):  # every tile is whole
            for tile in range(full_begin, full_end):
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
                doc_q = tl.load(
                    doc + b * stride_doc_0 + tl.cast(q, tl.int64) * stride_doc_1, mask=(0 <= q) & (q < k_len), other=0
                )
                if masked:
                    keep = (k <= q) & (doc_q == doc_k) & (row < q_len)
                    s = tl.where(keep, s, float("-inf"))
                p = tl.exp2(s * exponent - lse)
                ds = p * (dp - delta)
                d_v = tl.dot(p.to(d_out.dtype), d_out, d_v)
                d_k = tl.dot(ds.to(query.dtype), query, d_k)
        for lane_base in range(0, masked_1, 32):  # 32 tiles at a time are classed, one to a lane
            step = lane_base + tl.arange(0, 32)
            lane = tl.where(step < masked_0, begin, full_end - masked_0) + step
            inner_first, inner_last = lane * TILE_Q, tl.minimum(lane * TILE_Q + TILE_Q, q_len) - 1
            doc_q_min = tl.load(Tables + lane, mask=lane < q_tiles, other=0)
            doc_q_max = tl.load(Tables + q_tiles + lane, mask=lane < q_tiles, other=0)
            live = (step < masked_1) & (doc_q_min <= doc_k_max) & (doc_k_min <= doc_q_max) & (row_low <= inner_last)
            whole = (
                live & (doc_q_max <= doc_k_min) & (doc_k_max <= doc_q_min) & (row_high <= inner_first)
                & (inner_first + TILE_Q <= q_len)
            )
            for masked in tl.static_range(2):  # whole tiles first, then those that need the mask
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
                    doc_q = tl.load(
                        doc + b * stride_doc_0 + tl.cast(q, tl.int64) * stride_doc_1,
                        mask=(0 <= q) & (q < k_len),
                        other=0,
                    )
                    if masked:
                        keep = (k <= q) & (doc_q == doc_k) & (row < q_len)
                        s = tl.where(keep, s, float("-inf"))
                    p = tl.exp2(s * exponent - lse)
                    ds = p * (dp - delta)
                    d_v = tl.dot(p.to(d_out.dtype), d_out, d_v)
                    d_k = tl.dot(ds.to(query.dtype), query, d_k)

    at = head_kv.to(tl.int64) * k_len + k
    tl.store(D_k + at * 128 + d[None, :], (d_k * scale).to(D_k.dtype.element_ty), k < k_len)
    tl.store(D_v + at * 128 + d[None, :], d_v.to(D_v.dtype.element_ty), k < k_len)


@triton.jit(
    do_not_specialize=[
        "q_len", "k_len", "b_len", "h_len", "group", "q_tiles", "k_tiles"
    ],
    do_not_specialize_on_alignment=[
        "doc", "stride_doc_0", "stride_doc_1"
    ],
)
def document_backward_dq_tables(
    doc, Tables, Scans,
    stride_doc_0: "i64", stride_doc_1,
    q_len: "i32", k_len: "i32", b_len: "i32", h_len: "i32", group: "i32",
    q_tiles: "i32", k_tiles: "i32",
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
):
    # ---- the least and greatest of what the mask reads, over one tile of keys
    slab, tile = tl.program_id(0) // k_tiles, tl.program_id(0) % k_tiles
    b, h = slab, 0
    k = tile * TILE_K + tl.arange(0, TILE_K)
    Tables += slab.to(tl.int64) * (2 * k_tiles) + tile
    doc_k = tl.load(doc + b * stride_doc_0 + tl.cast(k, tl.int64) * stride_doc_1, mask=(k < k_len), other=0)
    tl.store(Tables, tl.max(tl.where(k < k_len, doc_k, -2147483647)))
    tl.store(Tables + k_tiles, tl.min(tl.where(k < k_len, doc_k, 2147483647)))


@triton.jit(
    do_not_specialize=[
        "q_len", "k_len", "b_len", "h_len", "group", "q_tiles", "k_tiles"
    ],
    do_not_specialize_on_alignment=[
        "doc", "stride_doc_0", "stride_doc_1"
    ],
)
def document_backward_dq_scans(
    doc, Tables, Scans,
    stride_doc_0: "i64", stride_doc_1,
    q_len: "i32", k_len: "i32", b_len: "i32", h_len: "i32", group: "i32",
    q_tiles: "i32", k_tiles: "i32",
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
):
    # ---- where among the tiles of keys something holds for one tile of rows: first, end, the run of them
    slab, mine = tl.program_id(0) // q_tiles, tl.program_id(0) % q_tiles
    b, h = slab, 0
    row = mine * TILE_Q + tl.arange(0, TILE_Q)[:, None]
    q = row + (k_len - q_len)
    first_row, last_row = mine * TILE_Q, tl.minimum(mine * TILE_Q + TILE_Q, q_len) - 1
    Tables += slab.to(tl.int64) * (2 * k_tiles)
    Scans += slab.to(tl.int64) * (4 * q_tiles)
    doc_q = tl.load(doc + b * stride_doc_0 + tl.cast(q, tl.int64) * stride_doc_1, mask=(0 <= q) & (q < k_len), other=0)
    doc_q_min = tl.min(tl.where(row < q_len, doc_q, 2147483647))
    doc_q_max = tl.max(tl.where(row < q_len, doc_q, -2147483647))
    first_1, stop_1, count_1 = k_tiles, 0, 0
    first_2, stop_2, count_2 = k_tiles, 0, 0
    for lane_base in range(0, k_tiles, 128):
        lane = lane_base + tl.arange(0, 128)
        inner_first, inner_last = lane * TILE_K, tl.minimum(lane * TILE_K + TILE_K, k_len) - 1
        doc_k_max = tl.load(Tables + lane, mask=lane < k_tiles, other=0)
        doc_k_min = tl.load(Tables + k_tiles + lane, mask=lane < k_tiles, other=0)
        holds = (lane < k_tiles) & (doc_q_min <= doc_k_max) & (doc_k_min <= doc_q_max)
        first_1 = tl.minimum(first_1, tl.min(tl.where(holds, lane, k_tiles)))
        stop_1 = tl.maximum(stop_1, tl.max(tl.where(holds, lane + 1, 0)))
        count_1 += tl.sum(holds.to(tl.int32))
        holds = (lane < k_tiles) & (doc_q_max <= doc_k_min) & (doc_k_max <= doc_q_min)
        first_2 = tl.minimum(first_2, tl.min(tl.where(holds, lane, k_tiles)))
        stop_2 = tl.maximum(stop_2, tl.max(tl.where(holds, lane + 1, 0)))
        count_2 += tl.sum(holds.to(tl.int32))
    tl.store(Scans + mine, first_1)
    tl.store(Scans + q_tiles + mine, stop_1)
    tl.store(Scans + 2 * q_tiles + mine, first_2)
    tl.store(Scans + 3 * q_tiles + mine, tl.where(stop_2 - first_2 == count_2, count_2, 0))


@triton.jit(
    do_not_specialize=[
        "q_len", "k_len", "b_len", "h_len", "group", "together", "q_tiles", "k_tiles"
    ],
    do_not_specialize_on_alignment=[
        "doc", "stride_doc_0", "stride_doc_1"
    ],
)
def document_backward_dq(
    Q, K, V, D_out, Lse_2, Delta, K_tiles, V_tiles, D_q, doc, Tables, Scans,
    stride_qb: "i64", stride_qh: "i64", stride_qm: "i64", stride_qd,
    stride_kb: "i64", stride_kh: "i64", stride_kn: "i64", stride_kd,
    stride_vb: "i64", stride_vh: "i64", stride_vn: "i64", stride_vd,
    stride_gb: "i64", stride_gh: "i64", stride_gm: "i64", stride_gd,
    stride_doc_0: "i64", stride_doc_1,
    q_len: "i32", k_len: "i32", b_len: "i32", h_len: "i32", group: "i32", together: "i32",
    q_tiles: "i32", k_tiles: "i32",
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
    doc_q = tl.load(doc + b * stride_doc_0 + tl.cast(q, tl.int64) * stride_doc_1, mask=(0 <= q) & (q < k_len), other=0)
    doc_q_min = tl.min(tl.where(row < q_len, doc_q, 2147483647))
    doc_q_max = tl.max(tl.where(row < q_len, doc_q, -2147483647))
    scale = 0.08838834764831845
    exponent = scale * LOG2E

    # ---- the key tiles that these rows see
    first_row, last_row = mine * TILE_Q, tl.minimum(mine * TILE_Q + TILE_Q, q_len) - 1
    Tables += b.to(tl.int64) * (2 * k_tiles)
    Scans += b.to(tl.int64) * (4 * q_tiles)
    doc_q_first = tl.load(Scans + mine).to(tl.int32)
    begin = doc_q_first
    q_high = last_row + k_len - q_len
    doc_q_stop = tl.load(Scans + q_tiles + mine).to(tl.int32)
    end = tl.minimum(doc_q_stop, (tl.maximum(q_high + 1, 0) + TILE_K - 1) // TILE_K)
    doc_q_full_first = tl.load(Scans + 2 * q_tiles + mine).to(tl.int32)
    full_begin = tl.minimum(doc_q_full_first, end)
    q_low = first_row + k_len - q_len
    doc_q_full_run = tl.load(Scans + 3 * q_tiles + mine).to(tl.int32)
    full_end = tl.maximum(
        full_begin,
        tl.where(
            0 < doc_q_full_run, tl.minimum(doc_q_full_first + doc_q_full_run, tl.maximum(q_low + 1, 0) // TILE_K), 0
        ),
    )
    masked_0 = tl.maximum(full_begin - begin, 0)
    masked_1 = masked_0 + tl.maximum(end - full_end, 0)

    # ---- ds again from lse, and its sums
    d_q = tl.zeros([TILE_Q, 128], tl.float32)
    for masked in tl.static_range(1):  # every tile is whole
        for tile in range(full_begin, full_end):
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
            if masked:
                doc_k = tl.load(doc + b * stride_doc_0 + tl.cast(k, tl.int64) * stride_doc_1, mask=(k < k_len), other=0)
                keep = (k <= q) & (doc_q == doc_k) & (k < k_len)
                s = tl.where(keep, s, float("-inf"))
            p = tl.exp2(s * exponent - lse)
            ds = p * (dp - delta)
            d_q = tl.dot(ds.to(key.dtype), key, d_q)
    for lane_base in range(0, masked_1, 32):  # 32 tiles at a time are classed, one to a lane
        step = lane_base + tl.arange(0, 32)
        lane = tl.where(step < masked_0, begin, full_end - masked_0) + step
        inner_first, inner_last = lane * TILE_K, tl.minimum(lane * TILE_K + TILE_K, k_len) - 1
        doc_k_max = tl.load(Tables + lane, mask=lane < k_tiles, other=0)
        doc_k_min = tl.load(Tables + k_tiles + lane, mask=lane < k_tiles, other=0)
        live = (step < masked_1) & (doc_q_min <= doc_k_max) & (doc_k_min <= doc_q_max) & (inner_first <= q_high)
        whole = (
            live & (doc_q_max <= doc_k_min) & (doc_k_max <= doc_q_min) & (inner_last <= q_low)
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
                if masked:
                    doc_k = tl.load(
                        doc + b * stride_doc_0 + tl.cast(k, tl.int64) * stride_doc_1, mask=(k < k_len), other=0
                    )
                    keep = (k <= q) & (doc_q == doc_k) & (k < k_len)
                    s = tl.where(keep, s, float("-inf"))
                p = tl.exp2(s * exponent - lse)
                ds = p * (dp - delta)
                d_q = tl.dot(ds.to(key.dtype), key, d_q)

    tl.store(D_q + at * 128 + d[None, :], tl.where(d_q == 0, 0.0, d_q * scale).to(D_q.dtype.element_ty), row < q_len)


# The same for tensors whose strides or addresses are not multiples of 16.
document_backward_delta_any_stride = triton.jit(
    document_backward_delta.fn,
    do_not_specialize=[
        "stride_ob", "stride_oh", "stride_om", "stride_od", "stride_gb", "stride_gh", "stride_gm", "stride_gd",
        "q_len", "h_len"
    ],
    do_not_specialize_on_alignment=[
        "Out", "D_out"
    ],
)
document_backward_dkdv_any_stride = triton.jit(
    document_backward_dkdv.fn,
    do_not_specialize=[
        "stride_qb", "stride_qh", "stride_qm", "stride_qd", "stride_kb", "stride_kh", "stride_kn", "stride_kd",
        "stride_vb", "stride_vh", "stride_vn", "stride_vd", "stride_gb", "stride_gh", "stride_gm", "stride_gd",
        "q_len", "k_len", "b_len", "h_len", "group", "together", "q_tiles", "k_tiles"
    ],
    do_not_specialize_on_alignment=[
        "Q", "K", "V", "D_out", "doc", "Tables", "Scans", "stride_doc_0", "stride_doc_1"
    ],
)
document_backward_dq_any_stride = triton.jit(
    document_backward_dq.fn,
    do_not_specialize=[
        "stride_qb", "stride_qh", "stride_qm", "stride_qd", "stride_kb", "stride_kh", "stride_kn", "stride_kd",
        "stride_vb", "stride_vh", "stride_vn", "stride_vd", "stride_gb", "stride_gh", "stride_gm", "stride_gd",
        "q_len", "k_len", "b_len", "h_len", "group", "together", "q_tiles", "k_tiles"
    ],
    do_not_specialize_on_alignment=[
        "Q", "K", "V", "D_out", "doc", "Tables", "Scans", "stride_doc_0", "stride_doc_1"
    ],
)


def descriptor(x, *tile):
    """A TMA descriptor of x [B, H, S, ...], which brings so many rows, and columns of them."""
    return TensorDescriptor(x, x.shape, x.stride(), [1, 1, *tile])


def backward(q, k, v, out, lse, d_out, d_lse=None, *, doc):
    """q [B, H, Q, 128], k [B, H_kv, K, 128], v [B, H_kv, K, 128], out and d_out [B, H, Q, 128] in bf16,
    lse and d_lse [B, H, Q] in float32; any strides, d_lse may be None.

    Returns d_q, d_k, d_v, and the gradients of parameters by name. Equal calls give equal bits."""
    (b_len, h_len, q_len, _), (_, h_kv_len, k_len, _) = q.shape, k.shape
    if b_len * h_len * q_len == 0:
        gradients = {}
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), gradients
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    d_out, lse = d_out.to(q.dtype), lse.contiguous()
    d_lse = None if d_lse is None else d_lse.to(torch.float32).contiguous()
    group, row_tiles = h_len // h_kv_len, triton.cdiv(q_len, 64)
    statistics = (2, b_len, h_len, triton.cdiv(q_len, 128) * 128)
    lse_2, delta = torch.empty(statistics, dtype=torch.float32, device=q.device)
    aligned = all(
        x.stride(3) == 1 and (x.stride(0) | x.stride(1) | x.stride(2)) % 16 == 0 and x.data_ptr() % 16 == 0
        for x in (q, k, v, out, d_out)
    )
    by_tma = aligned and k_len > 0 and min(s for x in (q, k, v, d_out) for s in x.stride()) > 0

    kernel = document_backward_delta if aligned else document_backward_delta_any_stride
    kernel[(b_len * h_len * triton.cdiv(q_len, 128),)](
        out, d_out, d_lse, lse, lse_2, delta,
        *out.stride(),
        *d_out.stride(),
        q_len, h_len,
        TILE_Q=128, num_warps=8, num_stages=1,
    )
    together = 8 * group  # heads whose tiles run side by side
    q_tiles, k_tiles, slabs = triton.cdiv(q_len, 64), triton.cdiv(k_len, 64), b_len
    tables = torch.empty(slabs * (2 * k_tiles), dtype=torch.int32, device=q.device)
    scans = torch.empty(
        slabs * (4 * q_tiles), dtype=torch.int16 if max(k_tiles, q_tiles) < 32768 else torch.int32, device=q.device
    )
    document_backward_dq_tables[(slabs * k_tiles,)](
        doc, tables, scans,
        *doc.stride(),
        q_len, k_len, b_len, h_len, group,
        q_tiles, k_tiles,
        TILE_Q=64, TILE_K=64, num_warps=1,
    )
    document_backward_dq_scans[(slabs * q_tiles,)](
        doc, tables, scans,
        *doc.stride(),
        q_len, k_len, b_len, h_len, group,
        q_tiles, k_tiles,
        TILE_Q=64, TILE_K=64, num_warps=1,
    )
    kernel = document_backward_dq if aligned else document_backward_dq_any_stride
    kernel[(b_len * h_len * row_tiles,)](
        q, k, v, d_out, lse_2, delta, descriptor(k, 64, 128) if by_tma else None,
        descriptor(v, 64, 128) if by_tma else None, d_q, doc, tables, scans,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *d_out.stride(),
        *doc.stride(),
        q_len, k_len, b_len, h_len, group, together,
        q_tiles, k_tiles,
        TILE_Q=64, TILE_K=64, num_warps=4, num_stages=2,
    )
    if k_len:
        together = 8
        q_tiles, k_tiles, slabs = triton.cdiv(q_len, 64), triton.cdiv(k_len, 64), b_len
        tables = torch.empty(slabs * (2 * q_tiles), dtype=torch.int32, device=q.device)
        scans = torch.empty(
            slabs * (4 * k_tiles), dtype=torch.int16 if max(q_tiles, k_tiles) < 32768 else torch.int32, device=q.device
        )
        document_backward_dkdv_tables[(slabs * q_tiles,)](
            doc, tables, scans,
            *doc.stride(),
            q_len, k_len, b_len, h_len, group,
            q_tiles, k_tiles,
            TILE_Q=64, TILE_K=64, num_warps=1,
        )
        document_backward_dkdv_scans[(slabs * k_tiles,)](
            doc, tables, scans,
            *doc.stride(),
            q_len, k_len, b_len, h_len, group,
            q_tiles, k_tiles,
            TILE_Q=64, TILE_K=64, num_warps=1,
        )
        kernel = document_backward_dkdv if aligned else document_backward_dkdv_any_stride
        kernel[(b_len * h_kv_len * triton.cdiv(k_len, 64),)](
            q, k, v, d_out, lse_2, delta, descriptor(q, 64, 128) if by_tma else None,
            descriptor(d_out, 64, 128) if by_tma else None, descriptor(lse_2, 64) if by_tma else None,
            descriptor(delta, 64) if by_tma else None, d_k, d_v, doc, tables, scans,
            *q.stride(),
            *k.stride(),
            *v.stride(),
            *d_out.stride(),
            *doc.stride(),
            q_len, k_len, b_len, h_len, group, together,
            q_tiles, k_tiles,
            TILE_Q=64, TILE_K=64, num_warps=4, num_stages=2,
        )
    gradients = {}
    return d_q, d_k, d_v, gradients


def check():
    """Each gradient along a random direction against a difference in float64. Returns the exit status."""

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
    sizes = (4, 300, 128), (2, 331, 128), (2, 331, 128)
    Q, K, V = (torch.randn(2, *size).to(kind) for size in sizes)
    doc = torch.randint(0, 100, (2, 331)).to(torch.int32)

    def dense(Q, K, V):
        (B, H, q_len, D), (H_kv, k_len), dtype = Q.shape, K.shape[1:3], torch.float64
        batch, heads, rows, keys, group = slice(None), slice(None), slice(None), slice(None), H // H_kv
        b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
        row, k = torch.arange(q_len)[:, None], torch.arange(k_len)
        q = row + (k_len - q_len)
        doc_q = read(doc, b, q).long()
        s = Q.double() @ K.double().repeat_interleave(group, 1).mT * D**-0.5
        doc_k = doc[batch, None, None, keys].long()
        keep = (k <= q) & (doc_q == doc_k)
        s.masked_fill_(~keep, -torch.inf)
        want_lse = torch.logsumexp(s, -1, keepdim=True)
        p = torch.where(s == -torch.inf, 0.0, torch.exp(s - want_lse))
        want = p @ V.double().repeat_interleave(group, 1)
        return want, want_lse[..., 0]

    inputs = [Q, K, V]
    out, lse = dense(*inputs)
    d_out, d_lse = torch.randn(out.shape).to(kind), torch.randn(lse.shape)
    given = (x.to(device) for x in (Q, K, V, out.to(kind), lse.float(), d_out, d_lse))
    d_q, d_k, d_v, more = backward(*given, doc=doc.to(device))
    failed = False
    for at, (name, gradient) in ((0, ("q", d_q)), (1, ("k", d_k)), (2, ("v", d_v))):
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
