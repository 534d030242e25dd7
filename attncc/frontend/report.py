"""Collects diagnostics, never more than a person would read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attncc.errors import Diagnostic, Span
from attncc.frontend.codes import CODES
from attncc.frontend.consts import MAX_FAULTS, MAX_NAME

if TYPE_CHECKING:
    from lark import Token, Tree

_SUGGESTIONS = 30  # difflib is slow; after so many faults nobody reads suggestions


def span_of(node: Token | Tree) -> Span:
    """The stretch of a token or tree; a tree without tokens has no place and must not be asked."""
    if isinstance(node, str):  # a Token
        return Span(node.line or 1, node.column or 1, node.start_pos or 0, node.end_pos or 0)
    return Span(node.meta.line, node.meta.column, node.meta.start_pos, node.meta.end_pos)


def cover(first: Span, last: Span) -> Span:
    return Span(first.line, first.column, first.start, last.end)


@dataclass
class Report:
    """Errors and warnings of one run; each code is one of codes.CODES."""

    errors: list[Diagnostic] = field(default_factory=list)
    warnings: list[Diagnostic] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return len(self.errors) > MAX_FAULTS

    def error(self, code: str, where: Span | Token | Tree | None, message: str, hint: str = "") -> None:
        if not self.full:
            self.errors.append(_diagnostic(code, where, message, hint, "error"))

    def warn(self, code: str, where: Span | Token | Tree | None, message: str, hint: str = "") -> None:
        if len(self.warnings) < MAX_FAULTS:
            self.warnings.append(_diagnostic(code, where, message, hint, "warning"))

    def suggest(self, word: str, known: Iterable[str], otherwise: str = "") -> str:
        """`did you mean …?` for the nearest known word, else the other hint."""
        if len(self.errors) < _SUGGESTIONS and len(word) <= MAX_NAME:
            close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
            if close:
                return f"did you mean {close[0]!r}?"
        return otherwise

    def sorted_errors(self) -> tuple[Diagnostic, ...]:
        """By place, each once; a last one says where the limit cut the list."""
        found = sorted(dict.fromkeys(self.errors), key=lambda d: (d.span is None, d.span or Span(0, 0, 0, 0)))
        if self.full:
            found[MAX_FAULTS:] = [Diagnostic("E805", f"more than {MAX_FAULTS} faults; the rest is not shown")]
        return tuple(found)


def _diagnostic(code: str, where: Span | Token | Tree | None, message: str, hint: str, severity: str) -> Diagnostic:
    if code not in CODES:
        raise KeyError(f"{code} is not in frontend/codes.py")
    span = where if where is None or isinstance(where, Span) else span_of(where)
    return Diagnostic(code, message, span, hint, severity)


def quoted(text: str) -> str:
    """A word of the spec for a message: short, printable."""
    shown = "".join(c if c.isprintable() else "?" for c in text[:40])
    return f"'{shown}{'…' if len(text) > 40 else ''}'"
