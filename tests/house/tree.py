"""The repository as the house tests see it: files that are, or would be, committed."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def files() -> tuple[str, ...]:
    """Paths from the root of what git knows or would not ignore; in an unpacked archive, of everything visible."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listed.returncode == 0:
        paths = [p for p in listed.stdout.decode().split("\0") if p]
    else:
        paths = [p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*") if p.is_file()]
        paths = [p for p in paths if not any(part.startswith((".", "__pycache__")) for part in p.split("/")[:-1])]
    return tuple(sorted(p for p in paths if (ROOT / p).is_file()))


def python_files(*folders: str) -> list[str]:
    return [p for p in files() if p.endswith(".py") and p.startswith(tuple(f + "/" for f in folders))]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
