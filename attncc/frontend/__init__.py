"""Text to AttentionSpec, and back."""

from attncc.frontend.parse import Parsed, parse
from attncc.frontend.unbuilt import refuse_unbuilt

__all__ = ["Parsed", "parse", "refuse_unbuilt"]
