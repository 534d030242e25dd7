"""What is cross-compiled is what a launch would compile: the same types, constants and alignment."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from attncc import analysis, codegen
from attncc.codegen.signature import arguments
from attncc.codegen.tables import tables_of
from attncc.codegen.triton import kernel_names
from attncc.frontend import parse
from attncc.ir import Shape
from attncc.planner import choose
from attncc.runtime.compile import hints, load_module, specialization
from attncc.targets import target

TEXT = """attention biased(window: int, slopes: f32[h], bias: bf16[h, k]) {
    mask  q - k < window
    score s - slopes[h] * bias[h, k]
}"""


class Recorder:
    """Stands for a kernel and keeps the arguments of its launch."""

    def __init__(self) -> None:
        self.args: tuple[object, ...] = ()
        self.options: dict[str, object] = {}

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.args, self.options = args, options

        return launch


def launched(spec, plan, tmp_path, q, k, v):
    """Triton's own reading of the launch: (type or constexpr, value or alignment) by argument; the launch options."""
    source = tmp_path / "kernel.py"
    source.write_text(codegen.render(spec, analysis.kernel_visits(spec, forward=True), plan), encoding="utf-8")
    module = load_module(source)
    kernels = {name: getattr(module, name) for name in ("biased_forward", "biased_forward_any_stride")
               if hasattr(module, name)}  # fmt: skip
    recorders = {name: Recorder() for name in kernels}
    for name, recorder in recorders.items():
        setattr(module, name, recorder)
    slopes, bias = torch.ones(2), torch.ones(2, k.shape[2], dtype=torch.bfloat16)
    module.forward(q, k, v, window=100, slopes=slopes, bias=bias)
    (name,) = [n for n, r in recorders.items() if r.args]
    kernel, call = kernels[name], recorders[name]
    backend = make_backend(GPUTarget(*target(plan.target).gpu_target))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    _, read, _ = bind(*call.args, **call.options)
    return name, dict(zip(kernel.arg_names, read, strict=True)), call.options


@pytest.mark.parametrize(("name", "aligned"), [("sm_80", True), ("sm_80", False), ("sm_90", True)])
def test_cross_compilation_specialises_as_a_launch_does(tmp_path, name, aligned):
    spec = parse(TEXT).spec
    plan = choose(
        spec, Shape(head_dim=64, head_dim_v=64), target(name), analysis.kernel_visits(spec, forward=True)
    ).plan
    width = 64 if aligned else 65
    q, k, v = (torch.zeros(1, 2, 80, width, dtype=torch.bfloat16)[..., :64] for _ in range(3))
    if not aligned:
        q, k, v = (torch.zeros(1, 2, 80, 65, 2, dtype=torch.bfloat16)[..., :64, 1] for _ in range(3))
    kernel, read, options = launched(spec, plan, tmp_path, q, k, v)
    assert kernel.endswith("_any_stride") is not aligned

    args = arguments(spec, plan, kernel_names(spec)[1])
    signature, constants, divisible = specialization(args, plan, aligned)
    assert list(signature) == list(read)
    for argument, (kind, value) in read.items():
        assert signature[argument] == kind.replace(" ", ""), argument
        if kind == "constexpr":
            assert constants[argument] == value, argument
        elif argument not in ("slopes", "bias", "stride_slopes", "stride_bias_0"):
            assert (value == "D") == (argument in divisible), argument
    expected = {"num_warps": plan.warps, "num_stages": plan.stages}
    expected |= {"maxnreg": plan.max_registers} if plan.max_registers else {}
    assert {n: o for n, o in options.items() if n not in ("TILE_Q", "TILE_K")} == expected


def test_alignment_is_told_of_the_arguments_it_is_of(tmp_path):
    spec = parse("attention document(doc: i32[b, k]) { mask k <= q and doc[b, q] == doc[b, k] }").spec
    visits = analysis.kernel_visits(spec, forward=True)
    plan = choose(spec, Shape(head_dim=64, head_dim_v=64), target("sm_80"), visits).plan
    plan = replace(plan, tables=tables_of(visits).made)
    source = tmp_path / "kernel.py"
    source.write_text(codegen.render(spec, visits, plan), encoding="utf-8")
    order = load_module(source).document_forward.arg_names

    signature, _, divisible = specialization(arguments(spec, plan, kernel_names(spec)[1]), plan, True)
    assert sorted(order) == sorted(signature) and order != list(signature)
    assert {order[i] for (i,) in hints(order, divisible)} == divisible
    assert {"K", "V", "stride_kn", "stride_vn", "Tables"} <= divisible and "together" not in divisible
