"""Kernel source from spec, visits and plan. What renders is imported when asked for: a known call needs names only."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attncc.codegen.naming import parameter_names

if TYPE_CHECKING:
    from attncc.codegen.backward import render_backward
    from attncc.codegen.cpu import render_cpu
    from attncc.codegen.launch import file_name
    from attncc.codegen.tangent_parts import tangent_names
    from attncc.codegen.triton import render

PLACES = {
    "render_backward": "backward", "render_cpu": "cpu", "file_name": "launch",
    "render": "triton", "tangent_names": "tangent_parts",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{PLACES[name]}"), name)


__all__ = [
    "file_name",
    "parameter_names",
    "render",
    "render_backward",
    "render_cpu",
    "tangent_names",
]
