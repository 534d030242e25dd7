"""Text to AttentionSpec, and back."""

from attncc.frontend.bind import bind
from attncc.frontend.canonical import canonical
from attncc.frontend.expression_text import expression_text, let_names
from attncc.frontend.format import format_text
from attncc.frontend.packed import packed
from attncc.frontend.parse import Parsed, parse
from attncc.frontend.unbuilt import refuse_unbuilt

__all__ = [
    "Parsed",
    "bind",
    "canonical",
    "expression_text",
    "format_text",
    "let_names",
    "packed",
    "parse",
    "refuse_unbuilt",
]  # fmt: skip
