"""Masks spelt as Python text: read into a spec for the analysis, and evaluated by numpy on their own for the oracle."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attncc.ir import AttentionSpec, Const, Expr, Op, Param, Read, Var

BUILT_IN = ("q", "k", "row", "b", "h", "h_kv", "b_len", "h_len", "q_len", "k_len")
BINARY = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%", ast.Div: "/"}
COMPARE = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}


@dataclass(frozen=True)
class Table:
    """A tensor parameter: element, axes, and whether it is declared sorted."""

    element: str
    axes: tuple[str | int, ...]
    sorted: bool = False

    @property
    def type(self) -> str:
        return "bool" if self.element in ("bool", "bit") else "float" if self.element.startswith("f") else "int"


class Reader:
    """Text to a typed Expr; numbers that meet floats are promoted as the frontend does it."""

    def __init__(self, tables: Mapping[str, Table]) -> None:
        self.tables = tables
        self.scalars: dict[str, None] = {}

    def expr(self, text: str) -> Expr:
        return self._expr(ast.parse(text, mode="eval").body)

    def _expr(self, n: ast.expr) -> Expr:
        if isinstance(n, ast.Constant):
            return Const(n.value)
        if isinstance(n, ast.Name):
            if n.id not in BUILT_IN and not any(n.id in t.axes for t in self.tables.values()):
                self.scalars[n.id] = None
            return Var(n.id, "int")
        if isinstance(n, ast.Subscript):
            indices = n.slice.elts if isinstance(n.slice, ast.Tuple) else [n.slice]
            table = self.tables[n.value.id]
            return Read(n.value.id, tuple(map(self._expr, indices)), table.type)
        if isinstance(n, ast.BoolOp):
            parts = list(map(self._expr, n.values))
            op = "and" if isinstance(n.op, ast.And) else "or"
            whole = parts[0]
            for p in parts[1:]:
                whole = Op(op, (whole, p), "bool")
            return whole
        if isinstance(n, ast.UnaryOp):
            inner = self._expr(n.operand)
            return Op("not", (inner,), "bool") if isinstance(n.op, ast.Not) else Op("neg", (inner,), inner.type)
        if isinstance(n, ast.BinOp):
            args = self._same(self._expr(n.left), self._expr(n.right))
            return Op(BINARY[type(n.op)], args, args[0].type)
        if isinstance(n, ast.Compare):
            return self._chain(n)
        assert isinstance(n, ast.Call)
        return self._call(n.func.id, list(map(self._expr, n.args)))

    def _chain(self, n: ast.Compare) -> Expr:
        sides = [self._expr(n.left), *map(self._expr, n.comparators)]
        whole: Expr | None = None
        for op, a, b in zip(n.ops, sides, sides[1:]):
            one = Op(COMPARE[type(op)], self._same(a, b), "bool")
            whole = one if whole is None else Op("and", (whole, one), "bool")
        return whole

    def _call(self, name: str, args: list[Expr]) -> Expr:
        if name == "where":
            a, b = self._same(args[1], args[2])
            return Op("where", (args[0], a, b), a.type)
        if name in ("min", "max"):
            a, b = self._same(*args)
            return Op(name, (a, b), a.type)
        if name == "abs":
            return Op("abs", tuple(args), args[0].type)
        arg = args[0] if args[0].type == "float" else Op("float", (args[0],), "float")
        return Op(name, (arg,), "int" if name == "floor" else "float")

    @staticmethod
    def _same(a: Expr, b: Expr) -> tuple[Expr, Expr]:
        if a.type == b.type:
            return a, b
        up = lambda e: Op("float", (e,), "float") if e.type == "int" else e
        return up(a), up(b)


def spec_of(
    text: str, tables: Mapping[str, Table] | None = None, align: str = "end", name: str = "mask"
) -> AttentionSpec:
    reader = Reader(tables or {})
    mask = reader.expr(text)
    params = [Param(n, "int") for n in reader.scalars]
    params += [Param(n, t.type, t.element, t.axes, sorted=t.sorted) for n, t in (tables or {}).items()]
    return AttentionSpec(name, tuple(params), masks=(mask,), align=align)


@dataclass(frozen=True)
class Call:
    """The values of one call: lengths, scalars, tensors."""

    q_len: int
    k_len: int
    scalars: Mapping[str, int] = field(default_factory=dict)
    tensors: Mapping[str, Any] = field(default_factory=dict)


def grid(text: str, call: Call, align: str, b: int = 0, h: int = 0) -> np.ndarray:
    """The mask of one batch entry and head, [row, k], by Python's own operators; reads outside give 0."""
    row, k = np.arange(call.q_len)[:, None], np.arange(call.k_len)[None, :]
    q = row + (call.k_len - call.q_len if align == "end" else 0)
    lengths = {"q_len": call.q_len, "k_len": call.k_len, "b_len": 2, "h_len": 8}
    extents = {}
    names = {**lengths, **call.scalars, **extents, "row": row, "k": k, "q": q, "b": b, "h": h, "h_kv": h}
    value = _Numbers(names, call.tensors)(ast.parse(text, mode="eval").body)
    return np.broadcast_to(np.asarray(value, bool), (call.q_len, call.k_len))


