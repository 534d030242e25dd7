"""Where a fault lies, what it is called, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Span:
    """A stretch of a spec's text: 1-based line and column, half-open offsets in characters."""

    line: int
    column: int
    start: int
    end: int


_SHOWN = 160  # characters of a line; of a longer one, the part around the fault


def _excerpt(span: Span, text: str) -> tuple[str, str]:
    """The line of a span and carets under it; what a terminal could obey is shown as a blank."""
    line = text[text.rfind("\n", 0, span.start) + 1 :].partition("\n")[0].rstrip("\r")
    first = min(span.column - 1, len(line))
    cut = max(0, first - _SHOWN // 2) if len(line) > _SHOWN else 0
    shown = "".join(c if c.isprintable() else " " for c in line[cut : cut + _SHOWN])
    width = max(1, min(span.end - span.start, len(shown) - (first - cut)))
    return shown, " " * (first - cut) + "^" * width


@dataclass(frozen=True)
class Diagnostic:
    """One fault: a code from docs/diagnostics.md, a sentence, where it is, and a hint on how to mend it."""

    code: str
    message: str
    span: Span | None = None
    hint: str = ""
    severity: str = "error"  # error | warning

    def render(self, text: str, filename: str) -> str:
        """`file:line:column: error CODE: message`, the line, a caret under the span, the hint."""
        where = f"{filename}:{self.span.line}:{self.span.column}" if self.span else filename
        lines = [f"{where}: {self.severity} {self.code}: {self.message}"]
        if self.span:
            lines += ["    " + part for part in _excerpt(self.span, text)]
        if self.hint:
            lines.append(f"    hint: {self.hint}")
        return "\n".join(lines)


def shown_number(value: float) -> str:
    """A number for a message: of a huge int its size, since Python refuses to write very many digits."""
    if not isinstance(value, int) or abs(value) < 2**128:
        return str(value)
    return f"about {'-' if value < 0 else ''}2^{abs(value).bit_length() - 1}"


class AttnError(Exception):
    """Base of every error that attncc raises on purpose; `exit_code` is the command line's status."""

    exit_code = 1


class SpecError(AttnError):
    """The spec is wrong, or asks for what is not built yet. Carries every diagnostic that was found."""

    def __init__(self, diagnostics: Sequence[Diagnostic], text: str = "", filename: str = "<spec>") -> None:
        self.diagnostics = tuple(diagnostics)
        self.text, self.filename = text, filename
        super().__init__("\n".join(d.render(text, filename) for d in self.diagnostics))


class NotBuilt(AttnError, NotImplementedError):
    """A call, or a derivative of one, asks for what is not built yet."""


class PlanError(AttnError):
    """No plan fits the target: says which limit is broken, and by how much."""

    exit_code = 3


class CheckError(AttnError):
    """Numbers differ from the float64 reference by more than the stated bound."""

    exit_code = 4


class EnvironmentFault(AttnError):
    """The cache, the disk or the GPU is not usable."""

    exit_code = 5
