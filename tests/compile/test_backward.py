"""The backward pass compiles for targets that are not there: without spills, in the shared memory predicted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest
import triton

from attncc.analysis import kernel_visits
from attncc.codegen import render_backward
from attncc.frontend import parse
from attncc.ir import AttentionSpec, KernelPlan, Shape
from attncc.planner import choose_backward
from attncc.planner.units import matrix_unit
from attncc.runtime.compile import Resources
from attncc.runtime.compile_backward import compile_backward
from attncc.targets import target
from tests.compile.random_specs import random_calls

PINNED = "3.7.1"  # the version whose spills are known
SPECS = Path(__file__).resolve().parents[2] / "specs"
CAUSAL = parse("attention causal { mask k <= q }").spec
FEW = [("sm_90", 64, 64, "bf16"), ("sm_90", 128, 128, "bf16"), ("sm_80", 128, 128, "bf16"),
       ("sm_100", 64, 64, "bf16"), ("gfx942", 128, 128, "bf16")]  # fmt: skip
SIZES = [(64, 64), (128, 128), (96, 96), (192, 128), (31, 31), (64, 16)]
MANY = [
    (name, d, dv, "bf16") for name in ("sm_80", "sm_90", "sm_100", "gfx942") for d, dv in SIZES
    if (name, d, dv, "bf16") not in FEW
] + [("sm_80", 64, 64, "f32"), ("sm_90", 128, 128, "f32"), ("gfx942", 64, 64, "f32"), ("sm_120", 128, 128, "f16"),
     ("gfx950", 64, 64, "f16"), ("sm_90", 256, 256, "bf16"), ("sm_90", 192, 192, "bf16")]  # fmt: skip
# Bytes of a thread by the columns of a head: what is put aside once around a loop.
FEW_WORDS = {64: 64, 128: 96, 256: 192}


def most_spills(width: int) -> int:
    return next(FEW_WORDS[d] for d in sorted(FEW_WORDS) if width <= d)


def compiled(folder: Path, spec: AttentionSpec, shape: Shape, name: str):
    plan = choose_backward(spec, shape, target(name), algorithm="fa2")
    visits = kernel_visits(spec, "q"), kernel_visits(spec, "k")
    source = folder / f"{spec.name}_{name}_{shape.head_dim}_{shape.head_dim_v}.py"
    source.write_text(render_backward(spec, *visits, plan), encoding="utf-8")
    return plan, compile_backward(source, spec, *visits, plan)


def fits(plan: KernelPlan, found: Sequence[Resources]) -> None:
    most = max(kernel.shared_bytes for kernel in found)
    assert most <= plan.shared_bytes, plan
    if triton.__version__ == PINNED:
        assert plan.shared_bytes <= 1.10 * most, plan


def check(folder: Path, name: str, d: int, dv: int, dtype: str) -> None:
    plan, found = compiled(folder, CAUSAL, Shape(head_dim=d, head_dim_v=dv, dtype=dtype), name)
    unit = matrix_unit(plan, target(name))
    fits(plan, found)
    for kernel in found[1:]:
        assert plan.shared_bytes <= target(name).shared_bytes, kernel
        assert unit == "fma" or unit in kernel.instructions
        if triton.__version__ == PINNED:
            assert kernel.spills <= most_spills(max(d, dv)), kernel
    over_keys = ["dkdv"] if plan.dv is None else ["dk", "dv"]
    assert [k.kernel.rpartition("_")[2] for k in found] == ["delta", *over_keys, "dq"]


@pytest.mark.parametrize(("name", "d", "dv", "dtype"), FEW)
def test_the_backward_pass_compiles_without_spills(tmp_path, name, d, dv, dtype):
    check(tmp_path, name, d, dv, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "d", "dv", "dtype"), MANY)
def test_every_size_compiles_without_spills(tmp_path, name, d, dv, dtype):
    check(tmp_path, name, d, dv, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("path", sorted(SPECS.glob("*.attn")), ids=lambda p: p.stem)
def test_the_library_fits_the_prediction(tmp_path, path, name, d):
    spec = parse(path.read_text(), path.name).spec.bind({})
    fits(*compiled(tmp_path, spec, Shape(head_dim=d, head_dim_v=d), name))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 204))
def test_no_random_spec_takes_more_than_was_predicted(tmp_path, seed):
    for text, dtype, d, dv, _, name in islice(random_calls(seed), 15):
        plan, found = compiled(tmp_path, parse(text).spec, Shape(head_dim=d, head_dim_v=dv, dtype=dtype), name)
        assert max(k.shared_bytes for k in found) <= plan.shared_bytes, (text, plan)


@pytest.mark.parametrize(
    ("text", "d", "dv", "name"),
    [
        ("mask k < 100", 40, 32, "gfx942"),  # p is there beside the first piece of keys
        ("mask k < 100", 96, 96, "sm_80"),  # keys that nobody sees are replaced in registers
        ("score where(t[h, row, k] > 0, s, s - 1.0)", 40, 128, "sm_100"),  # scores pass to the layout of what they read
    ],
)
def test_masked_keys_and_narrow_pairs_are_in_the_prediction(tmp_path, text, d, dv, name):
    spec = parse(f"attention drawn(t: i16[h, row, k]) {{ {text} }}").spec
    fits(*compiled(tmp_path, spec, Shape(head_dim=d, head_dim_v=dv, dtype="f16"), name))


@pytest.mark.parametrize("score", ["t[h] * q", "0.5", "floor(s)"])
def test_scores_without_a_slope_compile(tmp_path, score):
    spec = parse(f"attention flat(t: f32[h] grad) {{ score s * t[h] score {score} mask k <= q }}").spec
    compiled(tmp_path, spec, Shape(head_dim=64, head_dim_v=64), "sm_90")


@pytest.mark.parametrize(
    "text",
    [
        "attention a(e: f32[h] grad) { mask k < q softmax sink(e[h]) } layout { rows entropy }",
        "attention a(t: f32[h, row, k] grad) { mask k <= q score s + t[h, row, k] }",  # cells that a batch shares
    ],
    ids=["entropy", "cells"],
)
def test_what_the_interpreter_does_not_check_of_types(tmp_path, text):
    plan, kernels = compiled(tmp_path, parse(text).spec, Shape(2, 4, 4, 512, 512, 64, 64, "bf16"), "sm_90")
    fits(plan, kernels)
    for found in kernels:
        assert found.registers
