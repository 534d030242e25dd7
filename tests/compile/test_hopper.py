"""Warp-specialised kernels compile without a GPU: matrix products of warp groups, registers shared out, no spills."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import triton
from triton._C.libtriton import ir
from triton.compiler import make_backend

from attncc.analysis import kernel_visits
from attncc.codegen import render
from attncc.codegen.tables import tables_of
from attncc.frontend import parse
from attncc.ir import Schedule, Shape
from attncc.planner import choose
from attncc.runtime.compile import compiled as kernels_of
from attncc.runtime.compile import load_module
from attncc.targets import target

PINNED = "3.7.1"  # the version whose spills are known
OF_PAIRS = 192  # bytes, of a number for each pair: fa2 is taken there, but for wide heads
SPECS = Path(__file__).resolve().parents[2] / "specs"
FEW = [("causal", 128, 128, "bf16"), ("window_alibi_sinks", 64, 64, "f16")]
SIZES = [(64, 64), (96, 96), (192, 128), (128, 64), (256, 256)]
NAMES = (
    "full",
    "causal_start",
    "alibi",
    "softcap",
    "streaming",
    "prefix",
    "gpt_oss",
    "gemma2",
    "dense_bias",
    "sigmoid",
    "retnet",
    "window_alibi_sinks",
    "global_tokens",
    "causal_dropout",
    "document",
)
NARROW = [("softcap", 64, 64, "bf16"), ("row_bounds", 96, 96, "bf16")]
MANY = [("causal", d, dv, dtype) for d, dv in SIZES for dtype in ("bf16", "f16")] + [
    (name, 128, 128, "bf16") for name in NAMES
]


def check(compiled, name: str, d: int, dv: int, dtype: str) -> None:
    path = SPECS / f"{name}.attn"
    spec = parse(path.read_text(encoding="utf-8"), path.name).spec.bind({})
    spec = replace(spec, schedules=(Schedule(algorithm="fa3"),))
    visits = kernel_visits(spec, forward=True)
    plan = choose(spec, Shape(head_dim=d, head_dim_v=dv, dtype=dtype), target("sm_90"), visits).plan
    plan = replace(plan, tables=tables_of(visits, draws=True).made)
    assert plan.algorithm == "fa3"
    found = compiled(spec, plan)
    assert found.shared_bytes <= plan.shared_bytes <= target("sm_90").shared_bytes
    assert plan.shared_bytes <= 1.02 * found.shared_bytes
    assert found.instructions["wgmma"] and found.instructions["setmaxnreg"]
    if triton.__version__ == PINNED:
        assert found.spills <= (OF_PAIRS if plan.pair_bytes else 0)


@pytest.mark.parametrize(("name", "d", "dv", "dtype"), FEW)
def test_a_kernel_of_warp_groups_compiles(compiled, name, d, dv, dtype):
    check(compiled, name, d, dv, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "d", "dv", "dtype"), [*MANY, *NARROW])
def test_every_size_compiles(compiled, name, d, dv, dtype):
    check(compiled, name, d, dv, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "document", "padding", "sigmoid", "alibi"])
def test_loops_of_whole_tiles_compile(compiled, name):
    spec = parse((SPECS / f"{name}.attn").read_text(encoding="utf-8")).spec.bind({})
    spec = replace(spec, schedules=(Schedule(algorithm="fa3"),))
    visits = kernel_visits(spec, forward=True)
    plan = replace(choose(spec, Shape(), target("sm_90"), visits).plan, tables=tables_of(visits).made)
    apart, together = (compiled(spec, replace(plan, apart=own)) for own in (True, False))
    assert apart.instructions["wgmma"] > together.instructions["wgmma"]


def read(src, target, options):
    """The functions that Triton makes of a kernel's text before it compiles anything."""
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options(dict(options))
    made = src.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
    return [line for line in str(made).splitlines() if "tt.func private" in line]


def test_what_consumers_do_is_read_once(tmp_path):
    """Although the first is no worker to Triton, which tells what these call from what others do."""
    spec = replace(parse((SPECS / "causal.attn").read_text()).spec, schedules=(Schedule(algorithm="fa3"),))
    visits = kernel_visits(spec, forward=True)
    plan = choose(spec, Shape(), target("sm_90"), visits).plan
    source = tmp_path / "causal.py"
    source.write_text(render(spec, visits, plan), encoding="utf-8")
    (functions,) = kernels_of(source, spec, plan, True, read).values()
    parts = ("consumer", "consume", "rows")
    assert [sum(f"causal_forward_{part}__" in f for f in functions) for part in parts] == [2, 1, 1]


def test_the_kernels_of_tables_take_their_tiles(tmp_path):
    spec = replace(parse((SPECS / "document.attn").read_text()).spec, schedules=(Schedule(algorithm="fa3"),))
    visits = kernel_visits(spec)
    plan = replace(choose(spec, Shape(), target("sm_90"), visits).plan, tables=tables_of(visits).made)
    source = tmp_path / "document.py"
    source.write_text(render(spec, visits, plan), encoding="utf-8")
    module = load_module(source)
    for kernel in (module.document_forward_tables, module.document_forward_scans):
        assert {"TILE_Q", "TILE_K"} <= set(kernel.arg_names)
    assert "TILE_Q" not in module.document_forward.arg_names


@pytest.mark.parametrize(
    ("text", "algorithm", "int_bits"),
    [
        ("attention t(last: i64[b]) { mask k <= last[b] }", "fa2", 32),
        ("attention w(window: int) { mask 0 <= q - k < window }", "fa2", 64),
        pytest.param("attention t(last: i64[b]) { mask k <= last[b] }", "fa3", 32, marks=pytest.mark.slow),
        pytest.param("attention w(window: int) { mask 0 <= q - k < window }", "fa3", 64, marks=pytest.mark.slow),
        pytest.param("attention f { mask false }", "fa3", 32, marks=pytest.mark.slow),
        pytest.param(
            "attention r(t: f32[b, row], u: f32[b, k]) { score s * sigmoid(t[b, row]) + sigmoid(u[b, k]) }",
            "fa3",
            32,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ends_of_64_bits_and_none_compile(compiled, text, algorithm, int_bits):
    """TMA counts in 32 bits."""
    spec = replace(parse(text).spec, schedules=(Schedule(algorithm=algorithm),))
    plan = choose(spec, Shape(), target("sm_90"), kernel_visits(spec, forward=True)).plan
    assert compiled(spec, replace(plan, int_bits=int_bits)).instructions["wgmma"]
