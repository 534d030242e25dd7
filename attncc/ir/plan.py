"""How it is to be computed: a shape class and the choices made for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Shape:
    """The sizes of one call. Lengths, batch and heads are run-time values of a kernel; head sizes and dtype are not."""

    batch: int = 1
    heads: int = 16
    kv_heads: int = 16
    q_len: int = 4096
    k_len: int = 4096
    head_dim: int = 128
    head_dim_v: int = 128
    dtype: str = "bf16"


@dataclass(frozen=True)
class PassPlan:
    """The tiles of one of several kernels, and how it is launched; what the fields of KernelPlan say holds here."""

    tile_q: int
    tile_k: int
    stages: int
    warps: int
    loads: str = "pointer"  # of what streams by
    max_registers: int = 0


@dataclass(frozen=True)
class KernelPlan:
    """Every choice that changes generated code. Equal plans of one spec give the same bytes."""

    target: str  # a name of targets.TARGETS
    # standard: scores and weights go through HBM, three kernels; fa1: K and V outside, the state of rows in HBM;
    # fa2; fa3: of which tile_q / 64 warp groups multiply, beside a warp that loads
    algorithm: str
    loop: str  # q_outer | kv_outer: fa1's
    tile_q: int
    tile_k: int
    stages: int
    warps: int
    head_dim: int
    head_dim_v: int
    dtype: str  # bf16 f16 f32 f8e4m3 f8e5m2
    products: str = "ieee"
    kept: str = ""  # f8e4m3 or f8e5m2: what K and V are in memory, where the tile converts them to `dtype`
    # Of exponentials. running: the running maximum; first_tile, whole_tile: that of a row's first tiles; two_pass: that
    # of the row, found first; fixed: a given number.
    reference: str = "running"
    together: int = 8  # heads of K and V whose tiles run side by side, the longest first: they share L2
    int_bits: int = 32  # of positions and int parameters: 64 where a call's values could pass 2^31
    any_stride: bool = False  # the kernel beside a descriptor one, for calls that TMA cannot take
    tables: tuple[str, ...] = ()  # what kernels before this one make of the mask's tensors: Tables, Scans, Ranked
    loads: str = "pointer"  # of K and V. pointer: any strides; descriptor: by TMA, 16-byte-aligned rows only
    max_registers: int = 0  # of a thread, enforced so that another block fits on the SM; 0 leaves it to the compiler
    pair_bytes: int = 0  # of tensor parameters that a step reads for each pair, side by side
    pair_bits: int = 0  # packed bits for each pair
    key_bytes: int = 0  # for each key
    row_bytes: int = 0  # for each row
    row_tests: bool = False  # several parts of the mask compare what is read of rows with keys
    gather_bytes: int = 0  # for each pair, too narrow to be loaded ahead
    chain_bytes: int = 0  # for each pair, at indices that were read themselves, the indices among them
    levels: tuple[int, ...] = ()  # for each pair, wide enough to be loaded ahead: what scores read, its indices, theirs
    level_widths: tuple[int, ...] = ()  # of each level, the widest read
    full_levels: tuple[int, ...] = ()  # the same, without what the mask reads: in the loop over whole tiles
    full_key_bytes: int = 0  # as key_bytes, there
    full_reads: tuple[int, ...] = ()  # narrow_bytes, index_bytes, narrow_key_bytes and flag_bytes there; () without it
    narrow_bytes: int = 0  # for each pair, too narrow for that: the widest
    narrow_key_bytes: int = 0  # the same, for each key
    index_bytes: int = 0  # the same, of indices
    flag_bytes: int = 0  # of levels[0]: bits, and what is compared alone
    least_bytes: int = 0  # of the narrowest tensor that scores and masks read
    reads_down: bool = False  # what scores and masks read for each pair lies side by side from row to row, all of it
    reads_along: bool = False  # or from key to key, some of it: down the tiles of the backward pass's kernels over keys
    mask_levels: int = 0  # at which the part of the mask reads that keys alone decide, wide enough to be loaded ahead
    key_mask: bool = False  # keys alone decide a part of the mask: values that nobody sees are replaced
    dropout: bool = False  # a step draws bits for each pair
    classed: bool = False  # tiles are classed at run time: a loop in a loop
    listed: bool = False  # or by a kernel before: what there is to visit is read tile by tile
    shared_bytes: int = 0  # predicted
    layout: str = "dense"  # of q, k and v; ragged: sequences of different lengths packed one behind another
    apart: bool = False  # fa3: whole tiles, which need no mask and raise no reference, have a loop without branches
    scales: str = ""  # of 8-bit inputs. block: one for 128 rows or keys; whole: one for a head, or for more
    row_summaries: bool = False  # fa3: what the mask reads of a tile of rows is summed up, of all its rows at once
    queries: int = 1  # fa3: buffers of Q for each consumer; with two, the next rows are there when a tile is done
    direction: str = (
        "forward"  # forward | tangent | backward: there tiles, stages, warps, loads and max_registers are those of dQ
    )
    # fa3, backward. added: dQ is added up in memory as it comes; turns: in sums that heads may use one after another
    # and that stay in L2; apart: a kernel of its own makes it
    sums: str = ""
    # backward: of gradients that differ from pair to pair. own: a cell for each pair; shared: such cells, of several
    # batch entries or heads; table: any other entry; alike: of which a whole tile may hit one
    grads: tuple[str, ...] = ()
    dkdv: PassPlan | None = None  # and these those of dK and dV
    dv: PassPlan | None = None  # of dV alone, where registers have no room for both: `dkdv` makes dK then

    @property
    def passes(self) -> dict[str, PassPlan]:
        """By name, the kernels of the backward pass that walk over tiles."""
        dq = PassPlan(self.tile_q, self.tile_k, self.stages, self.warps, self.loads, self.max_registers)
        others = {"dkdv": self.dkdv, "dv": self.dv}
        return {"dq": dq, **{name: own for name, own in others.items() if own is not None}}


LOOP_OF = {"standard": "q_outer", "fa1": "kv_outer", "fa2": "q_outer", "fa3": "q_outer", "split_kv": "q_outer"}


@cache
def pieces(head_dim: int) -> tuple[int, ...]:
    """A head size in powers of two, largest first, whose sum is `head_dim` rounded up to 16, the depth of a matrix
    instruction: 96 -> (64, 32), 80 -> (64, 16), 31 -> (32,). A tile has a power of two of columns."""
    rounded = -(-head_dim // 16) * 16
    return tuple(1 << bit for bit in reversed(range(rounded.bit_length())) if rounded >> bit & 1)
