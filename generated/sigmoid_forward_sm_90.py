# attention sigmoid(shift: f32[h] grad) {
#     mask    k <= q
#     softmax sigmoid(shift[h])
# }
#
# forward · fa3 · tile 128 × 64 · 4 stages · 8 warps · K and V by TMA · weights of the scores alone
# sm_90, bf16, head size 128: 168 registers, no spills, 192 KB of shared memory
# HBM: Q and Out once, K and V once for each tile of rows that sees them. Rows without keys give 0.
# made by: attncc build sigmoid.attn --target sm_90     checked by: python sigmoid_forward_sm_90.py

import functools

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language._semantic import GluonCallerContext
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-3.4028234663852886e38)  # of float32
TILE_Q, TILE_K = gl.constexpr(128), gl.constexpr(64)
ROWS = gl.constexpr(64)  # of each of the 2 consumers
STAGES, QUERIES = gl.constexpr(4), gl.constexpr(2)  # buffers of K and V, and of Q for each consumer

# How registers hold scores, weights and output: as the matrix instruction of a warp group leaves and takes them.
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, OUTPUT.value, 2))
OF_ROWS, OF_KEYS = gl.constexpr(gl.SliceLayout(1, SCORES.value)), gl.constexpr(gl.SliceLayout(0, SCORES.value))

ONE, LANES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0])), gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))

# What the producer says of each tile of keys, beside 128 times its number.
LAST, MASKED, RAISES = gl.constexpr(1), gl.constexpr(2), gl.constexpr(4)
PLAIN = gl.constexpr(8)  # the next tile needs no mask
ENOUGH = gl.constexpr(16)  # the first consumer needs no more; the bits above it are for the others

# Words that Triton's versions spell differently.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
meet = getattr(gl, "barrier", None) or gl.thread_barrier


@builtin
def as_worker(function, args, _semantic=None, _generator=None):
    """Called as by a worker of four warps: the first consumer, no worker, shares what Triton read for others."""
    _generator.call_JitFunction(function, args, {}, caller_context=GluonCallerContext(4))


@gluon.jit
def here_again(x):
    """The same numbers, which the compiler takes for others: what is made of them it would work out before the roles
    part, and keep in registers of them all."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def as_rows(x, layout: gl.constexpr):
    """A value of each row, for a tile of that layout. All of them give a row to the same threads, so nothing moves."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, layout), assert_trivial=True), 1)


