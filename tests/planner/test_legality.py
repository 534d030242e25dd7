from dataclasses import replace

import pytest

from attncc.frontend import parse
from attncc.ir import KernelPlan, Shape
from attncc.planner import backward_candidates, choose_backward, shared_memory, violations
from attncc.targets import target

GOOD = KernelPlan("sm_90", "fa2", "q_outer", 128, 64, 2, 8, 128, 128, "bf16")


def test_a_plan_that_fits_breaks_nothing():
    assert violations(GOOD, target("sm_90")) == ()


def test_the_sentence_says_how_much_is_too_much():
    plan = replace(GOOD, target="sm_89", tile_q=128, tile_k=64, stages=4, head_dim=256, head_dim_v=256)
    (found,) = violations(plan, target("sm_89"))
    assert found.limit == "shared_bytes"
    assert (found.value, found.allowed) == (278528, 101376)
    assert found.sentence == "needs 278528 bytes of shared memory, sm_89 has 101376: 177152 too many"
    assert found.excess == pytest.approx(278528 / 101376)


@pytest.mark.parametrize(
    ("change", "limit", "words"),
    [
        ({"head_dim": 576}, "head_dim", "head_dim is 576, at most 512 goes: 64 too many"),
        ({"head_dim_v": 0}, "head_dim_v", "head_dim_v is 0, at least 1 is needed"),
        ({"tile_q": 8}, "tile_q", "tile_q is 8, at least 16 is needed"),
        ({"tile_k": 96}, "tile_k", "tile_k is 96, a power of two is needed, such as 64"),
        ({"warps": 3}, "warps", "warps is 3, a power of two is needed, such as 2"),
        ({"stages": 9}, "stages", "stages is 9, at most 8 goes: 1 too many"),
        ({"algorithm": "split_kv"}, "algorithm", "algorithm split_kv is not among what is built: standard, fa1"),
        ({"loop": "kv_outer"}, "loop", "loop kv_outer is not among what is built: q_outer"),
        ({"dtype": "f8e4m3"}, "dtype", "dtype f8e4m3 is not among what is built: f16, bf16, f32"),
        ({"dtype": "f64"}, "dtype", "dtype f64 is not among what is built: f16, bf16, f32"),
        ({"target": "sm_80"}, "target", "target sm_80 is not among what is built: sm_90"),
        ({"warps": 1}, "registers", "needs 768 registers a thread, sm_90 has 255: 513 too many"),
        ({"warps": 32, "tile_q": 1024}, "shared_bytes", "needs 327680 bytes of shared memory, sm_90 has 232448"),
        ({"max_registers": 64}, "registers", "needs 96 registers a thread, sm_90 has 64: 32 too many"),
    ],
)
def test_each_limit(change, limit, words):
    found = violations(replace(GOOD, **change), target("sm_90"))
    assert limit in [v.limit for v in found]
    assert any(v.sentence.startswith(words) for v in found)


def test_threads_of_a_block():
    plan = replace(GOOD, target="gfx942", warps=32, head_dim=64, head_dim_v=64)
    assert "needs 2048 threads a block, gfx942 has 1024: 1024 too many" in [
        v.sentence for v in violations(plan, target("gfx942"))
    ]


def test_descriptors_need_a_tma_unit():
    plan = replace(GOOD, loads="descriptor")
    assert violations(plan, target("sm_90")) == ()
    (found,) = violations(replace(plan, target="sm_80", stages=2), target("sm_80"))
    assert found.sentence == "sm_80 has no TMA unit for descriptor loads"


def test_tf32_is_nvidias():
    plan = replace(GOOD, target="gfx942", dtype="f32", products="tf32", tile_q=32, tile_k=32)
    assert [v.limit for v in violations(plan, target("gfx942"))] == ["products"]


def test_exact_products_stay_exact_where_narrow_values_go_into_them():
    plan = replace(GOOD, target="sm_100", dtype="f32", tile_q=64, tile_k=32, head_dim=64, head_dim_v=64, least_bytes=1)
    for change, limits in (
        ({}, ["tile_q"]),
        ({"products": "tf32"}, []),
        ({"tile_q": 32}, []),
        ({"least_bytes": 4}, []),
    ):
        assert [v.limit for v in violations(replace(plan, **change), target("sm_100"))] == limits


def test_a_cpu_has_no_limits_but_those_of_the_program():
    plan = replace(GOOD, target="cpu", dtype="f64", tile_k=256, stages=1, warps=1, head_dim=512, head_dim_v=512)
    assert violations(plan, target("cpu")) == ()
    assert [v.limit for v in violations(replace(plan, head_dim=513), target("cpu"))] == ["head_dim"]


@pytest.mark.parametrize("reads", [{"pair_bits": 1}, {"gather_bytes": 1}])
def test_triton_3_9_compiles_masks_of_bools_on_mfma_in_one_stage_only(monkeypatch, reads):
    plan = replace(GOOD, target="gfx942", head_dim=64, head_dim_v=64, warps=4, tile_k=32, **reads)
    monkeypatch.setattr(shared_memory, "triton_release", lambda: (3, 8))
    assert violations(plan, target("gfx942")) == ()
    monkeypatch.setattr(shared_memory, "triton_release", lambda: (3, 9))
    assert [(v.limit, v.allowed) for v in violations(plan, target("gfx942"))] == [("stages", 1)]
    assert violations(replace(plan, stages=1), target("gfx942")) == ()
    assert violations(replace(plan, pair_bits=0, gather_bytes=4), target("gfx942")) == ()


def test_values_by_tma_that_masks_of_keys_replace_take_fewer_keys_than_threads():
    reads = {"key_mask": True, "key_bytes": 4, "loads": "descriptor"}
    plan = replace(GOOD, target="sm_90", head_dim=64, head_dim_v=64, tile_q=16, tile_k=128, warps=4, **reads)
    assert [(v.limit, v.allowed) for v in violations(plan, target("sm_90"))] == [("tile_k", 64)]
    for other in ({"tile_k": 64}, {"warps": 8}, {"stages": 1}, {"loads": "pointer"}, {"key_mask": False}):
        assert violations(replace(plan, **other), target("sm_90")) == ()
    assert violations(replace(plan, tile_q=64), target("sm_90")) == ()  # wgmma


@pytest.mark.parametrize("head_dim", [128, 256])
def test_the_lse_of_few_rows_have_one_buffer(head_dim):
    """Triton put a second at 64 bytes, where TMA cannot write."""
    spec, goal = parse("attention causal { mask k <= q }").spec, target("sm_90")
    shape = Shape(head_dim=head_dim, head_dim_v=head_dim)
    chosen = choose_backward(spec, shape, goal, algorithm="fa2")
    few = replace(chosen, dkdv=replace(chosen.dkdv, tile_q=16, stages=3))
    (found,) = violations(few, goal)
    assert (found.limit, found.value, found.allowed) == ("stages", 3, 2) and "the lse of 16 rows" in found.sentence
    for change in ({"stages": 2}, {"tile_q": 32}, {"loads": "pointer"}):
        assert violations(replace(few, dkdv=replace(few.dkdv, **change)), goal) == ()
    kept = [p.passes["dkdv"] for p in (c.plan for c in backward_candidates(spec, shape, goal)) if p.algorithm == "fa2"]
    assert kept and not any(own.tile_q == 16 and own.stages > 2 for own in kept)
