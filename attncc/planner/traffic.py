"""What the kernels of each algorithm load, store and compute: formulas of Sizes, with numbers or with sympy's symbols.

Sources: standard attention and fa1 are algorithms 0 and 1 of FlashAttention (Dao et al. 2022), whose theorem 2 counts
what a memory without a cache sees: that is `streamed` here. The order of fa2's loops is that of FlashAttention-2 (Dao
2023), the backward pass follows its algorithm 2, in kernels that sum up without atomics. The cache is put right for by
`Stream.from_memory`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

STATISTIC = 4  # bytes of a row's lse, maximum, sum or delta: float32
SCORE = 4  # of a pair that standard attention writes
SUM = 4  # of an output that is still being summed up
# Of the L2: what is alive in no more than the first part stays, of more than the second nothing is found again. The L2
# has two halves, each for the SMs beside it: what one program reads alone may take twice as much. See results/io.json.
HELD, LOST = Fraction(1, 3), Fraction(3, 5)


@dataclass(frozen=True)
class Sizes:
    """What the formulas speak of, numbers or sympy expressions."""

    batch: Any
    heads: Any
    kv_heads: Any
    q_len: Any
    k_len: Any
    head_dim: Any
    head_dim_v: Any
    tile_q: Any
    tile_k: Any
    tiles: Any  # visited, of all batches and heads
    element: Any  # bytes
    operand: Any  # bytes of tensor parameters for each pair
    side: Any = 1  # programs that run side by side
    together: Any = 1  # heads of K and V that they belong to
    staggered: Any = 0  # of them, those that do not begin together: where others of them share an SM
    kept: int = 0  # bytes of an element of K and V where they are not as Q is

    @property
    def rows(self) -> Any:
        return self.batch * self.heads * self.q_len

    @property
    def keys(self) -> Any:
        return self.batch * self.kv_heads * self.k_len

    @property
    def stored(self) -> Any:
        """Bytes of an element of K and V."""
        return self.kept or self.element

    @property
    def pairs(self) -> Any:
        """Of visited tiles, masked ones inside them included."""
        return self.tiles * self.tile_q * self.tile_k

    @property
    def visited(self) -> Any:
        """The part of all pairs that is."""
        return self.pairs / (self.rows * self.k_len)

    @property
    def columns(self) -> Any:
        return self.head_dim + self.head_dim_v


@dataclass(frozen=True)
class Stream:
    """What programs of a kernel load again and again, in bytes.

    loaded    by all programs: what comes from the memory where nothing is cached
    distinct  each byte of whole tensors once: what comes where the cache keeps all of it from one use to the next, or
              `loaded`, where tiles that are left out make that less
    alive     in use at a time, by programs that run side by side
    readers   programs side by side that load the same bytes at the same time
    """

    what: str
    loaded: Any
    distinct: Any
    alive: Any
    readers: Any

    def lost(self, l2_bytes: int) -> Fraction:
        """Which part of what is loaded again an L2 of this size does not have any more, in hundredths."""
        part = float(min(self.alive, self.distinct)) / l2_bytes / (2 if self.readers == 1 else 1)
        return Fraction(round(100 * min(1.0, max(0.0, (part - HELD) / (LOST - HELD)))), 100)

    def from_memory(self, l2_bytes: int) -> Any:
        """What an L2 of this size leaves to the memory: each byte once, and of further loads what it has lost, once for
        all programs that walk in step."""
        return min(self.distinct, self.loaded) + self.lost(l2_bytes) * max(0, self.again)

    @property
    def again(self) -> Any:
        """Loads of what was loaded before, one for all programs in step."""
        return (self.loaded - self.distinct) / self.readers


@dataclass(frozen=True)
class Kernel:
    """One kernel: bytes that it loads or stores once, what it streams, operations of its products, exponentials."""

    name: str
    once: Any
    streams: tuple[Stream, ...]
    flops: Any
    exponentials: Any

    @property
    def streamed(self) -> Any:
        """Bytes to and from a memory without a cache."""
        return self.once + sum(s.loaded for s in self.streams)

    @property
    def distinct(self) -> Any:
        """Bytes where each is moved once."""
        return self.once + sum(s.distinct for s in self.streams)

    def from_memory(self, l2_bytes: int) -> Any:
        return self.once + sum(s.from_memory(l2_bytes) for s in self.streams)


def _keys(s: Sizes, row: Any, what: str) -> Stream:
    """Rows of K or V or both, walked over by each tile of rows. Those of the next heads are alive too while programs of
    both run side by side, as far as those that are left walk."""
    next_heads = s.staggered * s.tile_q * s.kv_heads / (s.heads * s.q_len)
    heads = s.together + next_heads * s.visited
    return Stream(what, s.tiles * s.tile_k * row, s.keys * row, heads * s.k_len * row, s.side / s.together)


def _keys_and_values(s: Sizes) -> Stream:
    return _keys(s, s.columns * s.stored, "K and V")


def _rows_and_gradients(s: Sizes, row: Any) -> Stream:
    """Q, d_out and what belongs to rows, walked over by each tile of keys."""
    heads = s.together + s.staggered * s.tile_k / s.k_len * s.visited
    return Stream("Q and d_out", s.tiles * s.tile_q * row, s.rows * row, heads * s.q_len * row, s.side / s.together)


def fused(s: Sizes, two_pass: bool = False) -> Kernel:
    """The forward pass of fa2 and fa3: Q is read and Out written once, K and V stream by; K twice where a first pass
    looks for the maximum."""
    once = s.rows * (s.columns * s.element + STATISTIC) + s.pairs * s.operand
    stream, columns = _keys_and_values(s), s.columns
    if two_pass:
        more = s.tiles * s.tile_k * s.head_dim * s.stored
        stream, columns = replace(stream, loaded=stream.loaded + more), columns + s.head_dim
    return Kernel("forward", once, (stream,), 2 * s.pairs * columns, s.pairs)


def standard_scores(s: Sizes) -> Kernel:
    """Standard attention's first kernel: scores of visited tiles, to the memory in float32."""
    row = s.head_dim * s.element
    once = s.rows * row + s.pairs * (SCORE + s.operand)
    return Kernel("scores", once, (_keys(s, row, "K"),), 2 * s.pairs * s.head_dim, 0)


