"""What follows from a spec: the tiles that its mask visits, proofs, counts, widths of integers."""

from attncc.analysis.counts import Balance, balance, empty_row_count, kept_pairs, tile_counts
from attncc.analysis.evaluate import Env, evaluate
from attncc.analysis.kernel import kernel_visits
from attncc.analysis.lift import nonnegative
from attncc.analysis.prove import Proved, prove
from attncc.analysis.solve import visits
from attncc.analysis.widths import Widths, widths

__all__ = [
    "Balance", "Env", "Proved", "Widths",
    "balance", "empty_row_count", "evaluate", "kernel_visits", "kept_pairs", "nonnegative", "prove", "tile_counts", "visits", "widths",
]  # fmt: skip
