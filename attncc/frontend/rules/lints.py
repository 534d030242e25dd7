"""Warnings: what is allowed, and is yet seldom what its author meant."""

from __future__ import annotations

from collections.abc import Iterator

from attncc.errors import Span
from attncc.frontend.report import quoted
from attncc.frontend.rules.context import Context
from attncc.ir import CALL_AXES, AttentionSpec, Const, Expr, Op, Read, Var, children, names, tensors, walk


def lint(spec: AttentionSpec, context: Context) -> None:
    """Every lint, in no particular order; `parse` sorts."""
    for rule in (_unused, _negative_query, _foreign_axis, _score_without_s, _constant_mask, _idle_products):
        rule(spec, context)


def expressions(spec: AttentionSpec) -> Iterator[tuple[str, Expr]]:
    """Each expression with its key in the spans."""
    yield from ((f"mask:{i}", e) for i, e in enumerate(spec.masks))
    yield from ((f"score:{i}", e) for i, e in enumerate(spec.scores))
    for kind in ("scale", "weight", "dropout"):
        e = getattr(spec, kind)
        if e is not None:
            yield kind, e
    yield from (("softmax", e) for e in (*spec.softmax.args, *(e for _, e in spec.softmax.named)))


def _unused(spec: AttentionSpec, context: Context) -> None:
    for param in spec.params:
        axes = [a for a in param.free_axes if a in context.used]
        if param.name not in context.used and not axes:
            context.report.warn(
                "W101", context.spans.get(f"param:{param.name}"), f"the parameter {quoted(param.name)} is never used"
            )
    for name, _ in spec.lets:
        if name not in context.used:
            context.report.warn("W102", context.spans.get(f"let:{name}"), f"the let {quoted(name)} is never used")


def _negative_query(spec: AttentionSpec, context: Context) -> None:
    """Aligned to the end, q is negative where q_len passes k_len; a read there is 0 or false, which may look real."""
    if spec.align != "end" or any(_excludes_negative(part) for mask in spec.masks for part in _conjuncts(mask)):
        return
    for key, e in expressions(spec):
        for node in walk(e):
            if isinstance(node, Read) and any(_bare_query(i) for i in node.indices):
                span = context.spans.get(key)
                where = "a query position, which is negative where q_len > k_len"
                message = f"{quoted(node.tensor)} is read at {where}; the read then gives 0 or false"
                context.report.warn(
                    "W103", span, message, "and-ing 'q >= 0' into the mask, or 'align start', settles it"
                )
                break


def _conjuncts(e: Expr) -> Iterator[Expr]:
    stack = [e]
    while stack:
        node = stack.pop()
        if isinstance(node, Op) and node.op == "and":
            stack.extend(node.args)
        else:
            yield node


def _excludes_negative(e: Expr) -> bool:
    """Whether a kept pair has q >= 0: k <= q, 0 <= q, 0 <= q - k and their like (k is never negative)."""
    if not (isinstance(e, Op) and e.op in ("<", "<=", ">", ">=")):
        return False
    low, high = e.args if e.op in ("<", "<=") else e.args[::-1]
    query = Var("q", "int")
    floor_ = isinstance(low, Const) and low.value >= 0
    if high == query:
        return floor_ or low == Var("k", "int")
    return floor_ and high == Op("-", (query, Var("k", "int")), "int")


def _bare_query(index: Expr) -> bool:
    """Whether an index is a query position (free of k), with nothing around q that takes care of its sign."""
    if "k" in names(index):
        return False
    stack = [index]
    while stack:
        node = stack.pop()
        if node == Var("q", "int"):
            return True
        if not (isinstance(node, Op) and node.op in ("max", "%", "abs", "where")):
            stack.extend(children(node))
    return False


def _foreign_axis(spec: AttentionSpec, context: Context) -> None:
    """An axis of the call indexed by a plain built-in of another axis, as in slopes[b] of f32[h]."""
    fits = {("k", "q")}
    told: set[str] = set()
    for key, e in expressions(spec):
        for node in walk(e):
            if not isinstance(node, Read) or node.tensor in told:
                continue
            for axis, index in zip(spec.param(node.tensor).axes, node.indices, strict=True):
                plain = index.name if isinstance(index, Var) else ""
                if axis in CALL_AXES and plain in (*CALL_AXES, "q") and plain != axis and (axis, plain) not in fits:
                    told.add(node.tensor)
                    span: Span | None = context.spans.get(key)
                    context.report.warn("W104", span, f"axis {axis!r} of {quoted(node.tensor)} is indexed by {plain!r}")


def _score_without_s(spec: AttentionSpec, context: Context) -> None:
    for i, e in enumerate(spec.scores):
        if "s" not in names(e):
            hint = "write score s + …, unless that is meant"
            context.report.warn(
                "W105",
                context.spans.get(f"score:{i}"),
                "the score does not read s, so q·k and the scores before are thrown away",
                hint,
            )


def _constant_mask(spec: AttentionSpec, context: Context) -> None:
    for i, e in enumerate(spec.masks):
        if not names(e) and not tensors(e):
            context.report.warn(
                "W106", context.spans.get(f"mask:{i}"), "the mask reads nothing, so it keeps every pair or none"
            )


def _idle_products(spec: AttentionSpec, context: Context) -> None:
    if spec.precision.products == "tf32" and spec.precision.inputs not in (None, "f32"):
        message = f"'products tf32' is about f32 inputs, and the inputs are {spec.precision.inputs}"
        context.report.warn("W108", context.spans.get("precision.products"), message)