def standard_weights(s: Sizes, reads: int = 2) -> Kernel:
    """The second: scores are read `reads` times, for what divides a row and for the weights, and weights written."""
    scores = Stream("scores", s.pairs * SCORE * reads, s.pairs * SCORE, s.side * s.tile_q * s.k_len * SCORE, 1)
    return Kernel("weights", s.rows * STATISTIC + s.pairs * s.element, (scores,), 0, s.pairs * reads)


def standard_output(s: Sizes) -> Kernel:
    """The third: weights times values."""
    row = s.head_dim_v * s.element
    return Kernel("output", s.rows * row + s.pairs * s.element, (_keys(s, row, "V"),), 2 * s.pairs * s.head_dim_v, 0)


def fa1(s: Sizes) -> Kernel:
    """The forward pass of fa1: K and V once; each tile of keys reads Q, and reads and writes what is known of its rows,
    the output in float32, their maxima and sums, which are also set up before and read once more at the end."""
    state = s.head_dim_v * SUM + 2 * STATISTIC
    walked = s.head_dim * s.element + 2 * state
    held = s.head_dim * s.element + state
    rows = Stream("rows", s.tiles * s.tile_q * walked + 2 * s.rows * state, s.rows * held, s.side * s.q_len * held, 1)
    once = s.keys * s.columns * s.element + s.rows * (s.head_dim_v * s.element + STATISTIC) + s.pairs * s.operand
    return Kernel("forward", once, (rows,), 2 * s.pairs * s.columns, s.pairs)


def forward(algorithm: str, s: Sizes, two_pass: bool = False) -> tuple[Kernel, ...]:
    """The kernels of a forward pass, in the order in which they run."""
    if algorithm == "standard":
        return standard_scores(s), standard_weights(s, 3 if two_pass else 2), standard_output(s)
    return (fa1(s),) if algorithm == "fa1" else (fused(s, two_pass),)


def delta(s: Sizes) -> Kernel:
    """Of the backward pass: sums of d_out * out; `s.tiles` plays no part."""
    return Kernel("delta", s.rows * (2 * s.head_dim_v * s.element + 3 * STATISTIC), (), 2 * s.rows * s.head_dim_v, 0)


def d_q(s: Sizes) -> Kernel:
    """Scores again, dP and dQ: three products; Q, d_out and dQ once."""
    once = s.rows * ((s.columns + s.head_dim) * s.element + 2 * STATISTIC) + s.pairs * s.operand
    return Kernel("dq", once, (_keys_and_values(s),), 2 * s.pairs * (s.columns + s.head_dim), s.pairs)


def d_kv(s: Sizes) -> Kernel:
    """Scores again, dP, dK and dV: four products; K, V and their gradients once, Q and d_out stream by."""
    stream = _rows_and_gradients(s, s.columns * s.element + 2 * STATISTIC)
    once = 2 * s.keys * s.columns * s.element + s.pairs * s.operand
    return Kernel("dkdv", once, (stream,), 4 * s.pairs * s.columns, s.pairs)


def d_qkv(s: Sizes) -> Kernel:
    """All three: five products. dQ is added up in float32 in the L2, between zeros before and the conversion after."""
    made = d_kv(s)
    once = made.once + s.rows * s.head_dim * (4 + 4 + s.element)
    return Kernel("dqkv", once, made.streams, made.flops + 2 * s.pairs * s.head_dim, s.pairs)


def d_k(s: Sizes) -> Kernel:
    """The same without dV."""
    stream = _rows_and_gradients(s, s.columns * s.element + 2 * STATISTIC)
    once = s.keys * (s.columns + s.head_dim) * s.element + s.pairs * s.operand
    return Kernel("dkdv", once, (stream,), 2 * s.pairs * (s.columns + s.head_dim), s.pairs)


def d_v(s: Sizes) -> Kernel:
    """dV by itself: scores again, two products; V is not read."""
    stream = _rows_and_gradients(s, s.columns * s.element + STATISTIC)
    once = s.keys * s.columns * s.element + s.pairs * s.operand
    return Kernel("dv", once, (stream,), 2 * s.pairs * s.columns, s.pairs)
