"""Parse trees to expressions: names resolved, types checked, lets inlined, chains of comparisons taken apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lark import Token, Tree

from attncc.errors import Span
from attncc.frontend.constants import BEYOND
from attncc.frontend.consts import FUNCTION_NAMES
from attncc.frontend.report import Report, cover, quoted, span_of
from attncc.frontend.rules import operators
from attncc.frontend.rules.context import Context, Typed
from attncc.frontend.rules.names import Place, check_place, unknown
from attncc.ir import BUILTINS, ELEMENTS, FUNCTIONS, LEAST_INT, MOST_INT, Const, Param, Read, Type, Var

_UP, _DOWN = frozenset(("<", "<=")), frozenset((">", ">="))
_FLOAT32_MAX, _FLOAT32_TINY = 3.4028234663852886e38, 1.1754943508222875e-38
Node = Token | Tree  # what lark gives


def build(node: Node, place: Place, context: Context) -> Typed | None:
    """The expression of a tree, or None where it has a fault; every fault that can be told is reported."""
    return _Builder(place, context).build(node)


def integer(token: Token, report: Report, negative: bool = False) -> int | None:
    """A 64-bit int, or None after a report."""
    limit = -LEAST_INT if negative else MOST_INT
    digits = token.lstrip("0") or "0"
    if len(digits) > 19 or int(digits) > limit:
        report.error("E105", token, "the number does not fit 64 bits", BEYOND)
        return None
    return -int(digits) if negative else int(digits)


def real(token: Token, report: Report, negative: bool = False) -> float | None:
    """A finite float, or None after a report."""
    value = float(token)
    if math.isinf(value):
        report.error("E105", token, f"{quoted(token)} is beyond every float")
        return None
    if (
        value > _FLOAT32_MAX
        or 0 < value < _FLOAT32_TINY
        or (value == 0 and token.strip("0.eE+-") and "." not in token[:1] and _has_digits(token))
    ):
        report.warn(
            "W107", token, f"{quoted(token)} is outside float32, in which kernels compute", "it becomes inf or 0 there"
        )
    return -value if negative else value


def _has_digits(token: str) -> bool:
    """Whether the mantissa has a digit other than 0 (1e-999 reads as 0)."""
    return any(c in "123456789" for c in token.lower().partition("e")[0])


class _Builder:
    """One statement's expressions. Recursion is bounded by the reader's limit on nesting."""

    def __init__(self, place: Place, context: Context) -> None:
        self.place, self.context, self.report = place, context, context.report

    def build(self, node: Node) -> Typed | None:
        if isinstance(node, Token):
            return self.atom(node)
        return getattr(self, "on_" + node.data)(node)  # one method for each alternative of the grammar

    def atom(self, token: Token) -> Typed | None:
        if token.type == "INT":
            value = integer(token, self.report)
            return None if value is None else Typed(Const(value), value=value)
        if token.type == "FLOAT":
            number = real(token, self.report)
            return None if number is None else Typed(Const(number))
        if token.type == "BOOL":
            return Typed(Const(token == "true"))
        return self.name(token)

    def name(self, token: Token) -> Typed | None:
        name, context = str(token), self.context
        context.used.add(name)
        if name in BUILTINS:
            found = Typed(Var(name, BUILTINS[name][0]), builtins=frozenset((name,)))
            return found if check_place(found, token, name, self.place, self.report) else None
        if name in context.lets:
            value = context.lets[name]
            return value if value and check_place(value, token, name, self.place, self.report) else None
        if name in context.params:
            param = context.params[name]
            if param is None:
                return None
            if param.is_tensor:
                axes = ", ".join(map(str, param.axes))
                self.report.error(
                    "E307", token, f"the tensor {quoted(name)} is read without indices", f"write {name}[{axes}]"
                )
                return None
            return Typed(Var(name, param.type))
        if name in context.axes:
            return Typed(Var(name, "int"))
        if name in FUNCTION_NAMES:
            self.report.error(
                "E309", token, f"the function {quoted(name)} has no arguments", f"write {name}({_parameters(name)})"
            )
        else:
            unknown(token, context)
        return None

    def on_group(self, tree: Tree) -> Typed | None:
        return self.build(tree.children[0])

    def on_neg(self, tree: Tree) -> Typed | None:
        operand = tree.children[1]
        if isinstance(operand, Token) and operand.type == "INT":
            value = integer(operand, self.report, negative=True)
            return None if value is None else Typed(Const(value), value=value)
        if isinstance(operand, Token) and operand.type == "FLOAT":
            number = real(operand, self.report, negative=True)
            return None if number is None else Typed(Const(number))
        return self.operate("neg", [operand], tree)

    def on_not_(self, tree: Tree) -> Typed | None:
        return self.operate("not", [tree.children[1]], tree)

    def on_expr(self, tree: Tree) -> Typed | None:
        return self.chain_left(tree)

    on_conj = on_sum = on_term = on_expr

    def chain_left(self, tree: Tree) -> Typed | None:
        """a op b op c, from the left."""
        left, left_span = self.build(tree.children[0]), span_of(tree.children[0])
        for op, node in zip(tree.children[1::2], tree.children[2::2], strict=True):
            right, right_span = self.build(node), span_of(node)
            both = cover(left_span, right_span)
            if left is None or right is None:
                left = None
            else:
                if op in ("//", "%"):
                    self.check_divisor(right, node)
                left = operators.apply(str(op), (left, right), (left_span, right_span), both, self.report)
            left_span = both
        return left

    def check_divisor(self, divisor: Typed, node: Node) -> None:
        """A parameter is checked at the call; a default that could never pass is told now."""
        name = operators.divisor_parameter(divisor)
        param = self.context.params.get(name) if name else None
        if param is not None and param.default is not None and param.default < 1:
            self.report.error(
                "E407", node, f"the divisor {quoted(param.name)} is {param.default} by default; it must be at least 1"
            )

    def on_cmp(self, tree: Tree) -> Typed | None:
        operands, signs = tree.children[::2], [str(t) for t in tree.children[1::2]]
        built = [self.build(n) for n in operands]
        if not self.one_way(signs, tree.children[1::2]):
            return None
        whole: Typed | None = None
        for i, sign in enumerate(signs):
            left, right = built[i], built[i + 1]
            if left is None or right is None:
                return None
            spans = (span_of(operands[i]), span_of(operands[i + 1]))
            link = operators.apply(sign, (left, right), spans, cover(*spans), self.report)
            if link is None:
                return None
            if whole is None:
                whole = link
            else:
                span = span_of(tree)
                whole = operators.apply("and", (whole, link), (span, spans[1]), span, self.report)
                if whole is None:
                    return None
        return whole

    def one_way(self, signs: Sequence[str], tokens: Sequence[Node]) -> bool:
        if len(signs) > 1:
            for allowed in (_UP, _DOWN, {"=="}):
                if signs[0] in allowed:
                    wrong = next((t for s, t in zip(signs, tokens, strict=True) if s not in allowed), None)
                    break
            else:
                wrong = tokens[0]
            if wrong is not None:
                hint = "a chain uses < and <= only, > and >= only, or == only; join others with 'and'"
                self.report.error("E406", wrong, f"'{wrong}' does not go on with this chain of comparisons", hint)
                return False
        return True

    def operate(self, op: str, nodes: Sequence[Node], tree: Tree) -> Typed | None:
        args = [self.build(n) for n in nodes]
        checked = [a for a in args if a is not None]
        if len(checked) < len(args):
            return None
        return operators.apply(op, checked, [span_of(n) for n in nodes], span_of(tree), self.report)

    def on_call(self, tree: Tree) -> Typed | None:
        token, args = _called(tree)
        name = str(token)
        if name not in FUNCTIONS:
            self.not_a_function(token)
        elif len(args) != FUNCTIONS[name]:
            wanted = FUNCTIONS[name]
            self.report.error(
                "E403",
                token,
                f"{name!r} takes {wanted} argument{'s' * (wanted > 1)}, not {len(args)}",
                f"write {name}({_parameters(name)})",
            )
        else:
            return self.operate(name, args, tree)
        for arg in args:
            self.build(arg)  # faults inside are told all the same
        return None

    def not_a_function(self, token: Token) -> None:
        name = str(token)
        self.context.used.add(name)
        if name in ELEMENTS or name in ("int", "float"):
            hint = (
                "write floor(x): it gives an int"
                if ELEMENTS.get(name, name) == "int"
                else "an int becomes a float by itself"
            )
        elif (param := self.context.params.get(name)) is not None and param.is_tensor:
            hint = f"write {name}[…] to read the tensor"
        elif name in self.context.visible():
            hint = f"{name!r} is a value; write '*' to multiply"
        else:
            hint = self.report.suggest(name, FUNCTION_NAMES, "functions are " + ", ".join(FUNCTION_NAMES))
        self.report.error("E306", token, f"{quoted(name)} is not a function", hint)

    def on_index(self, tree: Tree) -> Typed | None:
        token, nodes = _called(tree)
        indices = [self.build(n) for n in nodes]
        param = self.tensor(token)
        if param is None:
            return None
        if len(nodes) != len(param.axes):
            shape = ", ".join(map(str, param.axes))
            self.report.error(
                "E404",
                token,
                f"{param.name!r} has the axes [{shape}] and takes as many indices, not {len(nodes)}",
            )
            return None
        for index, node in zip(indices, nodes, strict=True):
            if index is not None and index.type != "int":
                hint = "write floor(…)" if index.type == "float" else ""
                self.report.error("E405", node, f"an index is an int, and this is {operators.words(index.type)}", hint)
                return None
        return self.read(param, [i for i in indices if i is not None], span_of(tree))

    def tensor(self, token: Token) -> Param | None:
        name = str(token)
        self.context.used.add(name)
        if name in self.context.params:
            param = self.context.params[name]
            if param is None or param.is_tensor:
                return param
            self.report.error(
                "E308", token, f"{quoted(name)} is {operators.words(param.type)}, not a tensor", "leave the indices out"
            )
        elif name in self.context.lets or name in BUILTINS or name in self.context.axes:
            self.report.error("E308", token, f"{quoted(name)} is a number, not a tensor", "leave the indices out")
        elif name in FUNCTION_NAMES:
            self.report.error(
                "E308", token, f"{quoted(name)} is a function, not a tensor", f"write {name}({_parameters(name)})"
            )
        else:
            unknown(token, self.context)
        return None

    def read(self, param: Param, indices: Sequence[Typed], span: Span) -> Typed | None:
        if len(indices) != len(param.axes):
            return None  # an index had a fault
        type_: Type = param.type
        value = Typed(
            Read(param.name, tuple(i.expr for i in indices), type_),
            1 + sum(i.size for i in indices),
            1 + max(i.depth for i in indices),
            frozenset().union(*(i.builtins for i in indices)),
            frozenset((param.name,)).union(*(i.tensors for i in indices)),
        )
        if not check_place(value, span, param.name, self.place, self.report):
            return None
        return value if operators.within_limits(value, span, self.report) else None


def _parameters(name: str) -> str:
    return {1: "x", 2: "x, y", 3: "condition, x, y"}[FUNCTIONS[name]]


def _called(tree: Tree) -> tuple[Token, list[Node]]:
    """The name and the arguments of a call, or of a read."""
    name, args = tree.children
    assert isinstance(name, Token) and isinstance(args, Tree)
    return name, args.children
