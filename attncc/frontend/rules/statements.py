"""Rules on statements: what each takes, how often it may stand, and what it puts into the spec."""

from __future__ import annotations

from dataclasses import dataclass, field

from lark import Token, Tree

from attncc.errors import Span
from attncc.frontend.consts import (
    MAX_DEPTH,
    MAX_LETS,
    MAX_NODES,
    MAX_POWER,
    MAX_STATEMENTS,
    MAX_TOTAL,
    POLICY_ARGUMENTS,
)
from attncc.frontend.reader import Piece
from attncc.frontend.report import quoted, span_of
from attncc.frontend.rules.context import Context, Typed
from attncc.frontend.rules.expressions import Node, build
from attncc.frontend.rules.names import PLACES, check_new, spoil
from attncc.frontend.rules.operators import promote, words
from attncc.ir import MAXIMUM, MOST_DROPPED, NONE, POLICIES, SUM, Expr, Softmax, Type, Var, walk
from attncc.ir.sign import never_negative

_MANY = {"let": MAX_LETS, "mask": MAX_STATEMENTS, "score": MAX_STATEMENTS}
_WANTED: dict[str, Type] = {"mask": "bool"}  # every other statement is a float
_TYPE_HINTS = {
    "mask": "a mask says which pairs are kept: write a comparison",
    "score": "a mask excludes pairs; a score is a number, like where(condition, s, s - 1)",
}


@dataclass
class Body:
    """The finished statements of an attention block."""

    lets: list[tuple[str, Expr]] = field(default_factory=list)
    masks: list[Expr] = field(default_factory=list)
    scores: list[Typed] = field(default_factory=list)
    single: dict[str, Expr] = field(default_factory=dict)  # scale, weight, dropout
    softmax: Softmax = field(default_factory=Softmax)
    align: str = "end"
    composed_too_large: bool = False  # told once


def read_statements(pieces: list[Piece], context: Context) -> Body:
    """Lets first, in the order of the text; the order between other kinds means nothing."""
    body = Body()
    pieces = _check_repeats([p for p in pieces if p.kind != "unknown"], context)
    lets = [p for p in pieces if p.kind == "let"]
    context.later = {str(p.tokens[1]) for p in lets if len(p.tokens) > 1}
    for piece in lets:
        _let(piece, body, context)
    context.later = set()
    for piece in pieces:
        if piece.kind != "let" and piece.tree is not None:
            _statement(piece, piece.tree, body, context)
    return body


def _check_repeats(pieces: list[Piece], context: Context) -> list[Piece]:
    """Masks, scores and lets may repeat, within limits; anything else stands once."""
    kept: list[Piece] = []
    first: dict[str, Span] = {}
    count: dict[str, int] = {}
    for piece in pieces:
        kind = piece.kind
        count[kind] = count.get(kind, 0) + 1
        if kind not in _MANY and kind in first:
            message = f"'{kind}' stands a second time; the first is on line {first[kind].line}"
            context.report.error("E501", piece.tokens[0], message, "only mask, score and let may repeat")
        elif kind in _MANY and count[kind] == _MANY[kind] + 1:
            context.report.error("E804", piece.tokens[0], f"more than {_MANY[kind]} '{kind}' statements")
        elif kind not in _MANY or count[kind] <= _MANY[kind]:
            first.setdefault(kind, span_of(piece.tokens[0]))
            kept.append(piece)
    return kept


def _let(piece: Piece, body: Body, context: Context) -> None:
    if piece.tree is None:
        spoil(piece.tokens[min(1, len(piece.tokens) - 1)], context.lets, context)
        return
    _, name, tree = piece.tree.children
    assert isinstance(name, Token)
    value = build(tree, PLACES["let"], context)
    fresh = check_new(name, "a let", context)
    context.later.discard(str(name))
    if not fresh:
        spoil(name, context.lets, context)
    else:
        context.lets[str(name)] = value
        context.spans[f"let:{name}"] = piece.span
        if value is not None and _within_total(value, piece.span, context):
            body.lets.append((str(name), value.expr))


def _within_total(value: Typed, span: Span, context: Context) -> bool:
    before, context.nodes = context.nodes, context.nodes + value.size
    if before <= MAX_TOTAL < context.nodes:
        hint = "every use of a let counts as its whole expression"
        context.report.error("E802", span, f"all expressions together have more than {MAX_TOTAL} parts", hint)
    return context.nodes <= MAX_TOTAL


