"""What the files say: no path of a machine, no registry's host; every Python file is Python 3.10."""

import ast
import re

import pytest

from tests.house.tree import ROOT, files, python_files, read

BINARY = (".png", ".cubin", ".pdf", ".npz", ".whl")
MACHINE = re.compile(
    r"(?<![\w.])/(root|home|Users|work|mnt|tmp/\w+)/\w"  # a folder of one person's machine
    r"|[A-Z]:\\\\?Users\\"
)
HOSTS = re.compile(r"(pypi|pythonhosted|npmjs|debian)\.(org|com|net)\b")
NEW_NAMES = {  # module: what it got after Python 3.10
    "typing": {"Self", "LiteralString", "Never", "assert_never", "Unpack", "TypeVarTuple", "override", "NotRequired"},
    "enum": {"StrEnum"},
    "datetime": {"UTC"},
    "itertools": {"batched"},
    "contextlib": {"chdir"},
    "hashlib": {"file_digest"},
}  # fmt: skip
NEW_MODULES = {"tomllib"}
NEW_BUILTINS = {"ExceptionGroup", "BaseExceptionGroup"}


def text_files() -> list[str]:
    return [p for p in files() if not p.endswith(BINARY)]


def newer(text: str) -> list[str]:
    """What Python 3.10 does not have: syntax, modules and names."""
    try:
        tree = ast.parse(text, feature_version=(3, 10))
    except SyntaxError as error:
        return [f"line {error.lineno}: {error.msg}"]
    said = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = {a.name for a in node.names}
            new = names & NEW_NAMES.get(node.module or "", set()) or ({node.module} & NEW_MODULES)
            said += [f"line {node.lineno}: {n}" for n in new]
        elif isinstance(node, ast.Import):
            said += [f"line {node.lineno}: {a.name}" for a in node.names if a.name in NEW_MODULES]
        elif isinstance(node, ast.Name) and node.id in NEW_BUILTINS:
            said.append(f"line {node.lineno}: {node.id}")
        elif isinstance(node, ast.TryStar if hasattr(ast, "TryStar") else ()):
            said.append(f"line {node.lineno}: except*")
        elif isinstance(node, ast.Attribute) and node.attr in NEW_NAMES.get(ast.unparse(node.value), set()):
            said.append(f"line {node.lineno}: {ast.unparse(node)}")
    return said


def test_no_path_of_a_machine():
    own = re.compile(rf"(?<![\w.]){re.escape(str(ROOT))}\b") if len(ROOT.parts) > 2 else MACHINE
    here = [
        f"{p}:{i}: {line.strip()[:100]}"
        for p in text_files()
        for i, line in enumerate(read(p).splitlines(), 1)
        if MACHINE.search(line) or own.search(line)
    ]
    assert not here


def test_no_host_of_a_registry():
    assert not [p for p in text_files() if HOSTS.search(read(p))]


def test_files_are_utf8_with_unix_lines_and_a_last_newline():
    wrong = [
        p for p in text_files() if (data := (ROOT / p).read_bytes()) and (b"\r\n" in data or not data.endswith(b"\n"))
    ]
    assert not [p for p in wrong if not p.startswith("tests/")]  # wrong input is what some tests are about


@pytest.mark.parametrize("path", python_files("attncc", "examples", "benchmarks", "generated", "tests"))
def test_python_310_understands(path):
    assert newer(read(path)) == []


@pytest.mark.parametrize(
    "text",
    [
        "type A = int\n",
        "def f[T](x: T): pass\n",
        "try:\n    pass\nexcept* ValueError:\n    pass\n",
        "from typing import Self\n",
        "import tomllib\n",
        "import datetime\nx = datetime.UTC\n",
        "raise ExceptionGroup('', [])\n",
    ],
)
def test_newer_python_is_noticed(text):
    assert newer(text)


@pytest.mark.parametrize("line", ["see {}home/ann/notes", "open('{}root/x.py')", "path = '{}Users/ann/src'"])
def test_a_path_of_a_machine_is_noticed(line):
    assert MACHINE.search(line.format("/"))


@pytest.mark.parametrize("line", ["a/home/b", "/tmp", "#!/usr/bin/env bash", "`/dev/null`"])
def test_an_innocent_path_passes(line):
    assert not MACHINE.search(line)
