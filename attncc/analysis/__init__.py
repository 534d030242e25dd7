"""What follows from a spec: the tiles that its mask visits, proofs, counts, widths of integers."""

from attncc.analysis.evaluate import Env, evaluate
from attncc.analysis.lift import nonnegative
from attncc.analysis.solve import visits

__all__ = ["Env", "evaluate", "nonnegative", "visits"]