@gluon.jit
def row_maximum(s):
    """Each thread's own part in chains side by side first, then across the four threads of a row."""
    chains = gl.max(gl.reshape(s, [ROWS, TILE_K // 16, 16]), 1)
    return gl.convert_layout(gl.max(chains, 1), OF_ROWS, assert_trivial=True)


@gluon.jit
def thread_sums(p):
    """What each thread adds to its rows' sums: they are added across threads once, at the end."""
    return gl.convert_layout(gl.sum(gl.reshape(p, [ROWS, TILE_K // 8, 8]), 1), SUMS, assert_trivial=True)


@gluon.jit
def hand_out(drawn, drawn_full, drawn_used, turn, b, h, mine, again):
    """Says which tile of rows comes next: tile `mine` of a head; -1 where nothing is left."""
    at = turn % 2
    mbarrier.wait(drawn_used.index(at), turn // 2 & 1 ^ 1)
    zero = gl.full([1], 0, gl.int32, LANES)
    drawn.index(4 * at).store(zero + b)
    drawn.index(4 * at + 1).store(zero + h)
    drawn.index(4 * at + 2).store(zero + mine)
    drawn.index(4 * at + 3).store(zero + again)
    mbarrier.arrive(drawn_full.index(at))


@gluon.jit
def handed(drawn, turn):
    """The consumer's side of it. Read again behind a loop, so that no registers hold it in the loop."""
    at = turn % 2 * 4
    b, h = gl.max(drawn.index(at).load(ONE), 0), gl.max(drawn.index(at + 1).load(ONE), 0)
    return b, h, gl.max(drawn.index(at + 2).load(ONE), 0), gl.max(drawn.index(at + 3).load(ONE), 0)


def sigmoid_assembly():
    """What a thread makes of 32 exponents, packed in pairs as they are multiplied: e^x - e^2x of packed exponentials,
    off by less than e^2x of it, where all of a warp are below 2^-5; else two share a reciprocal, as e^x (1 + e^y) and
    e^y (1 + e^x), over (1 + e^x) (1 + e^y)."""
    made, exponents = [f"${i}" for i in range(16)], [f"${i}" for i in range(16, 48)]
    lines = ["{ .reg .pred large; .reg .f32 a, b, x, y, e<32>; .reg .b32 limit, less, pair<16>, most<2>;"]
    lines += ["mov.b32 most0, 0; mov.b32 most1, 0; mov.b32 limit, 0x3D003D00;"]
    for i in range(32):
        lines += [f"ex2.approx.ftz.f32 e{i}, {exponents[i]};"]
    for i in range(16):
        lines += [f"cvt.rn.bf16x2.f32 pair{i}, e{2 * i + 1}, e{2 * i};"]
        lines += [f"max.NaN.bf16x2 most{i % 2}, most{i % 2}, pair{i};"]
        # without a rounding's name the product joins the difference: one instruction
        lines += [f"mul.bf16x2 less, pair{i}, pair{i}; sub.bf16x2 {made[i]}, pair{i}, less;"]
    lines += ["max.NaN.bf16x2 most0, most0, most1; set.gtu.bf16x2.bf16x2 less, most0, limit;"]
    lines += ["setp.ne.b32 large, less, 0; vote.sync.any.pred large, large, -1; @!large bra.uni DONE;"]
    for i in range(16):
        # up to 2^60, which leaves room for the product of two
        lines += [f"min.NaN.f32 x, e{2 * i}, 0f5D800000; min.NaN.f32 y, e{2 * i + 1}, 0f5D800000;"]
        lines += ["add.f32 a, x, 1.0; add.f32 b, y, 1.0;"]
        lines += ["mul.f32 x, x, b; mul.f32 y, y, a; mul.f32 a, a, b; rcp.approx.ftz.f32 a, a;"]
        lines += [f"mul.f32 x, x, a; mul.f32 y, y, a; cvt.rn.bf16x2.f32 {made[i]}, y, x;"]
    return "\n".join([*lines, "DONE: }"])


SIGMOIDS = gl.constexpr(sigmoid_assembly())
SIGMOID_REGISTERS = gl.constexpr(",".join(["=&r"] * 16 + ["f"] * 32))


@gluon.jit
def sigmoids(x):
    """Sigmoids of a tile, whose exponentials are 2^x."""
    return gl.inline_asm_elementwise(SIGMOIDS, SIGMOID_REGISTERS, [x], dtype=gl.bfloat16, is_pure=True, pack=32)


@gluon.jit
def sigmoid_forward_weights(s, tile, args, here, masked, raises):
    """Weights of a tile of keys from the products s."""
    Q, K, V, Out, Drawn, shift_, stride_shift_, q_len, k_len, b_len, h_len, group, together = args
    b, h, h_kv, row, q, shift__h, scale, offset = here
    k = tile * TILE_K + gl.expand_dims(gl.arange(0, TILE_K, OF_KEYS), 0)
    if masked:
        keep = (k <= q)
        s = gl.where(keep, s, float("-inf"))
    p = sigmoids(s * scale + offset)

    return p


@gluon.jit
def sigmoid_forward_tile(
    order, weights, out, query, loaded, b, h, h_kv, shared, signals, args, here, mine_of, plain: gl.constexpr
):
    """One more tile of keys: its products with the queries, those of the tile before under its weights.

    A `plain` tile needs no mask."""
    Q, K, V, Out, Drawn, shift_, stride_shift_, q_len, k_len, b_len, h_len, group, together = args
    Queries, Keys, Values, drawn, orders = shared
    query_full, query_used, key_full, value_full, used, drawn_full, drawn_used = signals
    at = loaded % STAGES
    before = (loaded - 1) % STAGES
    mbarrier.wait(key_full.index(at), loaded // STAGES & 1)
    s = warpgroup_mma(
        query,
        Keys.index(at).reshape([TILE_K, 128]).permute((1, 0)),
        gl.zeros([ROWS, TILE_K], gl.float32, SCORES),
        use_acc=False,
        is_async=True,
    )

    mbarrier.wait(value_full.index(before), (loaded - 1) // STAGES & 1)
    out = warpgroup_mma(weights, Values.index(before).reshape([TILE_K, 128]), out, is_async=True)

    order = gl.max(orders.index(at).load(ONE), 0)
    s = warpgroup_mma_wait(1, deps=[s])
    if plain:
        p = sigmoid_forward_weights(s, order // 128, args, here, False, True)
    else:
        p = sigmoid_forward_weights(s, order // 128, args, here, order & MASKED != 0, True)
    out = warpgroup_mma_wait(0, deps=[out])
    mbarrier.arrive(used.index(at))
    weights = gl.convert_layout(p.to(Out.dtype), WEIGHTS)
    return order, weights, out


@gluon.jit
def sigmoid_forward_tiles(order, weights, out, query, loaded, b, h, h_kv, shared, signals, args, here, mine_of):
    """All tiles of keys but the first."""
    while order & (ENOUGH << mine_of) == 0:
        while order & PLAIN != 0:
            order, weights, out = sigmoid_forward_tile(
                order, weights, out, query, loaded, b, h, h_kv, shared, signals, args, here, mine_of, True
            )
            loaded += 1
        while order & (PLAIN | (ENOUGH << mine_of)) == 0:
            order, weights, out = sigmoid_forward_tile(
                order, weights, out, query, loaded, b, h, h_kv, shared, signals, args, here, mine_of, False
            )
            loaded += 1
    return order, weights, out, loaded


@gluon.jit
def sigmoid_forward_rows(b, h, mine, again, loaded, turn, shared, signals, args, mine_of):
    """64 rows of a tile that the producer handed out; the tiles of keys that were loaded until then."""
    Q, K, V, Out, Drawn, shift_, stride_shift_, q_len, k_len, b_len, h_len, group, together = args
    Queries, Keys, Values, drawn, orders = shared
    query_full, query_used, key_full, value_full, used, drawn_full, drawn_used = signals
    h_kv = h // group
    shift__h = gl.load(shift_ + h * stride_shift_)
    scale = 0.08838834764831845 * LOG2E
    offset = shift__h * LOG2E
    buffer = mine_of * QUERIES + turn % QUERIES
    query = Queries.index(buffer).reshape([ROWS, 128])
    own = mine * TILE_Q + mine_of * ROWS
    row = own + gl.expand_dims(gl.arange(0, ROWS, OF_ROWS), 1)
    q = row + (here_again(k_len) - q_len)
    here = (b, h, h_kv, row, q, shift__h, scale, offset)
    out = gl.zeros([ROWS, 128], gl.float32, OUTPUT)

    # ---- the first tile of keys; from then on, the products of one tile run under the weights of the next
    at = loaded % STAGES
    mbarrier.wait(query_full.index(buffer), turn // QUERIES & 1)
    mbarrier.wait(key_full.index(at), loaded // STAGES & 1)
    s = warpgroup_mma(
        query,
        Keys.index(at).reshape([TILE_K, 128]).permute((1, 0)),
        gl.zeros([ROWS, TILE_K], gl.float32, SCORES),
        use_acc=False,
        is_async=True,
    )

    order = gl.max(orders.index(at).load(ONE), 0)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(used.index(at))
    p = sigmoid_forward_weights(s, order // 128, args, here, order & MASKED != 0, True)
    weights = gl.convert_layout(p.to(Out.dtype), WEIGHTS)
    tma.store_wait(0)  # the output of the tile of rows before has left its buffer
    mbarrier.arrive(query_used.index(mine_of * QUERIES + (turn + 1) % QUERIES), pred=turn > 0)
    loaded += 1
    order, weights, out, loaded = sigmoid_forward_tiles(
        order, weights, out, query, loaded, b, h, h_kv, shared, signals, args, here, mine_of
    )
    before = (loaded - 1) % STAGES
    mbarrier.wait(value_full.index(before), (loaded - 1) // STAGES & 1)
    out = warpgroup_mma(weights, Values.index(before).reshape([TILE_K, 128]), out, is_async=True)


    # ---- the output
    b, h, mine, again = handed(drawn, turn)
    mbarrier.arrive(drawn_used.index(turn % 2))
    own = mine * TILE_Q + mine_of * ROWS
    out = warpgroup_mma_wait(0, deps=[out])
    while order & LAST == 0:  # tiles that others see, and these rows do not
        at = loaded % STAGES
        mbarrier.wait(key_full.index(at), loaded // STAGES & 1)
        order = gl.max(orders.index(at).load(ONE), 0)
        mbarrier.arrive(used.index(at))
        loaded += 1
    result = query
    result.store((out).to(Out.dtype))
    fence_async_shared()
    meet()
    if (own < q_len):
        store_tile(Out, [b, h, own, 0], result.reshape([1, 1, ROWS, 128]))
    return loaded


@gluon.jit
def sigmoid_forward_consume(shared, signals, args, mine_of):
    """64 rows of each tile that the producer hands out: products, weights, and the output's store."""
    Queries, Keys, Values, drawn, orders = shared
    query_full, query_used, key_full, value_full, used, drawn_full, drawn_used = signals
    loaded = 0  # tiles of keys before this tile of rows
    turn = 0  # tiles of rows
    mbarrier.wait(drawn_full.index(0), 0)
    b, h, mine, again = handed(drawn, 0)
    while mine >= 0:
        loaded = sigmoid_forward_rows(b, h, mine, again, loaded, turn, shared, signals, args, mine_of)
        turn += 1
        mbarrier.wait(drawn_full.index(turn % 2), turn // 2 & 1)
        b, h, mine, again = handed(drawn, turn)
    tma.store_wait(0)


@gluon.jit
def sigmoid_forward_consumer(shared, signals, args, mine_of: gl.constexpr):
    """Its number as a value, so that what it calls is read once for all of them."""
    as_worker(sigmoid_forward_consume, (shared, signals, args, gl.to_tensor(mine_of)))


@gluon.jit
def sigmoid_forward_reach(first_row, b, h, h_kv, args):
    """The end of what rows from `first_row` on see, as many as a consumer has, in tiles of keys."""
    Q, K, V, Out, Drawn, shift_, stride_shift_, q_len, k_len, b_len, h_len, group, together = args
    last_row = gl.minimum(first_row + ROWS, q_len) - 1
    q_high = last_row + k_len - q_len
    end = (gl.maximum(q_high + 1, 0) + TILE_K - 1) // TILE_K
    return end


@gluon.jit
def sigmoid_forward_load(order, fresh, loaded, turn, b, h, h_kv, mine, shared, signals, args):
    """Hands an order on and loads its keys and values, and Q where it is the first for these rows."""
    Q, K, V, Out, Drawn, shift_, stride_shift_, q_len, k_len, b_len, h_len, group, together = args
    Queries, Keys, Values, drawn, orders = shared
    query_full, query_used, key_full, value_full, used, drawn_full, drawn_used = signals
    tile = order // 128
    # `used` arrives for the i-th time when K of step i and V of the step before are read
    at = loaded % STAGES
    mbarrier.wait(used.index(at), loaded // STAGES & 1 ^ 1)
    orders.index(at).store(gl.full([1], 0, gl.int32, LANES) + order)
    mbarrier.arrive(key_full.index(at))
    mbarrier.expect(key_full.index(at), TILE_K * 128 * 2)
    load_tile(K, [b, h_kv, tile * TILE_K, 0], key_full.index(at), Keys.index(at))

    if fresh:
        for consumer in gl.static_range(2):
            buffer = consumer * QUERIES + turn % QUERIES
            mbarrier.wait(query_used.index(buffer), turn // QUERIES & 1 ^ 1)
            mbarrier.expect(query_full.index(buffer), ROWS * 128 * 2)
            load_tile(Q, [b, h, mine * TILE_Q + consumer * ROWS, 0], query_full.index(buffer), Queries.index(buffer))
    mbarrier.wait(used.index((loaded + 1) % STAGES), (loaded + 1) // STAGES & 1 ^ 1)
    mbarrier.expect(value_full.index(at), TILE_K * 128 * 2)
    load_tile(V, [b, h_kv, tile * TILE_K, 0], value_full.index(at), Values.index(at))

    return loaded + 1


@gluon.jit
def sigmoid_forward_walk(b, h, h_kv, mine, loaded, turn, shared, signals, args):
    """Loads the keys that a tile of rows sees, in the order in which consumers use them."""
    Q, K, V, Out, Drawn, shift_, stride_shift_, q_len, k_len, b_len, h_len, group, together = args
    Queries, Keys, Values, drawn, orders = shared
    query_full, query_used, key_full, value_full, used, drawn_full, drawn_used = signals
    shift__h = gl.load(shift_ + h * stride_shift_)
    scale = 0.08838834764831845 * LOG2E
    offset = shift__h * LOG2E

    # ---- the key tiles that these rows see
    first_row, last_row = mine * TILE_Q, gl.minimum(mine * TILE_Q + TILE_Q, q_len) - 1
    q_high = last_row + k_len - q_len
    end = (gl.maximum(q_high + 1, 0) + TILE_K - 1) // TILE_K
    q_low = first_row + k_len - q_len
    full_end = gl.maximum(q_low + 1, 0) // TILE_K
    masked_steps = gl.maximum(end - full_end, 0)
    full_steps = gl.maximum(full_end, 0)
    total = gl.maximum(masked_steps + full_steps, 1)
    # what the rows of each consumer see ends before this tile
    reach_0 = sigmoid_forward_reach(mine * TILE_Q + 0 * ROWS, b, h, h_kv, args)
    reach_1 = sigmoid_forward_reach(mine * TILE_Q + 1 * ROWS, b, h, h_kv, args)

    for count in range(0, total):
        nth = count
        masked = count >= full_steps
        tile = nth
        if masked:
            nth -= full_steps
            tile = full_end + nth
        if masked_steps + full_steps == 0:
            tile = gl.cdiv(k_len, TILE_K)  # behind the last key, where nothing is seen
        order = tile * 128 + gl.where(masked, MASKED, 0)
        order += gl.where(count + 1 < full_steps, PLAIN, 0)
        if count >= full_steps:
            order += gl.where(tile + 1 >= reach_0, ENOUGH << 0, 0)
            order += gl.where(tile + 1 >= reach_1, ENOUGH << 1, 0)
        if count == total - 1:
            order = order | LAST | ENOUGH << 0 | ENOUGH << 1

        loaded = sigmoid_forward_load(order, count == 0, loaded, turn, b, h, h_kv, mine, shared, signals, args)
    return loaded


@gluon.jit
def sigmoid_forward_producer(shared, signals, args):
    """Draws tiles of rows, hands them out, and loads what they need in the order in which consumers use it."""
    Q, K, V, Out, Drawn, shift_, stride_shift_, q_len, k_len, b_len, h_len, group, together = args
    Queries, Keys, Values, drawn, orders = shared
    query_full, query_used, key_full, value_full, used, drawn_full, drawn_used = signals
    tiles = gl.cdiv(q_len, TILE_Q)  # of a head
    heads = here_again(b_len) * h_len
    slots = heads * tiles
    loaded = 0
    turn = 0
    slot = gl.program_id(0)
    while slot < slots:
        # ---- which rows (heads in groups that share L2, their longest tiles first)
        group_start = slot // (together * tiles) * together
        group_size = gl.minimum(heads - group_start, together)
        inside = slot - group_start * tiles
        head, mine = group_start + inside % group_size, tiles - 1 - inside // group_size
        b, h = head // h_len, head % h_len
        h_kv = h // group
        hand_out(drawn, drawn_full, drawn_used, turn, b, h, mine, 0)
        following = gl.atomic_add(Drawn, 1, sem="relaxed") + gl.num_programs(0)
        loaded = sigmoid_forward_walk(b, h, h_kv, mine, loaded, turn, shared, signals, args)
        slot = following
        turn += 1
    hand_out(drawn, drawn_full, drawn_used, turn, 0, 0, -1, 0)  # nothing is left


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(made.index(i), count=arrivals)
    return made


@gluon.jit(
    do_not_specialize=[
        "q_len", "k_len", "b_len", "h_len", "group", "together"
    ],
    do_not_specialize_on_alignment=[
        "shift_", "stride_shift_"
    ],
)
def sigmoid_forward(
    Q, K, V, Out, Drawn, shift_,
    stride_shift_: "i64",
    q_len: "i32", k_len: "i32", b_len: "i32", h_len: "i32", group: "i32", together: "i32",
):
    Queries = gl.allocate_shared_memory(Q.dtype, [2 * QUERIES, 1, 1, ROWS, 128], Q.layout)
    Keys = gl.allocate_shared_memory(K.dtype, [STAGES, 1, 1, TILE_K, 128], K.layout)
    Values = gl.allocate_shared_memory(V.dtype, [STAGES, 1, 1, TILE_K, 128], V.layout)
    orders = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    drawn = gl.allocate_shared_memory(gl.int32, [2 * 4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))  # tiles of rows
    query_full, query_used = barriers(2 * QUERIES, 1), barriers(2 * QUERIES, 1)
    key_full, value_full, used = barriers(STAGES, 2), barriers(STAGES, 1), barriers(STAGES, 2)
    drawn_full, drawn_used = barriers(2, 1), barriers(2, 2)
    shared = (Queries, Keys, Values, drawn, orders)
    signals = (query_full, query_used, key_full, value_full, used, drawn_full, drawn_used)
    args = (Q, K, V, Out, Drawn, shift_, stride_shift_, q_len, k_len, b_len, h_len, group, together)
    number_0: gl.constexpr = 0
    number_1: gl.constexpr = 1
    gl.warp_specialize(
        [
            (sigmoid_forward_consumer, (shared, signals, args, number_0)),
            (sigmoid_forward_consumer, (shared, signals, args, number_1)),
            (sigmoid_forward_producer, (shared, signals, args)),
        ],
        [4, 1],
        [240, 32],
    )


@functools.cache
def shared_layout(swizzle, bits, rank):
    """How shared memory holds a tile. To make one takes the host longer than a launch."""
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


def described(x, rows, columns):
    """Tiles of so many rows of one head, as the TMA unit loads and stores them: 0 and nothing beyond the last row."""
    return TensorDescriptor(x, x.shape, x.stride(), [1, 1, rows, columns], shared_layout(min(128, 2 * columns), 16, 4))


@functools.cache
def processors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


def forward(q, k, v, *, shift_):
    """q [B, H, Q, 128], k [B, H_kv, K, 128], v [B, H_kv, K, 128] in bf16 → out [B, H, Q, 128] in bf16,
    and an empty lse: there is none."""
    (b_len, h_len, q_len, _), (_, h_kv_len, k_len, _) = q.shape, k.shape
    out = q.new_empty((b_len, h_len, q_len, 128))
    lse = q.new_empty(0, dtype=torch.float32)
    if not out.numel():
        return out, lse
    group, slots = h_len // h_kv_len, b_len * h_len * -(-q_len // 128)
    cached = max(1, 33554432 // (512 * k_len))  # heads whose K and V L2 holds
    together = min(min(cached, 32) * group, b_len * h_len)
    # tiles of rows that were drawn, beside the first of each block
    drawn = torch.zeros(1, dtype=torch.int32, device=q.device)
    programs = min(slots, processors(q.device))
    # TMA takes tensors at 16-byte-aligned addresses and strides;
    # sigmoid_forward_sm_90_any_stride.py takes the rest.
    sigmoid_forward[(programs,)](
        described(q, 64, 128), described(k, 64, 128), described(v, 64, 128), described(out, 64, 128), drawn, shift_,
        *shift_.stride(),
        q_len, k_len, b_len, h_len, group, together,
        num_warps=4,
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

    if not torch.cuda.is_available() or torch.version.hip or torch.cuda.get_device_capability() != (9, 0):
        print("this kernel is for sm_90, and there is none here")
        return 3
    torch.manual_seed(0)
    device = "cuda"
    kind = torch.bfloat16
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
