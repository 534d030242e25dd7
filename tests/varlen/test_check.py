"""Every spec of the library that has a packed form, packed between sequences of other lengths, against float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attncc import frontend
from attncc.errors import SpecError
from attncc.ir import Layout, Shape
from attncc.runtime.check import check

SPECS = sorted((Path(__file__).parents[2] / "specs").glob("*.attn"))
SHAPES = (Shape(2, 4, 2, 33, 47, 32, 16, "f32"), Shape(1, 6, 2, 21, 5, 8, 24, "f32"))
WITHOUT = {"dense_bias"}  # a cell for each pair of each sequence


def packed(path: Path):
    spec = frontend.parse(path.read_text(encoding="utf-8"), path.name).spec
    return replace(spec, layout=Layout("ragged", "ragged"))


def test_which_specs_have_a_packed_form():
    refused = set()
    for path in SPECS:
        try:
            frontend.packed(frontend.parse(path.read_text(encoding="utf-8")))
        except SpecError:
            refused.add(path.stem)
    assert refused == WITHOUT


@pytest.mark.parametrize("name", ["document", "row_bounds", "relative_bias", "window_alibi_sinks"])
def test_a_few_specs(name):
    report = check(packed(SPECS[0].parent / f"{name}.attn"), seeds=(0,), shapes=SHAPES[:1])
    assert report.passed, report


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in SPECS if p.stem not in WITHOUT], ids=lambda p: p.stem)
def test_every_spec(path):
    report = check(packed(path), seeds=(0,), shapes=SHAPES)
    assert report.passed, report


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in SPECS if p.stem not in WITHOUT], ids=lambda p: p.stem)
def test_every_spec_in_the_interpreter(path):
    report = check(packed(path), "interpreter")
    assert report.passed, report
