"""What is to be computed: an attention variant, read from text or built in Python."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from attncc.ir.expr import Const, Expr, Op, Type, Var, substitute, walk

# Built-in names and the coarsest unit on which their value is one number.
# program: one batch entry and head; row: a query row; key: a key position; pair: one cell.
BUILTINS: dict[str, tuple[Type, str]] = {
    "b": ("int", "program"), "h": ("int", "program"), "h_kv": ("int", "program"),
    "b_len": ("int", "program"), "h_len": ("int", "program"), "q_len": ("int", "program"), "k_len": ("int", "program"),
    "q": ("int", "row"), "row": ("int", "row"), "k": ("int", "key"), "s": ("float", "pair"),
}  # fmt: skip
CALL_AXES = ("b", "h", "h_kv", "row", "k")  # axes whose extent the call gives; any other name is a free axis
ELEMENTS: dict[str, Type] = {
    "bit": "bool", "bool": "bool", "i8": "int", "i16": "int", "i32": "int", "i64": "int", "u8": "int",
    "f16": "float", "bf16": "float", "f32": "float",
}  # fmt: skip
SUM, NONE = Var("sum", "float"), Var("none", "float")  # what a custom weight may be divided by, beside expressions
MAXIMUM = Var("m", "float")  # of the row's scores, in a custom weight
EIGHT_BIT = ("f8e4m3", "f8e5m2")  # inputs that come with scales
MOST_DROPPED = 0.996  # the probability of dropout lies below: 15 random bits, read as numbers, are some above it
REPORTS = ("max", "entropy", "pairs")  # of each row, beside its lse, where they are asked for
POLICIES = (
    "online",
    "two_pass",
    "sink",
    "off_by_one",
    "unified",
    "sigmoid",
    "relu",
    "sparsemax",
    "entmax",
    "none",
    "custom",
)


@dataclass(frozen=True)
class Param:
    """A parameter. `element` is None for the scalars `int` and `float`, else a key of ELEMENTS with `axes`."""

    name: str
    type: Type
    element: str | None = None
    axes: tuple[str | int, ...] = ()
    const: bool = False
    sorted: bool = False
    grad: bool = False
    default: int | float | None = None

    @property
    def is_tensor(self) -> bool:
        return self.element is not None

    @property
    def free_axes(self) -> tuple[str, ...]:
        return tuple(a for a in self.axes if isinstance(a, str) and a not in CALL_AXES)


@dataclass(frozen=True)
class Softmax:
    """A row normaliser; `args` are positional, `named` those of `custom`."""

    policy: str = "online"
    args: tuple[Expr, ...] = ()
    named: tuple[tuple[str, Expr], ...] = ()

    @property
    def exponent(self) -> Expr | None:
        """Of a custom weight exp(g) or exp2(g) that is divided by its sum, g as a natural exponent, without the row's
        maximum `m` where that is subtracted, which cancels; None for another."""
        named = dict(self.named)
        weight = named.get("weight")
        if named.get("divide") != SUM or not isinstance(weight, Op) or weight.op not in ("exp", "exp2"):
            return None
        g = weight.args[0]
        if isinstance(g, Op) and g.op == "-" and g.args[1] == MAXIMUM:
            g = g.args[0]
        if MAXIMUM in walk(g):
            return None
        return g if weight.op == "exp" else Op("*", (g, Const(math.log(2.0))), "float")


@dataclass(frozen=True)
class Precision:
    """None leaves the choice to the call (inputs) or means the default."""

    inputs: str | None = None  # bf16 f16 f32 f8e4m3 f8e5m2
    kept: str | None = None  # f8e4m3 f8e5m2: of k and v, where q is of floats
    products: str = "ieee"  # ieee | tf32, of f32 inputs
    accumulate: str = "f32"
    # Of 8-bit inputs: per_tensor | per_head | per_block(N); left out, per_block(128), or where q is of floats none.
    scales: str | None = None
    rotate: str | None = None  # of 8-bit inputs: hadamard (left out, too) | none

    @property
    def is_eight_bit(self) -> bool:
        return self.inputs in EIGHT_BIT

    @property
    def block(self) -> int | None:
        """How many rows or keys share a scale; None where all of a head, or of a tensor, do."""
        if self.scales is None:
            return None if self.kept else 128
        word, _, size = self.scales.partition("(")
        return int(size.rstrip(")")) if word == "per_block" else None

    @property
    def rotates(self) -> bool:
        """Whether q and k are multiplied by one orthogonal matrix, which leaves q·k alone and spreads outliers."""
        return self.is_eight_bit and self.rotate != "none"


@dataclass(frozen=True)
class Schedule:
    """Choices pinned by hand, for every target (target None) or one; None leaves a choice to the planner."""

    target: str | None = None
    algorithm: str | None = None
    loop: str | None = None
    tile_q: int | None = None
    tile_k: int | None = None
    stages: int | None = None
    warps: int | None = None

    @property
    def asked(self) -> str | None:
        """The algorithm that it asks for: K and V outside is fa1."""
        return "fa1" if self.algorithm is None and self.loop == "kv_outer" else self.algorithm


@dataclass(frozen=True)
class Layout:
    """How q and k/v lie in memory; the parts of `kv` beyond the form are kept as written. `rows` are the REPORTS that
    are returned, in their order."""

    q: str = "dense"
    kv: str = "dense"
    v: str = ""  # shared(columns = N): v lies in the first columns of k
    rows: str = ""


@dataclass(frozen=True)
class AttentionSpec:
    """One attention variant. Masks are and-ed, scores apply in order (`s` in each is what came before)."""

    name: str
    params: tuple[Param, ...] = ()
    lets: tuple[tuple[str, Expr], ...] = ()  # already inlined below; kept because their names help a reader
    masks: tuple[Expr, ...] = ()
    scores: tuple[Expr, ...] = ()
    scale: Expr | None = None
    weight: Expr | None = None
    dropout: Expr | None = None
    softmax: Softmax = field(default_factory=Softmax)
    align: str = "end"
    precision: Precision = field(default_factory=Precision)
    schedules: tuple[Schedule, ...] = ()
    layout: Layout = field(default_factory=Layout)

    def param(self, name: str) -> Param:
        return next(p for p in self.params if p.name == name)

    @property
    def consts(self) -> tuple[Param, ...]:
        return tuple(p for p in self.params if p.const)

    @property
    def scalars(self) -> tuple[Param, ...]:
        """Run-time scalars, in the order of the text."""
        return tuple(p for p in self.params if not p.is_tensor and not p.const)

    @property
    def tensors(self) -> tuple[Param, ...]:
        return tuple(p for p in self.params if p.is_tensor)

    @property
    def ragged(self) -> bool:
        """Whether a call's sequences lie packed one behind another, told apart by where each starts."""
        return self.layout.q == "ragged"

    @property
    def reports(self) -> tuple[str, ...]:
        """What a call returns of each row, beside out and lse."""
        return tuple(self.layout.rows.split(", ")) if self.layout.rows else ()

    def reporting(self, wanted: Collection[str]) -> AttentionSpec:
        """The same attention with these REPORTS."""
        return replace(self, layout=replace(self.layout, rows=", ".join(r for r in REPORTS if r in wanted)))

    @property
    def scale_blocks(self) -> tuple[str, int] | None:
        """The free axis along which scales of 8-bit k and v lie beside a q of floats, and how many keys share one."""
        size = self.precision.block if self.precision.kept else None
        return None if size is None else (str(self.param("k_scales").axes[-1]), size)

    def packed_axis(self, p: Param) -> str:
        """The axis, row or k, of a tensor whose sequences lie packed along it, so that no axis b is stored; else ""."""
        return next((str(a) for a in p.axes if a in ("row", "k")), "") if self.ragged and "b" in p.axes else ""

    def stored_axes(self, p: Param) -> tuple[str | int, ...]:
        """The axes of the tensor that a call passes."""
        return tuple(a for a in p.axes if a != "b") if self.packed_axis(p) else p.axes

    @property
    def free_axes(self) -> tuple[str, ...]:
        """Names of the free axes, each once, in the order of the text."""
        return tuple(dict.fromkeys(a for p in self.tensors for a in p.free_axes))

    def schedule(self, target: str) -> Schedule:
        """The general schedule overlaid with the target's own."""
        merged: dict[str, Any] = {}
        for wanted in (None, target):
            for s in self.schedules:
                if s.target == wanted:
                    merged |= {f.name: v for f in fields(s) if (v := getattr(s, f.name)) is not None}
        return replace(Schedule(), **merged)

    def map(self, change: Any) -> AttentionSpec:
        """Apply `change: Expr -> Expr` to every expression."""

        def maybe(e: Expr | None) -> Expr | None:
            return None if e is None else change(e)

        soft = replace(
            self.softmax,
            args=tuple(map(change, self.softmax.args)),
            named=tuple((n, change(e)) for n, e in self.softmax.named),
        )
        return replace(
            self, lets=tuple((n, change(e)) for n, e in self.lets), masks=tuple(map(change, self.masks)),
            scores=tuple(map(change, self.scores)), scale=maybe(self.scale), weight=maybe(self.weight),
            dropout=maybe(self.dropout), softmax=soft,
        )  # fmt: skip

    def bind(self, values: Mapping[str, int]) -> AttentionSpec:
        """Bake the `const` parameters in: those given, else their defaults. Raises KeyError for one without either."""
        baked = {
            p.name: Const(values[p.name] if p.name in values or p.default is None else int(p.default))
            for p in self.consts
        }
        bound = self.map(lambda e: substitute(e, baked))
        return replace(bound, params=tuple(p for p in self.params if not p.const))._derived()

    def _derived(self) -> AttentionSpec:
        """Exponentials that are divided by their sum are a softmax of what they are exponentials of."""
        exponent = self.softmax.exponent
        if exponent is None:
            return self
        scores = self.scores if exponent == Var("s", "float") else (*self.scores, exponent)
        return replace(self, scores=scores, softmax=Softmax())
