"""Shared memory that Triton gives to the fa2 kernel, in bytes a block, worked out without compiling.

The kernel holds Q, streams K and V through buffers of the software pipeline, and on some ways of multiplying sends the
weights P from one product to the next through shared memory. Which of these are there depends on the matrix unit, so
there is one small formula for each. They were read off Triton 3.6 to 3.9's own allocation; tests/compile compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from math import gcd

from attncc.ir import KernelPlan, pieces
from attncc.planner.units import matrix_unit
from attncc.targets import Target

ELEMENT_BYTES = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "f8e4m3": 1, "f8e5m2": 1}
WHOLE = ("tcgen05", "fma")  # where the scores go to the layout of a narrow read, not the read to that of the scores
DIRECT_TO_SHARED = (3, 8)  # the Triton that began to use the direct loads of CDNA4 for this
IN_HALVES = (3, 7)  # the Triton that began to pass a tile from a layout to another in parts where that goes
PEELED = (3, 8)  # the Triton that began to peel the last step on mfma, where what is read passes as float32
PADDING = 16  # of the bytes of a buffer, at least: what is added to it
WORD, FLAG = 4, 1  # bytes that a packed bit is loaded as, and that what is true or not takes on its way to the scores
STORED = 64  # bytes of a thread that pass at a time on the way of an output without a matrix unit
SWAPPED = 32  # bytes of a thread that pass at a time from one layout to another, of an output of tcgen05
MMA_ROWS, VECTOR = 16, 8  # rows of a warp's instruction; elements of 16 bits that a thread stores at once
TESTED = 16  # the same, of what a mask found of rows
BARRIERS = 128  # of TMA
ALIGNMENT = 1024  # of a tile that a matrix unit or a descriptor addresses, whose rows have SWIZZLED bytes or more
SWIZZLED = 128


@cache
def triton_release() -> tuple[int, int]:
    """Major and minor number of the Triton that is installed, which will compile; without one, of the newest."""
    try:
        major, minor, *_ = version("triton").split(".")
    except PackageNotFoundError:
        return DIRECT_TO_SHARED
    return int(major), int(minor)


@cache
def padded(head_dim: int) -> int:
    """Elements that a head takes in a tile: the sum of its pieces."""
    return sum(pieces(head_dim))


@dataclass(frozen=True)
class Parts:
    """Bytes of the tiles; `*_piece` is the largest piece of a head size that was split into powers of two, `*_ahead`
    what of a tile the pipeline loads ahead, `*_late` the largest piece of the rest."""

    query: int
    key: int
    value: int
    weights: int
    query_piece: int
    key_piece: int
    value_piece: int
    key_ahead: int
    value_ahead: int
    key_late: int
    value_late: int
    out_piece: int
    ahead: int  # of tensor parameters that are loaded ahead, one buffer of each
    key_operand: int
    passed: int  # what changes its layout on the way to the scores, or to the addresses of what they read
    key_passed: int  # the same, of keys alone
    swapped: int  # what the output, or a mask, passes through on its way to another layout
    out: int  # all pieces
    sums: int  # of the output's widest piece, in float32
    pairs: int  # a byte each, as of rows
    rows: int


OF_READS = ("key_operand", "ahead", "passed", "key_passed")  # of Parts
Tiles = Callable[[KernelPlan, Target], Parts]


def parts(plan: KernelPlan, target: Target) -> Parts:
    size, stored = ELEMENT_BYTES[plan.dtype], ELEMENT_BYTES[plan.kept or plan.dtype]
    d, dv = padded(plan.head_dim), padded(plan.head_dim_v)
    piece, piece_v = pieces(plan.head_dim)[0], pieces(plan.head_dim_v)[0]
    pairs = plan.tile_q * plan.tile_k
    unit = matrix_unit(plan, target)
    aligned = alignment(plan) if unit in ("wgmma", "tcgen05") else 1
    column, out_piece = plan.tile_k * size, plan.tile_q * piece_v * size
    if unit == "fma":
        out_piece = min(out_piece, STORED * plan.warps * target.warp_size)
    if unit in ("wgmma", "mma") and size < WORD and triton_release() >= IN_HALVES:
        out_piece >>= _rows_apart(plan, target, piece_v)
    (key_ahead, key_late), (value_ahead, value_late) = (
        split(plan, n, target) for n in (plan.head_dim, plan.head_dim_v)
    )
    return Parts(
        query=plan.tile_q * d * size, key=plan.tile_k * d * size, value=plan.tile_k * dv * size,
        weights=pairs * size, query_piece=plan.tile_q * piece * size,
        key_piece=plan.tile_k * piece * size, value_piece=plan.tile_k * piece_v * size,
        key_ahead=plan.tile_k * stored * sum(key_ahead), value_ahead=plan.tile_k * stored * sum(value_ahead),
        key_late=column * max(key_late, default=0), value_late=column * max(value_late, default=0),
        out_piece=out_piece,
        ahead=pairs * ahead_bytes(plan), key_operand=-(-plan.tile_k * plan.key_bytes // aligned) * aligned,
        passed=int(pairs * passed_pair(plan, target)), key_passed=-(-key_passed(plan, target) // aligned) * aligned,
        swapped=(SWAPPED if unit == "tcgen05" else TESTED) * plan.warps * target.warp_size,
        out=plan.tile_q * dv * size, sums=plan.tile_q * piece_v * WORD, pairs=pairs, rows=plan.tile_q,
    )  # fmt: skip


def _rows_apart(plan: KernelPlan, target: Target, columns: int) -> int:
    """How often an output of 16 bits halves on its way to the rows that are stored: for each bit of a row's number that
    tells apart what a thread holds before and after, since its registers pass one after another then. Without
    instructions that store matrices this goes for warps that share out rows alone."""
    down = min(plan.warps, plan.tile_q // MMA_ROWS)  # warps, one below the other
    if not target.caps.has_tma and (down < plan.warps or columns <= MMA_ROWS):
        return 0
    stored = VECTOR * plan.warps * target.warp_size // columns  # rows that all threads store at a time
    bits = [bit for bit in (1 << n for n in range(plan.tile_q.bit_length() - 1)) if bit >= stored]
    return sum(bit == MMA_ROWS // 2 or bit >= MMA_ROWS * down for bit in bits)


def alignment(plan: KernelPlan) -> int:
    """Of the tiles of a warp-group instruction: narrower rows are swizzled over fewer of them."""
    row = max(pieces(plan.head_dim)[0], pieces(plan.head_dim_v)[0]) * ELEMENT_BYTES[plan.dtype]
    return ALIGNMENT * min(row, SWIZZLED) // SWIZZLED


def ahead_bytes(plan: KernelPlan) -> int:
    """For each pair, of reads that are loaded ahead: as many levels as there are stages before the product's own."""
    return sum(plan.levels[: plan.stages - 1])


