"""What the rules of meaning share: names found so far, the report, and what an expression carries while it is built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from attncc.errors import Span
from attncc.frontend.consts import BUILTIN_NAMES
from attncc.frontend.report import Report
from attncc.ir import Const, Expr, Param, Type


@dataclass(frozen=True)
class Typed:
    """An expression with `let`s inlined. `size` counts nodes as if nothing were shared, `depth` the longest path."""

    expr: Expr
    size: int = 1
    depth: int = 1
    builtins: frozenset[str] = frozenset()
    tensors: frozenset[str] = frozenset()
    value: int | None = None  # of an int expression that is the same in every call

    @property
    def type(self) -> Type:
        return self.expr.type

    @property
    def literal(self) -> int | float | None:
        """The number that the expression is, where that is plain to see."""
        if isinstance(self.expr, Const) and not isinstance(self.expr.value, bool):
            return self.expr.value
        return self.value


@dataclass
class Context:
    """Names of one attention block. None stands for a definition with a fault, so that its uses give no second one."""

    report: Report
    params: dict[str, Param | None] = field(default_factory=dict)
    axes: dict[str, Span] = field(default_factory=dict)  # free axes
    lets: dict[str, Typed | None] = field(default_factory=dict)
    later: set[str] = field(default_factory=set)  # lets that are defined further down
    used: set[str] = field(default_factory=set)
    spans: dict[str, Span] = field(default_factory=dict)
    nodes: int = 0  # of all finished expressions

    def visible(self) -> Iterator[str]:
        """Every name that an expression could read."""
        yield from BUILTIN_NAMES
        yield from self.params
        yield from self.axes
        yield from self.lets
