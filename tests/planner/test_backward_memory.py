"""Shared memory of the backward pass's kernels against what the compiler reported."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from attncc.frontend import parse
from attncc.ir import PassPlan, Shape
from attncc.planner import choose_backward, shared_memory
from attncc.planner.backward_memory import fa2_pass
from attncc.targets import target
from tests.planner.recorded_backward import BACKWARD

SPECS = Path(__file__).resolve().parents[2] / "specs"


@pytest.fixture(autouse=True)
def recorded_release(monkeypatch):
    """The Triton that the figures are of."""
    monkeypatch.setattr(shared_memory, "triton_release", lambda: (3, 7))


@pytest.mark.parametrize("record", BACKWARD, ids=lambda r: "-".join(map(str, r[1:5])))
def test_no_kernel_takes_more_than_predicted_and_the_most_at_most_a_tenth_less(record):
    text, name, dtype, d, dv, kernels = record
    spec = parse(text if " " in text else (SPECS / f"{text}.attn").read_text(encoding="utf-8")).spec.bind({})
    plan = choose_backward(spec, Shape(head_dim=d, head_dim_v=dv, dtype=dtype), target(name), algorithm="fa2")
    predicted = {}
    for which, *schedule, taken in kernels:
        own = PassPlan(*schedule)
        pinned = {f.name: getattr(own, f.name) for f in fields(own)} if which == "dq" else {which: own}
        predicted[which] = fa2_pass(replace(plan, **pinned), which, target(name))
        assert taken <= predicted[which], which
    assert max(predicted.values()) <= 1.10 * max(taken for *_, taken in kernels)
