"""Scores with their shared factors gathered are the scores that were written."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from attncc.analysis import Env, evaluate
from attncc.codegen.gather import gathered
from attncc.codegen.lower import level
from attncc.frontend import parse
from attncc.ir import Op, walk

PARAMS = "cap: float = 30.0, f: float = 2.0, t: f32[h]"


@pytest.mark.parametrize("cap", [-3.0, 0.5, 30.0])
@pytest.mark.parametrize("gains", [True, False])
@pytest.mark.parametrize(
    "score",
    ["score cap * tanh(s / cap)", "score s * f / cap", "score s + f * cap * (q - k)", "score f * s * s",
     "score tanh(s)", "score s / f score 2 * tanh(f * s) * cap", "score where(k <= q, s * f * 3, s)", "score 0.5", ""],
)  # fmt: skip
def test_the_value_stays(score, gains, cap):
    spec = parse(f"attention x({PARAMS}) {{ {score} }}").spec
    fresh = map("factor_{}".format, count())
    made = gathered(spec.scores, lambda wanted: next(fresh), gains)
    values = {"cap": cap, "f": 2.0, "scale": 0.125, "q": np.arange(4)[:, None], "k": np.arange(4)}
    raw = np.linspace(-9, 9, 16).reshape(4, 4)
    for name, value in made.shared:
        assert level(value) == "program"
        values[name] = evaluate(value, Env(values))
    want, got = raw * values["scale"], raw if made.scaled else raw * values["scale"]
    for e in spec.scores:
        want = evaluate(e, Env({**values, "s": want}))
    for e in made.scores:
        got = evaluate(e, Env({**values, "s": got}))
    gain = 1.0 if made.gain is None else evaluate(made.gain, Env(values))
    assert gain > 0 and np.allclose(np.broadcast_to(got, raw.shape) * gain, np.broadcast_to(want, raw.shape))


def test_a_soft_cap_multiplies_twice():
    spec = parse("attention x(cap: float) { score cap * tanh(s / cap) }").spec
    made = gathered(spec.scores, lambda wanted: wanted, True)
    assert made.gain is not None and [n.op for n in walk(made.scores[0]) if isinstance(n, Op)] == ["tanh", "*"]
