"""generated/ holds what the road renders today, to the byte, for sm_90: the forward pass of each spec of specs/, and
derivatives of a few that show their kinds.

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

from attncc import passes, pipeline
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


# Learned sinks, a learned table, derivatives of a score, a mask that each batch entry has for itself.
BACKWARD = ("causal", "window_alibi_sinks", "relative_bias", "gemma2", "document")
FILES = [
    *((spec, passes.FORWARD) for spec in SPECS),
    *((spec, passes.BACKWARD) for spec in SPECS if spec.stem in BACKWARD),
    *((spec, passes.TANGENT) for spec in SPECS if spec.stem == "causal"),
]
EACH = pytest.mark.parametrize(("spec", "made"), FILES, ids=[f"{spec.stem}-{made}" for spec, made in FILES])


def planned(spec: Path, made: str) -> pipeline.Planned:
    request = pipeline.Request(text=spec.read_text(encoding="utf-8"), filename=spec.name, target="sm_90")
    plan = pipeline.plan(request)
    derived = {passes.BACKWARD: passes.backward, passes.TANGENT: passes.tangent}
    return derived[made](plan) if made in derived else plan


def compiled(plan: pipeline.Planned, source: Path) -> Took:
    found = pipeline.compiled(plan, source)
    return Took(*(getattr(found, name) for name in SHOWN))


def known_as(spec: Path, made: str) -> str:
    return spec.stem if made == passes.FORWARD else f"{spec.stem} {made}"


def committed(spec: Path, made: str) -> Took:
    return Took(**json.loads(RESOURCES.read_text())[known_as(spec, made)])


@EACH
def test_what_is_rendered_is_what_is_committed(spec: Path, made: str, request: pytest.FixtureRequest, tmp_path: Path):
    plan = planned(spec, made)
    path = GENERATED / file_name(plan.spec.name, plan.choice.plan)
    if request.config.getoption("--renew"):
        (tmp_path / path.name).write_text(pipeline.render(plan), encoding="utf-8")
        took = compiled(plan, tmp_path / path.name)
        known = json.loads(RESOURCES.read_text()) if RESOURCES.exists() else {}
        known[known_as(spec, made)] = {name: getattr(took, name) for name in SHOWN}
        RESOURCES.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        path.write_text(pipeline.render(plan, took), encoding="utf-8")
    again = pipeline.render(planned(spec, made), committed(spec, made))
    assert path.read_text(encoding="utf-8") == again, "it drifted: `make generated` renews it; look at the difference"


def test_nothing_else_is_committed():
    plans = (planned(*file) for file in FILES)
    names = {file_name(p.spec.name, p.choice.plan) for p in plans}
    assert {p.name for p in GENERATED.iterdir()} == names | {"resources.json", "README.md"}


@pytest.mark.slow
@EACH
def test_the_committed_figures_are_the_compilers(spec: Path, made: str):
    plan = planned(spec, made)
    assert compiled(plan, GENERATED / file_name(plan.spec.name, plan.choice.plan)) == committed(spec, made)


@pytest.mark.parametrize("path", sorted(GENERATED.glob("*.py")), ids=lambda p: p.stem)
def test_files_are_fit_to_be_read(path: Path):
    text = path.read_text(encoding="utf-8")
    compile(text, path.name, "exec")
    assert text.endswith("\n") and not text.endswith("\n\n")
    assert not [n for n, line in enumerate(text.splitlines(), 1) if line != line.rstrip()]
    assert "\n\n\n\n" not in text
    assert str(ROOT) not in text


@pytest.mark.parametrize("made", [passes.FORWARD, passes.BACKWARD])
def test_without_its_hardware_a_file_says_so(made: str):
    run = subprocess.run(
        [sys.executable, str(GENERATED / f"causal_{made}_sm_90.py")], capture_output=True, text=True, check=False,
        env={"PATH": "", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert run.returncode == 3 and "sm_90" in run.stdout
