"""Rules on types: what each operator and function takes and gives. int promotes to float, nothing to or from bool."""

from __future__ import annotations

from collections.abc import Sequence

from attncc.errors import Span, shown_number
from attncc.frontend.constants import BEYOND, fits, fold
from attncc.frontend.consts import MAX_DEPTH, MAX_NODES
from attncc.frontend.report import Report
from attncc.frontend.rules.context import Typed
from attncc.ir import COMPARISON, FUNCTIONS, Op, Type, Var

_KEEP = ("+", "-", "*", "min", "max", "abs", "neg")
_TO_FLOAT = ("/", "exp", "exp2", "log", "log2", "tanh", "sigmoid", "sqrt")
_ARTICLE = {"int": "an int", "float": "a float", "bool": "a bool"}


def words(type_: Type) -> str:
    return _ARTICLE[type_]


def join(op: str, args: Sequence[Typed], type_: Type, value: int | None = None) -> Typed:
    """The node, with its measures."""
    return Typed(
        Op(op, tuple(a.expr for a in args), type_),
        1 + sum(a.size for a in args),
        1 + max(a.depth for a in args),
        frozenset().union(*(a.builtins for a in args)),
        frozenset().union(*(a.tensors for a in args)),
        value,
    )


def promote(value: Typed) -> Typed:
    return join("float", (value,), "float") if value.type == "int" else value


def apply(op: str, args: Sequence[Typed], spans: Sequence[Span], whole: Span, report: Report) -> Typed | None:
    """`op` on checked operands, or None after a report."""
    if op in ("and", "or", "not"):
        result = _logic(op, args, spans, report)
    elif op in COMPARISON:
        result = _comparison(op, args, spans, report)
    elif op == "where":
        result = _where(args, spans, report)
    else:
        result = _numbers(op, args, spans, whole, report)
    return result if result is not None and within_limits(result, whole, report) else None


def within_limits(value: Typed, span: Span, report: Report) -> bool:
    """Size and depth after inlining; told where they are first passed."""
    if value.size > MAX_NODES:
        hint = "every use of a let counts as its whole expression; pass a table as a tensor"
        report.error("E802", span, f"the expression has more than {MAX_NODES} parts", hint)
    elif value.depth > MAX_DEPTH:
        hint = "group a long chain with parentheses, or pass a table as a tensor"
        report.error("E803", span, f"the expression is more than {MAX_DEPTH} operators deep", hint)
    else:
        return True
    return False


def _logic(op: str, args: Sequence[Typed], spans: Sequence[Span], report: Report) -> Typed | None:
    for a, span in zip(args, spans, strict=True):
        if a.type != "bool":
            hint = "compare it: x != 0" if a.type == "int" else "compare it with something"
            report.error("E401", span, f"'{op}' takes bools, and this is {words(a.type)}", hint)
            return None
    return join(op, args, "bool")


def _comparison(op: str, args: Sequence[Typed], spans: Sequence[Span], report: Report) -> Typed | None:
    kinds = [a.type == "bool" for a in args]
    if any(kinds) and not all(kinds):
        at = kinds.index(True)
        hint = "'not' binds weaker than a comparison; bools are joined with and, or, not"
        report.error("E401", spans[at], f"'{op}' compares a bool with a number", hint)
        return None
    if all(kinds) and op not in ("==", "!="):
        report.error("E401", spans[0], f"'{op}' has no meaning for bools", "bools take ==, !=, and, or, not")
        return None
    if "float" in (args[0].type, args[1].type):
        args = [promote(a) for a in args]
    return join(op, args, "bool")


def _where(args: Sequence[Typed], spans: Sequence[Span], report: Report) -> Typed | None:
    condition, x, y = args
    if condition.type != "bool":
        report.error(
            "E401",
            spans[0],
            f"the condition of 'where' is a bool, and this is {words(condition.type)}",
            "compare it with something",
        )
        return None
    if (x.type == "bool") != (y.type == "bool"):
        report.error(
            "E401",
            spans[2],
            f"'where' chooses between {words(x.type)} and {words(y.type)}",
            "both must be numbers, or both bools",
        )
        return None
    if "float" in (x.type, y.type):
        x, y = promote(x), promote(y)
    return join("where", (condition, x, y), x.type)


def _numbers(op: str, args: Sequence[Typed], spans: Sequence[Span], whole: Span, report: Report) -> Typed | None:
    for a, span in zip(args, spans, strict=True):
        if a.type == "bool":
            sign = "-" if op == "neg" else op
            report.error("E401", span, f"'{sign}' takes numbers, and this is a bool", "write where(condition, 1, 0)")
            return None
    if op in ("//", "%"):
        return _floor_division(op, args, spans, whole, report)
    if op == "floor":
        return args[0] if args[0].type == "int" else _of_ints(op, args, whole, report)
    if op in _TO_FLOAT or any(a.type == "float" for a in args):
        return join(op, [promote(a) for a in args], "float")
    assert op in _KEEP or op in FUNCTIONS
    return _of_ints(op, args, whole, report)


def _of_ints(op: str, args: Sequence[Typed], whole: Span, report: Report) -> Typed | None:
    """The node of an int, with its value where that is known; a value beyond 64 bits is a fault of the text."""
    value = fold(op, [a.literal for a in args])
    if value is not None and not fits(value):
        report.error("E105", whole, f"this comes to {shown_number(value)}, which does not fit 64 bits", BEYOND)
        return None
    return join(op, args, "int", value)


def _floor_division(op: str, args: Sequence[Typed], spans: Sequence[Span], whole: Span, report: Report) -> Typed | None:
    for a, span in zip(args, spans, strict=True):
        if a.type == "float":
            report.error("E408", span, f"'{op}' takes ints, and this is a float", "write floor(x / y)")
            return None
    divisor = args[1].literal
    if divisor is not None and divisor < 1:
        report.error("E407", spans[1], f"the divisor of '{op}' is {divisor}; it must be at least 1")
        return None
    return _of_ints(op, args, whole, report)


def divisor_parameter(value: Typed) -> str | None:
    """The name of a parameter that is a divisor all by itself."""
    return value.expr.name if isinstance(value.expr, Var) else None
