"""`attncc tune` from the command line: what it says without the GPU, with another, and of what it found."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from attncc.commands import tune as command
from attncc.ir import KernelPlan, Shape
from attncc.planner import Candidate
from attncc.runtime import machine, search, tune_drawn
from attncc.runtime.search import Found, Trial
from attncc.runtime.tune import Tuning

PLAN = KernelPlan("sm_90", "fa2", "q_outer", 128, 64, 2, 8, 128, 128, "bf16")
FIRST, SECOND = Candidate(PLAN, 1.0), Candidate(PLAN, 2.0)


@pytest.fixture
def gpu(monkeypatch):
    """gpu(name): this machine's GPU."""
    become = lambda name: monkeypatch.setattr(machine, "local_target", lambda: name)
    become(None)
    return become


@pytest.fixture
def found(monkeypatch):
    """What a search finds, and what it was asked."""
    made, asked = Found(), []

    def stub(planned, tensors, passes, cold, budget, tell=None):
        asked.append((planned, tensors, passes, cold, budget))
        return Tuning(planned.spec.name, "Stub 9000", Shape(), dict.fromkeys(passes, made))

    monkeypatch.setattr(tune_drawn, "tune_drawn", stub)
    made.asked = asked
    return made


def test_without_a_gpu_there_is_the_ranking_of_the_model(program, gpu):
    said = program("tune", "causal.attn", "--target", "sm_90")
    assert (
        said.status == 5 and "nothing was measured, nothing is kept" in said.err and "there is no GPU here" in said.err
    )
    lines = said.out.splitlines()
    assert lines[1].split()[:4] == ["forward", "1", "fa3", "128x64,"]
    assert lines[-1].startswith("in the order a search measures them") and "; - where the model" in lines[-1]
    assert any(line.endswith(" -") for line in lines)
    ranking = json.loads(program("tune", "causal.attn", "--target", "sm_90", "--json").out)
    assert not ranking["measured"] and len(ranking["ranking"]) > 10
    assert [row["pass"] for row in ranking["ranking"]] == sorted((r["pass"] for r in ranking["ranking"]), reverse=True)


def test_the_ranking_is_of_the_call_that_was_asked_for(program, gpu):
    """Its shape and its passes; the times of the planner's choice are those of explain; no two rows read alike."""
    ask = ("causal.attn", "--target", "sm_90", "--shape", "batch=2,heads=8,q_len=8192,k_len=8192,head_dim=64")
    ranking = json.loads(program("tune", *ask, "--json").out)
    costs = json.loads(program("explain", *ask, "--json").out)["io"]
    first = {row["pass"]: row for row in reversed(ranking["ranking"])}
    assert ranking["shape"]["q_len"] == 8192
    assert first["forward"]["predicted_ms"] == costs["predicted_ms"]
    assert first["backward"]["predicted_ms"] == costs["backward"]["predicted_ms"]
    one = json.loads(program("tune", *ask, "--pass", "backward", "--json").out)["ranking"]
    assert one == [row for row in ranking["ranking"] if row["pass"] == "backward"]
    Path("capped.attn").write_text("attention capped { score 20 * tanh(s / 20) }")  # whose references differ as well
    capped = json.loads(program("tune", "capped.attn", "--target", "sm_90", "--json").out)
    for rows, name in product((ranking["ranking"], capped["ranking"]), first):
        texts = command.plans_in_words([row["choices"] for row in rows if row["pass"] == name])
        assert len(set(texts)) == len(texts)


def test_packed_calls_are_ranked_and_refused(program, gpu, found):
    said = program("tune", "causal.attn", "--target", "sm_90", "--layout", "ragged")
    assert said.status == 5 and said.out.splitlines()[1].split()[2] == "fa2"
    gpu("sm_90")
    said = program("tune", "causal.attn", "--layout", "ragged")
    assert said.status == 1 and "packed sequences are not tuned yet" in said.err and not found.asked


def test_another_gpu_is_none(program, gpu):
    gpu("sm_80")
    said = program("tune", "causal.attn", "--target", "sm_90")
    assert said.status == 5 and "this machine's GPU is sm_80" in said.err


def test_no_gpu_and_no_target(program, gpu):
    said = program("tune", "causal.attn")
    assert said.status == 5 and "--target sm_90" in said.err and not said.out
    assert "nothing to tune" in program("tune", "causal.attn", "--target", "cpu").err


def test_what_was_found_is_shown(program, gpu, found):
    gpu("sm_90")
    found.trials = [Trial(FIRST, search.OK, 2.0), Trial(SECOND, search.NO_MEMORY, why="2 GiB")]
    found.best, found.stopped = Trial(FIRST, search.OK, 1.6), "out of time: 50 s"
    said = program("tune", "causal.attn", "--pass", "forward", "--cold", "--seconds", "7", "--shape", "head_dim=64")
    assert said.status == 0
    row = said.out.splitlines()[1]
    assert row.startswith("forward  fa2 128x64, 2 stages, 8 warps") and "1.6 ms" in row and "1.25" in row
    assert "kept for Stub 9000" in said.out
    assert "out of memory (2 GiB)" in said.err and "out of time" in said.err
    ((planned, _, passes, cold, budget),) = found.asked
    assert (planned.shape.head_dim, passes, cold, budget) == (64, ("forward",), True, 7)


def test_nothing_right_is_a_failure(program, gpu, found):
    gpu("sm_90")
    found.trials = [Trial(FIRST, search.WRONG, why="out is beyond its bound")]
    said = program("tune", "causal.attn")
    assert said.status == 4 and "nothing is kept" in said.err and "out is beyond its bound" in said.err


def test_what_is_drawn_is_named(program, gpu, found):
    gpu("sm_90")
    with open("drawn.attn", "w") as file:
        file.write("attention drawn(n: int, m: int = 3, x: f32[h], y: f32[h]) { score s + x[h] + y[h] * (n + m) }")
    said = program("tune", "drawn.attn", "--set", "x=" + ",".join("1" * 16))
    assert "drawn at random: n, y;" in said.err and set(found.asked[0][1]) == {"x"}


def test_plans_in_words():
    second = {"tile_q": 64, "tile_k": 128, "stages": 3, "warps": 4}
    first = {"algorithm": "fa3", "tile_q": 128, "tile_k": 64, "stages": 1, "warps": 8, "max_registers": 168}
    assert command._plan({**first, "reference": "first_tile", "dkdv": second}) == (
        "fa3 128x64, 1 stage, 8 warps, 168 registers, first tiles' maximum; dK and dV 64x128, 3 stages, 4 warps"
    )
