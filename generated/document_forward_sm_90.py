# attention document(doc: i32[b, k]) {
#     mask k <= q and doc[b, q] == doc[b, k]
# }
#
# forward · fa2 · tile 64 × 64 · 3 stages · 4 warps · K and V by TMA · the first tiles' maximum
# sm_90, bf16, head size 128: 220 registers, no spills, 113 KB of shared memory
# HBM: Q and Out once, K and V once for each tile of rows that sees them. Rows without keys give 0, lse -inf.
# made by: attncc build document.attn --target sm_90     checked by: python document_forward_sm_90.py

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
        "q_len", "k_len", "b_len", "h_len", "group", "q_tiles", "k_tiles"
    ],
    do_not_specialize_on_alignment=[
        "doc", "stride_doc_0", "stride_doc_1"
    ],
)
def document_forward_tables(
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
def document_forward_scans(
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
def document_forward(
    Q, K, V, Out, Lse, doc, Tables, Scans,
    stride_qb: "i64", stride_qh: "i64", stride_qm: "i64", stride_qd,
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
    scale = 0.08838834764831845 * LOG2E
    doc_q = tl.load(doc + b * stride_doc_0 + tl.cast(q, tl.int64) * stride_doc_1, mask=(0 <= q) & (q < k_len), other=0)

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
    plain_end = tl.maximum(full_end, tl.minimum(doc_q_full_first + doc_q_full_run, end))
    reference_tile = tl.maximum(full_end - 1, full_begin)
    masked_0 = tl.maximum(full_begin - begin, 0)
    masked_1 = masked_0 + tl.maximum(end - plain_end, 0)

    # ---- Q, behind what the ranges wait for
    query = load(Q + row * stride_qm + d[None, :] * stride_qd, row < q_len, True)
    doc_q_min = tl.min(tl.where(row < q_len, doc_q, 2147483647))
    doc_q_max = tl.max(tl.where(row < q_len, doc_q, -2147483647))

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
            for lane_base in range(0, masked_1, 32):  # 32 tiles at a time are classed, one to a lane
                step = lane_base + tl.arange(0, 32)
                lane = tl.where(step < masked_0, begin, plain_end - masked_0) + step
                inner_first, inner_last = lane * TILE_K, tl.minimum(lane * TILE_K + TILE_K, k_len) - 1
                doc_k_max = tl.load(Tables + lane, mask=lane < k_tiles, other=0)
                doc_k_min = tl.load(Tables + k_tiles + lane, mask=lane < k_tiles, other=0)
                live = (step < masked_1) & (doc_q_min <= doc_k_max) & (doc_k_min <= doc_q_max) & (inner_first <= q_high)
                for masked in tl.static_range(1, 2):  # every tile needs the mask
                    chosen = live
                    rank = tl.cumsum(chosen.to(tl.int32))
                    for turn in range(tl.max(rank)):
                        tile = tl.sum(tl.where(chosen & (rank == turn + 1), lane, 0))
                        k = tile * TILE_K + tl.arange(0, TILE_K)[None, :]
                        key = K.load([b, h_kv, tile * TILE_K, 0]).reshape(TILE_K, 128).T
                        s = tl.dot(query, key)
                        if masked:
                            doc_k = tl.load(
                                doc + b * stride_doc_0 + tl.cast(k, tl.int64) * stride_doc_1, mask=(k < k_len), other=0
                            )
                            keep = (k <= q) & (doc_q == doc_k)
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
            # Two loops: with `masked`, over the tiles that need the mask and one whole tile, which give each row its
            # reference; then without, over the other whole ones.
            for masked in tl.static_range(1, -1, -1):
                for tile in range(reference_tile if masked else full_begin, plain_end if masked else reference_tile):
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
                    value = V.load([b, h_kv, tile * TILE_K, 0]).reshape(TILE_K, 128)

                    out = tl.dot(p.to(value.dtype), value, out)

    # ---- normalise once, at the end
    divisor = tl.where(l == 0, 1.0, l)
    out = out / divisor
    lse = tl.where(l == 0, float("-inf"), (m + tl.log2(l)) / LOG2E)
    at = head.to(tl.int64) * q_len + row
    tl.store(Out + at * 128 + d[None, :], out.to(Out.dtype.element_ty), row < q_len)
    tl.store(Lse + at, lse, row < q_len)


def forward(q, k, v, *, doc):
    """q [B, H, Q, 128], k [B, H_kv, K, 128], v [B, H_kv, K, 128] in bf16 → out [B, H, Q, 128] in bf16,
    lse [B, H, Q] in float32 (natural log)."""
    (b_len, h_len, q_len, _), (_, h_kv_len, k_len, _) = q.shape, k.shape
    out = q.new_empty((b_len, h_len, q_len, 128))
    lse = q.new_empty((b_len, h_len, q_len), dtype=torch.float32)
    if not b_len * h_len * q_len:
        return out, lse
    group, q_tiles = h_len // h_kv_len, -(-q_len // 64)
    together = 8 * group  # heads whose tiles run side by side
    q_tiles, k_tiles, slabs = triton.cdiv(q_len, 64), triton.cdiv(k_len, 64), b_len
    tables = torch.empty(slabs * (2 * k_tiles), dtype=torch.int32, device=q.device)
    scans = torch.empty(
        slabs * (4 * q_tiles), dtype=torch.int16 if max(k_tiles, q_tiles) < 32768 else torch.int32, device=q.device
    )
    document_forward_tables[(slabs * k_tiles,)](
        doc, tables, scans,
        *doc.stride(),
        q_len, k_len, b_len, h_len, group,
        q_tiles, k_tiles,
        TILE_Q=64, TILE_K=64, num_warps=1,
    )
    document_forward_scans[(slabs * q_tiles,)](
        doc, tables, scans,
        *doc.stride(),
        q_len, k_len, b_len, h_len, group,
        q_tiles, k_tiles,
        TILE_Q=64, TILE_K=64, num_warps=1,
    )
    # TMA takes keys and values at 16-byte-aligned addresses and strides;
    # document_forward_sm_90_any_stride.py takes the rest.
    document_forward[(b_len * h_len * q_tiles,)](
        q, TensorDescriptor(k, k.shape, k.stride(), [1, 1, 64, 128]),
        TensorDescriptor(v, v.shape, v.stride(), [1, 1, 64, 128]), out, lse, doc, tables, scans,
        *q.stride(),
        *doc.stride(),
        q_len, k_len, b_len, h_len, group, together,
        q_tiles, k_tiles,
        TILE_Q=64, TILE_K=64, num_warps=4, num_stages=3,
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
    doc = torch.randint(0, 100, (2, 331)).to(torch.int32)
    out, lse = forward(Q.to(device), K.to(device), V.to(device), doc=doc.to(device))
    out, lse = out.cpu(), lse.cpu()

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
    error = ((out - want).norm() / want.norm()).item()
    lse_error = torch.where(lse == want_lse[..., 0], 0.0, lse - want_lse[..., 0]).abs().max().item()
    print(f"output {error:.1e}, lse {lse_error:.1e} from float64")
    return 0 if error < 1e-2 and lse_error < 1e-3 else 1


if __name__ == "__main__":
    raise SystemExit(check())
