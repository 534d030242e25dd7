"""generated/ holds what the road renders today, to the byte: one file for each spec of specs/, for sm_90.

`--renew` writes the files anew and compiles them for the figures in their heads, which stand in resources.json beside
them; without it they are rendered with those figures and compared, and the long run compiles them again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from attncc import pipeline
from attncc.codegen import file_name

ROOT = Path(__file__).parents[2]
GENERATED, SPECS = ROOT / "generated", sorted((ROOT / "specs").glob("*.attn"))
RESOURCES = GENERATED / "resources.json"
SHOWN = ("registers", "spills", "shared_bytes")


@dataclass(frozen=True)
class Took:
    registers: int
    spills: int
    shared_bytes: int


def planned(spec: Path) -> pipeline.Planned:
    return pipeline.plan(pipeline.Request(text=spec.read_text(encoding="utf-8"), filename=spec.name, target="sm_90"))


def compiled(plan: pipeline.Planned, source: Path) -> Took:
    from attncc.runtime.compile import compile_kernel

    found = compile_kernel(source, plan.spec, plan.choice.plan)
    return Took(*(getattr(found, name) for name in SHOWN))


def committed(spec: Path) -> Took:
    return Took(**json.loads(RESOURCES.read_text())[spec.stem])


@pytest.mark.parametrize("spec", SPECS, ids=lambda p: p.stem)
def test_what_is_rendered_is_what_is_committed(spec: Path, request: pytest.FixtureRequest, tmp_path: Path):
    plan = planned(spec)
    path = GENERATED / file_name(plan.spec.name, plan.choice.plan)
    if request.config.getoption("--renew"):
        (tmp_path / path.name).write_text(pipeline.render(plan), encoding="utf-8")
        took = compiled(plan, tmp_path / path.name)
        known = json.loads(RESOURCES.read_text()) if RESOURCES.exists() else {}
        known[spec.stem] = {name: getattr(took, name) for name in SHOWN}
        RESOURCES.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        path.write_text(pipeline.render(plan, took), encoding="utf-8")
    again = pipeline.render(planned(spec), committed(spec))
    assert path.read_text(encoding="utf-8") == again, "it drifted: `make generated` renews it; look at the difference"


def test_nothing_else_is_committed():
    names = {file_name(p.spec.name, p.choice.plan) for p in map(planned, SPECS)}
    assert {p.name for p in GENERATED.iterdir()} == names | {"resources.json", "README.md"}


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS, ids=lambda p: p.stem)
def test_the_committed_figures_are_the_compilers(spec: Path):
    plan = planned(spec)
    assert compiled(plan, GENERATED / file_name(plan.spec.name, plan.choice.plan)) == committed(spec)


@pytest.mark.parametrize("path", sorted(GENERATED.glob("*.py")), ids=lambda p: p.stem)
def test_files_are_fit_to_be_read(path: Path):
    text = path.read_text(encoding="utf-8")
    compile(text, path.name, "exec")
    assert text.endswith("\n") and not text.endswith("\n\n")
    assert not [n for n, line in enumerate(text.splitlines(), 1) if line != line.rstrip()]
    assert "\n\n\n\n" not in text
    assert str(ROOT) not in text


def test_without_its_hardware_a_file_says_so():
    run = subprocess.run(
        [sys.executable, str(GENERATED / "causal_forward_sm_90.py")], capture_output=True, text=True, check=False,
        env={"PATH": "", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert run.returncode == 3 and "sm_90" in run.stdout
