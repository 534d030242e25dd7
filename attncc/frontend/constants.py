"""Ints that are the same in every call: what operators make of them, and what that may not be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from attncc.errors import Diagnostic, SpecError, shown_number
from attncc.frontend.consts import MAX_POWER
from attncc.frontend.report import Report
from attncc.ir import LEAST_INT, MOST_INT, Const, Expr, Op, Read, Var, children, names

if TYPE_CHECKING:
    from attncc.frontend.parse import Parsed

BEYOND = f"ints go from {LEAST_INT} to {MOST_INT}"


def fits(value: int) -> bool:
    return LEAST_INT <= value <= MOST_INT


def fold(op: str, values: Sequence[int | float | None]) -> int | None:
    """The int that an operator on constants gives, or None; for checks only, the expression stays as written."""
    if op == "floor" and isinstance(values[0], float):
        return math.floor(values[0])
    if not values or not all(isinstance(v, int) for v in values):
        return None
    a, b = int(values[0] or 0), int(values[-1] or 0)
    results = {"+": a + b, "-": a - b, "*": a * b, "min": min(a, b), "max": max(a, b), "abs": abs(a), "neg": -a}
    if b:
        results |= {"//": a // b, "%": a % b}
    return results.get(op)


def refuse_beyond(parsed: Parsed, constants: Iterable[int]) -> None:
    """Raise SpecError where the constants of masks come to more than 64 bits together, in which kernels count:
    `constants` are those of the ends of their tiles."""
    beyond = next((x for x in constants if not fits(x)), None)
    if beyond is not None:
        what = f"the constants of the masks come to {shown_number(beyond)} together, which does not fit 64 bits"
        raise SpecError((Diagnostic("E105", what, parsed.spans.get("mask:0"), BEYOND),), parsed.text, parsed.filename)


def check(parsed: Parsed, baked: Mapping[str, Const], report: Report) -> None:
    """Faults that the values of `const` parameters make."""
    from attncc.frontend.rules.lints import expressions  # reads text, and `refuse_beyond` does without

    folding = _Folding(parsed, baked, report)
    for _, e in expressions(parsed.spec):
        folding(e)
    soft = parsed.spec.softmax
    power = folding(soft.args[0]) if soft.policy == "relu" else None
    if power is not None and not 1 <= power <= MAX_POWER:
        report.error("E505", parsed.spans.get("softmax"), f"the power is {power}; it must be from 1 to {MAX_POWER}")


class _Folding:
    """Walks expressions with the constants in their places, and reports divisors below 1 and ints beyond 64 bits."""

    def __init__(self, parsed: Parsed, baked: Mapping[str, Const], report: Report) -> None:
        self.parsed, self.baked, self.report = parsed, baked, report
        self._known: dict[int, int | None] = {}

    def __call__(self, e: Expr) -> int | None:
        """The int that `e` is in every call, or None."""
        if isinstance(e, Var):
            e = self.baked.get(e.name, e)
        if isinstance(e, Const):
            return int(e.value) if e.type == "int" else None
        if id(e) not in self._known:
            self._known[id(e)] = None if isinstance(e, Var) else self._node(e)
        return self._known[id(e)]

    def _node(self, e: Read | Op) -> int | None:
        values = [self(child) for child in children(e)]
        if isinstance(e, Read) or e.type != "int":
            return None
        divisor = values[1] if e.op in ("//", "%") else None
        if divisor is not None and divisor < 1:
            self._fault("E407", e.args[1], f"makes a divisor of '{e.op}' {divisor}; it must be at least 1")
            return None
        value = fold(e.op, values)
        if value is not None and not fits(value):
            self._fault("E105", e, f"makes '{e.op}' {shown_number(value)}, which does not fit 64 bits")
            return None
        return value

    def _fault(self, code: str, e: Expr, what: str) -> None:
        """Told at the parameter, and once: what is wrong without one is told where the text is read."""
        name = min(names(e) & set(self.baked))
        given = f"{name} = {self.baked[name].value}"
        self.report.error(code, self.parsed.spans.get(f"param:{name}"), f"{given} {what}")