def _statement(piece: Piece, tree: Tree, body: Body, context: Context) -> None:
    kind = piece.kind
    if kind == "align":
        _align(tree, body, context)
        context.spans["align"] = piece.span
    elif kind == "softmax":
        _softmax(tree, body, context)
        context.spans["softmax"] = piece.span
    else:
        value = _value(kind, tree.children[1], piece.span, context)
        number = len(body.masks) if kind == "mask" else len(body.scores)
        context.spans[f"{kind}:{number}" if kind in _MANY else kind] = piece.span
        if value is not None:
            _keep(kind, value, piece.span, body, context)


def _value(kind: str, node: Node, span: Span, context: Context) -> Typed | None:
    """The expression of a mask, score, scale, weight or dropout, of the type that it wants."""
    value = build(node, PLACES[kind], context)
    if value is None or not _within_total(value, span, context):
        return None
    return _want(value, _WANTED.get(kind, "float"), f"'{kind}'", span_of(node), context, _TYPE_HINTS.get(kind, ""))


def _want(value: Typed, wanted: Type, what: str, span: Span, context: Context, hint: str = "") -> Typed | None:
    if wanted == "float":
        value = promote(value)
    if value.type != wanted:
        context.report.error("E402", span, f"{what} takes {words(wanted)}, and this is {words(value.type)}", hint)
        return None
    return value


def _keep(kind: str, value: Typed, span: Span, body: Body, context: Context) -> None:
    if kind == "mask":
        body.masks.append(value.expr)
    elif kind == "score":
        body.scores.append(value)
        _check_composed(body, span, context)
    else:
        body.single[kind] = value.expr
        if kind == "dropout":
            _check_range(value, "the probability", span, 0.0, MOST_DROPPED, context)


def _check_composed(body: Body, span: Span, context: Context) -> None:
    """Each score's `s` is the one before it: their size multiplies where `s` stands twice, their depth adds up."""
    size = depth = 1
    for score in body.scores:
        uses = sum(1 for n in walk(score.expr) if isinstance(n, Var) and n.name == "s")
        size, depth = score.size + uses * (size - 1), score.depth + depth - 1
    if (size > MAX_NODES or depth > MAX_DEPTH) and not body.composed_too_large:
        body.composed_too_large = True
        context.report.error(
            "E802",
            span,
            "the scores, put into one another, are too large",
            f"at most {MAX_NODES} parts, {MAX_DEPTH} deep",
        )


def _check_range(value: Typed, what: str, span: Span, low: float, high: float, context: Context) -> None:
    """A literal argument must lie in [low, high); a run-time one is checked at the call."""
    number = _number(value)
    if number is not None and not low <= number < high:
        context.report.error("E505", span, f"{what} is {number}; it must lie in [{low:g}, {high:g})")


def _number(value: Typed) -> float | None:
    """A literal, or None."""
    inner = value.expr.args[0] if getattr(value.expr, "op", "") == "float" else value.expr  # type: ignore[union-attr]
    number: float | None = getattr(inner, "value", None)
    return number


def _align(tree: Tree, body: Body, context: Context) -> None:
    word = tree.children[1]
    assert isinstance(word, Token)
    if word not in ("start", "end"):
        hint = context.report.suggest(
            word, ("start", "end"), "it is 'end' (q = row + k_len - q_len, the default) or 'start' (q = row)"
        )
        context.report.error("E502", word, f"unknown alignment {quoted(word)}", hint)
    else:
        body.align = str(word)


def _softmax(tree: Tree, body: Body, context: Context) -> None:
    name = tree.children[1]
    assert isinstance(name, Token)
    args: list[Tree] = list(tree.children[2].children) if len(tree.children) > 2 else []
    if name not in POLICIES:
        hint = context.report.suggest(name, POLICIES, "policies are " + ", ".join(POLICIES))
        context.report.error("E503", name, f"unknown softmax policy {quoted(name)}", hint)
        return
    policy, wanted = str(name), POLICY_ARGUMENTS[str(name)]
    if policy == "custom":
        _custom(name, args, body, context)
        return
    if len(args) != len(wanted):
        form = f"{policy}({', '.join(wanted)})" if wanted else policy
        context.report.error(
            "E504",
            name,
            f"'{policy}' takes {len(wanted) or 'no'} argument{'s' * (len(wanted) != 1)}, not {len(args)}",
            f"write softmax {form}",
        )
        return
    built = [_argument(policy, arg, context) for arg in args]
    if all(b is not None for b in built):
        body.softmax = Softmax(policy, tuple(b.expr for b in built if b is not None))


