from dataclasses import replace

import pytest

from attncc.errors import PlanError
from attncc.frontend import parse
from attncc.ir import AttentionSpec, Precision, Schedule, Shape
from attncc.planner import choose, class_of, classes, violations
from attncc.planner.efficiency import MEASURED
from attncc.targets import TARGETS, target

FULL = AttentionSpec("full")
CAUSAL = parse("attention causal { mask k <= q }").spec
CASE_30 = [
    (name, d, dv, dtype) for name in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "gfx942")
    for d, dv in ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512)) for dtype in ("f16", "f32")
]  # fmt: skip


def pinned(**choices):
    return replace(FULL, schedules=(Schedule(**choices),))


@pytest.mark.parametrize(("name", "d", "dv", "dtype"), CASE_30)
def test_case_30_a_plan_fits_its_target(name, d, dv, dtype):
    plan = choose(CAUSAL, Shape(head_dim=d, head_dim_v=dv, dtype=dtype), target(name)).plan
    assert violations(plan, target(name)) == ()
    assert 0 < plan.shared_bytes <= target(name).shared_bytes
    assert (plan.head_dim, plan.head_dim_v, plan.dtype, plan.target) == (d, dv, dtype, name)


@pytest.mark.parametrize(("name", "d", "dv", "dtype"), CASE_30)
def test_case_30_or_the_limit_is_named_with_the_excess(name, d, dv, dtype):
    spec = pinned(tile_q=256, tile_k=256, stages=4, warps=8)
    with pytest.raises(PlanError) as caught:
        choose(spec, Shape(head_dim=d, head_dim_v=dv, dtype=dtype), target(name))
    text = str(caught.value)
    assert caught.value.exit_code == 3
    assert f"no plan of full fits {name} (head_dim {d}, head_dim_v {dv}, {dtype})" in text
    need, _, rest = text.partition(" bytes of shared memory, ")
    if rest:
        need, have = int(need.split()[-1]), int(rest.split("has ")[1].split(":")[0])
        assert have == target(name).shared_bytes
        assert f": {need - have} too many" in text
    else:
        assert "registers a thread" in text
    assert "The schedule pins tile_q, tile_k, stages, warps" in text


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_the_h200_gets_what_was_fastest_on_it(d, mask):
    plan = choose(FULL if mask == "full" else CAUSAL, Shape(head_dim=d, head_dim_v=d), target("sm_90")).plan
    same = [r for r in MEASURED["sm_90"] if (r.head_dim, r.loads, r.reference) == (d, plan.loads, plan.reference)]
    best = max(same, key=lambda r: getattr(r, mask))
    names = ("tile_q", "tile_k", "stages", "warps", "max_registers")
    assert [getattr(plan, n) for n in names] == [getattr(best, n) for n in names]


def test_pins_are_kept():
    plan = choose(pinned(tile_q=64, tile_k=32, stages=3, warps=4), Shape(), target("sm_90")).plan
    assert (plan.tile_q, plan.tile_k, plan.stages, plan.warps) == (64, 32, 3, 4)
    assert choose(pinned(stages=4), Shape(), target("sm_90")).plan.stages == 4


def test_a_targets_own_schedule_goes_over_the_general_one():
    spec = replace(FULL, schedules=(Schedule(tile_q=64, warps=4), Schedule(target="sm_80", tile_q=32)))
    assert choose(spec, Shape(), target("sm_90")).plan.tile_q == 64
    plan = choose(spec, Shape(), target("sm_80")).plan
    assert (plan.tile_q, plan.warps) == (32, 4)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"tile_q": 128, "tile_k": 128, "stages": 4}, "too many. The schedule pins tile_q, tile_k, stages"),
        ({"algorithm": "fa3"}, "fa3 needs matrix products of warp groups and TMA, which sm_89 lacks"),
        ({"algorithm": "fa2", "loop": "kv_outer"}, "loop kv_outer is not among what is built"),
        ({"tile_k": 48}, "tile_k is 48, a power of two is needed"),
        ({"warps": 64}, "warps is 64, at most 32 goes"),
    ],
)
def test_pins_that_do_not_fit_are_refused(choices, words):
    with pytest.raises(PlanError, match="no plan of full fits") as caught:
        choose(pinned(**choices), Shape(head_dim=256, head_dim_v=256), target("sm_89"))
    assert words in str(caught.value)


