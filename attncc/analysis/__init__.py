"""What follows from a spec: the tiles that its mask visits, proofs, counts, widths of integers."""

from attncc.analysis.evaluate import Env, evaluate
from attncc.analysis.lift import nonnegative
from attncc.analysis.solve import visits
from attncc.analysis.widths import Widths, widths

__all__ = ["Env", "Widths", "evaluate", "nonnegative", "visits", "widths"]
