"""Scores that are linear in the key's position: the two parts add up to the whole, and nothing else is taken apart."""

from __future__ import annotations

import pytest

from attncc.analysis import Env, evaluate
from attncc.codegen.apart import apart
from attncc.codegen.passes import banded, cheaper
from attncc.frontend import parse
from attncc.ir import Expr, Op, Var, names


def spec_of(score: str):
    return parse(f"attention x(slope: float, n: int, bias: f32[k]) {{ score {score} }}").spec


def value(e: Expr, **more: float) -> float:
    return float(evaluate(e, Env({"slope": 0.3, "n": 5, "q": 700, "s": 1.5, **more})))


@pytest.mark.parametrize(
    "score",
    ["s - slope * (q - k)", "s + slope * (k - q)", "slope * k + s", "s - 3.0 * (2.0 * (q - k))", "s - k * slope",
     "s - slope * (n - k)"],
)  # fmt: skip
def test_the_parts_add_up(score):
    spec = spec_of(score)
    (written,), shift = apart(spec)
    assert shift is not None and "k" not in names(written) | names(shift)
    for first, column in ((0, 0), (128, 3), (640, 127)):
        parts = value(written, column=column) + value(shift, k_first=first)
        assert parts == pytest.approx(value(spec.scores[0], k=first + column), abs=1e-9)


@pytest.mark.parametrize("score", ["s - slope * abs(q - k)", "s + bias[k]", "s * k", "slope * s - k", "s - slope * q"])
def test_others_stay_whole(score):
    spec = spec_of(score)
    assert apart(spec) == (spec.scores, None)


def test_two_bounds_of_one_value_are_one_comparison():
    spec = parse("attention x(n: int) { mask k <= q and q - k < n and k < 7 }").spec
    terms = [Op("<=", (Var("k", "int"), Var("q", "int")), "bool"), spec.masks[0].args[0].args[1]]
    joined, *rest = banded([*terms, spec.masks[0].args[1]])
    assert joined.op == "within" and rest == [spec.masks[0].args[1]]


def test_a_quotient_by_what_is_constant_is_a_product():
    score = spec_of("slope * tanh(s / slope)").scores[0]
    changed = cheaper(score, lambda e: "s" not in names(e))
    assert value(changed) == pytest.approx(value(score)) and changed != score