def test_a_head_beyond_512_is_refused():
    with pytest.raises(PlanError, match="head_dim is 576, at most 512 goes: 64 too many"):
        choose(FULL, Shape(head_dim=576, head_dim_v=512), target("sm_90"))


def test_few_plans_serve_all_lengths():
    shapes = [Shape(batch=b, heads=h, kv_heads=h, q_len=n, k_len=m) for b, h, n, m in
              [(1 + i % 5, 1 + i % 7, 1 + 41 * i, 1 + 97 * i % 4096) for i in range(0, 100, 3)]]  # fmt: skip
    plans = {choose(CAUSAL, s, target("sm_90")).plan for s in shapes}
    assert len(plans) <= len(classes.Q_CLASSES) + 1
    assert {choose(CAUSAL, s, target("sm_90")).plan for s in {class_of(s) for s in shapes}} == plans


@pytest.mark.parametrize(("rows", "tile"), [(1, 16), (16, 16), (17, 64), (64, 64)])
def test_short_queries_do_not_get_tall_tiles(rows, tile):
    for name in TARGETS:
        assert choose(FULL, Shape(q_len=rows), target(name)).plan.tile_q <= tile


def test_rejected_plans_come_with_reasons():
    choice = choose(FULL, Shape(), target("sm_89"))
    assert choice.plan not in [p for p, _ in choice.rejected]
    assert any("times the time" in reason for _, reason in choice.rejected)
    assert any("too many" in reason for _, reason in choice.rejected)
    assert choice == choose(FULL, Shape(), target("sm_89"))


def test_float32_stays_small_without_a_matrix_unit():
    plan = choose(FULL, Shape(dtype="f32"), target("sm_80")).plan
    assert plan.tile_q * plan.tile_k <= 2048
    assert plan.products == "ieee"
    fast = choose(replace(FULL, precision=Precision(products="tf32")), Shape(dtype="f32"), target("sm_80")).plan
    assert fast.tile_q * fast.tile_k > plan.tile_q * plan.tile_k


def test_the_spec_decides_the_type_of_inputs():
    assert choose(replace(FULL, precision=Precision(inputs="f16")), Shape(), target("sm_90")).plan.dtype == "f16"


def test_a_cpu_plan_has_tiles_only():
    plan = choose(FULL, Shape(dtype="f64"), target("cpu")).plan
    assert (plan.stages, plan.warps, plan.shared_bytes) == (1, 1, 0)
    plan = choose(pinned(tile_q=32, tile_k=64), Shape(), target("cpu")).plan
    assert (plan.tile_q, plan.tile_k) == (32, 64)


@pytest.mark.parametrize("d", [64, 128, 256, 512])
def test_the_kernel_beside_a_descriptor_one(d):
    shape = Shape(head_dim=d, head_dim_v=d)
    plan = choose(CAUSAL, shape, target("sm_90")).plan
    beside = choose(CAUSAL, shape, target("sm_90"), any_stride=True).plan
    assert (plan.loads, plan.any_stride) == ("descriptor", False)
    assert (beside.loads, beside.any_stride) == ("pointer", True)
    assert violations(beside, target("sm_90")) == ()


@pytest.mark.parametrize(("name", "d", "dtype", "products", "loads"), [
    ("sm_90", 128, "bf16", "ieee", "descriptor"), ("sm_80", 128, "bf16", "ieee", "pointer"),
    ("sm_90", 31, "bf16", "ieee", "pointer"), ("sm_90", 68, "f32", "tf32", "descriptor"),
    ("sm_90", 64, "f32", "ieee", "pointer"), ("gfx942", 128, "f16", "ieee", "pointer"),
])  # fmt: skip
def test_descriptors_where_the_tma_unit_can_read(name, d, dtype, products, loads):
    spec = replace(FULL, precision=Precision(products=products))
    assert choose(spec, Shape(head_dim=d, head_dim_v=d, dtype=dtype), target(name)).plan.loads == loads
