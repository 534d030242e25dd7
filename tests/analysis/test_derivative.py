"""Derivatives against differences, their form, and the parameters that cannot have a gradient."""

import math

import numpy as np
import pytest

from attncc.analysis import Env, derivative, evaluate, ungradable
from attncc.analysis.derivative import reads, variables
from attncc.codegen.passes import fold
from attncc.codegen.printer import TRITON, Printer
from attncc.frontend import parse
from attncc.ir import Const, Var

S = Var("s", "float")
STEP = 1e-6


def score(text: str, params: str = "a: float, t: f32[n] grad, u: f32[h]"):
    return parse(f"attention x({params}) {{ score {text} }}").spec.scores[0]


def shown(e) -> str:
    return Printer(TRITON, reads={r: f"{r.tensor}{i}" for name in "tu" for i, r in enumerate(reads(e, name))})(e)


SCORES = [
    "s + a", "a * s * s - s / a", "(s - a) / (s * s + 2)", "-s * u[h]", "abs(s - a)", "min(s, a) + max(s, 2 * a)",
    "exp(s / 4) + exp2(s / 3)", "log(s * s + 1) - log2(s * s + 2)", "a * tanh(s / a)", "sigmoid(a * s) * u[h]",
    "sqrt(s * s + a * a)", "where(s > a, s * a, s / a)", "where(k % 2 == 0, s * u[h], a)", "s * floor(s) + k - q",
    "s * (q - k) / k_len", "tanh(sigmoid(s) * exp(-abs(s)))", "s + u[h] * u[h] * a", "1 / (1 + exp(-s)) + a / 3",
]  # fmt: skip


@pytest.mark.parametrize("text", SCORES)
def test_a_derivative_is_what_differences_say(text):
    e = score(text)
    at = {"a": 0.71, "h": 1, "k": 5, "q": 9, "k_len": 12, "s": np.linspace(-2.3, 2.7, 41)}
    table = np.array([0.3, -1.2])
    held = Env(at, {"u": table, "t": table})

    def difference(up: Env, down: Env):
        return (np.asarray(evaluate(e, up)) - evaluate(e, down)) / (2 * STEP)

    for name in ("s", "a"):
        found = evaluate(derivative(e, Var(name, "float")), held)
        wanted = difference(held.plus(**{name: at[name] + STEP}), held.plus(**{name: at[name] - STEP}))
        np.testing.assert_allclose(found + 0 * at["s"], wanted + 0 * at["s"], rtol=1e-6, atol=1e-7)
    total = sum(evaluate(derivative(e, r), held) for r in reads(e, "u"))
    moved = [Env(at, {"u": table + d}) for d in (STEP, -STEP)]
    np.testing.assert_allclose(total + 0 * at["s"], difference(*moved) + 0 * at["s"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("s", "1.0"),
        ("s + t[k] * (q - k)", "1.0"),
        ("s * u[h]", "u0"),
        ("a * tanh(s / a)", "1.0 - tanh(s / a) * tanh(s / a)"),
        ("-s / a", "-1.0 / a"),
        ("where(k < q, s, s * a)", "tl.where(k < q, 1.0, a)"),
        ("max(s, 0.0)", "tl.where(s >= 0.0, 1.0, 0.0)"),
        ("min(s, s * 1.0)", "1.0"),
        ("2 * s * 3.0", "6.0"),
        ("t[k]", "0.0"),
    ],
)
def test_a_derivative_reads_as_one_would_write_it(text, wanted):
    assert shown(fold(derivative(score(text), S))) == wanted


def test_each_read_of_a_table_is_a_variable_of_its_own():
    e = score("s + t[q] * a - t[k] + t[q]")
    first, second = reads(e, "t")
    assert shown(derivative(e, first)) == "a + 1.0" and derivative(e, second) == Const(-1.0)
    assert variables(e, parse("attention x(a: float) { score s * a }").spec.param("a")) == (Var("a", "float"),)


def test_nothing_flows_through_steps_conditions_and_indices():
    params = "m: f32[h] grad, c: f32[h] grad, w: f32[h] grad, ok: f32[h] grad, unused: f32[h] grad, x: f32[n]"
    spec = parse(
        f"attention x({params}) {{ mask m[h] > 0 score s + ok[h] + x[floor(w[h])] + where(c[h] > s, 1.0, 2.0) }}"
    ).spec
    found = {p.name: reason for p, reason in ungradable(spec)}
    assert set(found) == {"m", "c", "w", "unused"}
    assert "mask" in found["m"] and "not used" in found["unused"] and "comparison" in found["c"]


@pytest.mark.parametrize(
    "text",
    [
        "attention x(t: float grad) { scale t }",
        "attention x(t: f32[h] grad) { score s + t[h] }",
        "attention x(t: f32[h] grad) { softmax sink(t[h]) }",
        "attention x(t: f32[k] grad) { weight t[k] }",
    ],
)
def test_a_parameter_has_a_gradient_wherever_it_counts(text):
    assert ungradable(parse(text).spec) == []


def test_ties_and_corners_take_one_branch():
    at = Env({"s": np.array([0.0, 1.0]), "a": 0.0})
    assert list(evaluate(derivative(score("abs(s)"), S), at)) == [1.0, 1.0]
    assert list(np.broadcast_to(evaluate(derivative(score("max(a, s)"), S), at), 2)) == [0.0, 1.0]
    assert math.isinf(evaluate(derivative(score("sqrt(s)"), S), Env({"s": np.float64(0.0)})))
