"""Random calls of any spec: inputs in several memory layouts and parameters of the right kind, from a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attncc.analysis.divisors import below_one, computed_divisors
from attncc.ir import NONE, SUM, AttentionSpec, Expr, Op, Param, Read, Shape, Var, children, names, walk
from attncc.runtime.reference import environment, evaluate, keep_mask

DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2,
}  # fmt: skip
ELEMENTS = {
    "bool": torch.bool, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8,
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "bit": torch.int32,
}  # fmt: skip
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded")
WORD = 32
TRIES = 128  # of drawing what divides
FEW = 64  # rows and keys are enough to see which way an exponential grows


@dataclass(frozen=True)
class Uses:
    """Where names occur: `divisors` under `//` or `%`, `indices` inside a Read, `positive` under log, sqrt or `/`;
    `exponents`, what exponentials are made of, where that is no score."""

    divisors: frozenset[str]
    indices: frozenset[str]
    positive: frozenset[str]
    exponents: tuple[Expr, ...]


def uses(spec: AttentionSpec) -> Uses:
    found: dict[str, set[str]] = {"divisors": set(), "indices": set(), "positive": set()}
    for e in expressions(spec):
        _collect(e, found)
    grow = (n.args[0] for e in expressions(spec) for n in walk(e) if isinstance(n, Op) and n.op in ("exp", "exp2"))
    exponents = tuple(dict.fromkeys(e for e in grow if "s" not in names(e)))
    divisors, indices, positive = (frozenset(s) for s in found.values())
    return Uses(divisors, indices, positive, exponents)


def expressions(spec: AttentionSpec) -> list[Expr]:
    """Every expression of a spec but its lets, which are inlined in the others."""
    named = (e for _, e in spec.softmax.named if e not in (SUM, NONE))
    several = (*spec.masks, *spec.scores, *spec.softmax.args, *named, spec.scale, spec.weight, spec.dropout)
    return [e for e in several if e is not None]


def _collect(e: Expr, found: dict[str, set[str]]) -> None:
    for node in walk(e):
        if isinstance(node, Op) and node.op in ("//", "%"):
            found["divisors"] |= _names(node.args[1])
        elif isinstance(node, Op) and node.op in ("log", "log2", "sqrt"):
            found["positive"] |= _names(node.args[0])
        elif isinstance(node, Op) and node.op == "/":
            found["positive"] |= _names(node.args[1])
        elif isinstance(node, Read):
            found["indices"] |= {n for i in children(node) for n in _names(i)}


def _names(e: Expr) -> set[str]:
    return {n.name if isinstance(n, Var) else n.tensor for n in walk(e) if isinstance(n, (Var, Read))}


class Draw:
    """One stream of random calls of a spec. `values` pins scalars; the same seed gives the same calls."""

    def __init__(self, spec: AttentionSpec, seed: int, values: Mapping[str, Any]) -> None:
        self.spec, self.values, self.uses = spec, values, uses(spec)
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)

    def inputs(self, shape: Shape, dtype: str, layout: str, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, Q, D], k [B, H_kv, K, D], v [B, H_kv, K, D_v] of normal numbers, laid out in memory as asked."""
        B, H, H_kv = shape.batch, shape.heads, shape.kv_heads
        sizes = ((B, H, shape.q_len, shape.head_dim), (B, H_kv, shape.k_len, shape.head_dim),
                 (B, H_kv, shape.k_len, shape.head_dim_v))  # fmt: skip
        kept = DTYPES[self.spec.precision.kept or dtype]
        made = [torch.randn(size, generator=self.generator).to(kind).to(device)
                for size, kind in zip(sizes, (DTYPES[dtype], kept, kept), strict=True)]  # fmt: skip
        q, k, v = (self._laid_out(x, layout) for x in made)
        return q, k, v

    @staticmethod
    def _laid_out(x: Tensor, layout: str) -> Tensor:
        """The same shape in another layout: [B, S, H, D] in memory, a slice of a wider row, one head's row for all."""
        if layout == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "sliced":
            wide = x.new_full((*x.shape[:3], 2 * x.shape[3] + 3), float("nan"))
            wide[..., 1 : 1 + x.shape[3]] = x
            return wide[..., 1 : 1 + x.shape[3]]
        if layout == "expanded":
            return x[:1, :1].expand(x.shape)
        return x

    def params(self, shape: Shape, device: str = "cpu") -> dict[str, Any]:
        """A value for every parameter that is no const."""
        sizes = {"b": shape.batch, "h": shape.heads, "h_kv": shape.kv_heads, "row": shape.q_len, "k": shape.k_len}
        for axis in self.spec.free_axes:
            sizes[axis] = self._int(3, 12)
        if self.spec.scale_blocks is not None:
            axis, size = self.spec.scale_blocks
            sizes[axis] = max(sizes[axis], -(-shape.k_len // size))
        for p in self.spec.tensors:  # a packed free axis holds whole words
            if p.element == "bit" and p.axes[-1] in self.spec.free_axes:
                sizes[str(p.axes[-1])] = WORD * self._int(1, 2)
        made = {p.name: self._tensor(p, sizes, shape).to(device) if p.is_tensor else self._scalar(p, shape)
                for p in self.spec.params if not p.const}  # fmt: skip
        made |= self._dividing(made)
        made |= {n: x.to(device) for n, x in self._signs(made, shape).items()}
        return made if self.spec.dropout is None else {**made, "seed": self._int(0, 2**40)}

    def _dividing(self, made: Mapping[str, Any]) -> dict[str, int]:
        """Ints of computed divisors, drawn anew and from more and more until none is below 1, which a call refuses."""
        divisors, drawn = computed_divisors(self.spec), dict[str, int]()
        given = {p.name: made[p.name] for p in self.spec.scalars}
        free = [p.name for p in self.spec.scalars if p.type == "int" and p.name not in self.values]
        for most in range(2, TRIES):
            found = below_one(divisors, {**given, **drawn})
            if found is None:
                break
            drawn |= {name: self._int(1, most) for name in free if name in names(found[0])}
        return drawn

    def _signs(self, made: Mapping[str, Any], shape: Shape) -> dict[str, Tensor]:
        """Float tensors under an exponential, of the sign for which it grows less over the kept pairs: what decays
        with the distance goes on doing so."""
        under = {n for e in self.uses.exponents for n in _names(e)}
        drawn = {p.name: made[p.name].cpu() for p in self.spec.tensors if p.name in under and p.type == "float"}
        if not drawn:
            return {}
        q = torch.empty(1, shape.heads, min(shape.q_len, FEW), 1)
        k = torch.empty(1, shape.kv_heads, min(shape.k_len, FEW), 1)
        given = {n: x.cpu() if isinstance(x, Tensor) else x for n, x in made.items()}

        def growth() -> float:
            env = environment(self.spec, q, k, given)
            keep = keep_mask(self.spec, env, (1, shape.heads, q.shape[2], k.shape[2]))
            most = (torch.where(keep, evaluate(e, env), -torch.inf).max() for e in self.uses.exponents if keep.any())
            return max(map(float, most), default=0.0)

        for n, x in drawn.items():
            found: dict[float, Tensor] = {}
            for sign in (1, -1):
                given[n] = x.abs() * sign
                found.setdefault(growth(), given[n])
            given[n] = found[min(found)] if len(found) > 1 else x
        return {n: given[n] for n in drawn}

    def _int(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def _scalar(self, p: Param, shape: Shape) -> int | float:
        if p.name in self.values:
            return self.values[p.name]
        if self.spec.dropout is not None and p.name in _names(self.spec.dropout):
            return self._int(4, 32) / 64  # a probability
        if p.type == "float":
            return p.default if p.default is not None and self.seed % 2 else self._int(16, 96) / 64
        least = 1 if p.name in self.uses.divisors else 0
        return self._int(least, 6) if self.seed % 2 else self._int(least, shape.k_len + 2)

    def _tensor(self, p: Param, sizes: Mapping[str, int], shape: Shape) -> Tensor:
        size = [a if isinstance(a, int) else sizes[a] for a in p.axes]
        if p.element == "bit":
            size[-1] = -(-size[-1] // WORD)
            return torch.randint(-(2**31), 2**31, size, generator=self.generator).to(torch.int32)
        if p.element == "bool":
            return torch.rand(size, generator=self.generator) < 0.7
        kind = ELEMENTS[p.element or ""]
        if p.type == "float":  # multiples of 1/64: products with positions are exact in every type
            low = 32 if p.name in self.uses.positive else -64
            return (torch.randint(low, 65, size, generator=self.generator) / 64).to(kind)
        drawn = torch.randint(*self._range(p, shape), size, generator=self.generator)
        drawn = drawn.clamp(max=torch.iinfo(kind).max).to(kind)
        return drawn.sort(-1).values if p.sorted else drawn

    def _range(self, p: Param, shape: Shape) -> tuple[int, int]:
        """Few different numbers (ids, indices) or positions, by turns."""
        low = 1 if p.name in self.uses.divisors else -1 if p.element != "u8" and p.name in self.uses.indices else 0
        return (low, low + 4) if self.seed % 2 or p.name in self.uses.indices else (low, shape.k_len + 2)
