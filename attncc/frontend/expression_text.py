"""The language's own printer of expressions: what it prints reads back as an equal expression."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from attncc.ir import COMPARISON, FUNCTIONS, Const, Expr, Op, Read, Var

_OR, _AND, _NOT, _CMP, _SUM, _TERM, _UNARY, _ATOM = range(1, 9)
_BINARY = {"or": _OR, "and": _AND, "+": _SUM, "-": _SUM, "*": _TERM, "/": _TERM, "//": _TERM, "%": _TERM}
_WAYS = ({"<", "<="}, {">", ">="}, {"=="})


def expression_text(expr: Expr, lets: Mapping[Expr, str] | None = None) -> str:
    """`expr` with as few parentheses as precedence allows, and comparisons folded back into chains.

    `lets` gives names to print in place of the expressions that they stand for.
    """
    return _Printer(lets or {}).at(expr, _OR)


class _Printer:
    def __init__(self, lets: Mapping[Expr, str]) -> None:
        self.lets = lets

    def at(self, e: Expr, level: int) -> str:
        """The text of `e`, in parentheses where it binds weaker than `level`."""
        text, own = self.text(e)
        return f"({text})" if own < level else text

    def text(self, e: Expr) -> tuple[str, int]:
        """Text and precedence."""
        if self.lets and e in self.lets:
            return self.lets[e], _ATOM
        if isinstance(e, Const):
            return _constant(e)
        if isinstance(e, Var):
            return e.name, _ATOM
        if isinstance(e, Read):
            return f"{e.tensor}[{self.listed(e.indices)}]", _ATOM
        if e.op == "float":  # promotion goes without saying
            return self.text(e.args[0])
        if e.op in FUNCTIONS:
            return f"{e.op}({self.listed(e.args)})", _ATOM
        if e.op == "neg":
            return self.negative(e.args[0]), _UNARY
        if e.op == "not":
            return f"not {self.at(e.args[0], _NOT)}", _NOT
        chain = self.chain(e)
        if chain:
            return " ".join(chain), _CMP
        level = _BINARY[e.op]
        left, right = e.args
        return f"{self.at(left, level)} {e.op} {self.at(right, level + 1)}", level

    def listed(self, parts: tuple[Expr, ...]) -> str:
        return ", ".join(self.at(p, _OR) for p in parts)

    def negative(self, operand: Expr) -> str:
        """Parentheses keep `-(3)`, the operator, apart from `-3`, the literal, and signs from one another."""
        text = self.at(operand, _UNARY)
        bare = not (self.lets and operand in self.lets) and isinstance(_unpromoted(operand), Const)
        return f"-({text})" if bare or text.startswith("-") else f"-{text}"

    def chain(self, e: Op) -> list[str] | None:
        """`a < b < c` of a comparison, or of comparisons and-ed from the left that share their middle; else None."""
        links: list[Op] = []
        node: Expr = e
        while isinstance(node, Op) and node.op == "and" and not (links and node in self.lets):
            left, right = node.args
            if not _is_comparison(right) or right in self.lets:
                return None
            links.insert(0, right)  # type: ignore[arg-type]
            node = left
        if not _is_comparison(node) or (links and node in self.lets):
            return None
        links.insert(0, node)  # type: ignore[arg-type]
        linked = all(_unpromoted(a.args[1]) == _unpromoted(b.args[0]) for a, b in itertools.pairwise(links))
        one_way = any({link.op for link in links} <= way for way in _WAYS)
        if len(links) > 1 and not (linked and one_way):
            return None
        words = [self.at(links[0].args[0], _SUM)]
        for link in links:
            words += [link.op, self.at(link.args[1], _SUM)]
        return words


def _constant(e: Const) -> tuple[str, int]:
    if isinstance(e.value, bool):
        return ("true" if e.value else "false"), _ATOM
    text = repr(e.value)
    return text, _UNARY if text.startswith("-") else _ATOM


def _is_comparison(e: Expr) -> bool:
    return isinstance(e, Op) and e.op in COMPARISON


def _unpromoted(e: Expr) -> Expr:
    return e.args[0] if isinstance(e, Op) and e.op == "float" else e
