# attention gemma2(window: int = 4096, cap: float = 50.0, pre: float = 256.0) {
#     scale 1 / sqrt(pre)
#     mask  0 <= q - k < window
#     score cap * tanh(s / cap)
# }
#
# backward · fa3 · tile 64 × 128 · 2 stages · 8 warps · dQ added up by TMA, in any order, heads in turns
# sm_90, bf16, head size 128: 168 registers, 16 spills, 209 KB of shared memory
# Weights are worked out again from lse. A row that sees nothing: zero gradients.
# made by: attncc build gemma2.attn --pass backward --target sm_90     checked by: python gemma2_backward_sm_90.py

import functools

import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LOG2E = gl.constexpr(1.4426950408889634)
ELEMENT = gl.constexpr(gl.bfloat16)
TILE_Q, TILE_K = gl.constexpr(64), gl.constexpr(128)
KEYS = gl.constexpr(64)  # of each of the 2 consumers
STAGES = gl.constexpr(2)  # buffers of Q and d_out

# How registers hold what stands keys by rows, and the sums: as the matrix instruction of a warp group has them.
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OF_ROWS, OF_KEYS = gl.constexpr(gl.SliceLayout(0, SCORES.value)), gl.constexpr(gl.SliceLayout(1, SCORES.value))
KEY_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
VALUE_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
OF_DS = gl.constexpr(gl.DotOperandLayout(0, KEY_SUMS.value, 2))
OF_P = gl.constexpr(gl.DotOperandLayout(0, VALUE_SUMS.value, 2))
ROW_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
ADDING, CONVERTING = gl.constexpr(8), gl.constexpr(2)  # warps of a program that add to sums of dQ, that convert sums
RUN = gl.constexpr(gl.BlockedLayout([4], [32], [2], [0]))  # of sums in the order of registers
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ATOM = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))  # 64 columns

ONE, LANES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0])), gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))

# What the producer says of each tile of rows, beside 8 times its number.
LAST, MASKED = gl.constexpr(1), gl.constexpr(2)

# Words that Triton's versions spell differently.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


@builtin
def reduce_add(descriptor, coordinates, source, _semantic=None):
    """The TMA unit adds a tile of shared memory to what stands there; Gluon has no word for it before Triton 3.8."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    add = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(add, descriptor.handle, coordinates, source.handle)


add_tile = getattr(tma, "async_atomic_add", None) or reduce_add


@gluon.jit
def arrive(barrier):
    """Counts this consumer in at a hardware barrier of both, and goes on."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.b32 $0, 0;", "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def arrive_and_wait(barrier):
    """Waits there until the other has come too."""
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.b32 $0, 0;", "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def in_order_of_registers(x):
    """A tile of 64 x 64 sums as a row, in which each thread's registers stand side by side, four by four."""
    x = x.reshape([4, 2, 8, 8, 4, 2])  # warp, half, row, block of columns, pair of columns, column
    return x.permute([3, 0, 2, 4, 1, 5]).reshape([4096])


