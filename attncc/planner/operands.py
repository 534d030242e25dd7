"""Tensor parameters that a tile's step reads beside K and V: they take part in the pipeline, and in shared memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from attncc.ir import AttentionSpec, Const, Expr, Op, Read, Var, names, walk
from attncc.ir.expr import COMPARISON

ROWS, KEYS = frozenset(("q", "row")), frozenset(("k",))
ELEMENT = {"bool": 1, "i8": 1, "u8": 1, "i16": 2, "f16": 2, "bf16": 2, "i64": 8}
S = Var("s", "float")
WORD = 4  # bytes of f32 and i32, and of the word that a packed bit is loaded in: the least that is loaded ahead


@dataclass(frozen=True)
class Operands:
    """Bytes of one tile's step, for each pair of it, for each of its keys or for each of its rows.

    pair    read side by side, as a bias of each pair is
    bits    the same, packed bits: each is loaded as the word that it is in
    key     of a key alone, such as the document that it belongs to
    row     of a row alone: read once, before the loop
    gather  a byte of a pair's own: a bool as a byte, anything else as a word; the widest
    chain   read at an index that was read itself, and such indices: all together
    levels  of a pair, words and more: what scores and masks read, then its indices, then theirs, down to the first
            that is narrower; 0 for a level that holds what is read of keys alone
    widths  of each of these levels, the widest
    keys    of a key alone, words and more: all levels
    narrow  of a pair, read by scores and masks, less than a word: the widest
    index   the same, of indices that lie side by side from row to row, unlike what is read at them: they are loaded in
            a layout of their own; both take what is wide too where it is not loaded ahead
    narrow_keys  of a key alone, less than a word or not loaded ahead: the widest
    flags   of the first level, what goes to the scores as a truth value: packed bits, and what is compared alone
    mask_levels  how many levels the part of the mask that keys alone decide has
    down    whether all of the first level, narrow or not, lies side by side from row to row
    along   whether some of it lies side by side from key to key
    tests   whether several parts of the mask compare what is read of a row alone with keys
    least   of everything that is read, by the whole program too: bytes of the narrowest
    """

    pair: int = 0
    bits: int = 0
    key: int = 0
    row: int = 0
    gather: int = 0
    chain: int = 0
    levels: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    keys: int = 0
    narrow: int = 0
    narrow_keys: int = 0
    index: int = 0
    tests: bool = False
    flags: int = 0
    mask_levels: int = 0
    down: bool = False
    along: bool = False
    least: int = 0

    @property
    def passing(self) -> tuple[int, ...]:
        """What can pass from one layout to another, in the order of KernelPlan.full_reads."""
        return self.narrow, self.index, self.narrow_keys, self.flags


def operands(spec: AttentionSpec, apart: bool = False, late: Collection[Read] = ()) -> Operands:
    """What the scores, masks and weight of `spec` read in the loop over keys. Each element that is read counts once.

    `apart`: the matrix unit keeps its accumulators to itself, so that what is added to q·k is loaded as any other.
    `late`: what is read under a condition, and not ahead of it.
    """
    expressions = (*spec.masks, *spec.scores, *((spec.weight,) if spec.weight is not None else ()))
    reads = dict.fromkeys(n for e in expressions for n in walk(e) if isinstance(n, Read))
    inner = {n for r in reads for i in r.indices for n in walk(i) if isinstance(n, Read)}
    pair = bits = key = row = gather = chain = 0
    for read in reads:
        element, size = spec.param(read.tensor).element, element_bytes(spec, read)
        where = names(read)
        nested = any(isinstance(n, Read) for i in read.indices for n in walk(i))
        if not where & KEYS:
            row += size if where & ROWS else 0  # the others are of the whole program
            continue
        key += 0 if where & ROWS else size
        if nested or read in inner:
            chain += max(size, WORD)
        elif where & ROWS and size == 1:
            gather = max(gather, 1 if element == "bool" else WORD)
        elif where & ROWS and element == "bit":
            bits += 1
        elif where & ROWS:
            pair += size
    found, masked = _Levels(spec), _Levels(spec)
    for read in () if apart else _outermost(_summand(spec)):
        found.visit(read, 0, late=True)
    for e in expressions:
        for read in _outermost(e):
            found.visit(read, 0, read in late)
    for read in (r for t in _of_keys(spec) for r in _outermost(t)):
        masked.visit(read, 0)
    whole = {r for e in expressions for r in _outermost(e, compared=False)}
    flags = sum(size for read, size in found.first.items() if read not in whole or _is_bit(spec, read))
    down = bool(found.own) and all(map(_runs_down, found.own))
    least = min((element_bytes(spec, read) for read in reads), default=0)
    return Operands(
        pair, bits, key, row, gather, chain, tuple(found.bytes), tuple(found.widths), found.keys, found.narrow,
        found.narrow_keys, found.index, _tests(spec), flags, len(masked.bytes), down,
        any(_runs_down(e, KEYS) for e in found.own), least,
    )  # fmt: skip


def _is_bit(spec: AttentionSpec, read: Read) -> bool:
    return spec.param(read.tensor).element == "bit"


def _tests(spec: AttentionSpec) -> bool:
    tests = [t for m in spec.masks for t in _terms(m) if names(t) & KEYS and any(map(_is_of_row, walk(t)))]
    return len(tests) > 1


def _is_of_row(e: Expr) -> bool:
    return isinstance(e, Read) and bool(names(e) & ROWS) and not names(e) & KEYS


def element_bytes(spec: AttentionSpec, read: Read) -> int:
    return ELEMENT.get(spec.param(read.tensor).element or "", WORD)


def has_key_mask(spec: AttentionSpec) -> bool:
    """Whether keys alone decide a part of the mask."""
    return bool(_of_keys(spec))


def _of_keys(spec: AttentionSpec) -> list[Expr]:
    return [t for m in spec.masks for t in _terms(m) if names(t) & KEYS and not names(t) & ROWS]


def _summand(spec: AttentionSpec) -> Expr:
    """What is added to q·k as it is: Triton makes it the accumulator that the product starts from."""
    scale = spec.scale.args[0] if isinstance(spec.scale, Op) and spec.scale.op == "float" else spec.scale
    if spec.scores and isinstance(scale, Const) and scale.value == 1:
        first = spec.scores[0]
        while isinstance(first, Op) and first.op == "+" and S not in first.args and "s" in names(first.args[0]):
            first = first.args[0]
        if isinstance(first, Op) and first.op == "+" and S in first.args:
            return first.args[first.args[0] == S]
    return Const(0.0)


def _terms(e: Expr) -> Iterator[Expr]:
    if isinstance(e, Op) and e.op == "and":
        for a in e.args:
            yield from _terms(a)
    else:
        yield e


def _runs_down(e: Expr, side: frozenset[str] = ROWS) -> bool:
    """Whether `e` grows by one from row to row, or from key to key."""
    if isinstance(e, Op) and e.op in ("+", "-"):
        return any(_runs_down(a, side) for a in (e.args if e.op == "+" else e.args[:1]))
    return isinstance(e, Var) and e.name in side


def _outermost(e: Expr, compared: bool = True) -> Iterator[Read]:
    """Reads that are not inside another's index; `compared`: of comparisons that have no part in the scores, too."""
    if isinstance(e, Read):
        yield e
    elif isinstance(e, Op) and (compared or e.op not in COMPARISON or "s" in names(e)):
        for a in e.args:
            yield from _outermost(a, compared)


