"""How it is computed: what fits a target, what a plan costs, which plan to take."""

from attncc.planner.legality import Violation, violations
from attncc.planner.model import Prediction, predict
from attncc.planner.search import Choice, choose

__all__ = ["Choice", "Prediction", "Violation", "choose", "predict", "violations"]
