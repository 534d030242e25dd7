"""Generated files of tangents: right on the CPU and in Triton's interpreter, and able to check themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attncc.analysis.tangent import unbuilt
from attncc.frontend import parse
from attncc.ir import Shape
from attncc.runtime import check
from attncc.runtime.check_tangents import tangent_errors
from attncc.runtime.draw import Draw
from tests.backward import cases
from tests.backward.interpreted import Case
from tests.tangent.tangents import faults, module_of
from tests.training.test_cpu_program import FORMS

ROOT = Path(__file__).parents[2]
SPECS = [p for p in sorted((ROOT / "specs").glob("*.attn")) if not unbuilt(parse(p.read_text(encoding="utf-8")).spec)]
QUICK, LONG = ([c for c in some if "dropout" not in c.text] for some in (cases.QUICK, [*cases.MORE, *FORMS]))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MORE = [
    Case("weighted", "attention x(w: f32[b, h, row] grad, u: f32[k] grad) { weight w[b, h, row] * u[k] + u[q] "
         "mask k <= q }", cases.draw(w=(2, cases.H, cases.Q), u=(cases.K,))),
    Case("moving_scale", "attention x(m: float grad) { scale m * m score s + tanh(s) * m mask k <= q }",
         lambda g: {"m": 0.6}),
    Case("shifted", "attention x(e: f32[h] grad) { softmax sigmoid(e[h]) score s + e[h] * s * s mask k < 33 }",
         cases.draw(e=(cases.H,)), poisoned=20),
    Case("ramp", "attention x(a: float grad) { softmax relu(3) weight a score s + 0.5 mask k <= q }",
         lambda g: {"a": 0.6}),
    Case("two_in_a_sink", "attention x(c: float grad, a: f32[h] grad, n: int) "
         "{ softmax sink(a[h] + c * a[h] + n // 2 * c) mask k <= q }",
         lambda g: {**cases.draw(a=(cases.H,))(g), "c": 0.3, "n": 5}),
    Case("undivided", "attention x(a: f32[h] grad) { softmax none score a[h] * exp2(s) mask k <= q and k < 33 }",
         cases.draw(a=(cases.H,)), poisoned=20),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(1, 4))
def test_a_sink_that_holds_almost_all(seed):
    """It moves the lse by far more than the scores do, and out is rounded to 16 bits."""
    spec = parse("attention x(g: float grad, n: int) { softmax sink(g * n) }").spec
    draw, shape = Draw(spec, seed, {"g": 0.625, "n": 27}), Shape(2, 4, 2, 33, 47, 32, 16)
    run = check.compiled(spec, "interpreter" if INTERPRETED else "cpu")
    _, found = tangent_errors(spec, run, draw.inputs(shape, "f16", "contiguous"), draw.params(shape), seed)
    assert found == []


if INTERPRETED:

    @pytest.mark.parametrize("case", [*QUICK, *MORE], ids=lambda c: c.name)
    def test_tangents_of_the_kernel(case, tmp_path):
        assert faults(case, tmp_path, "sm_90") == []

    @pytest.mark.slow
    @pytest.mark.parametrize("case", LONG, ids=lambda c: c.name)
    def test_more_tangents_of_the_kernel(case, tmp_path):
        assert faults(case, tmp_path, "sm_90") == []

else:

    @pytest.mark.parametrize("case", [*QUICK, *LONG, *MORE], ids=lambda c: c.name)
    def test_tangents(case, tmp_path):
        assert faults(case, tmp_path, "cpu") == []

    @pytest.mark.parametrize("case", [*QUICK, *MORE], ids=lambda c: c.name)
    def test_tangents_in_float64(case, tmp_path):
        assert faults(case, tmp_path, "cpu", torch.float64, 1e-12) == []

    @pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
    def test_each_file_of_the_library_checks_itself(path, tmp_path, capsys):
        case = Case(path.stem, path.read_text(encoding="utf-8"), tiles=(64, 128), head_dim=16, head_dim_v=16)
        _, module = module_of(case, tmp_path, "cpu")
        with pytest.raises(SystemExit) as ended:
            exec(
                compile(Path(module.__file__).read_text(encoding="utf-8"), path.stem, "exec"), {"__name__": "__main__"}
            )
        assert not ended.value.code, capsys.readouterr().out

    def test_a_file_that_is_wrong_says_so(tmp_path, capsys):
        _, module = module_of(Case("alibi", SPECS[0].read_text(encoding="utf-8")), tmp_path, "cpu")
        wrong = Path(module.__file__).read_text(encoding="utf-8").replace(".sub_(mean * out", ".add_(mean * out")
        with pytest.raises(SystemExit) as ended:
            exec(compile(wrong, "wrong", "exec"), {"__name__": "__main__"})
        assert ended.value.code, capsys.readouterr().out

    def _interpreted(marks: str) -> None:
        kept = {n: x for n, x in os.environ.items() if not n.startswith("PYTEST_")}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", __file__, "-q", "-m", marks, "-p", "no:cacheprovider"], cwd=ROOT,
            env={**kept, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False, timeout=580,
        )  # fmt: skip
        assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]

    def test_tangents_in_the_interpreter():
        _interpreted("not slow")

    @pytest.mark.slow
    def test_more_tangents_in_the_interpreter():
        _interpreted("slow")
