"""Values for the `const` parameters, checked like the constants of a text."""

from __future__ import annotations

from collections.abc import Mapping

from attncc.errors import SpecError, shown_number
from attncc.frontend.constants import check, fits
from attncc.frontend.parse import Parsed
from attncc.frontend.report import Report
from attncc.ir import AttentionSpec, Const


def bind(parsed: Parsed, values: Mapping[str, int]) -> AttentionSpec:
    """The spec with its `const` parameters baked in: the values given, else the defaults.

    Raises KeyError for a parameter without either, and SpecError where a value, or an int made of such, does not fit
    64 bits (E105), the divisor of `//` or `%` is less than 1 (E407), or the power of relu leaves its range (E505).
    """
    spec, report = parsed.spec, Report()
    baked: dict[str, Const] = {}
    for p in spec.consts:
        value = values[p.name] if p.name in values or p.default is None else int(p.default)
        baked[p.name] = Const(value)
        if not fits(value):
            report.error(
                "E105", parsed.spans.get(f"param:{p.name}"), f"{p.name} = {shown_number(value)} does not fit 64 bits"
            )
    if baked and not report.errors:
        check(parsed, baked, report)
    if report.errors:
        raise SpecError(report.sorted_errors(), parsed.text, parsed.filename)
    return spec.bind(values)
