"""Expressions of the language: four node kinds, typed, immutable, hashable.

Meaning is the language's own (docs/language.md): integers are unbounded in meaning, `//` and `%` floor, `/` is float
division, promotion from int to float is explicit (the operator `float`), `and`, `or` and `not` guard nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Union

Type = Literal["bool", "int", "float"]

LEAST_INT, MOST_INT = -(2**63), 2**63 - 1  # of what kernels count in

ARITHMETIC = ("+", "-", "*", "/", "//", "%", "neg")
COMPARISON = ("<", "<=", ">", ">=", "==", "!=")
LOGIC = ("and", "or", "not")
FUNCTIONS = {  # name: number of arguments
    "abs": 1, "min": 2, "max": 2, "exp": 1, "exp2": 1, "log": 1, "log2": 1,
    "tanh": 1, "sigmoid": 1, "sqrt": 1, "floor": 1, "where": 3,
}  # fmt: skip
OPERATORS = frozenset((*ARITHMETIC, *COMPARISON, *LOGIC, *FUNCTIONS, "float"))


@dataclass(frozen=True)
class Const:
    """A literal. `value` is a bool, an int or a finite float; its Python type is its type, and false is not 0."""

    value: bool | int | float

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and (type(self.value), self.value) == (type(other.value), other.value)

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))

    @property
    def type(self) -> Type:
        return "bool" if isinstance(self.value, bool) else "int" if isinstance(self.value, int) else "float"


@dataclass(frozen=True)
class Var:
    """A built-in name, a scalar parameter, a free axis (its extent), or a name that the planner introduces."""

    name: str
    type: Type


@dataclass(frozen=True)
class Read:
    """An element of a tensor parameter; outside any axis it is 0 or false. Indices are int, one for each axis."""

    tensor: str
    indices: tuple[Expr, ...]
    type: Type


@dataclass(frozen=True)
class Op:
    """An operator of OPERATORS. `where` is (condition, then, else); `float` promotes an int."""

    op: str
    args: tuple[Expr, ...]
    type: Type


Expr = Union[Const, Var, Read, Op]


def children(e: Expr) -> tuple[Expr, ...]:
    return e.args if isinstance(e, Op) else e.indices if isinstance(e, Read) else ()


def walk(e: Expr) -> Iterator[Expr]:
    """Every node, parents before children, repeats included; without recursion."""
    stack = [e]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(children(node)))


def names(e: Expr) -> frozenset[str]:
    """The names of all Vars, those inside indices too; tensors are not among them (see `tensors`)."""
    return frozenset(n.name for n in walk(e) if isinstance(n, Var))


def tensors(e: Expr) -> frozenset[str]:
    return frozenset(n.tensor for n in walk(e) if isinstance(n, Read))


def rewrite(e: Expr, change: Callable[[Expr], Expr | None]) -> Expr:
    """Rebuild from the top: where `change` gives an Expr it takes the node's place, and its insides are left alone."""
    new = change(e)
    if new is not None:
        return new
    if isinstance(e, Op):
        return replace(e, args=tuple(rewrite(a, change) for a in e.args))
    if isinstance(e, Read):
        return replace(e, indices=tuple(rewrite(a, change) for a in e.indices))
    return e


def substitute(e: Expr, values: Mapping[str, Expr]) -> Expr:
    """Put an Expr in place of each named Var."""
    return rewrite(e, lambda n: values.get(n.name) if isinstance(n, Var) else None)


def conjuncts(e: Expr) -> Iterator[Expr]:
    """What an `and` joins."""
    if isinstance(e, Op) and e.op == "and":
        for a in e.args:
            yield from conjuncts(a)
    else:
        yield e


def conjunction(parts: tuple[Expr, ...]) -> Expr | None:
    """All parts and-ed, or None for no part."""
    whole: Expr | None = None
    for part in parts:
        whole = part if whole is None else Op("and", (whole, part), "bool")
    return whole
