"""What goes to the screen: results to standard output, errors and progress to standard error, colours on a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import click

PATIENCE = 1.0  # seconds of work after which a line says what is being done

REFERENCES = {"first_tile": "first tiles'", "whole_tile": "whole tile's"}  # but the running one, which is the usual


def colors() -> bool | None:
    """Never with NO_COLOR, always with FORCE_COLOR (either counts if not empty), else where a terminal is: None."""
    return False if os.environ.get("NO_COLOR") else True if os.environ.get("FORCE_COLOR") else None


def say(text: str = "") -> None:
    """A line of the result."""
    click.echo(text, color=colors())


def tell(text: str, **style: Any) -> None:
    """A line beside the result: an error, a warning, a remark."""
    click.echo(click.style(text, **style) if style else text, err=True, color=colors())


def warn(text: str) -> None:
    tell(f"attncc: warning: {text}", fg="yellow")


def say_json(facts: Any) -> None:
    """One JSON document; what is not a number (infinite, undefined) is null, so that every reader takes it."""
    click.echo(json.dumps(_finite(facts), indent=2, ensure_ascii=False, allow_nan=False))


def _finite(facts: Any) -> Any:
    if isinstance(facts, float):
        return facts if facts - facts == 0 else None
    if isinstance(facts, dict):
        return {name: _finite(value) for name, value in facts.items()}
    if isinstance(facts, (list, tuple)):
        return [_finite(value) for value in facts]
    return facts


def heading(text: str) -> str:
    return click.style(text, bold=True)


def dim(text: str) -> str:
    return click.style(text, dim=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Columns two spaces apart under bold heads; the columns in `numbers` are set flush right."""
    plain = [[click.unstyle(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in plain) for i in range(len(head))]
    lines = []
    for row, bare in zip((head, *rows), plain, strict=True):
        cells = []
        for i, (cell, text) in enumerate(zip(row, bare, strict=True)):
            space = " " * (widths[i] - len(text))
            cells.append(space + cell if i in numbers else cell + space)
        lines.append("  ".join(cells).rstrip())
    return "\n".join([heading(lines[0]), *lines[1:]])


def count(number: int | None) -> str:
    """A number with thousands set apart; a dash where there is none."""
    return "-" if number is None else f"{number:,}"


def digits(number: float) -> str:
    """Three digits, never with an exponent."""
    text = f"{number:.3g}"
    return f"{number:,.0f}" if "e+" in text else text


def amount(number: float, unit: str) -> str:
    """`1.5 GFLOP`, `67.1 MB`: three digits and a decimal prefix."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(number) < 1000 or prefix == "P":
            break
        number /= 1000
    return f"{digits(number)} {prefix}{unit}".rstrip()


def duration(ms: float) -> str:
    """`75.5 us`, `1.37 s`: three digits of a time in milliseconds."""
    unit, size = ("us", 1e-3) if ms < 1 else ("ms", 1.0) if ms < 1000 else ("s", 1e3)
    return f"{digits(ms / size)} {unit}"


class Progress:
    """Says on standard error what is being done once it takes longer than a second; on a terminal it moves."""

    def __init__(self) -> None:
        self._text = ""
        self._timer: threading.Timer | None = None
        self._status: Any = None
        self._lock = threading.Lock()

    def stage(self, text: str) -> None:
        """Name what begins now."""
        with self._lock:
            self._text = text
            if self._status is not None:
                self._status.update(text)
            elif self._timer is None:
                self._timer = threading.Timer(PATIENCE, self._show)
                self._timer.daemon = True
                self._timer.start()

    def note(self, text: str) -> None:
        """A remark that stays on the screen."""
        self.close()
        tell(text)

    def close(self) -> None:
        """Take the line off the screen."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._status is not None:
                self._status.stop()
                self._status = None

    def _show(self) -> None:
        with self._lock:
            if self._timer is None:
                return
            self._timer = None
            if not sys.stderr.isatty():
                with contextlib.suppress(OSError, ValueError):
                    tell(f"attncc: {self._text} ...")
                return
            from rich.console import Console

            self._status = Console(stderr=True).status(self._text)
            self._status.start()


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    shown = Progress()
    try:
        yield shown
    finally:
        shown.close()
