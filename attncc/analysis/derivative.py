"""Derivatives of expressions, by rule, and which parameters can have a gradient at all.

The rules are those of calculus, node by node; the result is simplified only as far as a reader of generated code would
do it (no term that is 0, no factor that is 1, `a * (x / a)` is x). Where a function has a corner the derivative is that
of the branch that is taken: min and max give the first operand's on a tie, abs(0) that of x.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from attncc.ir import AttentionSpec, Const, Expr, Op, Param, Read, Var, names, tensors, walk

ZERO, ONE = Const(0.0), Const(1.0)
LN2 = Const(math.log(2.0))


def derivative(e: Expr, wrt: Expr) -> Expr:
    """d e / d wrt as a float Expr; `wrt` is a float Var (`s`, a scalar parameter) or one Read of a float tensor.

    Another Read of the same tensor is another variable: the gradient of a table is the sum over its Reads, see `reads`.
    """
    known: dict[Expr, Expr] = {}

    def d(node: Expr) -> Expr:
        if node == wrt:
            return ONE
        if node.type != "float" or not isinstance(node, Op) or node.op == "float":
            return ZERO
        if node not in known:
            known[node] = _RULES[node.op](node, d)
        return known[node]

    return d(e)


def reads(e: Expr, tensor: str) -> tuple[Read, ...]:
    """The distinct Reads of a tensor in `e`, in the order of the text."""
    return tuple(dict.fromkeys(n for n in walk(e) if isinstance(n, Read) and n.tensor == tensor))


def variables(e: Expr, p: Param) -> tuple[Expr, ...]:
    """What of a parameter `e` can be differentiated by: each of its distinct Reads, or the scalar itself."""
    if p.is_tensor:
        return reads(e, p.name)
    return (Var(p.name, p.type),) if p.name in names(e) else ()


def ungradable(spec: AttentionSpec) -> list[tuple[Param, str]]:
    """Parameters marked `grad` that cannot have one, each with the reason in words."""
    found = ((p, _reason(spec, p)) for p in spec.params if p.grad)
    return [(p, reason) for p, reason in found if reason]


def differentiable(spec: AttentionSpec) -> tuple[Expr, ...]:
    """The expressions that gradients flow through: scores, scale, weight, arguments of the softmax."""
    more = [e for e in (spec.scale, spec.weight) if e is not None]
    args = () if spec.softmax.policy == "unified" else spec.softmax.args  # its argument changes nothing
    return (*spec.scores, *more, *args, *(e for _, e in spec.softmax.named))


def _reason(spec: AttentionSpec, p: Param) -> str:
    if p.type != "float":
        return f"{p.name} is of type {p.type}, and only a float has a gradient"
    if p.const:
        return f"{p.name} is a constant of the kernel"
    places = differentiable(spec)
    used = [e for e in places if p.name in tensors(e) | names(e)]
    if not used:
        if any(p.name in tensors(e) | names(e) for e in spec.softmax.args):
            return f"{p.name} says what exponentials are relative to, which changes nothing"
        masked = any(p.name in tensors(e) | names(e) for e in spec.masks)
        return f"{p.name} is read by the mask only, which selects" if masked else f"{p.name} is not used"
    if all(derivative(e, at) == ZERO for e in used for at in variables(e, p)):
        return f"{p.name} only stands where a small change does nothing: in a comparison, in floor or in an index"
    return ""


def add(a: Expr, b: Expr) -> Expr:
    """a + b without what is 0."""
    if isinstance(b, Op) and b.op == "neg":
        return subtract(a, b.args[0])
    return b if a == ZERO else a if b == ZERO else Op("+", (a, b), "float")


def subtract(a: Expr, b: Expr) -> Expr:
    if isinstance(b, Op) and b.op == "neg":
        return add(a, b.args[0])
    return a if b == ZERO else negate(b) if a == ZERO else Op("-", (a, b), "float")


def negate(a: Expr) -> Expr:
    if isinstance(a, Const):
        return Const(-a.value) if a.value else ZERO
    return a.args[0] if isinstance(a, Op) and a.op == "neg" else Op("neg", (a,), "float")


def multiply(a: Expr, b: Expr) -> Expr:
    """a * b without factors of 1; signs outside, fractions together, `a * (x / a)` is x."""
    if ZERO in (a, b):
        return ZERO
    if ONE in (a, b):
        return b if a == ONE else a
    for one, other in ((a, b), (b, a)):
        if isinstance(one, Op) and one.op == "neg":
            return negate(multiply(*((one.args[0], other) if one is a else (other, one.args[0]))))
        if one == Const(-1.0):
            return negate(other)
        if isinstance(one, Op) and one.op == "/":
            top, bottom = one.args
            return top if bottom == other else divide(multiply(*((top, other) if one is a else (other, top))), bottom)
    return Op("*", (a, b), "float")


def divide(a: Expr, b: Expr) -> Expr:
    if a == ZERO or b == ONE:
        return a
    if a == b:
        return ONE
    if isinstance(a, Op) and a.op == "neg":
        return negate(divide(a.args[0], b))
    return Op("/", (a, b), "float")


def select(condition: Expr, a: Expr, b: Expr) -> Expr:
    return a if a == b else Op("where", (condition, a, b), "float")


Rule = Callable[[Op, Callable[[Expr], Expr]], Expr]


def _product(e: Op, d: Callable[[Expr], Expr]) -> Expr:
    a, b = e.args
    return add(multiply(d(a), b), multiply(a, d(b)))


def _quotient(e: Op, d: Callable[[Expr], Expr]) -> Expr:
    """(da - (a / b) db) / b."""
    a, b = e.args
    return divide(subtract(d(a), multiply(e, d(b))), b)


def _extreme(relation: str) -> Rule:
    def rule(e: Op, d: Callable[[Expr], Expr]) -> Expr:
        a, b = e.args
        return select(Op(relation, (a, b), "bool"), d(a), d(b))

    return rule


def _function(slope: Callable[[Op], Expr]) -> Rule:
    """The chain rule for a function of one argument, `slope` being its own derivative there."""

    def rule(e: Op, d: Callable[[Expr], Expr]) -> Expr:
        inner = d(e.args[0])
        return ZERO if inner == ZERO else multiply(slope(e), inner)

    return rule


_RULES: dict[str, Rule] = {
    "+": lambda e, d: add(d(e.args[0]), d(e.args[1])),
    "-": lambda e, d: subtract(d(e.args[0]), d(e.args[1])),
    "neg": lambda e, d: negate(d(e.args[0])),
    "*": _product,
    "/": _quotient,
    "where": lambda e, d: select(e.args[0], d(e.args[1]), d(e.args[2])),
    "min": _extreme("<="),
    "max": _extreme(">="),
    "abs": _function(lambda e: select(Op("<", (e.args[0], ZERO), "bool"), Const(-1.0), ONE)),
    "exp": _function(lambda e: e),
    "exp2": _function(lambda e: multiply(LN2, e)),
    "log": _function(lambda e: divide(ONE, e.args[0])),
    "log2": _function(lambda e: divide(ONE, multiply(LN2, e.args[0]))),
    "tanh": _function(lambda e: subtract(ONE, multiply(e, e))),
    "sigmoid": _function(lambda e: multiply(e, subtract(ONE, e))),
    "sqrt": _function(lambda e: divide(Const(0.5), e)),
}