def _argument(policy: str, arg: Tree, context: Context) -> Typed | None:
    node, label = arg.children[-1], arg.children[0]
    if len(arg.children) > 1:
        context.report.error(
            "E504", label, f"'{policy}' takes its argument without a name", "only custom names its arguments"
        )
        return None
    value = build(node, PLACES["softmax"], context)
    if value is None:
        return None
    span, what = span_of(node), f"'{policy}'"
    if policy == "relu":
        value_int = _want(value, "int", what, span, context, "the power is an int")
        if value_int is None or not _is_constant(value_int, "the power", span, context):
            return None
        _check_range(value_int, "the power", span, 1, MAX_POWER + 1, context)
        return value_int
    result = _want(value, "float", what, span, context)
    if policy == "entmax" and result is not None:
        return result if _is_alpha(result, span, context) else None
    return result


def _is_alpha(value: Typed, span: Span, context: Context) -> bool:
    """A number in its range: 1 is softmax itself, and beyond 2 a weight's slope has no bound where it begins."""
    alpha, hint = _number(value), "1.5 and 2, which is sparsemax, are usual"
    if alpha is None:
        context.report.error("E504", span, "alpha is baked into the kernel, and is no number here", hint)
    elif not 1.0 < alpha <= 2.0:
        hint = "softmax online is what alpha = 1 means" if alpha == 1.0 else hint
        context.report.error("E505", span, f"alpha is {alpha:g}; it must be above 1 and at most 2", hint)
    return alpha is not None and 1.0 < alpha <= 2.0


def _custom_value(label: str, node: Node, context: Context) -> Typed | None:
    """A weight, which may read the row's maximum as m, or what it is divided by."""
    if label == "divide":
        word = str(node) if isinstance(node, Token) else ""
        marks = {"sum": SUM, "none": NONE}
        return Typed(marks[word]) if word in marks else build(node, PLACES["softmax"], context)
    tokens = node.scan_values(lambda t: t == "m") if isinstance(node, Tree) else (t for t in (node,) if t == "m")
    read = next(iter(tokens), None)
    if read is None:
        return build(node, PLACES["custom"], context)
    if "m" in context.visible():
        hint = "give what the spec calls m another name"
        context.report.error("E303", read, "'m' is the row's maximum in a custom weight", hint)
        return None
    context.lets["m"] = Typed(MAXIMUM)
    value = build(node, PLACES["custom"], context)
    del context.lets["m"]
    return value


def _is_constant(value: Typed, what: str, span: Span, context: Context) -> bool:
    """Known when the kernel is made: numbers and const parameters."""
    named = sorted(n.name for n in walk(value.expr) if isinstance(n, Var))
    varying = [n for n in named if (p := context.params.get(n)) is None or not p.const]
    if varying or value.tensors:
        what_varies = quoted(varying[0] if varying else min(value.tensors))
        hint = "write a number, or a parameter declared const int"
        context.report.error(
            "E504", span, f"{what} is baked into the kernel, and {what_varies} is not known then", hint
        )
    return not varying and not value.tensors


def _custom(name: Token, args: list[Tree], body: Body, context: Context) -> None:
    """custom(weight = …, divide = …): both by name, each once."""
    named: dict[str, Expr] = {}
    good = True
    for arg in args:
        label = str(arg.children[0]) if len(arg.children) > 1 else ""
        if label not in ("weight", "divide") or label in named:
            context.report.error("E504", arg, "'custom' takes 'weight = …' and 'divide = …', each once")
            good = False
            continue
        value = _custom_value(label, arg.children[-1], context)
        value = value and _want(value, "float", f"'{label}'", span_of(arg.children[-1]), context)
        good = good and value is not None
        if value is not None:
            named[label] = value.expr
    weighs, divides = named.get("weight"), named.get("divide")
    if good and weighs is not None and MAXIMUM in walk(weighs) and divides != SUM:
        message = "the row's maximum 'm' cancels only where the weights are divided by their sum"
        context.report.error("E504", name, message, "write divide = sum, or leave m out")
    elif good and len(named) != 2:
        context.report.error("E504", name, "'custom' takes 'weight = …' and 'divide = …', each once")
    elif good:
        made = Softmax("custom", (), tuple((n, named[n]) for n in ("weight", "divide")))
        if divides == SUM and made.exponent is None and not _can_be_summed(name, named["weight"], context):
            return
        body.softmax = made


def _can_be_summed(name: Token, weight: Expr, context: Context) -> bool:
    """A sum of weights that are no exponentials divides them where none of them can be negative."""
    if MAXIMUM in walk(weight):
        message = "the row's maximum 'm' cancels only in exp(… - m) and exp2(… - m)"
        context.report.error("E504", name, message, "leave m out")
    elif not never_negative(weight):
        message = "weights that are divided by their sum must not be negative, and nothing proves it of these"
        hint = "known: exp, sigmoid, sqrt, abs, x * x, max(x, 0), log(1 + exp(x)), their sums, products and quotients"
        context.report.error("E504", name, message, hint)
    else:
        return True
    return False
