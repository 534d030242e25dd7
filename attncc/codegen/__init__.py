"""Kernel source from spec, visits and plan."""

from attncc.codegen.cpu import render_cpu
from attncc.codegen.triton import render

__all__ = ["render", "render_cpu"]
