"""Contents for the masks of the corpus: parameters and tensors as functions of the lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

B, HEADS = 2, 8
Rng = np.random.Generator
Number = int | Callable[[int, int, Rng], int]
Tensors = Callable[[int, int, Rng, Mapping[str, int]], Mapping[str, Any]]


def part(d: int, least: int = 1) -> Callable[[int, int, Rng], int]:
    return lambda Q, K, rng: max(least, K // d)


def drawn(low: int, high: int) -> Callable[[int, int, Rng], int]:
    return lambda Q, K, rng: int(rng.integers(low, high))


def runs(n: int, rng: Rng, mean: int) -> np.ndarray:
    """Ascending ids of documents that lie one behind the other."""
    out: list[int] = []
    d = 0
    while len(out) < n:
        out += [d] * int(rng.integers(max(1, mean // 2), mean * 2))
        d += 1
    return np.array(out[:n])


def documents(kind: str, share: int = 5) -> Tensors:
    def make(Q: int, K: int, rng: Rng, scalars: Mapping[str, int]) -> Mapping[str, Any]:
        rows = []
        for _ in range(B):
            d = runs(K, rng, max(2, K // share))
            if kind == "shuffled":
                d = rng.permutation(1000)[: d.max() + 1][d]
            if kind == "interleaved":
                d = rng.integers(0, 4, K)
            rows.append(d)
        return {"doc": np.stack(rows)}

    return make


def two_documents(Q: int, K: int, rng: Rng, scalars: Mapping[str, int]) -> Mapping[str, Any]:
    return {
        "asks": np.stack([runs(Q, rng, max(2, Q // 5)) for _ in range(B)]),
        "from_": np.stack([runs(K, rng, max(2, K // 5)) for _ in range(B)]),
    }


def each_batch(name: str, value: Callable[[int, int, Rng], int]) -> Tensors:
    return lambda Q, K, rng, scalars: {name: np.array([value(Q, K, rng) for _ in range(B)])}


def lengths(Q: int, K: int, rng: Rng, scalars: Mapping[str, int]) -> Mapping[str, Any]:
    return {
        "length": np.array([int(rng.integers(0, K + 1)) for _ in range(B)]),
        "q_length": np.array([int(rng.integers(1, Q + 1)) for _ in range(B)]),
        "prefix": np.array([int(rng.integers(0, K)) for _ in range(B)]),
    }


def row_bounds(rising: bool, both: bool = False) -> Tensors:
    def make(Q: int, K: int, rng: Rng, scalars: Mapping[str, int]) -> Mapping[str, Any]:
        lo, hi = [], []
        for _ in range(B):
            low = rng.integers(0, K, Q)
            low = np.sort(low) if rising else low
            high = np.minimum(K, low + rng.integers(0, max(2, K // (4 if rising else 8)), Q))
            lo.append(low)
            hi.append(np.sort(high) if both else high)
        return {"lo": np.stack(lo), "hi": np.stack(hi)}

    return make


def tree(Q: int, K: int, rng: Rng, scalars: Mapping[str, int]) -> Mapping[str, Any]:
    """Nodes of a draft tree stand behind p cached tokens: Euler times, and the table of ancestors."""
    n = max(1, K - scalars["p"])
    parent = [-1] + [int(rng.integers(max(0, i - 3), i)) for i in range(1, n)]
    children: dict[int, list[int]] = {i: [] for i in range(-1, n)}
    for i, p in enumerate(parent):
        children[p].append(i)
    enter, leave, clock = np.zeros(n, int), np.zeros(n, int), 0
    stack = [(c, False) for c in children[-1]]
    while stack:
        u, done = stack.pop()
        if done:
            leave[u] = clock
        else:
            enter[u] = clock
            clock += 1
            stack.append((u, True))
            stack += [(c, False) for c in children[u]]
    ancestor = (enter[None, :] <= enter[:, None]) & (enter[:, None] < leave[None, :])
    after = np.arange(n) + 1 + rng.integers(0, 40, n)
    return {
        "enter": np.stack([enter] * B),
        "leave": np.stack([leave] * B),
        "ancestor": np.stack([ancestor] * B),
        "until": np.stack([after] * B),
    }


def big_bird(Q: int, K: int, rng: Rng, scalars: Mapping[str, int]) -> Mapping[str, Any]:
    n = -(-max(Q, K) // scalars["C"])
    return {"picks": rng.integers(0, -(-K // scalars["C"]), (HEADS, n, 3))}


def images(Q: int, K: int, rng: Rng, scalars: Mapping[str, int]) -> Mapping[str, Any]:
    doc = np.stack([runs(K, rng, max(4, K // 3)) for _ in range(B)])
    img = np.full((B, K), -1)
    for b in range(B):
        for j in range(6):
            s = int(rng.integers(0, K))
            img[b, s : min(K, s + int(rng.integers(2, max(3, K // 10))))] = j
    return {"doc": doc, "img": img}


def block_table(size: int, density: float) -> Tensors:
    def make(Q: int, K: int, rng: Rng, scalars: Mapping[str, int]) -> Mapping[str, Any]:
        shape = (HEADS, -(-max(Q, K) // size), -(-K // size))
        return {"blocks": rng.random(shape) < density}

    return make
