"""Compiled templates are kept beside Python's compiled modules: used again, and never where anything differs."""

from __future__ import annotations

import sys

import jinja2
import pytest

from attncc.codegen.bytecode import DIGEST, Templates
from attncc.codegen.environment import OPTIONS, environment

TEXT = "{% if x %}\nyes\n{% endif %}\n"


@pytest.fixture
def rendered(tmp_path, monkeypatch):
    """rendered(text, folder, options): what a new process makes of a template, and how often it compiles one."""
    compiled: list[str] = []
    compile = jinja2.Environment.compile
    monkeypatch.setattr(
        jinja2.Environment, "compile", lambda self, *a, **k: compiled.append("") or compile(self, *a, **k)
    )
    monkeypatch.setattr(sys, "dont_write_bytecode", False)

    def run(text=TEXT, folder=tmp_path, **options):
        kept = Templates(OPTIONS | options)
        kept.folder = folder
        made = jinja2.Environment(loader=jinja2.DictLoader({"t": text}), bytecode_cache=kept, **(OPTIONS | options))
        compiled.clear()
        return made.get_template("t").render(x=True), len(compiled)

    return run


def test_a_template_is_compiled_once(rendered, tmp_path):
    assert [rendered() for _ in range(3)] == [("yes\n", 1), ("yes\n", 0), ("yes\n", 0)]
    (kept,) = tmp_path.iterdir()
    assert sys.implementation.cache_tag in kept.name


def test_another_text_or_other_options_are_compiled_anew(rendered, tmp_path):
    rendered()
    assert rendered("no\n") == ("no\n", 1)
    assert rendered("no\n", keep_trailing_newline=False) == ("no", 1)
    assert rendered() == ("yes\n", 1) and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("spoilt", [b"", b"\0" * 400])
@pytest.mark.parametrize("kept", [0, DIGEST, 200])
def test_a_broken_file_is_compiled_anew(rendered, tmp_path, spoilt, kept):
    rendered()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:kept] + spoilt)
    assert rendered() == ("yes\n", 1) and rendered() == ("yes\n", 0)


def test_nothing_is_written_where_python_writes_nothing(rendered, tmp_path, monkeypatch):
    taken = tmp_path / "file"
    taken.write_text("")
    assert [rendered(folder=taken) for _ in range(2)] == [("yes\n", 1)] * 2
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert rendered(folder=tmp_path / "new") == ("yes\n", 1) and not (tmp_path / "new").exists()


def test_they_lie_beside_the_package(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    assert str(Templates(OPTIONS).folder).startswith(str(tmp_path))
    assert isinstance(environment().bytecode_cache, Templates)
