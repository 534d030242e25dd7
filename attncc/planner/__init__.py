"""How it is computed: what fits a target, what a plan costs, which plan to take.

What plans is imported when it is asked for: a known call needs to know its class only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attncc.planner.classes import MAX_HEAD_DIM, bucket_of, class_of

if TYPE_CHECKING:
    from attncc.planner.backward import choose_backward
    from attncc.planner.cpu import backward_of
    from attncc.planner.hopper_backward import backward_refused
    from attncc.planner.io import Costs, backward_costs, backward_forms, closed_forms, costs, sizes_of
    from attncc.planner.legality import Violation, violations
    from attncc.planner.search import Choice, choose, ranked
    from attncc.planner.tangent import choose_tangent
    from attncc.planner.timing import special_functions
    from attncc.planner.tuned import (
        Candidate,
        backward_candidates,
        beside,
        candidates,
        choices_of,
        crossed,
        with_choices,
    )

PLACES = {
    "backward": ("choose_backward",),
    "cpu": ("backward_of",),
    "hopper_backward": ("backward_refused",),
    "io": ("Costs", "backward_costs", "backward_forms", "closed_forms", "costs", "sizes_of"),
    "legality": ("Violation", "violations"),
    "search": ("Choice", "choose", "ranked"),
    "tangent": ("choose_tangent",),
    "timing": ("special_functions",),
    "tuned": ("Candidate", "backward_candidates", "beside", "candidates", "choices_of", "crossed", "with_choices"),
}


def __getattr__(name: str) -> Any:
    for place, names in PLACES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{place}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "MAX_HEAD_DIM",
    "Candidate",
    "Choice",
    "Costs",
    "Violation",
    "backward_candidates",
    "backward_costs",
    "backward_forms",
    "backward_of",
    "backward_refused",
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
    "special_functions",
    "violations",
    "with_choices",
]