class _Numbers:
    def __init__(self, names: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        self.names, self.tensors = names, tensors

    def __call__(self, n: ast.expr) -> Any:
        if isinstance(n, ast.Constant):
            return n.value
        if isinstance(n, ast.Name):
            return self.names[n.id]
        if isinstance(n, ast.Subscript):
            return self._read(n)
        if isinstance(n, ast.BoolOp):
            join = np.logical_and if isinstance(n.op, ast.And) else np.logical_or
            whole = self(n.values[0])
            for v in n.values[1:]:
                whole = join(whole, self(v))
            return whole
        if isinstance(n, ast.UnaryOp):
            inner = self(n.operand)
            return np.logical_not(inner) if isinstance(n.op, ast.Not) else -np.asarray(inner)
        if isinstance(n, ast.BinOp):
            return self._binary(type(n.op), self(n.left), self(n.right))
        if isinstance(n, ast.Compare):
            return self._chain(n)
        assert isinstance(n, ast.Call)
        return self._call(n.func.id, [self(a) for a in n.args])

    def _read(self, n: ast.Subscript) -> Any:
        table = np.asarray(self.tensors[n.value.id])
        index = n.slice.elts if isinstance(n.slice, ast.Tuple) else [n.slice]
        index = [np.asarray(self(i)) for i in index]
        shape = np.broadcast(*index).shape
        index = [np.broadcast_to(i, shape) for i in index]
        out = np.zeros(shape, table.dtype)
        inside = np.ones(shape, bool)
        for i, m in zip(index, table.shape):
            inside &= (i >= 0) & (i < m)
        out[inside] = table[tuple(i[inside] for i in index)]
        return out

    @staticmethod
    def _binary(op: type, a: Any, b: Any) -> Any:
        if op in (ast.FloorDiv, ast.Mod):
            b = np.asarray(b)
            value = (np.floor_divide if op is ast.FloorDiv else np.mod)(a, np.where(b >= 1, b, 1))
            return np.where(b >= 1, value, 0)
        return {ast.Add: np.add, ast.Sub: np.subtract, ast.Mult: np.multiply, ast.Div: np.true_divide}[op](a, b)

    def _chain(self, n: ast.Compare) -> Any:
        sides = [self(n.left), *map(self, n.comparators)]
        compare = {ast.Lt: np.less, ast.LtE: np.less_equal, ast.Gt: np.greater, ast.GtE: np.greater_equal,
                   ast.Eq: np.equal, ast.NotEq: np.not_equal}  # fmt: skip
        whole = True
        for op, a, b in zip(n.ops, sides, sides[1:]):
            whole = np.logical_and(whole, compare[type(op)](a, b))
        return whole

    @staticmethod
    def _call(name: str, args: list[Any]) -> Any:
        if name == "where":
            return np.where(*args)
        if name == "floor":
            return np.floor(args[0]).astype(int)
        return {"abs": np.abs, "min": np.minimum, "max": np.maximum, "sqrt": np.sqrt, "log2": np.log2, "exp2": np.exp2}[
            name
        ](*args)
