"""Rules on parameters: types, axes, flags, defaults."""

from __future__ import annotations

from dataclasses import dataclass, field

from lark import Token, Tree

from attncc.frontend.consts import (
    BUILTIN_NAMES,
    CALL_ARGUMENTS,
    FUNCTION_NAMES,
    MAX_AXES,
    MAX_PARAMS,
    SCALARS,
    TYPES,
)  # fmt: skip
from attncc.frontend.reader import Piece
from attncc.frontend.report import Report, quoted, span_of
from attncc.frontend.rules.context import Context
from attncc.frontend.rules.expressions import integer, real
from attncc.frontend.rules.names import check_new, check_shape, spoil
from attncc.ir import CALL_AXES, ELEMENTS, Param, Type

_OTHER_TYPES = {
    "double": "f32", "float32": "f32", "fp32": "f32", "float16": "f16", "half": "f16", "fp16": "f16",
    "bfloat16": "bf16",
    "i1": "bool", "int32": "i32", "int64": "i64", "int8": "i8", "int16": "i16", "uint8": "u8", "long": "i64",
    "tensor": "f32",
    "f64": "f32", "u16": "i32", "u32": "i64", "u64": "i64",
}  # fmt: skip


@dataclass
class _Parts:
    """A parameter's tree, sorted out."""

    name: Token
    type: Token
    const: Token | None = None
    axes: list[Token] | None = None
    flags: list[Token] = field(default_factory=list)
    default: Tree | None = None


def read_params(pieces: list[Piece], context: Context) -> None:
    """Fill context.params and context.axes; a faulty parameter keeps its name, without a meaning."""
    if len(pieces) > MAX_PARAMS:
        context.report.error("E804", pieces[MAX_PARAMS].span, f"more than {MAX_PARAMS} parameters")
        pieces = pieces[:MAX_PARAMS]
    for piece in pieces:
        if piece.tree is None:
            for token in piece.tokens:
                spoil(token, context.params, context)
            continue
        parts = _sort_out(piece.tree)
        fresh = check_new(parts.name, "a parameter", context)
        param = _param(parts, context)
        if not fresh:
            spoil(parts.name, context.params, context)
        else:
            context.params[str(parts.name)] = param
            context.spans[f"param:{parts.name}"] = piece.span
    for name, span in context.axes.items():
        if name in context.params:
            hint = "a free axis is an int by itself: leave the parameter out, or rename one of the two"
            context.report.error("E303", span, f"{quoted(name)} is a parameter and cannot name a free axis", hint)


def _sort_out(tree: Tree) -> _Parts:
    children = list(tree.children)
    name = children.pop(0)
    const = children.pop(0) if children[0].type == "CONST" else None  # type: ignore[union-attr]
    parts = _Parts(name, children.pop(0), const)  # type: ignore[arg-type]
    for child in children:
        if isinstance(child, Token):
            parts.flags.append(child)
        elif child.data == "dims":
            parts.axes = list(child.children)  # type: ignore[arg-type]
        else:
            parts.default = child
    return parts


def _param(parts: _Parts, context: Context) -> Param | None:
    report = context.report
    if not _check_type(parts, report):
        if parts.axes:
            _axes(parts.axes, context)
        return None
    type_name = str(parts.type)
    scalar = type_name in SCALARS
    type_: Type = ELEMENTS[type_name] if not scalar else "int" if type_name == "int" else "float"
    axes = _axes(parts.axes, context) if parts.axes else ()
    fits = [_check_const(parts, report), _check_flags(parts, type_, scalar, report)]
    default = _default(parts, type_, scalar, report)
    if axes is None or not all(fits) or default is _WRONG:
        return None
    flags = {str(f) for f in parts.flags}
    return Param(
        str(parts.name), type_, None if scalar else type_name, axes, parts.const is not None,
        "sorted" in flags, "grad" in flags, default,  # type: ignore[arg-type]
    )  # fmt: skip


