"""The library of specs as a user checks it: the program from the cache, the CPU and Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from attncc import frontend
from attncc.runtime.check import SHAPES, check

SPECS = sorted((Path(__file__).parents[2] / "specs").glob("*.attn"))
SAMPLE = ("window_alibi_sinks", "tree")  # a sink, ranges and a score; bits and tables


def checked(path: Path, device: str, **options):
    report = check(frontend.parse(path.read_text(encoding="utf-8")).spec, device, **options)
    assert report.passed, str(report)


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_on_the_cpu(path):
    checked(path, "cpu", seeds=(0,), shapes=SHAPES["cpu"][:3:2])


@pytest.mark.parametrize("path", [p for p in SPECS if p.stem in SAMPLE], ids=lambda p: p.stem)
def test_a_sample_in_the_interpreter(path):
    checked(path, "interpreter", seeds=(1,), shapes=SHAPES["interpreter"][:2])


@pytest.mark.slow
@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
@pytest.mark.parametrize("device", ["cpu", "interpreter"])
def test_everything(path, device):
    checked(path, device)
