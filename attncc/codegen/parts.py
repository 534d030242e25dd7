"""A head size in powers of two: `tl.arange` takes no other, and padding 96 to 128 would waste a quarter of it."""

from __future__ import annotations

from dataclasses import dataclass

from attncc.ir import pieces


@dataclass(frozen=True)
class Part:
    """Columns offset <= d < offset + size of a head; where `padded`, those from `limit` on do not exist."""

    name: str  # of the index vector
    tag: str  # behind the names of everything that belongs to this part; "" where there is only one
    offset: int
    size: int
    limit: int

    @property
    def padded(self) -> bool:
        return self.offset + self.size > self.limit

    def row(self, inside: str) -> str:
        """`inside` for a tile whose second axis is this part."""
        return f"({inside}) & ({self.name}{self.tag} < {self.limit})[None, :]" if self.padded else inside

    def column(self, inside: str) -> str:
        """`inside` for a tile whose first axis is this part."""
        return f"({inside}) & ({self.name}{self.tag} < {self.limit})[:, None]" if self.padded else inside


def split(head_dim: int, name: str, widest: int = 512) -> tuple[Part, ...]:
    """Parts of at most `widest` columns, a power of two."""
    made: list[Part] = []
    for size in (min(piece, widest) for piece in pieces(head_dim) for _ in range(max(1, piece // widest))):
        offset = made[-1].offset + made[-1].size if made else 0
        made.append(Part(name, "", offset, size, head_dim))
    if len(made) > 1:
        made = [Part(p.name, f"_{i}", p.offset, p.size, p.limit) for i, p in enumerate(made)]
    return tuple(made)
