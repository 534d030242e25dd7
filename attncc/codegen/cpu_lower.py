"""Lowering for the CPU program: where each value is worked out, and the lines that do it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from attncc.analysis.normaliser import normaliser
from attncc.analysis.tangent import MOVED_S
from attncc.codegen.lower import level
from attncc.codegen.naming import Names, read_name, reserved
from attncc.codegen.passes import fold
from attncc.codegen.printer import ANY, TORCH, Form, Printer
from attncc.ir import (
    BUILTINS,
    NONE,
    SUM,
    AttentionSpec,
    Const,
    Expr,
    Op,
    Read,
    Var,
    children,
    conjunction,
    names,
    rewrite,
    tensors,
)

FORWARD, BACKWARD = "cpu/forward.py.jinja", "cpu/backward.py.jinja"
TILES = replace(TORCH, forms={**TORCH.forms, "float": Form("real({0}, dtype)", helper="real")})
BUILT_IN = {"b_len": "B", "h_len": "H"}  # the other built-in names are spelled as they are
LENGTHS = ("b_len", "h_len", "q_len", "k_len")
SLICES = {"b": "batch", "h": "heads", "row": "rows", "k": "keys"}  # in the order of a score tile's dimensions
WORD = 32  # bits in an element of a `bit` tensor


def is_tensor(e: Expr) -> bool:
    """Whether `e` is a tensor in the file for certain, and not a Python number."""
    return bool(tensors(e)) or any(n in BUILTINS and n not in LENGTHS for n in names(e))


def of_dtype(e: Expr) -> bool:
    """Whether a float `e` is for certain a tensor of the products' type; a 0-d float64 beside it changes nothing."""
    return _kind(e) == "products"


def _kind(e: Expr) -> str:
    """scalar (a number, or 0-d), products (their type), or double: float64 of several elements, which takes over."""
    if isinstance(e, (Const, Var)):
        return "products" if e in (Var("s", "float"), MOVED_S) else "scalar"
    if isinstance(e, Read):  # one element for all is 0-d itself
        return "products" if any(map(is_tensor, e.indices)) else "scalar"
    if e.op == "float":
        return "products" if is_tensor(e.args[0]) else "scalar"
    found = {_kind(a) for a in (e.args[1:] if e.op == "where" else e.args) if a.type == "float"}
    if found == {"scalar"} and e.op == "where" and is_tensor(e.args[0]):
        return "double"
    return next(kind for kind in ("double", "products", "scalar") if kind in found)


def prepared(spec: AttentionSpec) -> AttentionSpec:
    """Constants worked out; `not` of a Python bool, which `~` would make an int, written as a comparison."""

    def negations(e: Expr) -> Expr | None:
        if isinstance(e, Op) and e.op == "not" and not is_tensor(e.args[0]):
            return Op("==", (rewrite(e.args[0], negations), Const(False)), "bool")
        return None

    return spec.map(lambda e: rewrite(fold(e), negations))