@gluon.jit
def count_in(counter):
    """Each warp counts there, behind all that its threads have written before."""
    gl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0;"
        " bar.warp.sync 0xffffffff; @first red.release.gpu.global.add.s32 [$1], 1; mov.b32 $0, 0; }",
        "=r,l", [counter.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def wait_for(counter, count):
    """Until so many warps have counted there; what they wrote before is seen from here on."""
    gl.inline_asm_elementwise(
        "{ .reg .pred few; .reg .b32 seen; again: ld.acquire.gpu.global.b32 seen, [$1]; setp.lt.s32 few, seen, $2;"
        " @few bra again; fence.proxy.async; mov.b32 $0, 0; }",
        "=r,l,r", [counter.to(gl.int64), count], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def wait_for_writes(but: gl.constexpr):
    """Until all that TMA was given to write is in memory, `but` for the last tiles."""
    gl.inline_asm_elementwise(
        f"cp.async.bulk.wait_group {but}; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def opaque_zero():
    """Keeps the compiler from working out dozens of addresses ahead of the loop, which registers have no room for."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def here(x):
    """x, as if it were not known before: what follows from it is worked out by each role, not held for all of them."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def as_float(x):
    """Two numbers of 16 bits in one register, with two instructions."""
    if x.dtype == gl.bfloat16:
        widen: gl.constexpr = "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }"
    else:
        widen: gl.constexpr = (
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
        )
    wide = gl.inline_asm_elementwise(widen, "=r,=r,r", [x], dtype=gl.int32, is_pure=True, pack=2)
    return wide.to(gl.float32, bitcast=True)


@gluon.jit
def each_key(x):
    """A value of each row, for all keys of a tile."""
    return gl.expand_dims(x, 0).broadcast_to([KEYS, TILE_Q])


@gluon.jit
def fast_tanh(x):
    """The hardware's own: off by 2^-11 of its value, half of what a 16-bit score would be off."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@triton.jit(
    do_not_specialize=[
        "q_len", "h_len", "zeroed"
    ],
)
def gemma2_backward_delta(
    Out, D_out, D_lse, Lse, Lse_2, Delta, Sums, Progress,
    stride_ob: "i64", stride_oh: "i64", stride_om: "i64", stride_od,
    stride_gb: "i64", stride_gh: "i64", stride_gm: "i64", stride_gd,
    q_len: "i32", h_len: "i32",
    zeroed: "i32",
    TILE_Q: tl.constexpr,
):
    # ---- a tile of rows of a head: the sum of d_out * out over each, less the gradient of its lse; and the lse
    tiles = tl.cdiv(q_len, TILE_Q)
    head, mine = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    b, h = head // h_len, head % h_len
    row = mine * TILE_Q + tl.arange(0, TILE_Q)[:, None]
    inside = row < q_len
    out_rows = Out + b * stride_ob + h * stride_oh + row * stride_om
    d_out_rows = D_out + b * stride_gb + h * stride_gh + row * stride_gm
    delta = tl.zeros([TILE_Q, 1], tl.float32)
    e = tl.arange(0, 128)
    out = tl.load(out_rows + e[None, :] * stride_od, inside, 0.0, eviction_policy="evict_first")
    d_out = tl.load(d_out_rows + e[None, :] * stride_gd, inside, 0.0, eviction_policy="evict_first")
    delta += tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1, keep_dims=True)
    at = head.to(tl.int64) * q_len + row
    if D_lse is not None:
        delta -= tl.load(D_lse + at, inside, 0.0)
    lse = tl.load(Lse + at, inside, float("-inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse)  # weights are 0 where rows see nothing, and below the last
    at = tl.program_id(0).to(tl.int64) * TILE_Q + tl.arange(0, TILE_Q)[:, None]
    tl.store(Lse_2 + at, lse * LOG2E)
    tl.store(Delta + at, -delta)
    if tl.program_id(0) < zeroed:
        tl.store(Sums + at * 128 + tl.arange(0, 128)[None, :], tl.zeros([TILE_Q, 128], tl.float32))
    tl.store(Progress + 2 * tl.program_id(0) + tl.arange(0, 2), tl.zeros([2], tl.int32))


@gluon.jit
def gemma2_backward_weights(s, lse, row, k, masked, b, h, h_kv, given):
    """Weights of a tile from the products s, and these times the slope of its scores."""
    q_len, k_len, b_len, h_len, group, together, window, cap, pre = given
    q = row + (k_len - q_len)
    scale = 1.0 / gl.sqrt_rn(pre)
    s = s * scale
    tanh_s = fast_tanh(s * (1.0 / cap))
    s = cap * tanh_s
    if masked:
        keep = ((q - k).to(gl.uint32) < gl.cast(gl.maximum(window, 0), gl.uint32)) & (row < q_len)
        s = gl.where(keep, s, float("-inf"))
    p = gl.exp2(s * LOG2E - lse)
    return p.to(ELEMENT), (p * (1.0 - tanh_s * tanh_s)).to(ELEMENT)


@gluon.jit
def gemma2_backward_chain(p, dp):
    """The derivative by the product, from that by the weight. p is rounded, as the output has it, times the slope."""
    ds = as_float(p) * dp
    return ds.to(p.dtype)


@gluon.jit
def gemma2_backward_rows(step, Keys, Slopes, mine_of: gl.constexpr):
    """64 x 64 of dQ for the tile of rows of a step, from the ds of both consumers."""
    tiles = reinterpret(Slopes, Slopes.dtype, [4, 64, 64], ATOM)  # consumer, step, 64 rows
    keys = reinterpret(Keys, Keys.dtype, [4, 64, 64], ATOM)  # consumer, 64 columns
    at = (step & 1)
    mine = mine_of + opaque_zero()
    d_q = gl.zeros([64, 64], gl.float32, ROW_SUMS)
    d_q = warpgroup_mma(tiles.index(at).permute((1, 0)), keys.index(mine), d_q, use_acc=False, is_async=True)
    return warpgroup_mma(tiles.index(2 + at).permute((1, 0)), keys.index(2 + mine), d_q, is_async=True)


@gluon.jit
def gemma2_backward_add(d_q, place, Partial, Sums, mine_of: gl.constexpr):
    """It is added to the sums of that tile of rows."""
    piece = place * 2 + mine_of
    tma.store_wait(0)
    Partial.index(mine_of).store(in_order_of_registers(d_q).reshape([16, 256]))
    fence_async_shared()
    add_tile(Sums, [piece * 16, 0], Partial.index(mine_of))


@gluon.jit
def gemma2_backward_consumer(shared, signals, args, mine_of: gl.constexpr, TURNS: gl.constexpr):
    """64 keys, and the rows that the producer hands out."""
    (
        Q, K, V, D_out, D_k, D_v, Lse_2, Delta, Sums, D_q, Progress, q_len, k_len, b_len, h_len, group,
        together, window, cap, pre, behind, ring,
    ) = args
    Keys, Values, Queries, Gradients, lses, deltas, orders, members, Slopes, Partial, Summed = shared
    key_full, value_full, query_full, gradient_full, used, key_read, sums_free, summed = signals
    # ---- which keys (heads in groups whose rows stay in L2, their first keys first)
    q_len, k_len, h_len, group = here(q_len), here(k_len), here(h_len), here(group)
    tiles = gl.cdiv(k_len, TILE_K)
    group_start = gl.program_id(0) // (together * tiles) * together
    group_size = gl.minimum(b_len * (h_len // group) - group_start, together)
    inside = gl.program_id(0) - group_start * tiles
    head_kv, mine = group_start + inside % group_size, inside // group_size
    b, h_kv = head_kv // (h_len // group), head_kv % (h_len // group)
    own = mine * TILE_K + mine_of * KEYS
    k = own + gl.expand_dims(gl.arange(0, KEYS, OF_KEYS), 1)
    given = (q_len, k_len, b_len, h_len, group, together, window, cap, pre)
    row_tiles = gl.cdiv(q_len, TILE_Q)
    if TURNS:
        first = head_kv % ring * (group * row_tiles)  # of this group's tiles of rows, among all whose sums are there
        after = ring * (group * row_tiles)
    else:
        first = (b * h_len + h_kv * group) * row_tiles
        after = b_len * h_len * row_tiles
    d_k = gl.zeros([KEYS, 128], gl.float32, KEY_SUMS)
    d_v = gl.zeros([KEYS, 128], gl.float32, VALUE_SUMS)

    # ---- the first tile of rows. All is waited for: what is in flight here makes the assembler wait everywhere
    mbarrier.wait(key_full, 0)
    mbarrier.wait(query_full.index(0), 0)
    s = warpgroup_mma(
        Keys.index(mine_of).reshape([KEYS, 128]),
        Queries.index(0).reshape([TILE_Q, 128]).permute((1, 0)),
        gl.zeros([KEYS, TILE_Q], gl.float32, SCORES),
        use_acc=False,
        is_async=True,
    )
    mbarrier.wait(value_full, 0)
    order, member = gl.max(orders.index(0).load(ONE), 0), gl.max(members.index(0).load(ONE), 0)
    s = warpgroup_mma_wait(0, deps=[s])
    row = order // 8 * TILE_Q + gl.expand_dims(gl.arange(0, TILE_Q, OF_ROWS), 0)
    p, factor = gemma2_backward_weights(
        s, each_key(lses.index(0).load(OF_ROWS)), row, k, order & MASKED != 0, b, h_kv * group + member, h_kv, given
    )
    mbarrier.wait(gradient_full.index(0), 0)
    dp = warpgroup_mma(
        Values.index(mine_of).reshape([KEYS, 128]),
        Gradients.index(0).reshape([TILE_Q, 128]).permute((1, 0)),
        each_key(deltas.index(0).load(OF_ROWS)),
        is_async=True,
    )
    d_v = warpgroup_mma(gl.convert_layout(p, OF_P), Gradients.index(0).reshape([TILE_Q, 128]), d_v, is_async=True)
    dp, d_v = warpgroup_mma_wait(0, deps=[dp, d_v])
    arrive(10 + mine_of)  # as if there were a tile before, with its ds
    before = after  # and its place behind all others
    if TURNS:
        mbarrier.wait(sums_free, 0)
    step = 0
    # the loop turns where nothing is in flight: registers have no room for more
    while order & LAST == 0:
        at = step % STAGES
        ds = gemma2_backward_chain(factor, dp)
        arrive_and_wait(8 + (step - 1 & 1) * 2 + (1 - mine_of))  # the other one's ds of the tile before is there
        Slopes.index(mine_of * 2 + (step & 1)).store(ds)
        fence_async_shared()
        d_k = warpgroup_mma(gl.convert_layout(ds, OF_DS), Queries.index(at).reshape([TILE_Q, 128]), d_k, is_async=True)

        # dQ lags by one tile: the other consumer's ds are there before they are asked for
        d_q = gemma2_backward_rows(step - 1, Keys, Slopes, mine_of)
        d_k = warpgroup_mma_wait(2, deps=[d_k])
        d_q = warpgroup_mma_wait(0, deps=[d_q])
        arrive(8 + (step & 1) * 2 + mine_of)  # ds is written, that of the tile before is read
        mbarrier.arrive(used.index(at))
        gemma2_backward_add(d_q, before, Partial, Sums, mine_of)
        before = first + member * row_tiles + order // 8
        step += 1
        at = step % STAGES
        # only now: the products of this consumer drain for a moment, filled by the other one's, with fewer registers in
        # flight
        mbarrier.wait(query_full.index(at), step // STAGES & 1)
        s = warpgroup_mma(
            Keys.index(mine_of + opaque_zero()).reshape([KEYS, 128]),
            Queries.index(at).reshape([TILE_Q, 128]).permute((1, 0)),
            gl.zeros([KEYS, TILE_Q], gl.float32, SCORES),
            use_acc=False,
            is_async=True,
        )
        order, member = gl.max(orders.index(at).load(ONE), 0), gl.max(members.index(at).load(ONE), 0)
        s = warpgroup_mma_wait(0, deps=[s])
        row = order // 8 * TILE_Q + gl.expand_dims(gl.arange(0, TILE_Q, OF_ROWS), 0)
        p, factor = gemma2_backward_weights(
            s,
            each_key(lses.index(at).load(OF_ROWS)),
            row,
            k,
            order & MASKED != 0,
            b,
            h_kv * group + member,
            h_kv,
            given,
        )
        mbarrier.wait(gradient_full.index(at), step // STAGES & 1)
        dp = warpgroup_mma(
            Values.index(mine_of + opaque_zero()).reshape([KEYS, 128]),
            Gradients.index(at).reshape([TILE_Q, 128]).permute((1, 0)),
            each_key(deltas.index(at).load(OF_ROWS)),
            is_async=True,
        )
        d_v = warpgroup_mma(gl.convert_layout(p, OF_P), Gradients.index(at).reshape([TILE_Q, 128]), d_v, is_async=True)
        dp, d_v = warpgroup_mma_wait(0, deps=[dp, d_v])

    # ---- the last tile of rows, whose own dQ follows at once
    at = step % STAGES
    ds = gemma2_backward_chain(factor, dp)
    arrive_and_wait(8 + (step - 1 & 1) * 2 + (1 - mine_of))  # the other one's ds of the tile before is there
    Slopes.index(mine_of * 2 + (step & 1)).store(ds)
    fence_async_shared()
    d_k = warpgroup_mma(gl.convert_layout(ds, OF_DS), Queries.index(at).reshape([TILE_Q, 128]), d_k, is_async=True)

    d_q = gemma2_backward_rows(step - 1, Keys, Slopes, mine_of)
    d_k, d_q = warpgroup_mma_wait(0, deps=[d_k, d_q])
    arrive(8 + (step & 1) * 2 + mine_of)
    gemma2_backward_add(d_q, before, Partial, Sums, mine_of)
    arrive_and_wait(8 + (step & 1) * 2 + (1 - mine_of))
    d_q = gemma2_backward_rows(step, Keys, Slopes, mine_of)
    d_q = warpgroup_mma_wait(0, deps=[d_q])
    mbarrier.arrive(key_read)
    gemma2_backward_add(d_q, first + member * row_tiles + order // 8, Partial, Sums, mine_of)

    # ---- both leave through the buffers of these keys, of which dQ of the other one reads K
    Values.index(mine_of).reshape([KEYS, 128]).store(d_v.to(ELEMENT))
    fence_async_shared()
    store_tile(D_v, [b, h_kv, own, 0], Values.index(mine_of))
    scale = 1.0 / gl.sqrt_rn(pre)
    d_k = (d_k * scale).to(ELEMENT)
    mbarrier.wait(key_read, 0)
    Keys.index(mine_of).reshape([KEYS, 128]).store(d_k)
    fence_async_shared()
    store_tile(D_k, [b, h_kv, own, 0], Keys.index(mine_of))
    if TURNS:
        wait_for_writes(2)  # but for dK and dV
        count_in(Progress + 2 * here(first))
    tma.store_wait(0)


@gluon.jit
def gemma2_backward_load(order, member, loaded, b, h_kv, mine, shared, signals, args):
    """Hands an order on and loads its rows, and V behind the first Q."""
    (
        Q, K, V, D_out, D_k, D_v, Lse_2, Delta, Sums, D_q, Progress, q_len, k_len, b_len, h_len, group,
        together, window, cap, pre, behind, ring,
    ) = args
    Keys, Values, Queries, Gradients, lses, deltas, orders, members, Slopes, Partial, Summed = shared
    key_full, value_full, query_full, gradient_full, used, key_read, sums_free, summed = signals
    at, h = loaded % STAGES, h_kv * group + member
    place = (b * h_len + h) * gl.cdiv(q_len, TILE_Q) + order // 8  # among all tiles of rows
    mbarrier.wait(used.index(at), loaded // STAGES & 1 ^ 1)
    mbarrier.expect(query_full.index(at), TILE_Q * 260)
    load_tile(Q, [b, h, order // 8 * TILE_Q, 0], query_full.index(at), Queries.index(at))
    load_tile(Lse_2, [place * TILE_Q], query_full.index(at), lses.index(at))
    orders.index(at).store(gl.full([1], 0, gl.int32, LANES) + order)
    members.index(at).store(gl.full([1], 0, gl.int32, LANES) + member)
    mbarrier.arrive(query_full.index(at))
    if loaded == 0:
        mbarrier.expect(value_full, TILE_K * 256)
        for i in gl.static_range(2):
            load_tile(V, [b, h_kv, mine * TILE_K + i * KEYS, 0], value_full, Values.index(i))
    mbarrier.expect(gradient_full.index(at), TILE_Q * 260)
    load_tile(D_out, [b, h, order // 8 * TILE_Q, 0], gradient_full.index(at), Gradients.index(at))
    load_tile(Delta, [place * TILE_Q], gradient_full.index(at), deltas.index(at))
    return loaded + 1


@gluon.jit
def gemma2_backward_producer(shared, signals, args):
    """Loads the keys, then the tiles of rows that see them, of all heads of the group, in the order of their use."""
    (
        Q, K, V, D_out, D_k, D_v, Lse_2, Delta, Sums, D_q, Progress, q_len, k_len, b_len, h_len, group,
        together, window, cap, pre, behind, ring,
    ) = args
    Keys, Values, Queries, Gradients, lses, deltas, orders, members, Slopes, Partial, Summed = shared
    key_full, value_full, query_full, gradient_full, used, key_read, sums_free, summed = signals
    # ---- which keys (heads in groups whose rows stay in L2, their first keys first)
    q_len, k_len, h_len, group = here(q_len), here(k_len), here(h_len), here(group)
    tiles = gl.cdiv(k_len, TILE_K)
    group_start = gl.program_id(0) // (together * tiles) * together
    group_size = gl.minimum(b_len * (h_len // group) - group_start, together)
    inside = gl.program_id(0) - group_start * tiles
    head_kv, mine = group_start + inside % group_size, inside // group_size
    b, h_kv = head_kv // (h_len // group), head_kv % (h_len // group)
    mbarrier.expect(key_full, TILE_K * 256)
    for i in gl.static_range(2):
        load_tile(K, [b, h_kv, mine * TILE_K + i * KEYS, 0], key_full, Keys.index(i))
    loaded = 0
    pending, whose = -1, 0  # the order before and its head, handed on when it is known whether another follows
    edge = gl.where(mine * TILE_K + TILE_K > k_len, MASKED, 0)  # keys behind the last have to be left out everywhere
    for member in range(group):
        first_key, last_key = mine * TILE_K, gl.minimum(mine * TILE_K + TILE_K, k_len) - 1
        row_low = first_key + q_len - k_len
        begin = gl.maximum(row_low, 0) // TILE_Q
        row_high = last_key + q_len - k_len
        end = (gl.maximum(gl.minimum(q_len, row_high + window), 0) + TILE_Q - 1) // TILE_Q
        full_begin = gl.minimum(end, (gl.maximum(row_high, 0) + TILE_Q - 1) // TILE_Q)
        full_end = gl.maximum(gl.maximum(gl.minimum(q_len, row_low + window), 0) // TILE_Q, full_begin)
        full_0 = gl.maximum(full_end - full_begin, 0)
        masked_0 = gl.maximum(full_begin - begin, 0)
        masked_1 = masked_0 + gl.maximum(end - full_end, 0)
        masked_steps = masked_1
        for count in range(masked_steps + full_0):
            nth = count
            order = (gl.where(nth < masked_0, begin, full_end - masked_0) + nth) * 8 + MASKED
            if count >= masked_steps:
                nth = count - masked_steps
                order = (full_begin + nth) * 8
            if pending >= 0:
                loaded = gemma2_backward_load(pending, whose, loaded, b, h_kv, mine, shared, signals, args)
            pending, whose = order | edge, member
    if pending < 0:
        pending = MASKED  # a tile of which these keys are not seen: nothing comes of it
    loaded = gemma2_backward_load(pending + LAST, whose, loaded, b, h_kv, mine, shared, signals, args)


@gluon.jit
def gemma2_backward_converter(shared, signals, args):
    """This program's share of dQ of a head of K to whose sums all was added, which are zero again then."""
    (
        Q, K, V, D_out, D_k, D_v, Lse_2, Delta, Sums, D_q, Progress, q_len, k_len, b_len, h_len, group,
        together, window, cap, pre, behind, ring,
    ) = args
    Keys, Values, Queries, Gradients, lses, deltas, orders, members, Slopes, Partial, Summed = shared
    key_full, value_full, query_full, gradient_full, used, key_read, sums_free, summed = signals
    # ---- which keys (heads in groups whose rows stay in L2, their first keys first)
    q_len, k_len, h_len, group = here(q_len), here(k_len), here(h_len), here(group)
    tiles = gl.cdiv(k_len, TILE_K)
    group_start = gl.program_id(0) // (together * tiles) * together
    group_size = gl.minimum(b_len * (h_len // group) - group_start, together)
    inside = gl.program_id(0) - group_start * tiles
    head_kv, mine = group_start + inside % group_size, inside // group_size
    b, h_kv = head_kv // (h_len // group), head_kv % (h_len // group)
    row_pieces = gl.cdiv(q_len, TILE_Q) * 1
    pieces = group * row_pieces * 2
    if head_kv >= ring:  # those who had these sums before: theirs are zero again
        wait_for(Progress + head_kv % ring * pieces + 1, head_kv // ring * tiles * CONVERTING)
    mbarrier.arrive(sums_free)
    if head_kv >= behind:
        head_kv -= behind
        from_piece = head_kv % ring * pieces
        wait_for(Progress + from_piece, (head_kv // ring + 1) * tiles * ADDING)
        scale = 1.0 / gl.sqrt_rn(pre)
        i = gl.arange(0, 512, RUN)  # 8 columns: of warps, rows, pairs of columns, halves
        row, column = i // 128 * 16 + i // 2 % 2 * 8 + i // 16 % 8, i // 4 % 4 * 2 + i % 2
        eighths = reinterpret(Summed, gl.float32, [8, 512], FLAT)
        phase = 0
        for piece in range(mine, pieces, tiles):
            mbarrier.expect(summed, 4096 * 4)
            load_tile(Sums, [(from_piece + piece) * 16, 0], summed, Summed)
            place = piece // 2
            first_row = place % row_pieces * 64
            at = ((head_kv * group + place // row_pieces).to(gl.int64) * q_len + first_row) * 128
            first_column = piece % 2 * 64
            mbarrier.wait(summed, phase)
            phase ^= 1
            for eighth in gl.static_range(8):
                x = eighths.index(eighth).load(RUN)
                eighths.index(eighth).store(gl.zeros([512], gl.float32, RUN))
                to = D_q + at + (first_column + eighth * 8) + (row * 128 + column)
                stored = row < q_len - first_row
                gl.store(to, (x * scale).to(ELEMENT), stored)
            fence_async_shared()
            store_tile(Sums, [(from_piece + piece) * 16, 0], Summed)
            tma.store_wait(0)
        wait_for_writes(0)
        count_in(Progress + from_piece + 1)


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(made.index(i), count=arrivals)
    return made


@gluon.jit(
    do_not_specialize=[
        "q_len", "k_len", "b_len", "h_len", "group", "together", "window", "cap", "pre", "behind", "ring"
    ],
)
def gemma2_backward(
    Q, K, V, D_out, D_k, D_v, Lse_2, Delta, Sums, D_q, Progress,
    q_len: "i32", k_len: "i32", b_len: "i32", h_len: "i32", group: "i32", together: "i32",
    window: "i32", cap: "fp32", pre: "fp32",
    behind: "i32", ring: "i32",
    TURNS: tl.constexpr,
):
    Keys = gl.allocate_shared_memory(K.dtype, [2, 1, 1, KEYS, 128], K.layout)
    Values = gl.allocate_shared_memory(V.dtype, [2, 1, 1, KEYS, 128], V.layout)
    Queries = gl.allocate_shared_memory(Q.dtype, [STAGES, 1, 1, TILE_Q, 128], Q.layout)
    Gradients = gl.allocate_shared_memory(D_out.dtype, [STAGES, 1, 1, TILE_Q, 128], D_out.layout)
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_Q], Lse_2.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_Q], Delta.layout)
    orders = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    members = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    Slopes = gl.allocate_shared_memory(K.dtype, [4, KEYS, TILE_Q], ATOM)  # ds of two steps of each consumer
    Partial = gl.allocate_shared_memory(gl.float32, [2, 16, 256], Sums.layout)  # dQ on its way
    if TURNS:
        Summed = gl.allocate_shared_memory(gl.float32, [16, 256], Sums.layout)  # and on its way back
    else:
        Summed = Partial
    key_full, value_full = barriers(1, 1).index(0), barriers(1, 1).index(0)
    query_full, gradient_full, used = barriers(STAGES, 2), barriers(STAGES, 1), barriers(STAGES, 2)
    key_read = barriers(1, 2).index(0)
    if TURNS:
        sums_free, summed = barriers(1, 1).index(0), barriers(1, 1).index(0)
    else:
        sums_free, summed = key_read, key_read
    shared = (Keys, Values, Queries, Gradients, lses, deltas, orders, members, Slopes, Partial, Summed)
    signals = (key_full, value_full, query_full, gradient_full, used, key_read, sums_free, summed)
    args = (
        Q,
        K,
        V,
        D_out,
        D_k,
        D_v,
        Lse_2,
        Delta,
        Sums,
        D_q,
        Progress,
        q_len,
        k_len,
        b_len,
        h_len,
        group,
        together,
        window,
        cap,
        pre,
        behind,
        ring,
    )
    number_0: gl.constexpr = 0
    number_1: gl.constexpr = 1
    if TURNS:
        gl.warp_specialize(
            [
                (gemma2_backward_consumer, (shared, signals, args, number_0, TURNS)),
                (gemma2_backward_consumer, (shared, signals, args, number_1, TURNS)),
                (gemma2_backward_producer, (shared, signals, args)),
                (gemma2_backward_converter, (shared, signals, args)),
            ],
            [4, 1, CONVERTING],
            [240, 32, 32],
        )
    else:
        gl.warp_specialize(
            [
                (gemma2_backward_consumer, (shared, signals, args, number_0, TURNS)),
                (gemma2_backward_consumer, (shared, signals, args, number_1, TURNS)),
                (gemma2_backward_producer, (shared, signals, args)),
            ],
            [4, 1],
            [240, 24],
        )


@triton.jit(
    do_not_specialize=[
        "q_len", "kept", "converted", "window", "cap", "pre"
    ],
)
def gemma2_backward_convert(
    Sums, D_q,
    q_len: "i32",
    kept: "i32", converted: "i32",
    window: "i32", cap: "fp32", pre: "fp32",
    TILE_Q: tl.constexpr,
):
    # ---- 64 rows of a head, whose sums stand in the order of registers
    tiles = tl.cdiv(q_len, TILE_Q) * (TILE_Q // 64)
    head, mine = converted + tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = mine * 64 + tl.arange(0, 64)
    scale = 1.0 / tl.sqrt_rn(pre)
    for i in tl.static_range(2):
        piece = ((head % kept).to(tl.int64) * tiles + mine) * 2 + i
        x = tl.load(Sums + piece * 4096 + tl.arange(0, 4096), eviction_policy="evict_first") * scale
        x = tl.reshape(x, (8, 4, 8, 4, 2, 2))  # block of columns, warp, row, pair of columns, half, column
        x = tl.reshape(tl.permute(x, (1, 4, 2, 0, 3, 5)), (64, 64))
        column = i * 64 + tl.arange(0, 64)[None, :]
        at = (head.to(tl.int64) * q_len + row[:, None]) * 128 + column
        inside = (row[:, None] < q_len)
        tl.store(D_q + at, x.to(D_q.dtype.element_ty), inside)


@functools.cache
def shared_layout(swizzle, bits, rank):
    """How shared memory holds a tile. To make one takes the host longer than a launch."""
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


def described(x, rows, columns):
    """Tiles of so many rows of one head, as the TMA unit loads and stores them: 0 and nothing beyond the last row."""
    return TensorDescriptor(x, x.shape, x.stride(), [1, 1, rows, columns], shared_layout(min(128, 2 * columns), 16, 4))


def described_row(x, count):
    """So many numbers of x side by side, as the TMA unit loads them."""
    return TensorDescriptor(x, x.shape, x.stride(), [count], shared_layout(0, 32, 1))


def described_sums(x):
    """A piece of dQ's sums, to which the TMA unit adds."""
    return TensorDescriptor(x, x.shape, x.stride(), [16, 256], shared_layout(0, 32, 2))


def within_reach(x):
    """x where the TMA unit can address it, else a copy of it."""
    *outer, last = x.stride()
    reached = last == 1 and min(outer) > 0 and all(s % 8 == 0 for s in outer) and x.data_ptr() % 16 == 0
    return x if reached else x.clone(memory_format=torch.contiguous_format)


def in_turns(heads, row_tiles, key_tiles, together):
    """How many heads of K go together, after how many more the sums of one are converted, how many have sums at a time.

    What a program waits for is done by programs of earlier groups, which began before it: `behind` is at least the
    size of a group, and so is `ring - behind`. Nobody waits long, since programs on all processors began in between.
    Each head has sums of its own where L2 has no room for so many.
    """
    begun = triton.cdiv(132, key_tiles)  # heads that programs work at, one on each processor
    few = 1
    room, behind = min(heads, 33554432 // (32768 * row_tiles)), few + begun - 1
    if room <= behind + few:
        return together, heads, heads
    return few, behind, min(room, behind + few + begun)


def backward(q, k, v, out, lse, d_out, d_lse=None, *, window=4096, cap=50.0, pre=256.0):
    """q [B, H, Q, 128], k [B, H_kv, K, 128], v [B, H_kv, K, 128], out and d_out [B, H, Q, 128] in bf16,
    lse and d_lse [B, H, Q] in float32; any strides, what TMA cannot address is copied; d_lse may be None.

    Returns d_q, d_k, d_v, and the gradients of parameters by name. dQ is added up in any order."""
    (b_len, h_len, q_len, _), (_, h_kv_len, k_len, _) = q.shape, k.shape
    if not (q.numel() and k.numel()):
        gradients = {}
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), gradients
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    q, k, v, out, d_out = (within_reach(x) for x in (q, k, v, out, d_out.to(q.dtype)))
    lse, d_lse = lse.contiguous(), None if d_lse is None else d_lse.to(torch.float32).contiguous()
    group, slots = h_len // h_kv_len, b_len * h_len * triton.cdiv(q_len, 64)
    row_tiles = triton.cdiv(q_len, 64)
    lse_2, delta = torch.empty((2, slots * 64), dtype=torch.float32, device=q.device)
    together = max(1, 33554432 // (1024 * min(q_len, 2048) * group))  # heads of K whose rows L2 holds
    together, behind, ring = in_turns(b_len * h_kv_len, group * row_tiles, triton.cdiv(k_len, 128), together)
    kept, converted = ring * group, (b_len * h_kv_len - behind) * group
    zeroed = kept * row_tiles
    # dQ is added up in float32, tile by tile in the order of registers; behind the last is one that nobody reads
    sums = torch.empty(((zeroed + 1) * 32, 256), dtype=torch.float32, device=q.device)
    progress = torch.empty(2 * slots, dtype=torch.int32, device=q.device)
    gemma2_backward_delta[(slots,)](
        out, d_out, d_lse, lse, lse_2, delta, sums, progress,
        *out.stride(),
        *d_out.stride(),
        q_len, h_len,
        zeroed,
        TILE_Q=64, num_warps=4,
    )
    gemma2_backward[(b_len * h_kv_len * triton.cdiv(k_len, 128),)](
        described(q, 64, 128), described(k, 64, 128), described(v, 64, 128), described(d_out, 64, 128),
        described(d_k, 64, 128), described(d_v, 64, 128), described_row(lse_2, 64), described_row(delta, 64),
        described_sums(sums), d_q, progress,
        q_len, k_len, b_len, h_len, group, together,
        window, cap, pre,
        behind, ring,
        TURNS=behind < b_len * h_kv_len, num_warps=4,
    )
    gemma2_backward_convert[((slots - converted * row_tiles) * 1,)](
        sums, d_q,
        q_len,
        kept, converted,
        window, cap, pre,
        TILE_Q=64, num_warps=4,
    )
    return d_q, d_k, d_v, {}


def check():
    """Each gradient along a random direction against a difference in float64. Returns the exit status."""

    def tensor(x):
        return (
            x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None)
        )

    def tanh(x):
        return torch.tanh(tensor(x))

    def sqrt(x):
        return torch.sqrt(tensor(x))

    if not torch.cuda.is_available() or torch.version.hip or torch.cuda.get_device_capability() != (9, 0):
        print("this kernel is for sm_90, and there is none here")
        return 3
    torch.manual_seed(0)
    device = "cuda"
    kind = torch.bfloat16
    sizes = (4, 300, 128), (2, 331, 128), (2, 331, 128)
    Q, K, V = (torch.randn(2, *size).to(kind) for size in sizes)
    window = 100
    cap = 50.0
    pre = 256.0

    def dense(Q, K, V):
        (B, H, q_len, D), (H_kv, k_len), dtype = Q.shape, K.shape[1:3], torch.float64
        batch, heads, rows, keys, group = slice(None), slice(None), slice(None), slice(None), H // H_kv
        b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
        row, k = torch.arange(q_len)[:, None], torch.arange(k_len)
        q = row + (k_len - q_len)
        s = Q.double() @ K.double().repeat_interleave(group, 1).mT * (1.0 / sqrt(pre))
        s = cap * tanh(s / cap)
        keep = (0 <= q - k) & (q - k < window)
        s.masked_fill_(~keep, -torch.inf)
        want_lse = torch.logsumexp(s, -1, keepdim=True)
        p = torch.where(s == -torch.inf, 0.0, torch.exp(s - want_lse))
        want = p @ V.double().repeat_interleave(group, 1)
        return want, want_lse[..., 0]

    inputs = [Q, K, V]
    out, lse = dense(*inputs)
    d_out, d_lse = torch.randn(out.shape).to(kind), torch.randn(lse.shape)
    given = (x.to(device) for x in (Q, K, V, out.to(kind), lse.float(), d_out, d_lse))
    d_q, d_k, d_v, more = backward(*given, window=window, cap=cap, pre=pre)
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
