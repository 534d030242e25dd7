"""Tensor parameters that a tile's step reads beside K and V: they take part in the pipeline, and in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from attncc.ir import AttentionSpec, Read, names, walk

ROWS, KEYS = frozenset(("q", "row")), frozenset(("k",))
ELEMENT = {"bool": 1, "i8": 1, "u8": 1, "i16": 2, "f16": 2, "bf16": 2, "i64": 8}
WORD = 4  # bytes of f32 and i32


@dataclass(frozen=True)
class Operands:
    """Bytes of one tile's step, for each pair of it, for each of its keys or for each of its rows.

    pair    read side by side, as a bias of each pair is: loaded ahead as K and V are
    bits    the same, packed bits: each is loaded as the word that it is in
    key     of a key alone, such as the document that it belongs to: likewise
    row     of a row alone: read once, before the loop
    gather  too narrow to be loaded ahead (a byte of a pair's own): loaded when needed, then put into the layout of the
            scores, a bool as a byte, anything else as a word; the widest
    chain   read at an index that was read itself, and such indices: all together
    """

    pair: int = 0
    bits: int = 0
    key: int = 0
    row: int = 0
    gather: int = 0
    chain: int = 0


def operands(spec: AttentionSpec) -> Operands:
    """What the scores, masks and weight of `spec` read in the loop over keys. Each element that is read counts once."""
    expressions = (*spec.masks, *spec.scores, *((spec.weight,) if spec.weight is not None else ()))
    reads = dict.fromkeys(n for e in expressions for n in walk(e) if isinstance(n, Read))
    inner = {n for r in reads for i in r.indices for n in walk(i) if isinstance(n, Read)}
    pair = bits = key = row = gather = chain = 0
    for read in reads:
        element = spec.param(read.tensor).element or ""
        size = ELEMENT.get(element, WORD)
        where = names(read)
        nested = any(isinstance(n, Read) for i in read.indices for n in walk(i))
        if not where & KEYS:
            row += size if where & ROWS else 0  # the others are of the whole program
            continue
        if nested or read in inner:
            chain += max(size, WORD)
        elif where & ROWS and size == 1:
            gather = max(gather, 1 if element == "bool" else WORD)
        elif where & ROWS and element == "bit":
            bits += 1
        elif where & ROWS:
            pair += size
        else:
            key += size
    return Operands(pair, bits, key, row, gather, chain)
