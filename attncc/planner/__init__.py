"""How it is computed: what fits a target, what a plan costs, which plan to take."""

from attncc.planner.backward import choose_backward
from attncc.planner.io import Costs, backward_costs, backward_forms, closed_forms, costs, sizes_of
from attncc.planner.legality import Violation, violations
from attncc.planner.search import Choice, bucket_of, choose, class_of, ranked
from attncc.planner.tangent import choose_tangent
from attncc.planner.tuned import (
    Candidate,
    backward_candidates,
    beside,
    candidates,
    choices_of,
    crossed,
    with_choices,
)

__all__ = [
    "Candidate",
    "Choice",
    "Costs",
    "Violation",
    "backward_candidates",
    "backward_costs",
    "backward_forms",
    "beside",
    "bucket_of",
    "candidates",
    "choices_of",
    "choose",
    "choose_backward",
    "choose_tangent",
    "class_of",
    "closed_forms",
    "costs",
    "crossed",
    "ranked",
    "sizes_of",
    "violations",
    "with_choices",
]
