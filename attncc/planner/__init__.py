"""How it is computed: what fits a target, what a plan costs, which plan to take."""

from attncc.planner.backward import choose_backward
from attncc.planner.io import Costs, closed_forms, costs
from attncc.planner.legality import Violation, violations
from attncc.planner.search import Choice, choose, class_of

__all__ = [
    "Choice",
    "Costs",
    "Violation",
    "choose",
    "choose_backward",
    "class_of",
    "closed_forms",
    "costs",
    "violations",
]
