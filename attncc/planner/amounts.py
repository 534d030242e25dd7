"""Bytes that remember of which tiles they are: the functions that estimate shared memory give a number, and the formula
that it came by."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from fractions import Fraction
from typing import Any

from attncc.ir import KernelPlan
from attncc.planner.shared_memory import Parts, parts
from attncc.targets import Target

SINGLE = "bytes"  # what is of no tile


class Amount(int):
    """A number of bytes. `terms`: how many of each part of Parts add up to it; SINGLE counts bytes of their own."""

    terms: Counter[str]

    def __new__(cls, value: int, terms: dict[str, Any]) -> Amount:
        made = super().__new__(cls, value)
        made.terms = Counter(terms)
        return made

    def __add__(self, other: int) -> Amount:
        found = self.terms.copy()
        for name, n in terms_of(other).items():
            found[name] += n
        return Amount(int(self) + int(other), found)

    __radd__ = __add__

    def __mul__(self, other: int) -> Amount:
        return Amount(int(self) * int(other), {name: n * int(other) for name, n in self.terms.items()})

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> Amount:
        return Amount(int(self) // other, {name: Fraction(n, other) for name, n in self.terms.items()})


def terms_of(value: int) -> dict[str, Any]:
    """Those of an Amount; a plain number is bytes of their own."""
    return value.terms if isinstance(value, Amount) else {SINGLE: int(value)}


def named_parts(plan: KernelPlan, target: Target) -> Parts:
    """`shared_memory.parts`, each of which knows its name."""
    made = parts(plan, target)
    return Parts(**{f.name: Amount(getattr(made, f.name), {f.name: 1}) for f in fields(made)})
