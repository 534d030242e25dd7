"""Text to AttentionSpec, and back. What reads text is imported when there is something to read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncc.frontend.algorithms import inexpressible, pinned
from attncc.frontend.bind import bind
from attncc.frontend.canonical import canonical
from attncc.frontend.constants import refuse_beyond
from attncc.frontend.expression_text import expression_text, let_names
from attncc.frontend.packed import packed
from attncc.frontend.parse import Parsed, parse
from attncc.frontend.rows import reporting
from attncc.frontend.unbuilt import refuse_unbuilt

if TYPE_CHECKING:
    from attncc.frontend.format import format_text


def __getattr__(name: str) -> Any:
    if name != "format_text":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from attncc.frontend.format import format_text

    return format_text


__all__ = [
    "Parsed",
    "bind",
    "canonical",
    "expression_text",
    "format_text",
    "inexpressible",
    "let_names",
    "packed",
    "parse",
    "pinned",
    "refuse_beyond",
    "refuse_unbuilt",
    "reporting",
]  # fmt: skip
