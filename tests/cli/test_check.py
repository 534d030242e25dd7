"""`attncc check`: the verdict's way out. What it measures is tested in tests/cpu."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from attncc.runtime import check, machine

GOOD = check.Row("B1 H1/1 Q1 K1 D16/16", "f32", "contiguous", 0, 1e-6, 1e-5, 0.0, 1e-5, ())
BAD = replace(GOOD, seed=1, out_error=1.0, faults=("out is beyond its bound",))


@pytest.fixture
def asked(monkeypatch):
    """Replaces the measurement: (what was asked for, the rows to answer with)."""
    calls, rows = [], [GOOD]

    def answer(spec, device, *, seeds, values, differences):
        calls.append((spec.name, device, tuple(seeds), dict(values)))
        return check.Report(spec.name, device, tuple(rows))

    monkeypatch.setattr(check, "check", answer)
    return calls, rows


def test_a_real_check(program):
    found = program("check", "causal.attn", "--seeds", "1", "--json")
    assert found.status == 0, found.err
    report = json.loads(found.out)
    assert report["passed"] and report["device"] == "cpu" and len(report["rows"]) >= 5


def test_wrong_numbers_exit_4(program, asked):
    calls, rows = asked
    assert program("check", "causal.attn").status == 0
    rows.append(BAD)
    found = program("check", "causal.attn", "--device", "interpreter", "--seeds", "2")
    assert found.status == 4 and "1 of 2 calls of causal on interpreter are wrong" in found.err
    assert "out is beyond its bound" in found.out and "1 of 2 calls within" in found.out
    assert calls == [("causal", "cpu", tuple(check.SEEDS), {}), ("causal", "interpreter", (0, 1), {})]
    found = program("check", "causal.attn", "--json")
    assert found.status == 4 and not json.loads(found.out)["passed"]


def test_scalars_are_pinned(program, asked):
    Path("w.attn").write_text(
        "attention w(window: int, block: const int, t: f32[h]) { mask q // block - k < window score s * t[h] }"
    )
    assert program("check", "w.attn", "--set", "window=3").status == 0
    assert program("check", "w.attn", "--set", "block=8").status == 0
    assert [c[3] for c in asked[0]] == [{"window": 3}, {"block": 8}]
    for wrong, said in (
        ("windw=3", "did you mean window?"),
        ("window=0.5", "is of type int"),
        ("t=1,2", "tensors are drawn"),
    ):
        found = program("check", "w.attn", "--set", wrong)
        assert found.status == 2 and said in found.err


def test_no_gpu_exits_5(program, asked, monkeypatch):
    monkeypatch.setattr(machine, "local_target", lambda: None)
    found = program("check", "causal.attn", "--device", "cuda")
    assert found.status == 5 and "no GPU here" in found.err and not asked[0]


@pytest.mark.parametrize(
    ("arguments", "device"),
    [
        ((), "cpu"), (("--algorithm", "fa1"), "interpreter"), (("--algorithm", "fa2"), "interpreter"),
        (("--algorithm", "standard", "--device", "interpreter"), "interpreter"),
    ],
)  # fmt: skip
def test_what_runs_has_the_algorithm(program, asked, arguments, device):
    assert program("check", "causal.attn", *arguments).status == 0
    assert asked[0][-1][1] == device


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--algorithm", "fa1", "--device", "cpu"), 2, "a CPU has one program"),
        (("--algorithm", "fa3", "--device", "interpreter"), 2, "knows no Gluon"),
        (("--algorithm", "split"), 2, "is not one of"),
    ],
)
def test_an_algorithm_that_a_device_has_not_is_refused(program, asked, arguments, status, said):
    found = program("check", "causal.attn", *arguments)
    assert found.status == status and said in found.err and not asked[0]


def test_what_a_spec_pins_runs_too(program, asked):
    Path("p.attn").write_text("attention p { mask k <= q } schedule { loop kv_outer }")
    assert program("check", "p.attn").status == 0
    assert asked[0][-1][1] == "interpreter"
    assert program("check", "p.attn", "--algorithm", "fa2").status == 0


def test_bfloat16_is_refused_where_triton_interprets(program):
    Path("c.attn").write_text("attention c { mask k <= q } precision { inputs bf16 }")
    said = program("check", "c.attn", "--device", "interpreter")
    assert said.status == 2 and "multiplies no bfloat16" in said.err