def _check_type(parts: _Parts, report: Report) -> bool:
    name = str(parts.type)
    if name not in TYPES:
        other = _OTHER_TYPES.get(name.lower())
        hint = f"here it is {other}" if other else report.suggest(name, TYPES, "types are " + ", ".join(TYPES))
        report.error("E601", parts.type, f"unknown type {quoted(name)}", hint)
        return False
    if name in SCALARS and parts.axes:
        element = "i32" if name == "int" else "f32"
        report.error("E602", parts.type, f"'{name}' is a single number and has no axes", f"a tensor is {element}[…]")
        return False
    if name in ELEMENTS and not parts.axes:
        scalar = {"int": "int", "float": "float"}.get(ELEMENTS[name])
        hint = (
            f"write {name}[h], or {scalar} for one number" if scalar else f"write {name}[b, k], or int and compare it"
        )
        report.error("E602", parts.type, f"'{name}' is an element of a tensor; its axes are missing", hint)
        return False
    return True


def _axes(tokens: list[Token], context: Context) -> tuple[str | int, ...] | None:
    report = context.report
    if len(tokens) > MAX_AXES:
        report.error("E804", tokens[MAX_AXES], f"more than {MAX_AXES} axes")
        return None
    axes: list[str | int] = []
    for token in tokens:
        if token.type == "INT":
            size = integer(token, report)
            if size is not None and size < 1:
                report.error("E603", token, "an axis has a size of at least 1")
                size = None
            if size is None:
                return None
            axes.append(size)
        elif not _check_axis(token, context):
            return None
        else:
            axes.append(str(token))
    return tuple(axes)


def _check_axis(token: Token, context: Context) -> bool:
    name, report = str(token), context.report
    if name in CALL_AXES:
        return True
    if name == "q":
        report.error(
            "E603",
            token,
            "'q' is no axis",
            "a table over positions is [k], and may be read at q; one over query rows is [row]",
        )
    elif name in BUILTIN_NAMES or name in FUNCTION_NAMES or name in TYPES:
        axis = {"q_len": "row", "k_len": "k", "b_len": "b", "h_len": "h"}.get(name)
        hint = f"the axis is called {axis!r}" if axis else "choose another name for a free axis"
        report.error("E603", token, f"{quoted(name)} is built in and is no axis", hint)
    elif name in context.axes:
        return True
    elif not check_shape(token, report):
        return False
    elif name in CALL_ARGUMENTS or name.startswith("return_"):
        report.error("E302", token, f"{quoted(name)} is an argument of every call", "choose another name")
    else:
        context.axes[name] = span_of(token)
        return True
    return False


def _check_const(parts: _Parts, report: Report) -> bool:
    if parts.const is not None and parts.type != "int":
        report.error(
            "E604",
            parts.const,
            f"only an int can be const, not {quoted(parts.type)}",
            "write const int, or leave const out",
        )
        return False
    return True


def _check_flags(parts: _Parts, type_: Type, scalar: bool, report: Report) -> bool:
    good = True
    seen: set[str] = set()
    for flag in parts.flags:
        code = "E607" if flag == "sorted" else "E606"
        if str(flag) in seen:
            report.error(code, flag, f"{flag!s} stands twice")
        elif flag == "grad" and type_ != "float":
            report.error(code, flag, f"only floats have a gradient, not {quoted(parts.type)}", "leave grad out")
        elif flag == "sorted" and (scalar or type_ != "int"):
            report.error(code, flag, "only a tensor of ints can be promised to be sorted", "leave sorted out")
        else:
            seen.add(str(flag))
            continue
        good = False
    return good


class _Wrong:
    """Marks a default that has a fault (None means that there is none)."""


_WRONG = _Wrong()


def _default(parts: _Parts, type_: Type, scalar: bool, report: Report) -> int | float | _Wrong | None:
    if parts.default is None:
        return None
    token = parts.default.children[-1]
    negative = len(parts.default.children) > 1
    assert isinstance(token, Token)
    if not scalar:
        report.error("E605", parts.default, "a tensor has no default", "only int and float parameters have one")
    elif token.type == "BOOL":
        report.error("E605", parts.default, "a bool is no default", f"write a number for {quoted(parts.type)}")
    elif type_ == "int" and token.type == "FLOAT":
        report.error(
            "E605",
            parts.default,
            f"the default of an int is an int, not {quoted(token)}",
            "make the parameter a float, or drop the point",
        )
    else:
        value = integer(token, report, negative) if token.type == "INT" else real(token, report, negative)
        if value is not None:
            return float(value) if type_ == "float" else value
    return _WRONG
