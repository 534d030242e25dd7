"""What is compiled of the package's own data is kept beside Python's modules, and used again where nothing differs."""

from __future__ import annotations

import sys

import jinja2
import pytest
from lark import Lark

from attncc import frontend, pycache
from attncc.codegen import naming
from attncc.codegen.bytecode import Templates
from attncc.codegen.environment import OPTIONS, environment
from attncc.errors import SpecError
from attncc.frontend import lexer

TEXT = "{% if x %}\nyes\n{% endif %}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(pycache, "folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def rendered(folder, monkeypatch):
    """rendered(text, options): what a new process makes of a template, and how often it compiles one."""
    made: list[str] = []
    whole = jinja2.Environment.compile
    monkeypatch.setattr(jinja2.Environment, "compile", lambda self, *a, **k: made.append("") or whole(self, *a, **k))

    def run(text=TEXT, **options):
        every = OPTIONS | options
        own = jinja2.Environment(loader=jinja2.DictLoader({"t": text}), bytecode_cache=Templates(every), **every)
        made.clear()
        return own.get_template("t").render(x=True), len(made)

    return run


def test_a_template_is_compiled_once(rendered, folder):
    assert [rendered() for _ in range(3)] == [("yes\n", 1), ("yes\n", 0), ("yes\n", 0)]
    (kept,) = folder.iterdir()
    assert sys.implementation.cache_tag in kept.name


def test_another_text_or_other_options_are_compiled_anew(rendered, folder):
    rendered()
    assert rendered("no\n") == ("no\n", 1)
    assert rendered("no\n", keep_trailing_newline=False) == ("no", 1)
    assert rendered() == ("yes\n", 1) and len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("spoilt", [b"", b"\0" * 400])
@pytest.mark.parametrize("kept", [0, pycache.DIGEST, 200])
def test_a_broken_file_is_compiled_anew(rendered, folder, spoilt, kept):
    rendered()
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:kept] + spoilt)
    assert rendered() == ("yes\n", 1) and rendered() == ("yes\n", 0)


def test_nothing_is_written_where_python_writes_nothing(rendered, folder, monkeypatch):
    taken = folder / "file"
    taken.write_text("")
    monkeypatch.setattr(pycache, "folder", lambda: taken)
    assert [rendered() for _ in range(2)] == [("yes\n", 1)] * 2
    monkeypatch.setattr(pycache, "folder", lambda: folder / "new")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert rendered() == ("yes\n", 1) and not (folder / "new").exists()


def test_a_kept_grammar_reads_as_the_built_one_does(folder, monkeypatch):
    text = "attention a(w: int = 3) { mask 0 <= q - k < w }\n"
    wrong = "attention a { mask k <= }\n"

    def read():
        lexer.language.cache_clear()
        with pytest.raises(SpecError) as fault:
            frontend.parse(wrong)
        return frontend.parse(text).spec, str(fault.value)

    built = read()
    monkeypatch.setattr(Lark, "__init__", lambda *_, **__: pytest.fail("built again"))
    assert read() == built
    lexer.language.cache_clear()


def test_kept_names_are_those_of_the_templates(folder, monkeypatch):
    naming.reserved.cache_clear()
    built = naming.reserved()
    assert {"keep", "warpgroup_mma", "d_3"} < built
    naming.reserved.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(naming, "identifiers", lambda texts: pytest.fail("searched again"))
        assert naming.reserved() == built
    (folder / "other.jinja").write_text("newcomer = 1\n")
    monkeypatch.setattr(naming, "template_root", lambda: folder)
    naming.reserved.cache_clear()
    assert "newcomer" in naming.reserved() and "warpgroup_mma" not in naming.reserved()
    naming.reserved.cache_clear()


def test_they_lie_beside_the_package(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    assert pycache.folder().is_relative_to(tmp_path)
    assert isinstance(environment().bytecode_cache, Templates)