@dataclass
class _Levels:
    """As Triton's pipeliner goes from the products back through what they read (AssignLatencies): each read that an
    index needs is a level further ahead, and behind a load that is too narrow it does not look."""

    spec: AttentionSpec
    bytes: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    keys: int = 0
    narrow: int = 0
    narrow_keys: int = 0
    index: int = 0
    own: list[Expr] = field(default_factory=list)  # the last indices of what the first level reads of pairs
    first: dict[Read, int] = field(default_factory=dict)  # what is in bytes[0], of pairs
    _known: set[Read] = field(default_factory=set)

    def visit(self, read: Read, level: int, late: bool = False) -> None:
        """`late`: not loaded ahead, however wide."""
        where, size = names(read), element_bytes(self.spec, read)
        if not where & KEYS or read in self._known:
            return
        self._known.add(read)
        wide, own = size >= WORD and not late, bool(where & ROWS)
        self.own += [read.indices[-1]] if own and level == 0 else []
        if wide:
            self.bytes += [0] * (level + 1 - len(self.bytes))
            self.bytes[level] += size if own else 0
            self.widths += [0] * (level + 1 - len(self.widths))
            self.widths[level] = max(self.widths[level], size if own else 0)
            self.first |= {read: size} if own and level == 0 else {}
            self.keys += 0 if own else size
        elif not own:
            self.narrow_keys = max(self.narrow_keys, size)
        elif level == 0:
            self.narrow = max(self.narrow, min(size, WORD))
        elif _runs_down(read.indices[-1]):
            self.index = max(self.index, size)
        for i in read.indices:
            for inner in _outermost(i):
                self.visit(inner, level + 1, not wide)
