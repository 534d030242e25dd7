"""Every plan that the planner chooses compiles, without spills, in the shared memory that was predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import triton

from attncc.analysis import kernel_visits
from attncc.codegen.tables import tables_of
from attncc.frontend import parse
from attncc.ir import AttentionSpec, Shape
from attncc.planner import choose
from attncc.planner.units import matrix_unit
from attncc.runtime.compile import Resources
from attncc.targets import target
from tests.compile.random_specs import random_calls

PINNED = "3.7.1"  # the version whose predictions are held to 10%; for others they only must not be too low
FEW_WORDS = 64  # bytes: what is put aside once around a loop; more is in the loop
UNROLLED = 512  # where scalar products, all unrolled, leave the compiler no room
SPECS = Path(__file__).resolve().parents[2] / "specs"
CAUSAL = parse("attention causal { mask k <= q }").spec
FEW = [
    ("sm_80", 128, 128, "bf16"), ("sm_90", 128, 128, "bf16"), ("sm_100", 128, 128, "bf16"),
    ("gfx942", 128, 128, "bf16"), ("sm_90", 192, 128, "f16"), ("sm_90", 31, 31, "f16"), ("sm_80", 64, 64, "f32"),
    ("gfx942", 96, 96, "f16"), ("sm_90", 128, 512, "bf16"),
]  # fmt: skip
SIZES = [(64, 64), (128, 128), (256, 256), (512, 512), (192, 128), (64, 16), (96, 96), (31, 31), (80, 80)]
NAMES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
MANY = [
    (name, d, dv, dtype) for name in NAMES for d, dv in SIZES for dtype in ("f16", "f32")
    if (name, d, dv, dtype) not in FEW
]  # fmt: skip
# Classes at run time, gathered bools, chains of reads, packed bits.
READS = [
    ("document", "sm_80", 64, "bf16"), ("block_sparse", "sm_80", 64, "bf16"), ("relative_bias", "sm_90", 64, "bf16"),
    ("tree", "gfx942", 64, "f16"),
]  # fmt: skip

# Head sizes whose last piece is loaded two bytes at a time, so that it does not run ahead as the others do.
ODD = [
    ("sm_80", 95, 65), ("sm_90", 95, 95), ("sm_90", 64, 129), ("sm_100", 31, 96), ("sm_100", 95, 31),
    ("sm_100", 255, 31), ("gfx942", 31, 63), ("gfx942", 33, 33), ("gfx950", 95, 95), ("gfx950", 31, 31),
]  # fmt: skip

# Reads ahead of reads, reads too narrow for that, and what passes from one layout to another on their account.
BIASES = [
    ("attention tab(bk: i32[n], tb: f16[m, h]) { mask k <= q score s + tb[bk[q - k], h] }",
     "bf16", 64, 128, 1, "sm_90"),
    ("attention i8b(bias: i8[h, row, k]) { score s + 0.1 * bias[h, row, k] softmax off_by_one }",
     "f32", 32, 32, 1, "sm_90"),
    ("attention rowt(t: f32[b, row]) { score s + t[b, row] }", "f32", 40, 40, 1, "sm_90"),
    ("attention rowt(t: f32[b, row]) { score s * t[b, row] mask k <= q }", "f32", 64, 64, 17, "sm_90"),
    ("attention far(i: i32[n], t: f32[m, h]) { score s + t[i[q - k], h] }", "bf16", 64, 64, 4096, "sm_90"),
    ("attention seen(t: i16[h, row, k]) { mask k % 3 != 1 score s + t[h, row, k] }", "bf16", 80, 256, 17, "sm_90"),
    ("attention odd(t: bool[b, row]) { mask t[b, row] }", "bf16", 31, 128, 1, "sm_90"),
    ("attention near(i: i64[b, k], t: bit[m, h]) { mask k < 100 mask t[i[b, k], h] }", "bf16", 31, 31, 1, "sm_90"),
    ("attention keys(t: i32[b, k]) { mask t[b, k] == 3 }", "f16", 64, 64, 1, "sm_90"),
    ("attention rowt(t: i8[b, row]) { mask k < 100 mask t[b, row] > 0 }", "f16", 16, 16, 4096, "sm_80"),
    ("attention rows(t: i8[b, row], u: i8[b, row]) { mask u[b, row] <= k < t[b, row] }", "f16", 16, 16, 4096, "sm_80"),
    ("attention wide { mask k % 3 != 1 }", "f32", 32, 256, 17, "sm_90"),
    ("attention pieces { mask k % 3 != 1 }", "bf16", 16, 96, 4096, "sm_90"),
    ("attention pieces { mask k % 3 != 1 }", "bf16", 256, 32, 4096, "sm_100"),
    ("attention late(t: i16[h, row, k]) { score s + t[h, row, k] }", "bf16", 31, 96, 4096, "gfx942"),
    ("attention sparse { softmax sparsemax }", "bf16", 128, 128, 4096, "sm_100"),
    ("attention flag(t: i32[h, row, k]) { score where(t[h, row, k] > 0, s, s - 1.0) }", "bf16", 40, 40, 1, "gfx942"),
    ("attention keys(t: i32[b, k]) { mask t[b, k] == 3 }", "f16", 16, 16, 4096, "sm_90"),
    ("attention keys(t: i32[b, k]) { mask t[b, k] == 3 }", "bf16", 32, 32, 4096, "sm_80"),
    ("attention thin(t: i64[b, k]) { mask k <= q score s + t[b, k] }", "f16", 16, 16, 4096, "sm_90"),
    ("attention down(t: i8[h, n]) { score s + t[h, q - k] }", "bf16", 32, 32, 4096, "sm_100"),
    ("attention down(t: bool[h, n]) { mask t[h, q - k] }", "bf16", 128, 128, 4096, "sm_100"),
    ("attention near(i: i16[b, k], t: i32[m, h]) { mask 0 <= q - k < 100 mask t[i[b, k], h] > 0 }",
     "f16", 40, 40, 4096, "sm_90"),
    ("attention thin(t: u8[b, k]) { score s + t[b, k] }", "bf16", 96, 96, 17, "sm_90"),
    ("attention thin(t: f16[b, k]) { score s * t[b, k] }", "bf16", 64, 64, 4096, "sm_90"),
    ("attention seen(t: i16[h, row, k]) { score s + t[h, row, k] }", "bf16", 40, 40, 4096, "sm_100"),
    ("attention down(t: i8[h, n]) { score s + t[h, q - k] }", "bf16", 16, 16, 4096, "sm_100"),
    ("attention two(i: i64[n], t: bit[m, h], j: i32[n], u: i32[m, h]) "
     "{ mask t[i[q - k], h] score where(u[j[q - k], h] > 0, s, s - 1.0) }", "f16", 96, 96, 1, "gfx942"),
    ("attention far(i: i64[n], t: bf16[m, h]) { mask k <= q score s * t[i[q - k], h] }", "bf16", 31, 31, 17, "sm_80"),
    ("attention few(t: bf16[h, row, k]) { mask k <= q score s * t[h, row, k] }", "bf16", 16, 16, 4096, "gfx942"),
]  # fmt: skip
# The same with other types, lengths and targets.
MORE_BIASES = [
    ("attention far(i: i8[n], t: i64[m, h], u: i32[b, k]) { mask u[b, k] > 0 score s * t[i[q - k], h] }",
     "bf16", 64, 64, 4096, "sm_100"),
    ("attention near(i: i32[b, k], t: i32[m, h]) { mask t[i[b, k], h] > 0 }", "bf16", 96, 96, 17, "sm_90"),
    ("attention down(t: i32[h, n]) { mask k < 100 score where(t[h, q - k] > 0, s, s - 1.0) }",
     "f16", 64, 64, 4096, "sm_100"),
    ("attention far(i: i32[n], t: i8[m, h]) { mask k < 100 score s + t[i[q - k], h] }", "f16", 64, 64, 4096, "sm_90"),
    ("attention far(i: i64[n], t: bf16[m, h]) { score s * t[i[q - k], h] }", "f16", 256, 96, 4096, "sm_80"),
    ("attention keys(t: i32[b, k]) { mask k <= q mask t[b, k] > 0 }", "bf16", 16, 16, 1, "sm_100"),
    ("attention near(i: i32[b, k], t: bit[m, h]) { mask t[i[b, k], h] }", "f16", 16, 16, 4096, "sm_90"),
    ("attention keys(t: i64[b, k]) { score where(t[b, k] > 0, s, s - 1.0) }", "bf16", 16, 128, 4096, "sm_80"),
    ("attention late(i: i32[n], t: f32[m, h]) { scale 1 score s + t[i[k - q], h] }", "bf16", 64, 64, 4096, "sm_90"),
    ("attention near(i: i16[b, k], t: i32[m, o]) { mask t[i[b, q], i[b, k]] > 0 }", "bf16", 31, 64, 17, "sm_100"),
]  # fmt: skip

Compiled = Callable[..., Resources]


def check(compiled: Compiled, spec: AttentionSpec, name: str, d: int, dv: int, dtype: str, rows: int = 4096) -> None:
    shape = Shape(q_len=rows, head_dim=d, head_dim_v=dv, dtype=dtype)
    for any_stride in (False, True):
        plan = choose(spec, shape, target(name), kernel_visits(spec, forward=True), any_stride=any_stride).plan
        if any_stride and choose(spec, shape, target(name), kernel_visits(spec, forward=True)).plan.loads == "pointer":
            continue  # one file holds both
        found = compiled(spec, plan)
        assert found.shared_bytes <= found.predicted_shared_bytes == plan.shared_bytes
        if triton.__version__ == PINNED:
            assert found.predicted_shared_bytes <= 1.10 * found.shared_bytes
            assert any_stride or found.spills <= (UNROLLED if matrix_unit(plan, target(name)) == "fma" else FEW_WORDS)
        if (unit := matrix_unit(plan, target(name))) != "fma":
            assert unit in found.instructions


@pytest.mark.parametrize(("name", "d", "dv", "dtype"), FEW)
def test_a_chosen_plan_takes_what_was_predicted(compiled, name, d, dv, dtype):
    check(compiled, CAUSAL, name, d, dv, dtype)


@pytest.mark.parametrize("read", ["i8[k]", "bool[row]", "f16[h]", "i32[k]"])
def test_exact_products_take_no_matrix_unit(compiled, read):
    """Of tcgen05 Triton 3.6 and 3.7 have tf32 where narrow values go into the weights."""
    element, axes = read.split("[")
    term = f"where(t[{axes}, s, s + 1)" if element == "bool" else f"s + t[{axes}"
    spec = parse(f"attention a(t: {read}) {{ score {term} }}").spec
    shape = Shape(head_dim=64, head_dim_v=64, dtype="f32")
    plan = choose(spec, shape, target("sm_100"), kernel_visits(spec, forward=True)).plan
    assert not {"mma", "tcgen05"} & set(compiled(spec, plan).instructions)


@pytest.mark.parametrize(("name", "d", "dv", "rows"), [(*sizes, (1, 4096)[i % 2]) for i, sizes in enumerate(ODD)])
def test_a_chosen_plan_of_odd_head_sizes_takes_what_was_predicted(compiled, name, d, dv, rows):
    check_text(compiled, "attention causal { mask k <= q }", "f16", d, dv, rows, name, 1.10)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "d", "dv", "rows"), [(*sizes, (4096, 1)[i % 2]) for i, sizes in enumerate(ODD)])
def test_so_does_one_for_other_lengths(compiled, name, d, dv, rows):
    check_text(compiled, "attention causal { mask k <= q }", "f16", d, dv, rows, name, 1.10)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "d", "dv", "dtype"), MANY)
def test_every_chosen_plan_takes_what_was_predicted(compiled, name, d, dv, dtype):
    check(compiled, CAUSAL, name, d, dv, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_short_queries_have_plans_that_fit(compiled, name, rows):
    check(compiled, CAUSAL, name, 128, 128, "bf16", rows)


def check_library(compiled: Compiled, stem: str, name: str, d: int, dtype: str) -> None:
    path = SPECS / f"{stem}.attn"
    spec = parse(path.read_text(encoding="utf-8"), path.name).spec.bind({})
    visits, shape = kernel_visits(spec, forward=True), Shape(head_dim=d, head_dim_v=d, dtype=dtype)
    plan = choose(spec, shape, target(name), visits).plan
    plans = [plan] if plan.loads == "pointer" else [plan, choose(spec, shape, target(name), visits, True).plan]
    for plan in plans:
        found = compiled(spec, replace(plan, tables=tables_of(visits).made))
        assert found.shared_bytes <= found.predicted_shared_bytes
        if triton.__version__ == PINNED:
            assert found.predicted_shared_bytes <= 1.10 * found.shared_bytes


def check_text(
    compiled: Compiled, text: str, dtype: str, d: int, dv: int, rows: int, name: str, above: float | None
) -> None:
    spec = parse(text).spec
    visits, shape = kernel_visits(spec, forward=True), Shape(q_len=rows, head_dim=d, head_dim_v=dv, dtype=dtype)
    plans = [choose(spec, shape, target(name), visits, any_stride).plan for any_stride in (False, True)]
    for plan in plans if plans[0].loads == "descriptor" else plans[:1]:
        found = compiled(spec, replace(plan, tables=tables_of(visits).made))
        assert found.shared_bytes <= found.predicted_shared_bytes, (text, plan)
        if above is not None and triton.__version__ == PINNED:
            assert found.predicted_shared_bytes <= above * found.shared_bytes, (text, plan)


@pytest.mark.parametrize(("text", "dtype", "d", "dv", "rows", "name"), BIASES)
def test_biases_are_in_the_prediction(compiled, text, dtype, d, dv, rows, name):
    check_text(compiled, text, dtype, d, dv, rows, name, 1.10)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "dtype", "d", "dv", "rows", "name"), MORE_BIASES)
def test_so_are_more_of_them(compiled, text, dtype, d, dv, rows, name):
    check_text(compiled, text, dtype, d, dv, rows, name, 1.10)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 104))
def test_no_random_spec_takes_more_than_was_predicted(compiled, seed):
    for call in islice(random_calls(seed), 25):
        check_text(compiled, *call, above=None)


@pytest.mark.parametrize(("stem", "name", "d", "dtype"), READS)
def test_what_a_spec_reads_is_in_the_prediction(compiled, stem, name, d, dtype):
    check_library(compiled, stem, name, d, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("d", "dtype"), [(64, "bf16"), (128, "bf16"), (64, "f16"), (128, "f16"), (64, "f32")])
@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("stem", sorted(p.stem for p in SPECS.glob("*.attn")))
def test_the_library_fits_the_prediction(compiled, stem, name, d, dtype):
    check_library(compiled, stem, name, d, dtype)


def test_the_general_kernel_takes_no_more_than_the_aligned_one(compiled):
    plan = choose(CAUSAL, Shape(head_dim=64, head_dim_v=64), target("sm_80")).plan
    aligned, general = compiled(CAUSAL, plan), compiled(CAUSAL, plan, False)
    assert general.shared_bytes <= aligned.shared_bytes
    assert "async_copy" in aligned.instructions
    assert (aligned.aligned, general.aligned) == (True, False)
