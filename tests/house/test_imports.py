"""Who may import what, by the table in CONTRIBUTING.md. A place is a folder or module right under attncc/."""

import ast
import sys
from dataclasses import dataclass

import pytest

from tests.house.tree import python_files, read


@dataclass(frozen=True)
class Rule:
    ours: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


BELOW = ("errors", "ir", "frontend", "analysis", "targets", "planner", "codegen")
RULES = {
    "errors": Rule(),
    "pycache": Rule(),
    "targets": Rule(),
    "ir": Rule(("errors",)),
    "frontend": Rule(("errors", "pycache", "ir"), ("lark",)),
    "analysis": Rule(("errors", "ir"), ("numpy", "sympy")),
    "planner": Rule(("errors", "ir", "analysis", "targets"), ("sympy",)),
    "codegen": Rule(("errors", "pycache", "ir", "analysis", "targets", "planner"), ("jinja2",)),
    "runtime": Rule((*BELOW, "pipeline"), ("torch", "triton", "numpy", "platformdirs")),
}
# What joins the stages (the package itself, the API, the command line) may name them all, but neither torch nor triton.
ROAD = Rule(("*",), ("click", "rich", "numpy", "matplotlib", "platformdirs"))


def place(path: str) -> str:
    """attncc/ir/expr.py is in ir, attncc/targets.py is targets, attncc/__init__.py is the package itself."""
    parts = path.split("/")
    return parts[1].removesuffix(".py") if len(parts) > 1 else ""


def imported(text: str) -> list[tuple[int, str]]:
    """(line, dotted name) of each import, at any depth, but those that only a type checker sees."""
    found: list[tuple[int, str]] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes = node.orelse
        else:
            nodes = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            found.extend((node.lineno, a.name) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ("." * node.level) + (node.module or "")
            single = base == "attncc"  # `from attncc import api` names a place of ours in its list
            found.extend((node.lineno, f"{base}.{a.name}" if single else base) for a in node.names)
        for child in nodes:
            visit(child)

    visit(ast.parse(text))
    return found


def faults(path: str, text: str) -> list[str]:
    here = place(path)
    rule = RULES.get(here, ROAD)
    said = []
    for line, name in imported(text):
        top, *rest = name.split(".")
        if name.startswith("."):
            said.append(f"{path}:{line}: relative import {name}; write attncc.…")
        elif top == "attncc":
            target = rest[0] if rest else ""
            free = "*" in rule.ours or target in ("", "__version__", here) or target in rule.ours
            if not free:
                said.append(f"{path}:{line}: {here} may not import attncc.{target}")
        elif top not in sys.stdlib_module_names and top not in rule.others:
            said.append(f"{path}:{line}: {here} may not import {top}")
    return said


@pytest.mark.parametrize("path", python_files("attncc"))
def test_imports_follow_the_table(path):
    assert not faults(path, read(path))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("attncc/errors.py", "from attncc.ir import Expr"),
        ("attncc/ir/expr.py", "import attncc.frontend.reader"),
        ("attncc/ir/expr.py", "from attncc import planner"),
        ("attncc/planner/search.py", "def f():\n    import torch"),
        ("attncc/cli.py", "import triton.language as tl"),
        ("attncc/codegen/view.py", "from attncc.runtime import cache"),
        ("attncc/codegen/view.py", "from . import printer"),
        ("attncc/frontend/reader.py", "import numpy"),
        ("attncc/api.py", "try:\n    pass\nfinally:\n    from torch import Tensor"),
    ],
)
def test_a_forbidden_import_is_noticed(path, text):
    assert len(faults(path, text)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "attncc/planner/search.py",
            "import sympy\nfrom attncc.planner.model import predict",
        ),
        ("attncc/runtime/launch.py", "import torch, triton\nfrom attncc.codegen import render"),
        (
            "attncc/api.py",
            "if TYPE_CHECKING:\n    import torch\nimport attncc.runtime.cache",
        ),
        ("attncc/codegen/environment.py", "import attncc\nimport jinja2\nfrom attncc import __version__"),
    ],
)
def test_an_allowed_import_passes(path, text):
    assert faults(path, text) == []


def test_each_place_is_still_there():
    places = {place(p) for p in python_files("attncc")}
    assert set(RULES) <= places
