"""What `check` draws, and that it sees each kind of fault: a judge that cannot convict is none."""

from __future__ import annotations

import json

import pytest
import torch

from attncc import frontend
from attncc.errors import CheckError
from attncc.ir import Shape
from attncc.runtime import check as checking
from attncc.runtime.check import Report, check, trials
from attncc.runtime.draw import LAYOUTS, Draw
from attncc.runtime.poison import poisoned
from attncc.runtime.reference import reference

SHAPES = (Shape(2, 4, 2, 9, 13, 8, 12), Shape(1, 2, 1, 7, 3, 8, 8))
CAUSAL = frontend.parse("attention causal { mask k <= q }").spec


def right(spec=CAUSAL):
    """The reference in the call's own types."""

    def run(q, k, v, **params):
        out, lse = reference(spec, q, k, v, params)
        return out.to(q.dtype), lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)

    return run


def verdict(change, spec=CAUSAL, seeds=(0,)):
    """The faults found when `change(out, lse, q, k, v)` is done to right answers."""
    run = right(spec)
    return check(spec, shapes=SHAPES, seeds=seeds, run=lambda q, k, v, **p: change(*run(q, k, v, **p), q, k, v))


def test_right_answers_pass():
    report = verdict(lambda out, lse, *_: (out, lse))
    assert report.passed, str(report)
    assert {(r.dtype) for r in report.rows} == {"f32", "f64", "f16", "bf16"}
    assert {r.layout for r in report.rows} == set(LAYOUTS)


def _hole(out, lse, *_):
    made = torch.empty_like(out)  # one row is never written
    made[:, :, 1:] = out[:, :, 1:]
    return made, lse


def _written(out, lse, q, k, v):
    k[0, 0, 0, 0] += 1
    return out, lse