def loads_keys_once(plan: KernelPlan, target: Target) -> bool:
    """Whether what is read of a tile's keys is loaded in one layout and passes to others. Of a tile with fewer keys
    than there are threads a load is cheap: the compiler makes one in each layout."""
    return plan.tile_k >= plan.warps * target.warp_size


def latency(plan: KernelPlan, target: Target) -> int:
    """Stages between a load and its use: the levels share out those that there are. What a masked load of V waits for
    is a level further ahead than what the scores read, where it is not the same load."""
    waits = plan.key_mask and plan.loads == "pointer" and not loads_keys_once(plan, target)
    waits = waits and split(plan, plan.head_dim_v, target)[1] == ()
    levels = max(len(plan.levels), plan.mask_levels + 1 if waits and plan.mask_levels else 0)
    return (plan.stages - 1) // max(1, min(levels, plan.stages - 1))


def passed_bytes(plan: KernelPlan, target: Target) -> float:
    """For each pair, what is not loaded ahead, the widest: to the layout of the scores what they read, as it lies in
    memory but for int64; to the layout of what is read at it an index. A tile as wide as that of V is read in V's
    layout, whose registers can pass half at a time; what is narrower than a word passes in pairs already."""
    unit, kept = matrix_unit(plan, target), plan.stages - 1
    if unit == "mfma":  # what it loads ahead, it keeps in registers, and never in the layout of the scores
        kept = 0
    direct, inner = plan.levels[kept:1], plan.level_widths[max(kept, 1) : len(plan.levels)]
    words = sum(direct) - plan.flag_bytes * len(direct)
    narrow = max(plan.narrow_bytes, min(words, WORD), FLAG if plan.flag_bytes and direct else 0)
    index = max(plan.index_bytes, *inner, 0)
    if _reads_as_scores(plan, target):
        narrow = 0 if plan.tile_q == target.warp_size * plan.warps else narrow
    elif narrow and (unit in WHOLE or (unit == "mfma" and plan.stages > 1 and triton_release() >= PEELED)):
        narrow = WORD
    if unit in ("fma", "mfma") or triton_release() < IN_HALVES:
        return max(narrow, index)
    at_once = narrow / _parts(plan, target) if narrow >= WORD else narrow
    return max(at_once, _index_at_once(plan, target, index))


