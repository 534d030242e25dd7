"""What follows from a spec: the tiles that its mask visits, proofs, counts, widths of integers."""

from attncc.analysis.alike import alike_visits, same_entry
from attncc.analysis.counts import Balance, kept_pairs, row_counts, tile_counts, visited_tiles
from attncc.analysis.derivative import derivative, ungradable
from attncc.analysis.divisors import computed_divisors, computed_ints, divisors
from attncc.analysis.evaluate import Env, evaluate
from attncc.analysis.kernel import constants, kernel_visits
from attncc.analysis.lift import Prover, nonnegative
from attncc.analysis.prove import Proved, prove
from attncc.analysis.solve import visits
from attncc.analysis.spread import even, lopsided, spread
from attncc.analysis.widths import Widths, widths
from attncc.analysis.words import low_divisor, wide_int

__all__ = [
    "Balance",
    "Env",
    "Proved",
    "Prover",
    "Widths",
    "alike_visits",
    "computed_divisors",
    "computed_ints",
    "constants",
    "derivative",
    "divisors",
    "evaluate",
    "even",
    "kept_pairs",
    "kernel_visits",
    "lopsided",
    "low_divisor",
    "nonnegative",
    "prove",
    "row_counts",
    "same_entry",
    "spread",
    "tile_counts",
    "ungradable",
    "visited_tiles",
    "visits",
    "wide_int",
    "widths",
]  # fmt: skip
