"""Where each part of a spec is computed: for a program, a row, a key tile or each pair. Loads become statements."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from attncc.codegen.naming import Names, read_name
from attncc.codegen.passes import banded, cheaper, fold
from attncc.codegen.printer import ATOM, BIT_AND, COMPARE, LANGUAGES, TERM, Printer
from attncc.codegen.signature import stride_name, vectorized
from attncc.codegen.tables import LARGEST, SCANS, Tables
from attncc.ir import (
    BUILTINS,
    AttentionSpec,
    Const,
    Expr,
    Op,
    Param,
    Read,
    Summary,
    Var,
    children,
    conjuncts,
    names,
    rewrite,
    walk,
)

EXTENTS = {"b": "b_len", "h": "h_len", "h_kv": "(h_len // group)", "row": "q_len", "k": "k_len"}
STARTS = {"row": "q_start", "k": "k_start"}  # of packed sequences
TILE = Var("_tile", "int")  # the number of the tile of keys
LEVELS = {**{name: unit for name, (_, unit) in BUILTINS.items()}, TILE.name: "key"}
IN_BOUNDS = ("b", "h", "h_kv")  # axes that their own index cannot leave
NARROW = {"f16": "float32", "bf16": "float32", "i8": "int32", "i16": "int32", "u8": "int32"}
WIDE = {**NARROW, **dict.fromkeys(("i8", "i16", "u8", "i32"), "int64")}


def level(e: Expr) -> str:
    """program | row | key | pair: the coarsest unit on which `e` is one value."""
    found = {LEVELS[n] for n in names(e) if n in LEVELS} - {"program"}
    return "pair" if len(found) > 1 or "pair" in found else found.pop() if found else "program"


@dataclass
class Lowering:
    """Collects statements for each level while expressions are printed; one for each kernel."""

    spec: AttentionSpec
    names: dict[str, str]
    fresh: Names
    nonnegative: Callable[[Expr], bool]
    tables: Tables
    int_bits: int
    language: str = "tl"  # of the kernel: tl is Triton, gl Gluon
    tiles: int = 0  # of keys that share a scale of 8-bit k and v
    lines: dict[str, list[str]] = field(default_factory=lambda: {"program": [], "row": [], "key": [], "pair": []})
    printer: Printer = field(init=False)

    def __post_init__(self) -> None:
        self.widen = NARROW if self.int_bits == 32 else WIDE
        self.printer = Printer(
            LANGUAGES[self.language, self.int_bits], self.names, {}, {}, self.nonnegative, self.positive, self.inverse
        )
        self._reads: dict[Read, str] = {}
        self._inverses: dict[Var, str] = {}
        self._known: dict[Expr, str] = {}
        self._summaries = {s.name: s for s in (*self.tables.own.values(), *self.tables.reduced, *self.tables.scanned)}
        self.printer.reads, self.printer.known = self._reads, self._known

    def positive(self, e: Expr) -> bool:
        """At least 1: literals, and what the launcher checks (int parameters that divide, extents, lengths)."""
        if isinstance(e, Const):
            return e.value >= 1
        return isinstance(e, Var) and (e.name not in BUILTINS or e.name.endswith("_len"))

    def inverse(self, e: Op) -> str:
        """The variable with the inverse of a run-time divisor, for what is divided in every key tile; else empty.

        A division is some 25 instructions, the product with an inverse 5.
        """
        divisor = e.args[1]
        here = self.language == "tl" and self.int_bits == 32 and level(e.args[0]) in ("key", "pair")
        if not here or not isinstance(divisor, Var):
            return ""
        if divisor not in self._inverses:
            name = self.names.get(divisor.name, divisor.name)
            self._inverses[divisor] = self.fresh.fresh(f"inverse_{name}")
            self.lines["program"].append(f"{self._inverses[divisor]} = inverse({name})")
        return self._inverses[divisor]

    def text(self, e: Expr, binds: int = 0) -> str:
        """Print `e`, after the statements that its loads and the let names in it need."""
        e = rewrite(fold(e), self._by_tile) if self.tiles else fold(e)
        if self.language == "gl":
            e = cheaper(e, lambda divisor: level(divisor) == "program")
        self.bind_lets(e)
        self._place_reads(e)
        return self.printer(e, binds)

    def bind_lets(self, user: Expr) -> None:
        """The lets that `user` holds, as statements of their own; those of `s` stay where the score is."""
        for name, value in self.spec.lets:
            self._bind_let(name, fold(value), user)

    def _by_tile(self, e: Expr) -> Expr | None:
        """A scale as one number for all keys of a tile."""
        if not isinstance(e, Read) or e.tensor not in ("k_scales", "v_scales"):
            return None
        return replace(e, indices=(*e.indices[:-1], Op("//", (TILE, Const(self.tiles)), "int")))

    def take(self, where: str) -> tuple[str, ...]:
        """The statements collected for a level since the last call."""
        taken, self.lines[where] = tuple(self.lines[where]), []
        return taken

    def _bind_let(self, name: str, value: Expr, user: Expr) -> None:
        if value in self._known or not isinstance(value, Op) or "s" in names(value) or value not in set(walk(user)):
            return
        self._place_reads(value)
        text = self.printer(value)
        self._known[value] = self.fresh.fresh(name)
        self.lines[level(value)].append(f"{self._known[value]} = {text}")

    def _place_reads(self, e: Expr) -> None:
        for child in children(e):
            self._place_reads(child)
        if isinstance(e, Read) and e not in self._reads:
            if e.tensor in self._summaries:
                self._place_summary(e, self._summaries[e.tensor])
                return
            code = self._load(e, self.spec.param(e.tensor))
            variables = (self.printer(i) for i in e.indices if isinstance(i, Var))
            name = self.fresh.fresh(read_name(self.names[e.tensor], variables))
            self.lines[level(e)].append(f"{name} = {code}")
            self._reads[e] = name

    def _place_summary(self, read: Read, summary: Summary) -> None:
        """A table's entry; or the least or greatest over this tile's own rows, which are here already."""
        side, inside = ("row", "row < q_len") if summary.axis == "q" else ("key", "k < k_len")
        name = self.fresh.fresh(summary.name)
        if summary.name in self.tables.own:
            self.lines[side].append(f"{name} = {self.reduced(summary, inside)}")
        else:
            tile, place = self.printer(read.indices[-1]), self.tables.place(summary)
            lanes = "" if summary.axis == self.tables.outer else f", mask={tile} < {summary.axis}_tiles, other=0"
            scan = summary.reduce in SCANS
            at = " + ".join(filter(None, ("Scans" if scan else "Tables", place, self.tables.first(summary.axis), tile)))
            code = f"{self.language}.load({at}{lanes})" + (f".to({self.language}.int{self.int_bits})" if scan else "")
            self.lines["program"].append(f"{name} = {code}")
        self._reads[read] = name

    def reduced(self, summary: Summary, inside: str) -> str:
        """The least or greatest of a summary's value over the positions of a tile that are `inside`."""
        neutral = LARGEST[self.int_bits] if summary.reduce == "min" else -LARGEST[self.int_bits]
        value = self.text(summary.value)
        value = (
            value if self.int_bits == 32 else f"{self.language}.cast({value}, {self.language}.int64)"
        )  # flags are 32 bits wide by themselves
        return f"{self.language}.{summary.reduce}({self.language}.where({inside}, {value}, {neutral}))"

    def _load(self, read: Read, param: Param) -> str:
        tensor, terms = self.names[param.name], []
        packed = self.spec.packed_axis(param)
        for i, index in enumerate(read.indices):
            if packed and param.axes[i] == "b":  # in its place: where the sequence starts on the packed axis
                start = f"{STARTS[packed]}.to(tl.int64)"
                terms.append(f"{start} * {stride_name(self.spec, param, tensor, param.axes.index(packed))}")
                continue
            word = param.element == "bit" and i == len(param.axes) - 1
            if vectorized(param, i):
                index_text = self.printer(index, ATOM) + " // 32" if word else self.printer(index)
                offset = f"{self.language}.cast({index_text}, {self.language}.int64)"
            else:
                offset = self.printer(index, TERM)
            terms.append(f"{offset} * {stride_name(self.spec, param, tensor, i)}")
        inside = " & ".join(self.inside(read, param))
        code = f"{self.language}.load({' + '.join([tensor, *terms])}" + (
            f", mask={inside}, other=0)" if inside else ")"
        )
        if param.element == "bit":
            return f"({code} >> ({self.printer(read.indices[-1], ATOM)} & 31)) & 1 != 0"
        return f"{code}.to({self.language}.{self.widen[param.element or '']})" if param.element in self.widen else code

    def inside(self, read: Read, param: Param) -> Iterable[str]:
        """What has to be compared so that nothing outside an axis is read."""
        for axis, index in zip(param.axes, read.indices, strict=True):
            own = isinstance(index, Var) and index.name == axis
            if own and axis in IN_BOUNDS:
                continue
            text = self.printer(index, COMPARE + 1)
            if not (own or self.nonnegative(index)):
                yield f"(0 <= {text})"
            if not (isinstance(axis, int) and isinstance(index, Const) and index.value < axis):
                yield f"({text} < {self.extent(axis)})"

    def extent(self, axis: str | int) -> str:
        """The length of an axis of a parameter."""
        return str(axis) if isinstance(axis, int) else EXTENTS.get(axis) or self.names[axis]


def score_text(lowering: Lowering, e: Expr) -> str:
    """A score, as one number for each pair even where it has one for a row, a key or all of them."""
    if level(e) == "pair":
        return lowering.text(e)
    return f"{lowering.language}.zeros_like({lowering.names.get('s', 's')}) + {lowering.text(e, TERM)}"


def conjoin(lowering: Lowering, masks: Iterable[Expr], tail: str) -> str:
    """The masks and-ed, with the check of the key tile's tail last."""
    split = [t for m in masks for t in conjuncts(m)]
    parts = [lowering.text(m, BIT_AND) for m in (banded(split) if lowering.language == "gl" else masks)]
    return " & ".join([*parts, *([f"({tail})"] if tail else [])]) if parts else tail