class CpuLowering:
    """Puts a spec's expressions into lines of Python.

    Values of a program (its batch entries and heads) and of rows are worked out outside the loop over key tiles. Ask
    for scale, start, scores and weight first, for masks last: what only the mask needs is worked out in masked tiles.
    """

    def __init__(self, spec: AttentionSpec, spelled: Mapping[str, str], free: Names | None = None) -> None:
        self.spec, self.spelled = spec, spelled
        self.gain = ""  # the name of the weight's value, once there is one
        self.program: list[str] = []
        self.row: list[str] = []
        self._known: dict[Expr, str] = {}
        self._reads: dict[Read, str] = {}
        self.free = free or Names({*reserved(), *spelled.values()})
        self._lets = {e: n for n, e in reversed(spec.lets) if isinstance(e, Op) and "s" not in names(e)}
        self.printer = Printer(
            TILES, names={**spelled, **BUILT_IN}, reads=self._reads, known=self._known, positive=self._positive,
            number=numbers_of(spec),
        )  # fmt: skip
        self.normaliser = normaliser(spec)
        self.sink = self.normaliser.sink
        if any("h_kv" in names(e) for e in expressions(spec)):
            self.program.append("h_kv = h // group")

    def _positive(self, e: Expr) -> bool:
        """Constants, and names as they are: the call refuses one below 1 that divides; there may be no keys."""
        if isinstance(e, Const):
            return e.value >= 1
        return isinstance(e, Var) and e.name not in (*BUILTINS.keys() - {"b_len", "h_len", "q_len"},)

    def text(self, e: Expr, lines: list[str], binds: int = ANY) -> str:
        """The text of `e`; values that it needs first are put into `lines`, or further out where they can be."""
        self._place(e, lines)
        return self.printer(e, binds)

    def number(self, e: Expr, lines: list[str], binds: int = ANY) -> str:
        """A float `e` as a tensor of the products' type."""
        text = self.text(e, lines, binds if of_dtype(e) else ANY)
        return text if of_dtype(e) else f"{self._tensor(text)}.to(dtype)"

    def _tensor(self, text: str) -> str:
        self.printer.helpers.add("tensor")
        return f"tensor({text})"

    def _place(self, e: Expr, lines: list[str]) -> None:
        if e in self._known or e in self._reads:
            return
        for child in children(e):
            self._place(child, lines)
        where = {"program": self.program, "row": self.row}.get(level(e), lines)
        if isinstance(e, Read):
            text = self._read(e)
            variables = (self.printer(i) for i in e.indices if isinstance(i, Var))
            self._reads[e] = self.free.fresh(read_name(self.spelled[e.tensor], variables))
            where.append(f"{self._reads[e]} = {text}")
        elif isinstance(e, Op) and e in self._lets:
            text = self.printer(e)
            self._known[e] = self.free.fresh(self._lets[e])
            where.append(f"{self._known[e]} = {text}")

    def _read(self, e: Read) -> str:
        p = self.spec.param(e.tensor)
        name, indices = self.spelled[e.tensor], ", ".join(map(self.printer, e.indices))
        if p.element == "bit":
            self.printer.helpers.add("read_bit")
            return f"read_bit({name}, {bit_extent(p.axes[-1], self.spelled)}, {indices})"
        if where := self.slices(e):
            text = f"{name}[{where}]"
        else:
            self.printer.helpers.add("read")
            text = f"read({name}, {indices})"
        return text + {"float": ".to(dtype)", "int": ".long()", "bool": ""}[e.type]

    def slices(self, e: Read) -> str:
        """How a tile's part of a tensor is cut out where its axes are read in their own order; else empty."""
        at = [i.name if isinstance(i, Var) else "" for i in e.indices]
        if list(self.spec.param(e.tensor).axes) != at or at != [a for a in SLICES if a in at]:
            return ""
        dims = [SLICES[a] if a in at else "None" for a in SLICES]
        return ", ".join(dims[list(SLICES).index(at[0]) :])

    def remember(self, e: Expr, name: str) -> None:
        """From here on the value of `e` stands in a variable."""
        self._known[e] = name

    def forget(self, e: Expr) -> None:
        del self._known[e]

    def scale(self, binds: int = ANY) -> str:
        """What q is multiplied by; an expression of no more than b, h and row."""
        if self.spec.scale is None:
            return "D**-0.5"
        return self.text(self.spec.scale, self.row, binds)

    def start(self) -> list[str]:
        """The running maximum and sum before the first tile: empty, or the sink."""
        if self.sink is None:
            return ["m = query.new_full((*shape, 1), -torch.inf)", "l = torch.zeros_like(m)"]
        sink = self.number(self.sink, self.row)
        return [
            f"m = query.new_empty((*shape, 1)).copy_({sink})",
            "m, l = m.clamp(max=largest), torch.exp(m - m.clamp(-largest, largest))  # the sink",
        ]

    def scores(self) -> list[str]:
        lines: list[str] = []
        for e in self.spec.scores:
            text = self.number(e, lines)
            lines.append(f"s = {text}" if of_dtype(e) and "s" in names(e) else f"s.copy_({text})")
        return lines

    def stages(self, pair: list[str]) -> list[str]:
        """From the masked scores s to the weights p, for a normaliser that makes them of the scores alone; what they
        read goes to `pair`."""
        lines: list[str] = []
        names_before = self.printer.names
        for e in self.normaliser.stages or ():
            text = self.number(e, pair)
            lines.append(f"p = {text}" if "s" in names(e) else f"p = torch.empty_like(s).copy_({text})")
            self.printer.names = {**names_before, "s": "p"}
        self.printer.names = names_before
        return [*lines, *self.excluded()]

    def excluded(self) -> list[str]:
        """The line that makes the weight of what is excluded 0, where the stages do not do it by themselves."""
        if self.normaliser.stages is None or self.normaliser.vanishes:
            return []
        return [f"p = torch.where(s == -torch.inf, 0.0, {'p' if self.normaliser.stages else 's'})"]

    def weight(self, pair: list[str]) -> list[str]:
        """Lines that weigh p, by `self.gain`; values that they need go to `pair`."""
        if self.spec.weight is None:
            return []
        text = self.number(self.spec.weight, pair)
        self.gain = self.free.fresh("gain")
        return [f"{self.gain} = {text}", f"p = torch.where(p == 0, 0.0, p * {self.gain})"]

    def masks(self) -> list[str]:
        mask = conjunction(self.spec.masks)
        if mask is None:
            return []
        lines: list[str] = []
        text = self.text(mask, lines)
        keep = text if is_tensor(mask) else self._tensor(text)
        return [*lines, f"keep = {keep}", "s.masked_fill_(~keep, -torch.inf)"]


def numbers_of(spec: AttentionSpec) -> Callable[[Expr], bool]:
    """Whether an expression may be a Python number in the file: arithmetic on scalars and lengths; functions give
    tensors."""
    plain = {*LENGTHS, *spec.free_axes, *(p.name for p in spec.scalars)}

    def number(e: Expr) -> bool:
        if isinstance(e, Op):
            return e.op in ("+", "-", "*", "/", "neg", "abs") and all(map(number, e.args))
        return isinstance(e, Const) or (isinstance(e, Var) and e.name in plain)

    return number


def bit_extent(axis: str | int, spelled: Mapping[str, str]) -> str:
    """How many bits there are on an axis."""
    call = {"b": "B", "h": "H", "h_kv": "H_kv", "row": "q_len", "k": "k_len"}
    return str(axis) if isinstance(axis, int) else call.get(axis) or spelled[axis]


def expressions(spec: AttentionSpec) -> list[Expr]:
    """Every expression of a spec but its lets, which are inlined in the others."""
    named = (e for _, e in spec.softmax.named if e not in (SUM, NONE))
    several = (*spec.masks, *spec.scores, *spec.softmax.args, *named, spec.scale, spec.weight, spec.dropout)
    return [e for e in several if e is not None]
