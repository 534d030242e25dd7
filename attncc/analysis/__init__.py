"""What follows from a spec: the tiles that its mask visits, proofs, counts, widths of integers."""

from attncc.analysis.alike import alike_visits
from attncc.analysis.counts import Balance, balance, empty_row_count, kept_pairs, tile_counts
from attncc.analysis.derivative import derivative, ungradable
from attncc.analysis.evaluate import Env, evaluate
from attncc.analysis.kernel import kernel_visits
from attncc.analysis.lift import Prover, divisors, nonnegative
from attncc.analysis.prove import Proved, prove
from attncc.analysis.solve import visits
from attncc.analysis.spread import spread
from attncc.analysis.widths import Widths, widths

__all__ = [
    "Balance",
    "Env",
    "Proved",
    "Prover",
    "Widths",
    "alike_visits",
    "balance",
    "derivative",
    "divisors",
    "empty_row_count",
    "evaluate",
    "kept_pairs",
    "kernel_visits",
    "nonnegative",
    "prove",
    "spread",
    "tile_counts",
    "ungradable",
    "visits",
    "widths",
]  # fmt: skip
