"""The one Jinja environment. Templates choose structure; values come finished, so an undefined one is an error."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attncc
from attncc.codegen.layout import broken

if TYPE_CHECKING:
    import jinja2

OPTIONS: Mapping[str, Any] = {
    "trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True, "autoescape": False,
}  # fmt: skip


@cache
def template_root() -> Path:
    """The template tree: inside an installed package, or beside it in a checkout."""
    package = Path(attncc.__file__).parent
    inside = package / "templates"
    return inside if inside.is_dir() else package.parent / "templates"


@cache
def environment() -> jinja2.Environment:
    import jinja2  # takes longer than all of ours, and a call whose kernel is in the cache does without

    from attncc.codegen.bytecode import Templates

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_root()),
        undefined=jinja2.StrictUndefined,
        bytecode_cache=Templates(OPTIONS),
        **OPTIONS,
    )


def rendered(template: str, view: Any) -> str:
    """A whole file: the template with its view, lines that are too long broken."""
    return broken(environment().get_template(template).render(view=view))
