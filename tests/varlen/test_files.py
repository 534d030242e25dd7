"""The generated files of packed sequences: what they are called, that they check themselves, that they compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attncc import analysis, frontend, pipeline
from attncc.codegen import file_name
from attncc.ir import Shape

SPECS = Path(__file__).parents[2] / "specs"
SMALL = Shape(head_dim=32, head_dim_v=16, dtype="f32")


def planned(name: str, target: str, shape: Shape = SMALL) -> pipeline.Planned:
    parsed = frontend.packed(frontend.parse((SPECS / f"{name}.attn").read_text(encoding="utf-8"), name))
    return pipeline.plan_parsed(parsed, {}, {}, shape, target)


def written(plan: pipeline.Planned, folder: Path) -> Path:
    chosen = plan.choice.plan
    path = folder / file_name(plan.spec.name, chosen)
    path.write_text(pipeline.render(plan), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "target"),
    [("document", "cpu"), ("gpt_oss", "cpu"), ("document", "sm_90"),
     pytest.param("gpt_oss", "sm_90", marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_file_checks_itself(name, target, tmp_path):
    plan = planned(name, target)
    files = [written(plan, tmp_path), written(pipeline.backward(plan), tmp_path)]
    assert [f.name for f in files] == [f"{name}_{which}_ragged_{target}.py" for which in ("forward", "backward")]
    for file, which in zip(files, ("", " --pass backward"), strict=True):
        text = file.read_text(encoding="utf-8")
        assert f"attncc build {name}.attn --layout ragged{which} --target {target}" in text and file.name in text
        done = subprocess.run(
            [sys.executable, str(file)], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
            check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0 and "from float64" in done.stdout, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("name", "target"),
    [("causal", "sm_90"), *(pytest.param("document", t, marks=pytest.mark.slow) for t in ("sm_90", "sm_80", "gfx942"))],
)
def test_it_compiles(name, target, tmp_path):
    from attncc.runtime.compile import compile_kernel
    from attncc.runtime.compile_backward import compile_backward

    plan = planned(name, target, Shape(head_dim=64, head_dim_v=64))
    for one in pipeline.every_kernel(plan):
        took = compile_kernel(written(one, tmp_path), one.spec, one.choice.plan)
        assert took.registers and took.shared_bytes <= one.target.shared_bytes
    back = pipeline.backward(plan)
    visits = (analysis.kernel_visits(back.spec, outer) for outer in ("q", "k"))
    kernels = compile_backward(written(back, tmp_path), back.spec, *visits, back.choice.plan)
    assert kernels[0].kernel == f"{name}_backward_delta" and len(kernels) >= 3
