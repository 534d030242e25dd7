"""Scores that bound themselves: where their values lie."""

from __future__ import annotations

import numpy as np
import pytest

from attncc.analysis import Env, evaluate
from attncc.analysis.bounded import bounded
from attncc.frontend import parse

PARAMS = "cap: float = 30.0, at: float = 2.0, t: f32[h]"
VALUES = {"cap": -3.0, "at": 2.0, "b_len": 1, "h_len": 1, "q_len": 4, "k_len": 4}


def spec(score: str):
    return parse(f"attention x({PARAMS}) {{ {score} }}").spec


@pytest.mark.parametrize(
    "score",
    ["score cap * tanh(s / cap)", "score sigmoid(s) * 5 - 1", "score s score at + tanh(s) / cap",
     "score -abs(cap * tanh(s))", "score where(k <= q, tanh(s), at + sigmoid(s))",
     "score 0.5", "score tanh(s) score 2 * s + at"],
)  # fmt: skip
def test_every_value_is_within_the_radius_of_the_middle(score):
    parsed = spec(score)
    middle, radius = (evaluate(e, Env(VALUES)) for e in bounded(parsed))
    s, q, k = np.linspace(-300, 300, 4001)[:, None, None], np.arange(4)[:, None], np.arange(4)
    for e in parsed.scores:
        s = evaluate(e, Env({**VALUES, "s": s, "q": q, "k": k}))
    assert radius >= 0 and np.all(np.abs(s - middle) <= radius * (1 + 1e-12))
    assert np.abs(s - middle).max() >= 0.5 * radius


@pytest.mark.parametrize(
    "score",
    ["", "score s", "score s * cap", "score min(s, 3)", "score tanh(s) + 0.1 * k", "score tanh(s) score s * s / 0.1"],
)
def test_what_nothing_bounds_has_no_bounds(score):
    found = bounded(spec(score))
    assert found is None
