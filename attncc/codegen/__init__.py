"""Kernel source from spec, visits and plan."""

from attncc.codegen.cpu import render_cpu
from attncc.codegen.naming import parameter_names
from attncc.codegen.triton import file_name, render

__all__ = ["file_name", "parameter_names", "render", "render_cpu"]
