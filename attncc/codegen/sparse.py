"""The arithmetic of sparse weights in Triton: finished texts for both passes.

With `above` = max((alpha - 1) s - threshold, 0) and power = 1 / (alpha - 1) a weight is above^power, whose slope by the
threshold is -power above^(power - 1) and by the score p^(2 - alpha), which is the same above^(power - 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from attncc.analysis.normaliser import Normaliser

TURNS = 32
NEAR, PRECISION = {"f32": "5e-4"}, {"f32": "5e-6"}  # by type; for 16 bits 2e-3 and 1e-3
# Of squares in bfloat16, which rounds weights by 4e-3: a step of 5e-2 leaves 1e-3 to the next one, and weights that are
# divided by their sum keep a part of that.
NEAR_SQUARES, PRECISION_SQUARES = {**NEAR, "bf16": "5e-2"}, {**PRECISION, "bf16": "1.5e-2"}

SLACK = "0.0625"  # at least any NEAR: the last step then proves where tiles have no weights
BIAS = {1.5: "0.02"}  # of others 0.1: with these fewest steps were left for rows of Gaussian scores


@dataclass(frozen=True)
class SparseView:
    factor: str  # of the scores
    power: str
    weight: str  # from `above`
    slope: str
    shortened: str  # total^(1 - 1 / power): what Newton's step of the norm leaves of a total
    near: str  # a step of the threshold after which the next one is worth the output
    precision: str  # how far from 1 the weights of a row may add up
    turns: int  # at most
    careful: int  # what is left of those where an equation's solution gives way to Newton's steps
    quadratic: bool  # weights are squares: on a known support the threshold solves an equation of second degree
    slack: str  # what is as far below tau still counts as close to it
    bias: str  # what a guess is lowered by
    skips: bool  # later walks leave tiles out that have no weights


def sparse_view(rule: Normaliser, dtype: str = "", fused: bool = False) -> SparseView | None:
    """None for a normaliser that is not sparse. What 16 bits round asks for less precision, and for less still where
    weights are divided by their sum, as a `fused` kernel does, which also need not write those that are 0."""
    if rule.alpha is None:
        return None
    power, quadratic = 1 / (rule.alpha - 1), rule.alpha == 1.5
    weight, slope = {
        2.0: ("above", "tl.where(above > 0, 1.0, 0.0)"),
        1.5: ("above * above", "above"),
    }.get(rule.alpha, (_power("above", power), _power("above", power - 1)))
    shortened = {2.0: "1.0", 1.5: "tl.sqrt(total)"}.get(rule.alpha, _power("total", 1 - 1 / power))
    return SparseView(
        factor=repr(rule.alpha - 1), power=repr(power), weight=weight, slope=slope, shortened=shortened,
        near=(NEAR_SQUARES if quadratic and fused else NEAR).get(dtype, "2e-3"),
        precision=(PRECISION_SQUARES if quadratic and fused else PRECISION).get(dtype, "1e-3"),
        turns=TURNS, careful=TURNS - 4, quadratic=quadratic, slack=SLACK, bias=BIAS.get(rule.alpha, "0.1"),
        skips=fused,
    )  # fmt: skip


def _power(base: str, exponent: float) -> str:
    """0 stays 0, by way of log2(0) = -inf."""
    return f"tl.exp2({exponent!r} * tl.log2({base}))"
