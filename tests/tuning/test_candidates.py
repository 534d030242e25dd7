"""What is worth measuring: legal plans, the planner's choice first, and a file for one of each kind."""

from __future__ import annotations

import pytest

from attncc import frontend, pipeline, planner
from attncc.ir import Shape
from attncc.runtime.tune import candidates_of
from tests.house.tree import ROOT


@pytest.mark.parametrize("name", ["causal", "alibi", "document"])
def test_candidates_are_legal_and_of_each_kind_there_is_a_file(name):
    parsed = frontend.parse((ROOT / "specs" / f"{name}.attn").read_text())
    shape = planner.bucket_of(Shape(head_dim=64, head_dim_v=64))
    planned = pipeline.plan_parsed(parsed, {}, {}, shape, "sm_90")
    found = candidates_of(planned, "forward")
    assert found[0].choices == planner.choices_of(planned.choice.plan)
    assert len({c.plan for c in found}) == len(found) > 10
    assert all(planner.with_choices(planned.choice.plan, c.choices, planned.target) for c in found)
    kinds = {(c.plan.algorithm, c.plan.reference): c for c in found}
    for candidate in kinds.values():
        made = pipeline.plan_parsed(parsed, {}, {}, shape, "sm_90", tuned={"forward": candidate.choices})
        assert planner.choices_of(made.choice.plan) == candidate.choices
        assert "def forward(" in pipeline.render(made)
