"""Expressions in numpy: for tests, explanations and counts. Scalars and vectors broadcast against one another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from attncc.ir import LEAST_INT, MOST_INT, Const, Expr, Op, Read, Var

Value = Any  # an int, a float, a bool, or an array of them
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Env:
    """Values by name: scalars and positions in `names`, tensor parameters and summaries in `tensors`.

    Tensors named in `bits` hold 32 bits to an int32, the lowest first, along the last axis.
    """

    names: Mapping[str, Value]
    tensors: Mapping[str, Array] = field(default_factory=dict)
    bits: frozenset[str] = frozenset()

    def plus(self, **names: Value) -> Env:
        return Env({**self.names, **names}, self.tensors, self.bits)


def evaluate(e: Expr, env: Env) -> Value:
    """The value of e. Integers are int64, floats float64. Raises KeyError for a name or a tensor that is not given."""
    memo: dict[int, Value] = {}

    def value(x: Expr) -> Value:
        if isinstance(x, Const):
            return _held(x.value)
        if isinstance(x, Var):
            return env.names[x.name]
        known = memo.get(id(x))
        if known is None:
            if isinstance(x, Read):
                known = _read(x, env, [value(i) for i in x.indices])
            elif x.op == "search":
                known = _search(x, env, value)
            else:
                known = _held(OPERATIONS[x.op](*(value(a) for a in x.args)))
            memo[id(x)] = known
        return known

    with np.errstate(all="ignore"):
        return value(e)


def _held(found: Value) -> Value:
    """A Python int as the nearest of 64 bits: no position, length or bound of them is beyond."""
    return min(max(found, LEAST_INT), MOST_INT) if type(found) is int else found


def _read(x: Read, env: Env, indices: list[Value]) -> Value:
    """An element; 0 or false outside any axis."""
    tensor = env.tensors[x.tensor]
    packed = x.tensor in env.bits
    extents = (*tensor.shape[:-1], tensor.shape[-1] * 32) if packed else tensor.shape
    inside: Value = True
    clipped = []
    for i, n in zip(indices, extents):
        inside = inside & (np.asarray(i) >= 0) & (np.asarray(i) < n)
        clipped.append(np.clip(i, 0, max(n - 1, 0)))
    if 0 in extents:
        return np.zeros(np.broadcast(*indices).shape, dtype=bool if x.type == "bool" else np.int64)
    if packed:
        at = (*clipped[:-1], clipped[-1] // 32)
        word = tensor[at].astype(np.int64)
        found = (word >> (np.asarray(clipped[-1]) % 32)) & 1
    else:
        found = tensor[tuple(clipped)]
    kinds: dict[str, Any] = {"bool": bool, "int": np.int64, "float": np.float64}
    return np.where(inside, found, 0).astype(kinds[x.type])


def _search(x: Op, env: Env, value: Callable[[Expr], Value]) -> Value:
    """The first position whose element is at least the value: search(T[.., x], value)."""
    read, wanted = x.args
    assert isinstance(read, Read)
    row = env.tensors[read.tensor][tuple(int(value(i)) for i in read.indices[:-1])]
    return np.searchsorted(row, value(wanted), side="left")


def floor_divide(a: Value, n: Value) -> Value:
    """Floors; 0 for a divisor below 1."""
    return np.where(np.asarray(n) >= 1, np.floor_divide(a, np.maximum(n, 1)), 0)


def floor_modulo(a: Value, n: Value) -> Value:
    return np.where(np.asarray(n) >= 1, np.mod(a, np.maximum(n, 1)), 0)


OPERATIONS: dict[str, Callable[..., Value]] = {
    "+": np.add, "-": np.subtract, "*": np.multiply, "/": np.true_divide, "neg": np.negative,
    "//": floor_divide, "%": floor_modulo,
    "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal, "==": np.equal, "!=": np.not_equal,
    "and": np.logical_and, "or": np.logical_or, "not": np.logical_not,
    "abs": np.abs, "min": np.minimum, "max": np.maximum, "where": np.where,
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "tanh": np.tanh, "sqrt": np.sqrt,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "floor": lambda x: np.floor(x).astype(np.int64),
    "float": lambda x: np.asarray(x, np.float64),
}  # fmt: skip
