"""What expressions mean, twice: of the tree by a small evaluator, of the text by Python with its own precedence."""

from __future__ import annotations

import math
import operator
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from attncc.ir import Const, Expr, Op, Read, Var

INTS = ("b", "h", "row", "k", "q", "n", "size")  # n a parameter, size a free axis
PARAMS = "n: int, t: i32[size, k], f: f32[h], x: float, u: bit[k]"


class Table:
    """A tensor that gives 0 or false outside of its axes."""

    def __init__(self, sizes: tuple[int, ...], value: Callable[..., Any]) -> None:
        self.sizes, self.value = sizes, value

    def __getitem__(self, at: Any) -> Any:
        indices = at if isinstance(at, tuple) else (at,)
        inside = all(0 <= i < n for i, n in zip(indices, self.sizes, strict=True))
        value = self.value(*indices)
        return value if inside else type(value)()


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "tanh": math.tanh,
    "sigmoid": _sigmoid,
    "floor": math.floor,
    "where": lambda c, x, y: x if c else y,
}
OPERATORS: dict[str, Callable[..., Any]] = FUNCTIONS | {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
    "//": operator.floordiv, "%": operator.mod,
    "neg": operator.neg, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq,
    "!=": operator.ne, "not": operator.not_, "float": float,
    "and": lambda a, b: a and b, "or": lambda a, b: a or b,
}  # fmt: skip


def values(b: int, h: int, row: int, k: int, n: int) -> dict[str, Any]:
    return {
        "b": b, "h": h, "row": row, "k": k, "q": row - 2, "n": n, "size": 5, "x": 0.75, "s": -1.5,
        "t": Table((5, 9), lambda i, j: 3 * i - j), "f": Table((4,), lambda i: i / 2),
        "u": Table((9,), lambda i: i % 3 == 0),
    }  # fmt: skip


def of_tree(e: Expr, env: Mapping[str, Any]) -> Any:
    if isinstance(e, Const):
        return e.value
    if isinstance(e, Var):
        return env[e.name]
    if isinstance(e, Read):
        return env[e.tensor][tuple(of_tree(i, env) for i in e.indices)]
    assert isinstance(e, Op)
    return OPERATORS[e.op](*(of_tree(a, env) for a in e.args))


def of_text(text: str, env: Mapping[str, Any]) -> Any:
    """By Python's own parser."""
    return eval(text, {"__builtins__": {}, "true": True, "false": False, **FUNCTIONS}, dict(env))


LEAVES = {
    "int": (*INTS, "0", "1", "7", "-3"),
    "float": ("x", "s", "0.5", "2.0", "-1.5", "f[h]", "1e-3"),
    "bool": ("true", "false", "u[k]", "k <= q", "k != 3", "(k < n)"),
}
# Templates: {i} {f} {c} {n} stand for an int, a float, a bool, a number; {d} for a divisor.
RULES = {
    "int": (
        "{i} + {i}", "{i} - {i}", "{i}*{i}", "{i} -{i}", "-{i}", "({i})", "-({i})", "{i} // {d}", "{i}%{d}",
        "min({i}, {i})",
        "abs({i})", "where({c}, {i}, {i})", "t[{i}, {i}]", "floor({f})",
    ),
    "float": (
        "{f} + {n}", "{f} - {n}", "{f} * ({n})", "{i} - {f}", "-{f}", "({f})", "{n} / {d}", "tanh({f})", "sigmoid({f})",
        "max({f}, {i})", "where({c}, {f}, {i})",
    ),
    "bool": (
        "{n} < {n}", "{n}<={n}", "{n} > {n}", "{n} >= {n}", "{n} == {n}", "{n} != {n}", "{i} <= {n} < {n}",
        "{f} > {i} >= {i}",
        "{i} == {i} == {i}", "not {c}", "({c})", "{c} and {c}", "{c} or {c}", "({c}) == ({c})", "({c}) != ({c})",
    ),
}  # fmt: skip
DIVISORS = ("1", "2", "7", "(2 + 3)", "max(n, 1)")


def random_text(type_: str, depth: int, rng: random.Random) -> str:
    """A right expression of a type, spelt with and without needless parentheses."""
    if depth == 0 or rng.random() < 0.15:
        return rng.choice(LEAVES[type_])
    kinds = {"i": ("int",), "f": ("float",), "c": ("bool",), "n": ("int", "float")}

    def part(match: re.Match[str]) -> str:
        letter = match.group(1)
        if letter == "d":
            return rng.choice(DIVISORS)
        return random_text(rng.choice(kinds[letter]), depth - 1, rng)

    return re.sub(r"\{(\w)\}", part, rng.choice(RULES[type_]))
