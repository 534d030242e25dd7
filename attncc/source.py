"""A spec's file as text."""

from __future__ import annotations

from attncc.errors import Diagnostic, Span, SpecError

MAX_BYTES = 1 << 22  # of a spec's file; the language's own limit is lower and says where it lies


def decode(data: bytes, filename: str) -> str:
    """The text of a spec's bytes. Raises SpecError for too many (E107), and for what is no UTF-8 (E101)."""
    if len(data) > MAX_BYTES:
        raise SpecError([Diagnostic("E107", f"the text has more than {MAX_BYTES} bytes")], "", filename)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise SpecError([_not_utf8(data, fault)], data.decode("utf-8", "replace"), filename) from None


def _not_utf8(data: bytes, fault: UnicodeDecodeError) -> Diagnostic:
    before = data[: fault.start].decode("utf-8")
    line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
    span = Span(line, column, len(before), len(before) + 1)
    return Diagnostic("E101", f"byte 0x{data[fault.start]:02x} is no UTF-8 text", span, "save the file as UTF-8")
