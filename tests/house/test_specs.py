"""Each spec of the library is read without a fault or a warning, and asks for nothing that is not built."""

import pytest

from attncc import frontend
from attncc.codegen.naming import parameter_names
from tests.house.tree import files, read

SPECS = [p for p in files() if p.startswith("specs/") and p.endswith(".attn")]


@pytest.mark.parametrize("path", SPECS)
def test_a_spec_of_the_library_is_read_without_a_word(path):
    parsed = frontend.parse(read(path), path)
    assert [w.render(read(path), path) for w in parsed.warnings] == []
    frontend.refuse_unbuilt(parsed)
    assert path == f"specs/{parsed.spec.name}.attn"


@pytest.mark.parametrize("path", SPECS)
def test_a_spec_of_the_library_is_in_canonical_form(path):
    assert frontend.format_text(read(path)) == read(path)


def test_specs_keep_their_names_in_generated_files():
    kept = {"p", "first", "shift"}  # that templates need
    specs = [frontend.parse(read(path), path).spec for path in SPECS]
    assert {n for spec in specs for n, given in parameter_names(spec).items() if given != n} <= kept