FAULTS = {
    "a part too large": (lambda out, lse, *_: (out * 1.0001, lse), "out is beyond"),
    "off in one element": (lambda out, lse, *_: (out.index_fill(3, torch.tensor([0]), 0.3), lse), "out is beyond"),
    "lse base 2": (lambda out, lse, *_: (out, lse * 1.442695), "lse is beyond"),
    "nan": (lambda out, lse, *_: (torch.where(out == out.max(), torch.nan, out), lse), "out is beyond"),
    "not written": (_hole, "out is beyond"),
    "empty row not zero": (lambda out, lse, *_: (torch.where(out == 0, 1e-30, out), lse), "not exactly 0"),
    "empty row's lse": (lambda out, lse, *_: (out, lse.clamp(min=-1e30)), "-inf in the wrong rows"),
    "strides ignored": (
        lambda out, lse, q, *_: (out + (0 if q.is_contiguous() else 1e-6), lse), "differs from that of contiguous"
    ),
    "an argument written to": (_written, "k was written to"),
    "wrong type": (lambda out, lse, *_: (out.double(), lse), "wrong shape or type"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_kind_of_fault_is_seen(name):
    change, said = FAULTS[name]
    report = verdict(change)
    assert not report.passed
    assert any(said in fault for row in report.rows for fault in row.faults), str(report)
    assert "FAIL" in str(report) and said in str(report)


def test_rounding_every_intermediate_is_within_the_16_bit_bound_and_thrice_that_is_not():
    def run(q, k, v, **params):
        out, lse = right()(q, k, v, **params)
        if q.dtype not in (torch.float16, torch.bfloat16):
            return out, lse
        exact = reference(CAUSAL, q, k, v, params)[0]
        error = checking.unfused(CAUSAL, q, k, v, params) - exact
        return (exact + times * error).to(q.dtype), lse

    times = 1
    assert check(CAUSAL, shapes=SHAPES, seeds=(0,), run=run).passed
    times = 6
    report = check(CAUSAL, shapes=SHAPES, seeds=(0,), run=run)
    assert {r.dtype for r in report.rows if not r.passed} == {"f16", "bf16"}


def test_a_report_survives_json():
    report = verdict(FAULTS["lse base 2"][0])
    again = Report.from_json(json.loads(json.dumps(report.to_json())))
    assert again == report and not again.passed
    assert not Report("none", "cpu", ()).passed


def test_settings_of_the_process_are_given_back():
    verdict(lambda out, lse, *_: (out, lse))
    assert not torch.are_deterministic_algorithms_enabled()
    with poisoned():
        assert torch.empty(4).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("score", "sign"), [("s * exp2(-decay[h] * (q - k))", 1), ("s + exp(decay[h] * abs(q - k))", -1)]
)
def test_what_decays_with_the_distance_is_drawn_so(score, sign):
    spec = frontend.parse(f"attention far(decay: f32[h]) {{ mask k <= q score {score} softmax none }}").spec
    for seed in range(6):
        assert (Draw(spec, seed, {}).params(SHAPES[0])["decay"] * sign >= 0).all()


PARAMS = """attention drawn(
    window: int, gain: float, step: int, size: const int = 8, ids: i32[b, k] sorted, at: i64[slots],
    table: bf16[slots, h], seen: bit[row, nodes], flags: bool[h_kv, 3],
    wide: f32[b, h, row, k], small: u8[k]
) {
    mask q - k < window and k // step == q // size and ids[b, k] == 1 and seen[row, k] and flags[h_kv, 1]
    score s + table[at[k], h] / gain + wide[b, h, row, k] + small[k]
}"""


@pytest.mark.parametrize("seed", [0, 1])
def test_parameters_are_of_the_declared_kinds(seed):
    spec = frontend.parse(PARAMS).spec
    shape = Shape(2, 4, 2, 5, 7, 8, 8)
    drawn = Draw(spec, seed, {"window": 3}).params(shape)
    assert set(drawn) == {p.name for p in spec.params} - {"size"}
    assert drawn["window"] == 3 and drawn["step"] >= 1 and drawn["gain"] > 0
    assert drawn["ids"].dtype == torch.int32 and (drawn["ids"].diff() >= 0).all() and drawn["ids"].shape == (2, 7)
    assert drawn["table"].shape == (len(drawn["at"]), 4) and drawn["table"].dtype == torch.bfloat16
    assert drawn["seen"].dtype == torch.int32 and drawn["seen"].shape[0] == 5
    assert drawn["flags"].shape == (2, 3) and drawn["flags"].dtype == torch.bool
    assert drawn["wide"].shape == (2, 4, 5, 7) and drawn["small"].dtype == torch.uint8
    again = Draw(spec, seed, {"window": 3}).params(shape)
    assert all(torch.equal(torch.as_tensor(drawn[n]), torch.as_tensor(again[n])) for n in drawn)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_views_of_the_right_shape(layout):
    q, k, v = Draw(CAUSAL, 0, {}).inputs(SHAPES[0], "f32", layout)
    assert q.shape == (2, 4, 9, 8) and k.shape == (2, 2, 13, 8) and v.shape == (2, 2, 13, 12)
    assert q.is_contiguous() == (layout == "contiguous")
    assert (0 in k.stride()) == (layout == "expanded")
    assert torch.isfinite(q).all()


def test_a_spec_with_its_own_input_type_is_tried_in_that_alone():
    spec = frontend.parse("attention halves { } precision { inputs f16 }").spec
    assert {t[1] for t in trials(spec, "cpu", (0,), SHAPES)} == {"f16"}


def test_a_broken_interpreter_is_an_error_and_no_verdict(monkeypatch):
    monkeypatch.setattr(checking.sys, "executable", "false")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(CheckError, match="status 1"):
        check(CAUSAL, "interpreter", shapes=SHAPES[:1], seeds=(0,))


def test_the_compiled_program_of_a_spec_with_parameters_and_consts():
    text = "attention whole(size: const int, t: f32[h]) { mask k // size <= q // size score s * t[h] }"
    report = check(frontend.parse(text).spec, shapes=SHAPES, seeds=(0,), values={"size": 3})
    assert report.passed and len(report.rows) >= 6, str(report)
