"""That `check` judges gradients: right ones pass, each kind of wrong one is seen."""

from __future__ import annotations

import json

import pytest
import torch

from attncc import frontend
from attncc.ir import Shape
from attncc.runtime.attention import Attention
from attncc.runtime.check import Compiled, Report, check, compiled
from attncc.runtime.gradients import differences, gradients

SHAPES = (Shape(2, 4, 2, 9, 13, 8, 12), Shape(1, 2, 1, 7, 3, 8, 8))
SPEC = frontend.parse("""attention judged(slopes: f32[h] grad, cap: float grad, sinks: f32[h] grad) {
    score cap * tanh(s / cap) - slopes[h] * (q - k)
    mask k <= q
    softmax sink(sinks[h])
}""").spec


class Wrong(torch.autograd.Function):
    """The same values; a gradient that is changed."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None


def judged(name="", change=lambda g: g, **options):
    run = compiled(SPEC, "cpu")

    def changed(q, k, v, **params):
        given = {"q": q, "k": k, "v": v, **params}
        if name and isinstance(given[name], torch.Tensor):
            given[name] = Wrong.apply(given[name], change)
        return run(given.pop("q"), given.pop("k"), given.pop("v"), **given)

    return check(SPEC, shapes=SHAPES, seeds=(0,), run=changed, gradients=True, **options)


def test_right_gradients_pass_and_survive_json():
    report = judged(differences=True)
    assert report.passed, str(report)
    names = {"q", "k", "v", "slopes", "cap", "sinks"}
    assert set(report.rows[0].gradients) == names | {f"differences by {n}" for n in names}
    assert {frozenset(r.gradients) for r in report.rows if r.dtype == "bf16"} == {frozenset(names)}
    again = Report.from_json(json.loads(json.dumps(report.to_json())))
    assert again == report and "d_sinks" in str(report)


@pytest.mark.parametrize("name", ["q", "k", "v", "slopes", "cap", "sinks"])
@pytest.mark.parametrize("change", [lambda g: g * 1.001, torch.zeros_like, lambda g: g.new_full(g.shape, torch.nan)])
def test_wrong_gradients_fail(name, change):
    report = judged(name, change)
    rows = [r for r in report.rows if r.dtype == "f32"]
    assert not any(r.passed for r in rows)
    assert all(f"the gradient of {name} is beyond its bound" in r.faults for r in rows)


def test_a_plain_calls_gradients_are_checked_and_those_of_equal_bits_where_they_are_apart(monkeypatch):
    asked, plain = [], Attention.gradients

    def gradients(self, ready, call, given, deterministic=None):
        asked.append(deterministic)
        d_q, *others = plain(self, ready, call, given, deterministic)
        return (2 * d_q if deterministic else d_q, *others)

    monkeypatch.setattr(Attention, "gradients", gradients)
    assert check(SPEC, shapes=SHAPES, seeds=(0,)).passed and set(asked) == {False}
    monkeypatch.setattr(Compiled, "apart", lambda run, *call: Compiled(run.attention, True))
    report = check(SPEC, shapes=SHAPES, seeds=(0,))
    assert {r.faults for r in report.rows} == {("the gradient of q is beyond its bound, deterministic",)}
    assert {"q", "q, deterministic"} <= set(report.rows[0].gradients)


def test_differences_see_what_is_wrong_by_themselves():
    report = judged("k", lambda g: g * 1.01, differences=True)
    assert any("differences by k disagree" in f for r in report.rows for f in r.faults)


def test_without_being_asked_a_run_has_no_gradients():
    report = check(SPEC, shapes=SHAPES, seeds=(0,), run=compiled(SPEC, "cpu"))
    assert report.passed and not any(r.gradients for r in report.rows)


def test_the_reference_against_its_own_differences():
    """Empty rows, an excluded key that is not finite, a sink, a weight, rounding."""
    spec = frontend.parse("""attention x(e: f32[h] grad, w: f32[k] grad, m: float grad) {
        scale m * m  score s - 0.1 * s * s  mask k < q and k > 0  softmax sink(e[h])  weight 1 + w[k] * w[q]
    }""").spec
    g = torch.Generator().manual_seed(1)
    q, k, v, d_out = (torch.randn(1, h, 6, 4, generator=g, dtype=torch.float64) for h in (2, 1, 1, 2))
    params = {"e": torch.randn(2, generator=g), "w": torch.randn(6, generator=g), "m": 0.7}
    d_lse = torch.randn(1, 2, 6, generator=g)
    exact = gradients(spec, q, k, v, params, d_out, d_lse)
    along = {n: torch.randn(x.shape, generator=g, dtype=torch.float64) for n, x in exact.values.items()}
    moved = differences(spec, q, k, v, params, d_out, d_lse, along)
    for n, x in exact.values.items():
        assert abs(float((x * along[n]).sum()) - moved[n]) < 1e-7 * (1 + float(x.norm()))
    rounded = gradients(spec, q, k, v, params, d_out, d_lse, torch.bfloat16)
    off = (rounded.values["q"] - exact.values["q"]).norm() / exact.values["q"].norm()
    assert 1e-4 < off < 3e-2 and not exact.values["q"][:, :, :2].any()


@pytest.mark.parametrize("by", [1.0, 1.01])
def test_a_gradient_that_sums_weights_of_both_signs_has_a_bound_that_it_meets_and_a_wrong_one_does_not(by):
    spec = frontend.parse("attention x(s0: f32[h], c: float grad) { mask k <= q  weight s0[h] * c }").spec
    run = compiled(spec, "cpu")

    def changed(q, k, v, *, s0, c):
        return run(q, k, v, s0=s0, c=Wrong.apply(c, lambda g: g * by) if isinstance(c, torch.Tensor) else c)

    report = check(spec, shapes=(Shape(2, 4, 2, 33, 47, 32, 16),), seeds=(0,), run=changed, gradients=True)
    assert [r.passed for r in report.rows if r.dtype == "f32"] == [by == 1.0] * 3, str(report)


@pytest.mark.parametrize("part", ["score s + c * e[h]", "softmax sink(c * e[h])", "weight c * e[h]"])
def test_what_a_gradient_adds_up_is_told_before_signs_cancel(part):
    """Two heads of one content: what they add is the same but for its sign."""
    spec = frontend.parse(f"attention x(e: f32[h], c: float grad) {{ {part} }}").spec
    q, v = (torch.linspace(-1, 1, 3 * n, dtype=torch.float64).view(1, 1, 3, n).expand(1, 2, 3, n) for n in (4, 2))
    k = torch.ones_like(q)
    made = gradients(spec, q, k, v, {"e": torch.tensor([1.0, -1.0]), "c": 0.5}, v.sign(), torch.ones(1, 2, 3))
    assert made.summed["c"] > 1
