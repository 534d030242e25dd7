"""The frontend's road: text, tokens, trees, rules, spec."""

from __future__ import annotations

from attncc.errors import Span, SpecError
from attncc.frontend.lexer import lex
from attncc.frontend.parse import Parsed
from attncc.frontend.reader import Body, Draft, read
from attncc.frontend.report import Report, span_of
from attncc.frontend.rules.context import Context
from attncc.frontend.rules.lints import lint
from attncc.frontend.rules.names import check_shape
from attncc.frontend.rules.packed import check_packed
from attncc.frontend.rules.params import read_params
from attncc.frontend.rules.settings import read_settings
from attncc.frontend.rules.statements import read_statements
from attncc.frontend.scaled import SCALES, scaled
from attncc.ir import AttentionSpec


def meaning(text: str, filename: str) -> Parsed:
    """See parse."""
    report = Report()
    lexed = lex(text, report)
    draft = read(lexed, report)
    context = Context(report)
    block = _the_attention(draft, report, lexed.end)
    spec = _spec(block, draft, context) if block is not None else None
    if spec is not None and spec.ragged:
        check_packed(spec, context.spans, report)
    if spec is not None and spec.precision.kept and spec.precision.scales:
        _check_scales(context)
    if report.errors or spec is None:
        raise SpecError(report.sorted_errors(), text, filename)
    lint(spec, context)
    warnings = tuple(sorted(report.warnings, key=lambda d: d.span or Span(0, 0, 0, 0)))
    return Parsed(scaled(spec), context.spans, warnings, text, filename)


def _check_scales(context: Context) -> None:
    """Names of scales are the call's own."""
    for name in SCALES:
        if name in context.params or name in context.axes:
            hint = "call it otherwise, or leave scales out and multiply by it"
            span = context.spans.get(f"param:{name}", context.axes.get(name))
            context.report.error("E303", span, f"'{name}' is what a call's scales are called", hint)


def _the_attention(draft: Draft, report: Report, end: Span) -> Body | None:
    """The one attention block."""
    blocks = draft.of("attention")
    for block in blocks[1:]:
        report.error("E202", block.opening, "a second attention; a file holds one", "put it into a file of its own")
    if not blocks and not report.errors:
        report.error("E201", end, "no attention block", "a spec is attention NAME { … }")
    return blocks[0] if blocks else None


def _spec(block: Body, draft: Draft, context: Context) -> AttentionSpec:
    """The spec as far as it could be understood; with errors in the report it is not handed out."""
    name = "unnamed"
    if block.name is not None:
        name = str(block.name)
        check_shape(block.name, context.report)
        context.spans["attention"] = span_of(block.name)
    read_params(block.params, context)
    body = read_statements(block.pieces, context)
    precision, schedules, layout = read_settings(draft, context)
    return AttentionSpec(
        name,
        tuple(p for p in context.params.values() if p is not None),
        tuple(body.lets),
        tuple(body.masks),
        tuple(s.expr for s in body.scores),
        body.single.get("scale"),
        body.single.get("weight"),
        body.single.get("dropout"),
        body.softmax,
        body.align,
        precision,
        schedules,
        layout,
    )
