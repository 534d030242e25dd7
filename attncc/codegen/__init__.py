"""Kernel source from spec, visits and plan."""

from attncc.codegen.backward import backward_file_name, render_backward
from attncc.codegen.cpu import render_cpu
from attncc.codegen.launch import file_name
from attncc.codegen.naming import parameter_names
from attncc.codegen.triton import render

__all__ = ["backward_file_name", "file_name", "parameter_names", "render", "render_backward", "render_cpu"]
