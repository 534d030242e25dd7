"""The warp-specialised backward pass compiles without a GPU: products of warp groups, no spills, memory as foretold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import triton

from attncc import passes, pipeline
from attncc.analysis import kernel_visits
from attncc.codegen import file_name
from attncc.codegen.hopper_backward import render
from attncc.frontend import parse
from attncc.ir import AttentionSpec, KernelPlan, Schedule, Shape
from attncc.planner import backward_refused, choose_backward
from attncc.runtime.compile_backward import compile_backward
from attncc.targets import target

PINNED = "3.7.1"  # the version whose spills are known
FEW_WORDS = 16  # bytes: what is put aside once around a loop
SPECS = Path(__file__).resolve().parents[2] / "specs"
FEW = [("causal", 128, "bf16", False)]
MANY = [
    ("causal", 128, "f16", True), ("causal", 64, "bf16", False), ("causal", 64, "bf16", True),
    ("full", 128, "bf16", True),
    ("full", 64, "f16", False), ("window", 128, "bf16", False), ("alibi", 128, "bf16", False),
    ("softcap", 128, "bf16", False), ("softcap", 64, "bf16", True), ("prefix", 128, "bf16", False),
    ("streaming", 64, "bf16", False), ("chunked", 128, "bf16", True), ("retnet", 128, "bf16", False),
    ("gpt_oss", 64, "bf16", False), ("gemma2", 128, "bf16", True), ("causal", 96, "bf16", False),
]  # fmt: skip


def pinned(text: str) -> AttentionSpec:
    return replace(parse(text).spec.bind({}), schedules=(Schedule(algorithm="fa3"),))


def planned(spec: AttentionSpec, d: int, dtype: str, deterministic: bool) -> KernelPlan:
    shape = Shape(head_dim=d, head_dim_v=d, dtype=dtype)
    return choose_backward(spec, shape, target("sm_90"), deterministic=deterministic)


def check(folder: Path, name: str, d: int, dtype: str, deterministic: bool) -> None:
    spec = pinned((SPECS / f"{name}.attn").read_text(encoding="utf-8"))
    plan, visits = planned(spec, d, dtype, deterministic), (kernel_visits(spec, "q"), kernel_visits(spec, "k"))
    assert plan.algorithm == "fa3"
    source = folder / f"{name}.py"
    source.write_text(render(spec, *visits, plan, "", None), encoding="utf-8")
    found = compile_backward(source, spec, *visits, plan)
    ends = ["backward_delta", "backward", "backward_rows" if deterministic else "backward_convert"]
    assert [k.kernel for k in found] == [f"{name}_{end}" for end in ends]
    gluon = found[1:2] + (found[2:] if deterministic else ())
    assert all(k.instructions["wgmma"] and k.instructions["setmaxnreg"] for k in gluon)
    most = max(k.shared_bytes for k in found)
    assert most <= plan.shared_bytes <= 1.02 * most
    if triton.__version__ == PINNED:
        assert all(k.spills <= FEW_WORDS for k in found)


@pytest.mark.parametrize(("name", "d", "dtype", "deterministic"), FEW)
def test_the_backward_pass_of_warp_groups_compiles(tmp_path, name, d, dtype, deterministic):
    check(tmp_path, name, d, dtype, deterministic)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "d", "dtype", "deterministic"), MANY)
def test_every_kind_compiles(tmp_path, name, d, dtype, deterministic):
    check(tmp_path, name, d, dtype, deterministic)


def test_equal_bits_are_a_plan_of_their_own():
    spec = pinned("attention causal { mask k <= q }")
    fast, equal = (planned(spec, 128, "bf16", wanted) for wanted in (False, True))
    assert (fast.sums, equal.sums) == ("added", "apart")
    assert file_name("causal", fast) != file_name("causal", equal)
    request = pipeline.Request("attention causal { mask k <= q } schedule { algorithm fa3 }", target="sm_90")
    both = passes.every_backward(pipeline.plan(request))
    assert [p.choice.plan for p in both] == [fast, equal]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("attention a { mask k <= q } schedule { algorithm fa2 }", "the schedule asks for fa2"),
        ("attention a(t: f32[h] grad) { score s * t[h] }", "gradients of parameters of scores"),
        ("attention a(t: f32[h, row] grad) { softmax sink(t[h, row % 7]) }", "for heads and rows alone"),
        ("attention a(p: float) { dropout p }", "dropout"),
        ("attention a { softmax sigmoid(0.0) }", "softmax sigmoid"),
        ("attention a(t: f32[h]) { weight t[h] }", "weights"),
        ("attention a(x: float grad) { scale x }", "gradients of parameters of scores"),
        ("attention a(length: i32[b]) { mask k < length[b] }", "the mask leaves out keys"),
        ("attention a(t: f32[b, h, row, k]) { score s + t[b, h, row, k] }", "for each pair"),
    ],
)
def test_what_it_does_not_do_is_said(text, why):
    spec = parse(text).spec
    assert why in backward_refused(spec, Shape(), target("sm_90"))
    assert choose_backward(spec, Shape(), target("sm_90")).algorithm == "fa2"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("path", sorted(SPECS.glob("*.attn")), ids=lambda p: p.stem)
def test_files_are_the_same_to_the_byte_and_fit_to_be_read(path, deterministic):
    spec = pinned(path.read_text())
    plan = choose_backward(spec, Shape(), target("sm_90"), deterministic=deterministic)
    if plan.algorithm != "fa3":
        pytest.skip("has the other kernels")
    first, second = (render(spec, kernel_visits(spec, "q"), kernel_visits(spec, "k"), plan, "", None) for _ in "ab")
    assert first == second
    compile(first, path.name, "exec")
    assert first.endswith("\n") and not first.endswith("\n\n") and "\n\n\n\n" not in first
    assert not [line for line in first.splitlines() if line != line.rstrip() or len(line) > 120]


def test_other_hardware_and_sizes_have_the_other_kernels():
    spec = pinned("attention causal { mask k <= q }")
    for shape, name in (
        (Shape(), "sm_80"),
        (Shape(head_dim=192, head_dim_v=192), "sm_90"),
        (Shape(dtype="f32"), "sm_90"),
    ):
        assert choose_backward(spec, shape, target(name)).algorithm == "fa2"
