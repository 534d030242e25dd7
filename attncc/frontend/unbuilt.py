"""Refusal of what the language knows and this version does not build yet; never a quiet way around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attncc.errors import Diagnostic, SpecError
from attncc.frontend import built, rows
from attncc.frontend.algorithms import inexpressible
from attncc.frontend.parse import Parsed
from attncc.frontend.report import Report
from attncc.ir import SUM, Softmax

_LATER = "the language knows it; this version does not build it yet"


def refuse_unbuilt(parsed: Parsed, passes: Sequence[str] = ("forward",)) -> None:
    """Raise SpecError with one "not yet" diagnostic (codes N…) for each thing that is not built, and one (E708) for
    each schedule whose algorithm cannot express the spec or (E709) row output without meaning; else do nothing."""
    report = Report()
    for code, key, what in _unbuilt(parsed, passes):
        report.error(code, parsed.spans.get(key), f"not yet: {what}", _LATER)
    for key, what, hint in inexpressible(parsed.spec):
        report.error("E708", parsed.spans.get(key), what, hint)
    for key, what, hint in rows.meaningless(parsed.spec):
        report.error("E709", parsed.spans.get(key), what, hint)
    found: tuple[Diagnostic, ...] = report.sorted_errors()
    if found:
        raise SpecError(found, parsed.text, parsed.filename)


def summed(softmax: Softmax) -> bool:
    """Whether weights that are no exponentials are divided by their sum."""
    return dict(softmax.named).get("divide") == SUM and softmax.exponent is None


def _unbuilt(parsed: Parsed, passes: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Code, key of the place, and what it is."""
    spec = parsed.spec
    yield from _memory(parsed)
    yield from _precision(parsed)
    for schedule in spec.schedules:
        prefix = "schedule" if schedule.target is None else f"schedule.{schedule.target}"
        if schedule.algorithm is not None and schedule.algorithm not in built.ALGORITHMS:
            yield "N106", f"{prefix}.algorithm", f"algorithm {schedule.algorithm}"
        if schedule.algorithm in ("standard", "fa1") and summed(spec.softmax):
            yield "N106", f"{prefix}.algorithm", f"algorithm {schedule.algorithm} with sums that are of no exponentials"
        if spec.precision.kept and schedule.asked in ("standard", "fa1", "fa3"):
            key = "loop" if schedule.algorithm is None else "algorithm"
            yield "N106", f"{prefix}.{key}", f"algorithm {schedule.asked} of inputs of two types"
    for name in passes:
        if name not in built.PASSES:
            yield "N109", "attention", f"the {name} pass"


def _precision(parsed: Parsed) -> Iterator[tuple[str, str, str]]:
    precision = parsed.spec.precision
    if precision.inputs is not None and precision.inputs not in built.INPUTS:
        yield "N105", "precision.inputs", f"inputs {precision.inputs}"
    if precision.is_eight_bit and parsed.spec.ragged:
        yield "N105", "precision.inputs", f"inputs {precision.inputs} of packed sequences"
    if precision.is_eight_bit and precision.block not in (None, built.BLOCK):
        yield "N108", "precision.scales", f"scales {precision.scales}, of another number than {built.BLOCK}"
    if precision.is_eight_bit and precision.products != "ieee":
        yield "N108", "precision.products", f"products {precision.products} of inputs of 8 bits"
    if not precision.is_eight_bit:
        for name in ("rotate",) if precision.kept else ("scales", "rotate"):
            value = getattr(precision, name)
            if value not in (None, "none"):
                yield "N108", f"precision.{name}", f"{name} {value} of inputs that are not of 8 bits"


def _memory(parsed: Parsed) -> Iterator[tuple[str, str, str]]:
    layout = parsed.spec.layout
    for key, what in rows.unbuilt(parsed.spec):
        yield "N103", key, what
    if (layout.q == "ragged") != (layout.kv == "ragged") and "paged" not in layout.kv:
        axis, other = ("q", "kv") if layout.q == "ragged" else ("kv", "q")
        yield "N103", f"layout.{axis}", f"layout {axis} ragged beside {other} {getattr(layout, other)}"
    for axis in ("q", "kv", "v"):
        form, _, element = str(getattr(layout, axis)).partition(", ")
        if form.partition("(")[0] not in built.LAYOUT[axis]:
            yield "N103", f"layout.{axis}", f"layout {axis} {form}"
        if element and element.partition("(")[0] not in built.QUANTISED:
            yield "N104", f"layout.{axis}", f"{axis} as {element}"
