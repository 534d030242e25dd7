"""Random masks, and calls to try them with."""

from __future__ import annotations

import numpy as np
from contents import runs
from spelling import Call, Table

SCALARS = ("w", "C", "a", "st", "neg")
TABLES = {
    "length": Table("i32", ("b",)),
    "lo": Table("i32", ("b", "k")),
    "hi": Table("i32", ("b", "k")),
    "rd": Table("i32", ("b", "k")),
    "doc": Table("i32", ("b", "k")),
    "up": Table("i32", ("b", "row"), sorted=True),
    "on": Table("bool", ("b", "k")),
    "blocks": Table("bool", ("h", "n_rows", "n_keys")),
}
SORTED = {**TABLES, "doc": Table("i32", ("b", "k"), sorted=True)}
LEAVES = (
    "length[b]",
    "lo[b, q]",
    "hi[b, q]",
    "doc[b, q]",
    "doc[b, k]",
    "rd[b, q]",
    "rd[b, k]",
    "up[b, row]",
    "lo[b, k - w]",
)
FACTS = (
    "doc[b, q] == doc[b, k]",
    "rd[b, q] == rd[b, k]",
    "doc[b, q] != doc[b, k]",
    "k < hi[b, q]",
    "k >= lo[b, q]",
    "q < hi[b, k]",
    "k < length[b]",
    "rd[b, q] == 1",
    "doc[b, q] <= doc[b, k]",
    "on[b, k]",
    "on[b, q]",
    "not on[b, k]",
    "k <= up[b, row]",
    "blocks[h, row // 16, k // 32]",
    "blocks[h, row // C, k // C]",
    "sqrt(abs(q)) * 2 > k",
)
COMMON = (
    "k <= q",
    "q - k < w",
    "abs(q - k) <= w",
    "k <= row",
    "k < a",
    "q < a",
    "q // C == k // C",
    "h < 4",
    "k % st >= 3",
    "(q - k) % 3 == 0",
    "q % C < k % C",
    "row < a",
)


class Maker:
    """Draws masks as text; `depth` bounds the nesting of and, or, not."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def _one(self, choices: tuple[str, ...]) -> str:
        return choices[int(self.rng.integers(len(choices)))]

    def integer(self, depth: int) -> str:
        c = int(self.rng.integers(0, 12 if depth > 0 else 6))
        if c < 4:
            return ("q", "q", "k", "k", "row")[int(self.rng.integers(5))]
        if c == 4:
            return str(int(self.rng.integers(0, 40)))
        if c == 5:
            return self._one((*SCALARS, "q_len", "k_len", *LEAVES))
        x, y = self.integer(depth - 1), self.integer(depth - 1)
        if c < 9:
            return f"({x} {self._one(('+', '-'))} {y})"
        if c == 9:
            return f"({x} {self._one(('//', '%'))} {self._one(('C', 'st', '7', '32', '48', 'lo[b, 0]'))})"
        if c == 10:
            return f"{self.rng.integers(2, 4)} * {x}" if self.rng.integers(2) else f"abs({x})"
        if self.rng.integers(3) == 0:
            return f"where({self.boolean(0)}, {x}, {y})"
        return f"{self._one(('min', 'max'))}({x}, {y})"

    def boolean(self, depth: int) -> str:
        c = int(self.rng.integers(0, 10))
        if depth <= 0 or c < 3:
            kind = int(self.rng.integers(0, 7))
            if kind < 2:
                return f"({self._one(COMMON if kind else FACTS)})"
            op = str(self.rng.choice(["<=", "<", ">=", ">", "==", "!="], p=[0.3, 0.2, 0.2, 0.1, 0.12, 0.08]))
            return f"({self.integer(2)} {op} {self.integer(2)})"
        if c == 3:
            return f"(not {self.boolean(depth - 1)})"
        op = " and " if c < 7 else " or "
        return "(" + op.join(self.boolean(depth - 1) for _ in range(int(self.rng.integers(2, 4)))) + ")"

    def call(self, longest: int = 200) -> Call:
        r = self.rng
        q_len, k_len = (int(x) for x in r.integers(1, longest, 2))
        n = max(q_len, k_len)
        lo = r.integers(-3, k_len, n)
        scalars = {
            "w": int(r.integers(0, k_len)),
            "C": int(r.integers(1, k_len + 1)),
            "a": int(r.integers(0, k_len)),
            "st": int(r.integers(1, 60)),
            "neg": -int(r.integers(0, 50)),
            "n_rows": 40,
            "n_keys": 40,
        }
        tensors = {
            "length": r.integers(-1, k_len + 1, 1),
            "lo": lo[None, :k_len],
            "hi": (lo + r.integers(0, k_len, n))[None, :k_len],
            "doc": runs(k_len, r, max(2, n // 5))[None] + int(r.integers(-2, 3)),
            "on": (r.random((1, k_len)) < 0.5),
            "rd": r.permutation(50)[runs(k_len, r, max(2, n // 8)) % 50][None],
            "up": np.sort(r.integers(-5, k_len, (1, q_len)), 1),
            "blocks": r.random((8, 40, 40)) < 0.3,
        }
        return Call(q_len, k_len, scalars, tensors)
