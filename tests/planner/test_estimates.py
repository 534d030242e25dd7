"""Shared memory and registers against what the compiler reported."""

from dataclasses import replace
from pathlib import Path

import pytest

from attncc.analysis import kernel_visits
from attncc.frontend import parse
from attncc.ir import KernelPlan, Schedule, Shape, pieces
from attncc.planner import choose, registers, shared_memory, units
from attncc.targets import target
from tests.planner.recorded import LIBRARY, RECORDED
from tests.planner.recorded_reads import READS

SPECS = Path(__file__).resolve().parents[2] / "specs"


def plan_of(record):
    name, tile_q, tile_k, warps, stages, d, dv, dtype = record[:8]
    return KernelPlan(name, "fa2", "q_outer", tile_q, tile_k, stages, warps, d, dv, dtype)


@pytest.fixture(autouse=True)
def recorded_release(monkeypatch):
    """The Triton that the figures are of."""
    monkeypatch.setattr(shared_memory, "triton_release", lambda: (3, 7))


def test_cdna4_gets_a_buffer_for_every_stage_from_triton_3_8_on(monkeypatch):
    plan = KernelPlan("gfx950", "fa2", "q_outer", 64, 32, 3, 4, 128, 128, "f16")
    before = shared_memory.fa2_forward(plan, target("gfx950"))
    monkeypatch.setattr(shared_memory, "triton_release", lambda: (3, 8))
    assert before == 36864
    assert 54720 <= shared_memory.fa2_forward(plan, target("gfx950")) <= 1.1 * 54720  # reported by 3.8.0 and 3.9.0
    same = replace(plan, target="gfx942")
    assert shared_memory.fa2_forward(same, target("gfx942")) == before


@pytest.mark.parametrize("record", RECORDED, ids=lambda r: "-".join(map(str, r[:8])))
def test_shared_memory_is_never_below_and_within_a_tenth_above(record):
    predicted = shared_memory.fa2_forward(plan_of(record), target(record[0]))
    assert record[8] <= predicted <= 1.10 * record[8]


def library_plan(record):
    stem, name, tile_q, tile_k, warps, stages, loads, d, dtype, _ = record
    spec = parse((SPECS / f"{stem}.attn").read_text(encoding="utf-8"), stem).spec.bind({})
    spec = replace(spec, schedules=(Schedule(algorithm="fa2"),))
    chosen = choose(spec, Shape(head_dim=d, head_dim_v=d, dtype=dtype), target(name), kernel_visits(spec)).plan
    return replace(chosen, tile_q=tile_q, tile_k=tile_k, warps=warps, stages=stages, loads=loads)


@pytest.mark.parametrize("record", LIBRARY, ids=lambda r: "-".join(map(str, r[:9])))
def test_what_a_spec_reads_is_in_shared_memory(record):
    predicted = shared_memory.fa2_forward(library_plan(record), target(record[1]))
    assert record[-1] <= predicted <= 1.10 * record[-1]


def read_plan(record):
    text, name, dtype, d, dv, tile_q, tile_k, warps, stages, loads, classed, _ = record
    spec = parse(text).spec
    chosen = choose(spec, Shape(q_len=tile_q, head_dim=d, head_dim_v=dv, dtype=dtype), target(name)).plan
    return replace(chosen, tile_q=tile_q, tile_k=tile_k, warps=warps, stages=stages, loads=loads, classed=classed)


@pytest.mark.parametrize("record", READS, ids=lambda r: "-".join(map(str, r[1:-1])))
def test_what_is_read_ahead_or_changes_its_layout_is_in_shared_memory(record):
    predicted = shared_memory.fa2_forward(read_plan(record), target(record[1]))
    assert record[-1] <= predicted <= 1.10 * record[-1]


def test_before_triton_3_7_a_tile_passes_whole(monkeypatch):
    (record,) = [r for r in LIBRARY if r[:3] == ("relative_bias", "sm_90", 64) and r[6:8] == ("pointer", 64)]
    now = shared_memory.fa2_forward(library_plan(record), target("sm_90"))
    monkeypatch.setattr(shared_memory, "triton_release", lambda: (3, 6))
    assert shared_memory.fa2_forward(library_plan(record), target("sm_90")) == 73728 > now  # reported by 3.6.0


def test_registers_are_right_in_the_mean():
    unspilled = [r for r in RECORDED if r[10] == 0 and r[9] < 250]
    errors = [abs(registers.fa2_forward(plan_of(r), target(r[0])) - r[9]) for r in unspilled]
    assert len(errors) > 30
    assert sum(errors) / len(errors) < 25


def test_plans_that_spilled_much_are_seen():
    spilled = [r for r in RECORDED if r[10] > 64]
    assert len(spilled) > 10
    missed = [r for r in spilled if registers.pressure(plan_of(r), target(r[0])) == "fits"]
    assert missed == []


@pytest.mark.parametrize(
    ("head_dim", "parts"),
    [(8, (16,)), (16, (16,)), (31, (32,)), (64, (64,)), (72, (64, 16)), (80, (64, 16)), (96, (64, 32)),
     (120, (128,)), (192, (128, 64)), (512, (512,))],
)  # fmt: skip
def test_head_sizes_are_split_not_padded_to_a_power_of_two(head_dim, parts):
    assert pieces(head_dim) == parts
    assert shared_memory.padded(head_dim) == sum(parts)


@pytest.mark.parametrize(
    ("name", "dtype", "products", "tile_q", "unit"),
    [
        ("sm_80", "bf16", "ieee", 128, "mma"), ("sm_90", "f16", "ieee", 128, "wgmma"),
        ("sm_90", "f16", "ieee", 32, "mma"),
        ("sm_100", "bf16", "ieee", 64, "tcgen05"), ("sm_120", "bf16", "ieee", 128, "mma"),
        ("sm_90", "f32", "ieee", 64, "fma"), ("sm_90", "f32", "tf32", 64, "wgmma"),
        ("gfx942", "f32", "ieee", 64, "mfma"),
    ],
)  # fmt: skip
def test_what_multiplies(name, dtype, products, tile_q, unit):
    plan = KernelPlan(name, "fa2", "q_outer", tile_q, 32, 2, 4, 64, 64, dtype, products)
    assert units.matrix_unit(plan, target(name)) == unit


def test_a_cpu_has_no_shared_memory():
    plan = KernelPlan("cpu", "fa2", "q_outer", 128, 256, 1, 1, 64, 64, "f64")
    assert shared_memory.fa2_forward(plan, target("cpu")) == 0