def _parts(plan: KernelPlan, target: Target) -> int:
    """In how many parts what is read passes to or from the layout of the scores: for each of the neighbours that a
    thread has in both. tcgen05's accumulators have whole rows; what is read at indices that were read has the layout of
    a piece of Q, and all its neighbours."""
    if plan.reads_along:
        return 1
    if matrix_unit(plan, target) != "tcgen05":
        return 2 if plan.tile_k == pieces(plan.head_dim_v)[0] else 1
    if not _as_piece(plan):
        return 1
    loaded = gcd(VECTOR, plan.head_dim, plan.head_dim_v, plan.tile_q * plan.tile_k // (plan.warps * target.warp_size))
    return 2 if plan.pair_bytes or plan.gather_bytes else max(2, loaded)


def _as_piece(plan: KernelPlan) -> bool:
    """Whether a tile of pairs is as wide as a piece of Q or of the output, in 16 bits: it takes the layout of these,
    of which a thread has neighbours."""
    return ELEMENT_BYTES[plan.dtype] < WORD and plan.tile_k in (*pieces(plan.head_dim), *pieces(plan.head_dim_v))


def _as_keys(plan: KernelPlan) -> bool:
    """Whether what runs down the rows has the shape of K's own loads, and their layout."""
    return plan.loads == "pointer" and plan.tile_q in pieces(plan.head_dim)


def _index_at_once(plan: KernelPlan, target: Target, index: int) -> float:
    """What of an index passes at once to the layout of what is read at it: registers that a thread has before and after
    pass one after another, where one of the two layouts has neighbours."""
    if _as_keys(plan) == _as_piece(plan):
        return index
    along, many = (plan.tile_k, {8: 4}) if _as_keys(plan) else (plan.tile_q, {2: 1, 4: 1, 8: 4})
    # threads side by side along the other axis are two at most, so that two bits of a neighbour's number are apart
    return many.get(index, index) if plan.warps * target.warp_size <= 2 * along else index


def _reads_as_scores(plan: KernelPlan, target: Target) -> bool:
    """Whether a read has a row to a thread, as tcgen05 leaves the scores: not where K's own loads are tiles of the same
    shape, whose layout it takes."""
    return plan.reads_down and matrix_unit(plan, target) == "tcgen05" and not _as_keys(plan)


def key_passed(plan: KernelPlan, target: Target) -> int:
    """Bytes of keys alone that are not loaded ahead and pass from one layout to another: the widest."""
    return plan.tile_k * plan.narrow_key_bytes if loads_keys_once(plan, target) else 0


def passed_pair(plan: KernelPlan, target: Target) -> float:
    """The same with dropout, whose flags pass too."""
    return max(passed_bytes(plan, target), FLAG * plan.dropout)


Phase = dict[str, int]  # how many of each of Parts are there together; `bytes` counts single bytes


def phases(plan: KernelPlan, target: Target) -> tuple[Phase, ...]:
    """What lies in shared memory at the moments that could be the fullest: the loop, its parts, and the last store."""
    if not target.is_gpu:
        return ()
    unit = matrix_unit(plan, target)
    query = ({"query_piece": 1},) if unit == "mfma" else ()  # passes through once, before the loop
    stored = [{"out_piece": 1}] if unit != "mfma" or _regroups(plan) else []
    return (*query, *_steps(plan, target), *stored)


def _steps(plan: KernelPlan, target: Target) -> list[Phase]:
    """A loop, and what passes from one layout to another in it."""
    loops = _loops(plan, target)
    made = {**loops[0], "weights": 0, "key_late": 0}  # the scores; keys that did not run ahead are done with
    passing = [{**made, what: 1} for what in ("passed", "key_passed")]
    if _swaps(plan, target):
        passing += [{**moment, "swapped": 1} for moment in loops]
    return [*loops, *passing]


def _regroups(plan: KernelPlan) -> bool:
    """Whether the output goes to another layout than mfma left it in, so that a thread stores several elements: not in
    float32, and not where rows are of an odd length."""
    return plan.dtype != "f32" and plan.head_dim_v % 2 == 0


def _loops(plan: KernelPlan, target: Target) -> list[Phase]:
    unit = matrix_unit(plan, target)
    # for the scores, and turned round for each piece of the values, but for their masked load
    ahead, late = split(plan, plan.head_dim_v, target)
    reads = 1 + (len(ahead) if plan.key_mask and not late and not loads_keys_once(plan, target) else 0)
    stages, moments = latency(plan, target), _LAYOUTS[unit](plan, target)
    kept = {"key_operand": max(stages, 1) * reads, "ahead": stages}
    kept = dict.fromkeys(kept, 0) if unit == "mfma" else kept  # there they are loaded ahead to registers
    runs = plan.listed and split(plan, plan.head_dim, target)[1]  # numbers of tiles run ahead, if K does not
    listed = WORD * stages if runs else 0
    return [{**moment, **kept, "bytes": moment.get("bytes", 0) + listed} for moment in moments]


def _swaps(plan: KernelPlan, target: Target) -> bool:
    """Whether a tile passes from one layout to another, a few registers at a time. In tcgen05's loops in loops, and
    beside reads by row, the output from that of its own columns to that of the scores, where there are two groups;
    before wgmma and mma, several parts of a mask over rows that were read one to a thread."""
    unit = matrix_unit(plan, target)
    if unit == "tcgen05":
        by_row = plan.reads_down and plan.narrow_bytes > 0  # what is loaded ahead is read as the scores lie
        other = plan.tile_k != padded(plan.head_dim_v) or plan.key_mask
        return (plan.classed or by_row) and plan.warps > 4 and other
    return unit in ("wgmma", "mma") and plan.row_tests and plan.tile_q == target.warp_size * plan.warps


def fa2_forward(plan: KernelPlan, target: Target, tiles_of: Tiles = parts) -> int:
    """Shared memory of the forward kernel in bytes a block; 0 on a CPU. Where the mask reads at what it read, the loop
    over whole tiles, which leaves that out, has K and V more stages ahead."""
    tiles = tiles_of(plan, target)
    found = [phase_bytes(phase, tiles) for phase in phases(plan, target)]
    if plan.full_reads and (plan.levels != plan.full_levels or plan.key_mask):
        full = whole_tiles(plan)
        if target.is_gpu:
            own = tiles_of(full, target)
            read = {name: getattr(own, name) for name in OF_READS}  # numbers of its own where the plan's differ
            own = replace(own, **{name: int(n) for name, n in read.items() if n != getattr(tiles, name)})
            found += [phase_bytes(phase, own) for phase in _steps(full, target)]
    return max(found, default=0)


def whole_tiles(plan: KernelPlan) -> KernelPlan:
    """The plan as the loop over whole tiles has it, which evaluates no mask."""
    narrow, index, keys, flags = plan.full_reads
    return replace(
        plan, levels=plan.full_levels, key_bytes=plan.full_key_bytes, key_mask=False, mask_levels=0, row_tests=False,
        narrow_bytes=narrow, index_bytes=index, narrow_key_bytes=keys, flag_bytes=flags,
    )  # fmt: skip


def phase_bytes(phase: Phase, tiles: Parts) -> int:
    return sum(n if what == "bytes" else n * getattr(tiles, what) for what, n in phase.items())


def split(plan: KernelPlan, head_dim: int, target: Target) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The pieces of a head of K or V that run ahead, and the others. Ahead goes what has more than one stage, and a
    word of each thread at a time at least: the last piece of a head of 95, whose columns are tested one by one, has 2
    bytes in f16, and so has a piece of as many elements as there are threads."""
    whole = pieces(head_dim)
    if plan.stages == 1:
        return (), whole
    if plan.loads == "descriptor":
        return whole, ()
    size = ELEMENT_BYTES[plan.kept or plan.dtype]
    few = WORD * plan.warps * target.warp_size // (size * plan.tile_k)  # columns of a word of each thread
    ahead = tuple(piece for piece in whole if piece >= few)
    if gcd(16, head_dim) * size < WORD and sum(whole) != head_dim:
        ahead = ahead[: len(whole) - 1]
    return ahead, whole[len(ahead) :]


def _loop(plan: KernelPlan, buffers: int, kept: Phase, second: Phase | None = None) -> tuple[Phase, ...]:
    """The loop as such, and at its two products, `second` with the second one: what of K and V runs ahead in `buffers`
    tiles, the rest a piece at a time at its product, and so does every piece that is converted."""
    late = "piece" if plan.kept else "late"
    base = {**kept, "key_ahead": buffers, "value_ahead": buffers}
    return base, {**base, f"key_{late}": 1}, {**base, f"value_{late}": 1, **(second or {})}


def _wgmma(plan: KernelPlan, target: Target) -> tuple[Phase, ...]:
    """Q and every stage of K and V stay; P goes from registers. Values that came by TMA, where some of them are
    replaced, go back from registers, all pieces, so that a stage less of them waits; so does all that is converted."""
    by_tma, buffers = plan.loads == "descriptor" and plan.stages > 1, latency(plan, target)
    barriers = BARRIERS + alignment(plan) if by_tma else 0
    loop = _loop(plan, buffers + (not plan.kept), {"query": 1, "bytes": barriers})
    if plan.kept or not (by_tma and plan.key_mask):
        return loop
    return tuple({**moment, "value_ahead": buffers, "value": 1} for moment in loop)


def _tcgen05(plan: KernelPlan, target: Target) -> tuple[Phase, ...]:
    """As wgmma, but that the second product is pipelined with the first: of values that were not loaded ahead there are
    two pieces then, beside one of such keys. With a threshold to look for, loops follow one another, and the tiles of
    the last lie behind the scratch of the first: warp groups have some that share out columns."""
    grouped = plan.warps > 4  # groups share out columns: a row's sums pass between them
    sums = BARRIERS + (ALIGNMENT if grouped else alignment(plan))
    sums = -(-sums // ALIGNMENT) * ALIGNMENT if plan.reference == "threshold" and grouped else sums
    base, *late = _loop(plan, latency(plan, target) + (not plan.kept), {"query": 1, "bytes": sums})
    both = {"key_piece": 1, "value_piece": 1} if plan.kept else {"key_late": 1, "value_late": 2}
    return (*late, base) if plan.stages == 1 else ({**base, **both},)


def _mma(plan: KernelPlan, target: Target) -> tuple[Phase, ...]:
    """One stage of K and V is in registers. P passes through shared memory where the warps share out the columns:
    Triton does so where the last piece of the output is wider than the tile has rows. So do values that came by TMA,
    where some of them are replaced."""
    weights, by_tma = int(plan.tile_q < pieces(plan.head_dim_v)[-1]), plan.loads == "descriptor" and plan.stages > 1
    replaced = {"value_piece": 1} if plan.key_mask and by_tma else {}
    across = 16 * plan.warps // plan.tile_q  # warps that share a row
    kept = {"query": 1, "bytes": BARRIERS if plan.key_mask or by_tma else 0}
    in_registers = replace(plan, kept="")  # what is converted
    base, first, second = _loop(in_registers, latency(plan, target), kept, {"weights": weights, **replaced})
    summed = {**base, "bytes": base["bytes"] + (4 * plan.tile_q * across if across > 2 else 0)}
    return base, first, second, summed


def _fma(plan: KernelPlan, target: Target) -> tuple[Phase, ...]:
    """As mma, P always through shared memory, and 4 bytes a row for sums across warps, as many as share out columns."""
    across = plan.warps if plan.narrow_bytes else min(plan.warps, max(1, plan.tile_k // (2 * target.warp_size)))
    return _loop(plan, latency(plan, target), {"query": 1, "weights": 1, "bytes": 4 * plan.tile_q * across})


def _mfma(plan: KernelPlan, target: Target) -> tuple[Phase, ...]:
    """Q is in registers; P passes through where the two products deal out rows to warps differently, and for
    float32 in 16 rows. From Triton 3.8 on, loads that go past the registers (CDNA4) have a buffer for every stage,
    padded against bank conflicts; before, and on CDNA3, one stage waits in registers."""
    weights = int(mfma_passes(plan))
    if plan.stages > 1 and target.caps.has_async_copy and triton_release() >= DIRECT_TO_SHARED:
        tiles = parts(plan, target)
        padding = plan.stages * (tiles.key + tiles.value) // PADDING
        return ({"key": plan.stages, "value": plan.stages, "weights": weights, "bytes": padding},)
    base, *late = _loop(plan, plan.stages - 1, {})
    if plan.stages > 1 and target.caps.has_async_copy and not plan.kept:  # what is loaded late stays, too
        return ({**base, "key_late": 1, "value_late": 1, "weights": weights},)
    return base, *late, {**base, "weights": weights}


def mfma_passes(plan: KernelPlan) -> bool:
    """Whether P goes through shared memory between two products of mfma."""
    rows, rows_out = _mfma_rows(plan, plan.tile_k), _mfma_rows(plan, pieces(plan.head_dim_v)[-1])
    small = plan.dtype == "f32" and rows == 16
    return rows != rows_out or rows < plan.tile_q < rows * plan.warps or small


def _mfma_rows(plan: KernelPlan, columns: int) -> int:
    """Rows of the instruction that makes a tile of so many columns."""
    return 32 if plan.tile_q >= 32 and columns >= 32 else 16


_LAYOUTS = {"wgmma": _wgmma, "tcgen05": _tcgen05, "mma": _mma, "fma": _fma, "mfma": _mfma}
