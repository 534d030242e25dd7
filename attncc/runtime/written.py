"""A spec written out in PyTorch's own operators on any device: what other kernels are told of it, and unfused
attention itself, which holds all pairs of a head at once."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attncc import analysis
from attncc.analysis.normaliser import EXPONENTIAL, normaliser
from attncc.ir import SUM, AttentionSpec, Const, Expr, Read, Shape, Var, conjunction

Names = Mapping[str, Any]  # b, h, h_kv, row, q, k and s: numbers or tensors that broadcast
Function = Callable[[Names], Any]
WORD = 32  # bits in one element of a `bit` tensor's storage
S = Var("s", "float")
WRITTEN = (*EXPONENTIAL, "sigmoid", "relu", "none", "custom")


def _unary(of_tensor: Callable[[Tensor], Tensor], of_number: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: of_tensor(x) if isinstance(x, Tensor) else of_number(x)


def _where(c: Any, x: Any, y: Any) -> Any:
    return torch.where(c, x, y) if isinstance(c, Tensor) else x if c else y


def _floor_divide(x: Any, y: Any) -> Any:
    if not isinstance(y, Tensor):
        return 0 * x if y < 1 else x // y
    return torch.where(y < 1, 0, x // y.clamp(min=1))


def _modulo(x: Any, y: Any) -> Any:
    if not isinstance(y, Tensor):
        return 0 * x if y < 1 else x % y
    return torch.where(y < 1, 0, x % y.clamp(min=1))


OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": _floor_divide, "%": _modulo,
    "neg": operator.neg, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq,
    "!=": operator.ne, "and": operator.and_, "or": operator.or_, "not": _unary(torch.logical_not, operator.not_),
    "abs": abs, "min": lambda x, y: _where(x < y, x, y), "max": lambda x, y: _where(x > y, x, y),
    "exp": _unary(torch.exp, math.exp), "exp2": _unary(torch.exp2, lambda x: 2.0**x),
    "log": _unary(torch.log, math.log), "log2": _unary(torch.log2, math.log2),
    "tanh": _unary(torch.tanh, math.tanh), "sigmoid": _unary(torch.sigmoid, lambda x: 1 / (1 + math.exp(-x))),
    "sqrt": _unary(torch.sqrt, math.sqrt), "floor": _unary(lambda x: torch.floor(x).to(torch.int32), math.floor),
    "float": _unary(lambda x: x.to(torch.float32), float), "where": _where,
}  # fmt: skip


class Written:
    """The expressions of one call of `spec` as functions of positions; parameters by name are the call's own."""

    def __init__(self, spec: AttentionSpec, shape: Shape, params: Mapping[str, Any]) -> None:
        self.spec, self.shape = spec, shape
        self.tensors = {p.name: params[p.name] for p in spec.tensors}
        lengths = {"q_len": shape.q_len, "k_len": shape.k_len, "b_len": shape.batch, "h_len": shape.heads}
        scalars = {p.name: params.get(p.name, p.default) for p in spec.scalars}
        self.fixed: dict[str, Any] = {**lengths, **scalars}
        self.packed = {p.name for p in spec.tensors if p.element == "bit"}
        for p in spec.tensors:
            for i, axis in enumerate(p.axes):
                if axis in p.free_axes:
                    packed = p.name in self.packed and i == len(p.axes) - 1
                    self.fixed[str(axis)] = self.tensors[p.name].shape[i] * (WORD if packed else 1)

    def __call__(self, e: Expr) -> Function:
        """`e` as a function of names. Reads outside an axis give 0 or false, as everywhere."""
        if isinstance(e, Const):
            return partial(_constant, e.value)
        if isinstance(e, Var):
            if e.name in self.fixed:
                return partial(_constant, self.fixed[e.name])
            return operator.itemgetter(e.name)
        if isinstance(e, Read):
            return self._read(e)
        return partial(_apply, OPERATIONS[e.op], tuple(self(x) for x in e.args))

    def _read(self, e: Read) -> Function:
        table, indices = self.tensors[e.tensor], tuple(self(i) for i in e.indices)
        extents = list(table.shape)
        if e.tensor in self.packed:
            extents[-1] = self._bits(e.tensor)

        def read(names: Names) -> Any:
            at = [torch.as_tensor(i(names), device=table.device) for i in indices]
            inside = at[0] >= 0
            for i, n in zip(at, extents, strict=True):
                inside = inside & (i >= 0) & (i < n)
            safe = [torch.where(inside, i, 0) for i in at]
            if e.tensor in self.packed:
                at_word = (*safe[:-1], safe[-1] // WORD)
                found = (table[at_word] >> (safe[-1] % WORD)) & 1
            else:
                found = table[tuple(safe)]
            if e.type == "bool":
                return found.to(torch.bool) & inside
            return torch.where(inside, found.to(torch.float32) if e.type == "float" else found, 0)

        return read

    def _bits(self, name: str) -> int:
        axis, s = self.spec.param(name).axes[-1], self.shape
        called = {"b": s.batch, "h": s.heads, "h_kv": s.kv_heads, "row": s.q_len, "k": s.k_len, **self.fixed}
        return axis if isinstance(axis, int) else int(called[axis])

    def names(self, device: torch.device) -> dict[str, Any]:
        """Positions that broadcast over [B, H, Q, K]."""
        s, count = self.shape, partial(torch.arange, device=device)
        heads, row = count(s.heads).view(-1, 1, 1), count(s.q_len).view(-1, 1)
        return {"b": count(s.batch).view(-1, 1, 1, 1), "h": heads, "h_kv": heads // (s.heads // s.kv_heads), "row": row,
                "q": row + self.shift, "k": count(s.k_len)}  # fmt: skip

    @property
    def shift(self) -> int:
        return self.shape.k_len - self.shape.q_len if self.spec.align == "end" else 0

    @property
    def scale(self) -> float:
        e = self.spec.scale
        return self.shape.head_dim**-0.5 if e is None else float(self(e)({}))

    def mask(self, names: Names) -> Any:
        """Kept pairs; True where there is no mask."""
        e = conjunction(self.spec.masks)
        return True if e is None else self(e)(names)

    def score(self, s: Any, names: Names) -> Any:
        """What the spec's scores make of scaled scores."""
        for e in self.spec.scores:
            s = self(e)({**names, "s": s})
        return s

    @property
    def additive(self) -> bool:
        """Whether scores add to s what does not depend on it."""
        return all(analysis.derivative(e, S) == Const(1.0) for e in self.spec.scores)

    @property
    def plain(self) -> bool:
        """Whether weights are a softmax of the scores and nothing else."""
        plain = self.spec.softmax.policy in ("online", "two_pass", "unified")
        return plain and self.spec.weight is None and self.spec.dropout is None

    @property
    def beyond(self) -> str:
        """What PyTorch has no operator for; empty where it can be written out."""
        policy, named = self.spec.softmax.policy, dict(self.spec.softmax.named)
        if policy not in WRITTEN or named.get("divide") == SUM:
            return f"PyTorch has no softmax {policy}"
        return "PyTorch draws other bits for its dropout" if self.spec.dropout is not None else ""

    def unfused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output, over [B, H, Q, K] scores in float32; differentiable. NotImplementedError where `beyond` says."""
        if self.beyond:
            raise NotImplementedError(self.beyond)
        made, names = normaliser(self.spec), self.names(q.device)
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
        s = self.score((q @ k.mT).float() * self.scale, names)
        keep = self.mask(names)
        if keep is not True:
            s = torch.where(keep, s, -math.inf)
        if made.exponential:
            p = self._exponentials(s, made.sink, names)
        else:
            p = s
            for e in made.stages or ():
                p = self(e)({**names, "s": p})
            p = p if keep is True else torch.where(keep, p, 0.0)
        if self.spec.weight is not None:
            p = p * self(self.spec.weight)(names)
        return p.to(v.dtype) @ v

    def _exponentials(self, s: Tensor, sink: Expr | None, names: Names) -> Tensor:
        if sink is None:
            return torch.where(s == -math.inf, 0.0, s.softmax(-1)) if self.spec.masks else s.softmax(-1)
        extra = torch.as_tensor(self(sink)(names), device=s.device).to(s).expand(*s.shape[:3], 1)
        return torch.cat((s, extra), -1).softmax(-1)[..., :-1]


def _constant(value: Any, names: Names) -> Any:
    return value


def _apply(operation: Callable[..., Any], args: tuple[Function, ...], names: Names) -> Any:
    return operation(*(x(names) for x in args))


def unfused_bytes(shape: Shape, element: int) -> int:
    """What `Written.unfused` holds at once: products, scores in float32 twice, and weights."""
    pairs = shape.batch * shape.heads * shape.q_len * shape.k_len
    return pairs * (2 * element + 8)
