"""Cross-compilation of chosen plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from attncc import analysis, codegen, frontend
from attncc.ir import KernelPlan
from attncc.runtime.compile import Resources, compile_kernel

SPECS = Path(__file__).resolve().parents[2] / "specs"


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[..., Resources]:
    """`compiled(name, plan, aligned=True)`: a spec of the library through templates and compiler."""

    def build(name: str, plan: KernelPlan, aligned: bool = True) -> Resources:
        spec = frontend.parse((SPECS / f"{name}.attn").read_text(), name).spec
        source = tmp_path / f"{name}.py"
        source.write_text(codegen.render(spec, analysis.visits(spec, "q"), plan), encoding="utf-8")
        return compile_kernel(source, spec, plan, aligned)

    return build
