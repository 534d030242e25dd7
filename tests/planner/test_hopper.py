"""Plans of the warp-specialised kernel: taken where they are pinned and can be, and refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attncc.analysis import kernel_visits
from attncc.codegen import render
from attncc.codegen.tables import tables_of
from attncc.errors import PlanError
from attncc.frontend import parse
from attncc.ir import Schedule, Shape
from attncc.planner import choose, hopper, search
from attncc.targets import target

SPECS = Path(__file__).resolve().parents[2] / "specs"


def plan(name: str, any_stride: bool = False, goal: str = "sm_90", pins: Schedule | None = None, **sizes):
    spec = parse((SPECS / f"{name}.attn").read_text(encoding="utf-8")).spec.bind({})
    spec = replace(spec, schedules=(pins or Schedule(algorithm="fa3"),))
    return choose(spec, Shape(**sizes), target(goal), kernel_visits(spec), any_stride).plan


@pytest.mark.parametrize(("d", "dv", "tiles"), [(64, 64, (192, 128)), (128, 128, (128, 64)), (256, 256, (128, 64))])
def test_a_pinned_algorithm_is_taken(d, dv, tiles):
    found = plan("causal", head_dim=d, head_dim_v=dv)
    assert (found.algorithm, found.tile_q, found.tile_k) == ("fa3", *tiles)
    assert found.warps * 16 == found.tile_q


@pytest.mark.parametrize(
    ("name", "dtype", "reference"),
    [("causal", "bf16", "whole_tile"), ("causal", "f16", "running"), ("alibi", "bf16", "first_tile"),
     ("document", "bf16", "whole_tile"), ("softcap", "bf16", "bounded")],
)  # fmt: skip
def test_a_whole_tile_sets_the_reference_of_scores_that_are_products_alone(name, dtype, reference):
    spec = parse((SPECS / f"{name}.attn").read_text(encoding="utf-8")).spec.bind({})
    visits = kernel_visits(spec)
    found = hopper.plans(spec, Shape(dtype=dtype), target("sm_90"), Schedule(), search.references(
        spec, dtype, target("sm_90"), visits), visits)  # fmt: skip
    assert reference in [p.reference for p in found]


def test_what_rows_read_is_summed_up_for_a_power_of_two_of_them():
    pins = Schedule(algorithm="fa3", tile_q=192, tile_k=64, stages=3)
    assert plan("causal", head_dim=64, head_dim_v=64, pins=pins).tile_q == 192
    with pytest.raises(PlanError, match="a power of two of them, such as 128, and not for 192"):
        plan("document", head_dim=64, head_dim_v=64, pins=pins)
    spec = parse((SPECS / "row_bounds.attn").read_text(encoding="utf-8")).spec.bind({})
    tried = search.specialised(spec, Shape(head_dim=64, head_dim_v=64), target("sm_90"), kernel_visits(spec))
    assert tried and all(p.tile_q == 128 for p in tried)


@pytest.mark.parametrize("name", ["relative_bias", "dense_bias"])
def test_numbers_of_pairs_come_with_a_running_maximum(name):
    found = plan(name, pins=Schedule(), head_dim=256, head_dim_v=256)
    assert (found.algorithm, found.reference, found.apart) == ("fa3", "running", True)


def test_few_registers_are_left_to_vectors():
    assert plan("document", head_dim=64, head_dim_v=64).tile_q == 128
    assert plan("block_causal", head_dim=64, head_dim_v=64).tile_q == 128


def test_what_else_is_pinned_is_kept():
    found = plan("causal", pins=Schedule(algorithm="fa3", tile_q=128, tile_k=64, stages=3))
    assert (found.tile_q, found.tile_k, found.stages) == (128, 64, 3)


def test_strides_that_tma_cannot_take_run_another_kernel():
    found = plan("causal", any_stride=True)
    assert (found.algorithm, found.loads) == ("fa2", "pointer")


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("sparsemax", {}, "fa3 does not know softmax sparsemax"),
        ("causal", {"dtype": "f32"}, "fa3 multiplies 16-bit types, not f32"),
        ("causal", {"head_dim": 24}, "fa3 takes head sizes that are multiples of 16"),
        ("causal", {"head_dim": 512, "head_dim_v": 512}, "head size 512"),
        ("causal", {"head_dim": 64}, "leaves through the buffer of Q"),
        ("causal", {"goal": "sm_80"}, "fa3 needs matrix products of warp groups and TMA, which sm_80 lacks"),
        ("causal", {"pins": Schedule(algorithm="fa3", tile_q=64)}, "tile_q is 128 or 192, not 64"),
    ],
)
def test_a_refusal_says_why(name, sizes, words):
    with pytest.raises(PlanError) as caught:
        plan(name, **sizes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("causal", "fa3"),
        ("document", "fa3"),
        ("block_sparse", "fa2"),
        ("tree", "fa3"),
        ("padding", "fa3"),
        ("sigmoid", "fa3"),
        ("retnet", "fa3"),
        ("relative_bias", "fa2"),
        ("causal_dropout", "fa3"),
    ],
)
def test_what_was_not_measured_is_not_taken_unasked(name, algorithm):
    assert plan(name, pins=Schedule()).algorithm == algorithm


def test_a_loop_of_their_own_for_whole_tiles_is_there_where_it_is_faster():
    spec = parse((SPECS / "causal.attn").read_text(encoding="utf-8")).spec
    usual, other, *_ = search.specialised(spec, Shape(), target("sm_90"), kernel_visits(spec, forward=True))
    assert usual.apart and other == replace(usual, apart=False)
    texts = [render(spec, kernel_visits(spec, forward=True), p) for p in (usual, other)]
    assert ["PLAIN" in text for text in texts] == [True, False]
    assert not plan("full", head_dim=64, head_dim_v=64).apart and not plan("causal", head_dim=256, head_dim_v=256).apart
    assert not plan("alibi").apart and plan("causal", head_dim=256, head_dim_v=256, dtype="f16").apart


@pytest.mark.parametrize(
    ("name", "tile_k"),
    [("full", 128), ("causal", 64), ("alibi", 128), ("softcap", 128), ("window", 64), ("document", 64)],
)
def test_tiles_are_narrow_where_that_is_faster(name, tile_k):
    assert plan(name, pins=Schedule()).tile_k == tile_k


def test_two_blocks_share_a_processor_where_heads_are_narrow_and_there_is_a_mask_alone():
    found = plan("causal", head_dim=64, head_dim_v=64, q_len=1000)
    assert hopper.blocks(found) == 2 and 2 * found.shared_bytes <= target("sm_90").shared_bytes_sm
    cap, consumers = hopper.register_cap(found), found.tile_q // hopper.GROUP_ROWS
    assert 2 * cap * hopper.GROUP_THREADS * (consumers + 1) <= target("sm_90").registers_sm
    assert cap * (consumers + 1) >= found.max_registers * consumers + hopper.LOADER
    spec = parse((SPECS / "causal.attn").read_text(encoding="utf-8")).spec
    text = render(spec, kernel_visits(spec, forward=True), found)
    assert f"num_warps=4, maxnreg={cap}," in text and "min(slots, 2 * processors(q.device))" in text
    assert f"[{found.max_registers}, {cap * (consumers + 1) - found.max_registers * consumers}]" in text


@pytest.mark.parametrize(
    ("name", "pins"),
    [("full", {}), ("softcap", {}), ("causal_dropout", {}), ("padding", {}), ("window", {"tile_q": 192}),
     ("window", {"tile_k": 128}), ("window", {"stages": 3})],
)  # fmt: skip
def test_a_block_with_more_to_hold_has_the_processor_alone(name, pins):
    found = plan(name, pins=Schedule(algorithm="fa3", **pins), head_dim=64, head_dim_v=64, q_len=1000)
    assert hopper.blocks(found) == 1 and not hopper.register_cap(found)


@pytest.mark.parametrize(("name", "rows", "blocks"), [("causal", 1024, 2), ("causal", 1025, 1), ("window", 4096, 2)])
def test_blocks_share_a_processor_where_that_is_faster(name, rows, blocks):
    assert hopper.blocks(plan(name, pins=Schedule(), head_dim=64, head_dim_v=64, q_len=rows)) == blocks


@pytest.mark.parametrize(("name", "keys"), [("causal", "k_len"), ("document", "min(k_len, 2048)")])
def test_more_heads_run_side_by_side_where_their_tiles_see_few_keys(name, keys):
    spec = parse((SPECS / f"{name}.attn").read_text(encoding="utf-8")).spec
    visits = kernel_visits(spec, forward=True)
    made = plan(name)
    assert f"cached = max(1, 33554432 // (512 * {keys}))" in render(
        spec, visits, replace(made, tables=tables_of(visits).made)
    )
