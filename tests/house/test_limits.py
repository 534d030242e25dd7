"""Rooms stay small: a module 400 lines, a function 60, a template 200, a line 120."""

import ast

import pytest

from tests.house.tree import files, functions, python_files, read

MODULE, FUNCTION, TEMPLATE, LINE = 400, 60, 200, 120
CODE = ("attncc", "examples", "benchmarks")


def long_functions(text: str) -> list[str]:
    found = functions(ast.parse(text))
    return [f"{f.name}, line {f.lineno}" for f in found if f.end_lineno - f.lineno + 1 > FUNCTION]


@pytest.mark.parametrize("path", python_files(*CODE))
def test_modules_and_functions_are_short(path):
    text = read(path)
    assert len(text.splitlines()) <= MODULE, f"{path} has outgrown {MODULE} lines"
    assert not long_functions(text), f"{path}: longer than {FUNCTION} lines: {long_functions(text)}"


def test_templates_are_short():
    templates = [p for p in files() if p.startswith("templates/")]
    long = {p: n for p in templates if (n := len(read(p).splitlines())) > TEMPLATE}
    assert not long, f"templates over {TEMPLATE} lines: {long}"


def test_specs_are_narrow():
    specs = [p for p in files() if p.endswith(".attn") and p.startswith("specs/")]
    wide = [f"{p}:{i}" for p in specs for i, line in enumerate(read(p).splitlines(), 1) if len(line) > LINE]
    assert specs and not wide, wide


def test_a_long_function_is_noticed():
    body = "    x = 1\n"
    assert long_functions("def f():\n" + body * (FUNCTION - 1)) == []
    assert long_functions("class A:\n  def f(self):\n" + "  " * 2 + "x = 1\n" + ("    x = 1\n" * FUNCTION)) == [
        "f, line 2"
    ]
    assert long_functions("async def g():\n" + body * FUNCTION) == ["g, line 1"]
