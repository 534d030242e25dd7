"""The language's own printer of expressions: what it prints reads back as an equal expression."""

from __future__ import annotations

import itertools

from attncc.ir import COMPARISON, FUNCTIONS, AttentionSpec, Const, Expr, Op, Read, Var, children

_OR, _AND, _NOT, _CMP, _SUM, _TERM, _UNARY, _ATOM = range(1, 9)
_BINARY = {"or": _OR, "and": _AND, "+": _SUM, "-": _SUM, "*": _TERM, "/": _TERM, "//": _TERM, "%": _TERM}
_WAYS = ({"<", "<="}, {">", ">="}, {"=="})


class LetNames:
    """Names to print in place of the expressions that they stand for.

    Equal expressions get one number, made from those of their parts, so that a look-up compares no whole trees.
    """

    def __init__(self) -> None:
        self.numbers: dict[object, int] = {}  # of a node's own content with the numbers of its parts
        self.known: dict[int, tuple[Expr, int]] = {}  # by identity; the Expr is kept so that its id stays its own
        self.names: dict[int, str] = {}

    def add(self, expr: Expr, name: str) -> None:
        """The first name of an expression stays; a number or a bare name is always printed as itself."""
        if not isinstance(expr, Const | Var):
            self.names.setdefault(self.number(expr), name)

    def get(self, expr: Expr) -> str | None:
        return self.names.get(self.number(expr)) if self.names else None

    def number(self, expr: Expr) -> int:
        found = self.known.get(id(expr))
        if found is None:
            parts = tuple(self.number(c) for c in children(expr))
            own: object = (expr, expr.type)
            if isinstance(expr, Op | Read):
                own = (expr.op if isinstance(expr, Op) else expr.tensor, type(expr), expr.type)
            found = expr, self.numbers.setdefault((own, parts), len(self.numbers))
            self.known[id(expr)] = found
        return found[1]


def let_names(spec: AttentionSpec) -> LetNames:
    """The lets of a spec."""
    names = LetNames()
    for name, e in spec.lets:
        names.add(e, name)
    return names


def expression_text(expr: Expr, lets: LetNames | None = None) -> str:
    """`expr` with as few parentheses as precedence allows, comparisons back in chains, lets by their names."""
    return _Printer(lets or LetNames()).at(expr, _OR)


class _Printer:
    def __init__(self, lets: LetNames) -> None:
        self.lets = lets

    def at(self, e: Expr, level: int) -> str:
        """The text of `e`, in parentheses where it binds weaker than `level`."""
        text, own = self.text(e)
        return f"({text})" if own < level else text

    def text(self, e: Expr) -> tuple[str, int]:
        """Text and precedence."""
        name = self.lets.get(e)
        if name is not None:
            return name, _ATOM
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
        bare = isinstance(_unpromoted(operand), Const)  # which no let stands for
        return f"-({text})" if bare or text.startswith("-") else f"-{text}"

    def chain(self, e: Op) -> list[str] | None:
        """`a < b < c` of a comparison, or of comparisons and-ed from the left that share their middle; else None."""
        links: list[Op] = []
        node: Expr = e
        while isinstance(node, Op) and node.op == "and" and not (links and self.lets.get(node)):
            left, right = node.args
            if not _is_comparison(right) or self.lets.get(right):
                return None
            links.insert(0, right)  # type: ignore[arg-type]
            node = left
        if not _is_comparison(node) or (links and self.lets.get(node)):
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
