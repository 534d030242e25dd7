"""Cross-compilation of chosen plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from attncc import analysis, codegen
from attncc.ir import AttentionSpec, KernelPlan
from attncc.runtime.compile import Resources, compile_kernel


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[..., Resources]:
    """`compiled(spec, plan, aligned=True)`: through templates and compiler."""

    def build(spec: AttentionSpec, plan: KernelPlan, aligned: bool = True) -> Resources:
        source = tmp_path / f"{spec.name}.py"
        source.write_text(codegen.render(spec, analysis.kernel_visits(spec, forward=True), plan), encoding="utf-8")
        return compile_kernel(source, spec, plan, aligned)

    return build
