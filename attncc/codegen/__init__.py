"""Kernel source from spec, visits and plan."""

from attncc.codegen.backward import backward_file_name, render_backward
from attncc.codegen.cpu import render_cpu
from attncc.codegen.naming import parameter_names
from attncc.codegen.triton import file_name, render

__all__ = ["backward_file_name", "file_name", "parameter_names", "render", "render_backward", "render_cpu"]
