"""Sums of dQ that heads use one after another: nobody waits for what has not begun, whatever the order of events; heads
whose sums have no room in L2 have their own, which is a plan too that a search may try."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from attncc.analysis import even, kernel_visits, lopsided
from attncc.codegen.hopper_backward import render
from attncc.frontend import parse
from attncc.ir import AttentionSpec, KernelPlan, Schedule, Shape
from attncc.planner import backward_candidates, choices_of, choose_backward, violations, with_choices
from attncc.planner.hopper_backward import ADDED
from attncc.runtime.compile import load_module
from attncc.runtime.compile_backward import compile_backward
from attncc.targets import target

MASKS = ("mask k <= q", "", "mask 0 <= q - k < 100")


def planned(mask: str) -> tuple[AttentionSpec, KernelPlan]:
    spec = replace(parse(f"attention a {{ {mask} }}").spec, schedules=(Schedule(algorithm="fa3"),))
    return spec, choose_backward(spec, Shape(), target("sm_90"))


def waiting(mask: str, folder: Path) -> Any:
    """The function of a generated file that says who waits for whom."""
    spec, plan = planned(mask)
    path = folder / "a.py"
    path.write_text(render(spec, kernel_visits(spec, "q"), kernel_visits(spec, "k"), plan, "", None), encoding="utf-8")
    return load_module(path).in_turns


@pytest.fixture(scope="module", params=MASKS)
def in_turns(request, tmp_path_factory):
    return waiting(request.param, tmp_path_factory.mktemp("turns"))


def ends(heads: int, tiles: int, processors: int, turns: tuple[int, int, int], random: Random) -> bool:
    """Whether all programs of a grid end that begin in order, as many at a time as there are processors.

    A program converts its share of an earlier head, adds where those who had the same sums were converted, and ends.
    """
    together, behind, _ = turns
    added, converted = [0] * heads, [0] * heads
    waiting, running = iter(range(heads * tiles)), []
    while True:
        while len(running) < processors and (program := next(waiting, None)) is not None:
            start = program // (together * tiles) * together
            running.append((start + (program - start * tiles) % min(heads - start, together), 0))
        able = [i for i, (head, stage) in enumerate(running) if _goes_on(head, stage, tiles, added, converted, turns)]
        if not able:
            return not running and added == [tiles] * heads
        i = random.choice(able)
        head, stage = running[i]
        running[i] = (head, stage + 1)
        if stage == 0 and head >= behind:
            converted[head - behind] += 1
        if stage == 2:
            added[head] += 1
            del running[i]


def _goes_on(head: int, stage: int, tiles: int, added: list[int], converted: list[int], turns: tuple[int, ...]) -> bool:
    _, behind, ring = turns
    if stage == 0:
        return head < behind or added[head - behind] == tiles
    return stage == 2 or head < ring or converted[head - ring] == tiles


def test_every_program_ends(in_turns):
    random, shared = Random(3), 0
    for _ in range(70):
        heads, tiles = random.randint(1, 40), random.choice((1, 2, 7, 16, 70))
        turns = in_turns(heads, random.choice((8, 64, 128)), tiles, random.randint(1, 12))
        together, behind, ring = turns
        assert behind == ring == heads or together <= min(behind, ring - behind)
        assert 1 <= behind <= ring <= heads
        shared += ring < heads
        assert ends(heads, tiles, random.choice((1, 3, 132)), turns, random), turns
    assert shared > 10


def test_a_head_that_waits_for_its_own_group_is_found():
    assert not ends(8, 4, 1, (2, 1, 4), Random(0))
    assert not ends(8, 4, 1, (2, 2, 3), Random(0))
    assert ends(8, 4, 1, (2, 2, 4), Random(0))


def test_sums_fit_into_the_cache_or_each_head_has_its_own(in_turns):
    for heads, rows in ((256, 16), (64, 64), (16, 256), (2048, 2), (8, 2048)):
        ring = in_turns(heads, rows, rows // 2, 2)[2]
        assert ring == heads or ring * rows * 64 * 128 * 4 <= 32 * 2**20
    assert in_turns(256, 16, 8, 32)[2] < 256


@pytest.mark.parametrize(("mask", "taken"), [("", False), ("mask k <= q", False), ("mask 0 <= q - k < 100", True)])
def test_long_heads_take_turns_where_they_see_near_keys_alone(tmp_path, mask, taken):
    in_turns = waiting(mask, tmp_path)
    assert (in_turns(16, 256, 128, 1)[2] < 16) is taken  # 16384 rows
    assert in_turns(64, 64, 32, 8)[2] < 64  # 4096


def test_turns_are_the_planners_form_and_sums_for_each_head_are_tried_beside_it():
    spec, plan = planned("mask k <= q")
    found = [c.plan for c in backward_candidates(spec, Shape(), target("sm_90"))]
    own = next(p for p in found if p.sums == "added")
    assert found[0] == plan and plan.sums == "turns" and not violations(own, target("sm_90"))
    assert with_choices(plan, choices_of(own), target("sm_90")) == own
    wide = choose_backward(spec, Shape(head_dim=256, head_dim_v=256), target("sm_90"))
    assert violations(replace(wide, sums="turns"), target("sm_90"))
    assert not [c for c in backward_candidates(spec, Shape(head_dim=256, head_dim_v=256), target("sm_90"))
                if c.plan.sums in ADDED]  # fmt: skip


def test_both_ways_of_a_call_compile(tmp_path):
    spec, plan = planned("mask k <= q")
    path, visits = tmp_path / "a.py", (kernel_visits(spec, "q"), kernel_visits(spec, "k"))
    path.write_text(render(spec, *visits, plan, "", None), encoding="utf-8")
    found = compile_backward(path, spec, *visits, plan)
    ends = ("backward_delta", "backward", "backward in turns", "backward_convert")
    assert [k.kernel for k in found] == [f"a_{end}" for end in ends]
    assert all(k.instructions["wgmma"] for k in found[1:3])
    most = max(k.shared_bytes for k in found)
    assert most <= plan.shared_bytes <= 1.02 * most


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("attention a { }", True), ("attention a { mask 0 <= q - k < 500 }", True),
        ("attention a { mask k <= q }", False),
        ("attention a { mask k <= q and (q - k < 500 or k < 4) }", False),
        ("attention a(d: i32[b, k]) { mask d[b, q] == d[b, k] }", False),
    ],
)  # fmt: skip
def test_programs_with_as_many_rows_each_are_known(text, wanted):
    spec = parse(text).spec
    assert even(spec, kernel_visits(spec, "k")) is wanted


def test_heads_whose_first_programs_are_much_longer_begin_together(tmp_path):
    """Under sinks beside a window: the last head's would begin when most others have ended."""
    sinks = "mask k <= q and (q - k < 500 or k < 4)"
    for mask, wanted in (*zip(MASKS, (False,) * 3, strict=True), (sinks, True)):
        spec = parse(f"attention a {{ {mask} }}").spec
        assert lopsided(spec, kernel_visits(spec, "k")) is wanted
    assert waiting(sinks, tmp_path)(64, 64, 32, 64) == (64, 64, 64)
