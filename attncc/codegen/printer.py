"""The one expression printer: Expr to source text, by a table of operators for each backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from attncc.ir import Const, Expr, Op, Read, Var

# Python's precedence, low to high. An operand is put in parentheses where it binds less tightly than its place asks.
OR, AND, NOT, COMPARE, BIT_OR, BIT_AND, SUM, TERM, UNARY, ATOM, ANY = 1, 2, 3, 4, 5, 7, 9, 10, 11, 13, 0


@dataclass(frozen=True)
class Form:
    """How one operator is written: a pattern, how tightly it binds, what each operand must at least bind like."""

    pattern: str
    binds: int = ATOM
    operands: tuple[int, ...] = (ANY, ANY, ANY)
    helper: str = ""  # a function that the file has to define


def infix(symbol: str, binds: int) -> Form:
    return Form(f"{{0}} {symbol} {{1}}", binds, (binds, binds + 1))


def call(function: str, helper: bool = False) -> Form:
    arity = "{0}, {1}" if function.endswith(("imum", "_div", "_mod")) else "{0}"
    return Form(f"{function}({arity})", helper=function if helper else "")


_ARITHMETIC = {"+": infix("+", SUM), "-": infix("-", SUM), "*": infix("*", TERM), "/": infix("/", TERM),
               "neg": Form("-{0}", UNARY, (UNARY,))}  # fmt: skip
_COMPARISON = {o: Form(f"{{0}} {o} {{1}}", COMPARE, (BIT_OR, BIT_OR)) for o in ("<", "<=", ">", ">=", "==", "!=")}
_BITWISE = {"and": infix("&", BIT_AND), "or": infix("|", BIT_OR), "not": Form("~{0}", UNARY, (UNARY,))}


@dataclass(frozen=True)
class Backend:
    """A table of operators.

    `truncates`: its `//` and `%` round toward zero, so that a helper has to floor. `promotes`: an int beside a float32
    becomes a float32 by itself, so that the conversion need not be written.
    """

    name: str
    forms: Mapping[str, Form]
    truncates: bool = False
    promotes: bool = False


_PROMOTING = frozenset(("+", "-", "*", "/", "<", "<=", ">", ">=", "==", "!=", "min", "max", "where"))


TRITON = Backend(
    "triton",
    {
        **_ARITHMETIC, **_COMPARISON, **_BITWISE,
        "//": infix("//", TERM), "%": infix("%", TERM),
        "abs": call("tl.abs"), "min": call("tl.minimum"), "max": call("tl.maximum"),
        "exp": call("tl.exp"), "exp2": call("tl.exp2"), "log": call("tl.log"), "log2": call("tl.log2"),
        "tanh": call("tanh", helper=True), "sigmoid": call("tl.sigmoid"), "sqrt": call("tl.sqrt_rn"),
        "floor": Form("tl.floor({0}).to(tl.int32)"), "where": Form("tl.where({0}, {1}, {2})"),
        "float": Form("({0}).to(tl.float32)"),
        "floor_div": call("floor_div", helper=True), "floor_mod": call("floor_mod", helper=True),
        "checked_div": call("checked_div", helper=True), "checked_mod": call("checked_mod", helper=True),
        "fast_div": Form("fast_div({0}, {1}, {2})", helper="fast_div"),
        "fast_mod": Form("fast_mod({0}, {1}, {2})", helper="fast_div"),
    },
    truncates=True,
    promotes=True,
)  # fmt: skip

# The same where 32 bits do not do for integers.
TRITON_WIDE = replace(TRITON, forms={**TRITON.forms, "floor": Form("tl.floor({0}).to(tl.int64)")})

# What Python refuses of floats is left to tensors without dimensions, which take 1 / 0 as the language does.
_QUOTIENT = Form("tensor({0}) / {1}", TERM, (ANY, TERM + 1), "tensor")

_HOPPER = {"sigmoid": "sigmoid", "tanh": "fast_tanh"}


def _gluon(triton: Backend) -> Backend:
    """The same words from Gluon's own module. It has no sigmoid; the hardware's tanh is exact to 11 bits, which is
    what 16-bit products ask for."""
    forms = {op: replace(form, pattern=form.pattern.replace("tl.", "gl.")) for op, form in triton.forms.items()}
    unsigned = "gl.uint64" if "int64" in triton.forms["floor"].pattern else "gl.uint32"
    within = Form(f"({{0}}).to({unsigned}) < gl.cast(gl.maximum({{1}}, 0), {unsigned})", COMPARE)
    return replace(
        triton, name="gluon", forms={**forms, "within": within, **{f: call(h, helper=True) for f, h in _HOPPER.items()}}
    )


LANGUAGES = {  # by the name of the module in a kernel's file, and the width of its integers
    ("tl", 32): TRITON, ("tl", 64): TRITON_WIDE, ("gl", 32): _gluon(TRITON), ("gl", 64): _gluon(TRITON_WIDE),
}  # fmt: skip

# Tiles as tensors; scalars may be Python numbers, which the helpers accept too.
TORCH = Backend(
    "torch",
    {
        **_ARITHMETIC, **_COMPARISON, **_BITWISE, "quotient": _QUOTIENT,
        "//": infix("//", TERM), "%": infix("%", TERM), "abs": call("abs"),
        **{f: call(f, helper=True) for f in ("exp", "exp2", "log", "log2", "tanh", "sigmoid", "sqrt")},
        "min": call("minimum", helper=True), "max": call("maximum", helper=True),
        "floor": Form("floor({0})", helper="floor"), "where": Form("where({0}, {1}, {2})", helper="where"),
        "float": Form("real({0})", helper="real"),
        "checked_div": call("checked_div", helper=True), "checked_mod": call("checked_mod", helper=True),
    },
)  # fmt: skip

# Run-time scalars of the host: Python numbers. log(0), exp(1000) and the like go through tensors too.
PYTHON = Backend(
    "python",
    {
        **_ARITHMETIC, **_COMPARISON, "quotient": _QUOTIENT,
        "and": infix("and", AND), "or": infix("or", OR), "not": Form("not {0}", NOT, (NOT,)),
        "//": infix("//", TERM), "%": infix("%", TERM), "abs": call("abs"),
        "min": Form("min({0}, {1})"), "max": Form("max({0}, {1})"),
        **{f: call(f, helper=True) for f in ("exp", "exp2", "log", "log2", "tanh", "sigmoid", "sqrt")},
        "floor": Form("int(floor({0}))", helper="floor"),
        "where": Form("{1} if {0} else {2}", ANY, (OR, OR, ANY)), "float": Form("float({0})"),
        "checked_div": Form("{0} // {1} if {1} > 0 else 0", ANY, (TERM, ATOM)),
        "checked_mod": Form("{0} % {1} if {1} > 0 else 0", ANY, (TERM, ATOM)),
    },
)  # fmt: skip


@dataclass
class Printer:
    """Prints expressions for one backend and remembers which helper functions they call.

    `names` gives the spelling of a Var where it differs from its name. `reads` gives the name that holds a Read's
    value; one that is missing is a KeyError: loads are statements, placed by the lowering. `known` gives the name of a
    value that stands in a variable already. `number` says that an expression may be a Python number: two of them are
    divided as tensors, unless the divisor is a constant other than 0. `nonnegative` proves an int expression >= 0,
    `positive` >= 1; without a proof `//` and `%` go through a helper that floors, and a divisor that may be below 1
    through one that then gives 0.
    `inverse` names the variable that holds the inverse of a divisor where a division is worth a multiplication.
    """

    backend: Backend
    names: Mapping[str, str] = field(default_factory=dict)
    reads: Mapping[Read, str] = field(default_factory=dict)
    known: Mapping[Expr, str] = field(default_factory=dict)
    nonnegative: Callable[[Expr], bool] = lambda e: False
    positive: Callable[[Expr], bool] = lambda e: isinstance(e, Const) and e.value >= 1
    inverse: Callable[[Op], str] = lambda e: ""
    helpers: set[str] = field(default_factory=set)
    number: Callable[[Expr], bool] = lambda e: False

    def __call__(self, e: Expr, binds: int = ANY) -> str:
        """The text of `e`, in parentheses if it binds less tightly than `binds`."""
        if e in self.known:
            return self.known[e]
        if isinstance(e, Const):
            return self._constant(e, binds)
        if isinstance(e, Var):
            return self.names.get(e.name, e.name)
        if isinstance(e, Read):
            return self.reads[e]
        form = self._form(e)
        if form.helper:
            self.helpers.add(form.helper)
        parts = [self(a, need) for a, need in zip(self._operands(e), form.operands, strict=False)]
        if form.helper == "fast_div":
            parts.append(self.inverse(e))
        return self._wrap(form.pattern.format(*parts), form.binds, binds)

    @staticmethod
    def _wrap(text: str, has: int, needs: int) -> str:
        return f"({text})" if has < needs else text

    def _constant(self, e: Const, binds: int) -> str:
        if isinstance(e.value, float) and not math.isfinite(e.value):
            return f'float("{e.value}")'
        negative = not isinstance(e.value, bool) and e.value < 0
        return self._wrap(repr(e.value), UNARY if negative else ATOM, binds)

    def _operands(self, e: Op) -> tuple[Expr, ...]:
        """The operands, without the conversions that the backend makes by itself beside a real float (and in `/`)."""
        converted = [isinstance(a, Op) and a.op == "float" for a in e.args]
        beside = any(a.type == "float" and not c for a, c in zip(e.args, converted, strict=True)) or e.op == "/"
        if not (self.backend.promotes and e.op in _PROMOTING and beside):
            return e.args
        return tuple(a.args[0] if c and isinstance(a, Op) else a for a, c in zip(e.args, converted, strict=True))

    def _form(self, e: Op) -> Form:
        safe = isinstance(e.args[-1], Const) and e.args[-1].value != 0
        if e.op == "/" and not safe and all(map(self.number, e.args)):
            return self.backend.forms["quotient"]
        if e.op not in ("//", "%"):
            return self.backend.forms[e.op]
        kind = "div" if e.op == "//" else "mod"
        if not self.positive(e.args[1]):
            return self.backend.forms[f"checked_{kind}"]
        if self.backend.truncates and not self.nonnegative(e.args[0]):
            return self.backend.forms[f"floor_{kind}"]
        if self.inverse(e):
            return self.backend.forms[f"fast_{kind}"]
        return self.backend.forms[e.op]
