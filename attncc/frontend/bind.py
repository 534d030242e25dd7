"""Values for the `const` parameters, checked like the constants of a text."""

from __future__ import annotations

from collections.abc import Mapping

from attncc.errors import SpecError, shown_number
from attncc.frontend.consts import MAX_POWER
from attncc.frontend.parse import Parsed
from attncc.frontend.report import Report
from attncc.ir import AttentionSpec, Const, Expr, Op, names, substitute, walk


def bind(parsed: Parsed, values: Mapping[str, int]) -> AttentionSpec:
    """The spec with its `const` parameters baked in: the values given, else the defaults.

    Raises KeyError for a parameter without either, and SpecError where a value does not fit 64 bits (E105), makes the
    divisor of `//` or `%` less than 1 (E407), or the power of relu leave its range (E505).
    """
    spec, report = parsed.spec, Report()
    baked: dict[str, Expr] = {}
    for p in spec.consts:
        value = values[p.name] if p.name in values or p.default is None else int(p.default)
        baked[p.name] = Const(value)
        if not -(2**63) <= value < 2**63:
            report.error(
                "E105", parsed.spans.get(f"param:{p.name}"), f"{p.name} = {shown_number(value)} does not fit 64 bits"
            )
    if baked and not report.errors:
        _check_divisors(parsed, baked, report)
        _check_power(parsed, baked, report)
    if report.errors:
        raise SpecError(report.sorted_errors(), parsed.text, parsed.filename)
    return spec.bind(values)


def _check_divisors(parsed: Parsed, baked: Mapping[str, Expr], report: Report) -> None:
    from attncc.frontend.rules.lints import expressions

    for _, e in expressions(parsed.spec):
        for node in walk(e):
            if not (isinstance(node, Op) and node.op in ("//", "%")):
                continue
            responsible = sorted(names(node.args[1]) & set(baked))
            value = _value(substitute(node.args[1], baked)) if responsible else None
            if value is not None and value < 1:
                name = responsible[0]
                given = baked[name]
                assert isinstance(given, Const)
                message = f"{name} = {given.value} makes a divisor of '{node.op}' {value}; it must be at least 1"
                report.error("E407", parsed.spans.get(f"param:{name}"), message)


def _check_power(parsed: Parsed, baked: Mapping[str, Expr], report: Report) -> None:
    soft = parsed.spec.softmax
    power = _value(substitute(soft.args[0], baked)) if soft.policy == "relu" else None
    if power is not None and not 1 <= power <= MAX_POWER:
        report.error("E505", parsed.spans.get("softmax"), f"the power is {power}; it must be from 1 to {MAX_POWER}")


def _value(e: Expr) -> int | None:
    """The int that an expression of constants is; None for any other."""
    if isinstance(e, Const):
        return e.value if isinstance(e.value, int) else None
    if not isinstance(e, Op) or e.type != "int":
        return None
    from attncc.frontend.rules.operators import fold

    values = [_value(a) for a in e.args]
    return fold(e.op, values) if values else None
