"""How a policy of `softmax` makes a row's scores into weights, as data that every template and pass reads.

Three kinds are built. Of the exponential kind a weight is exp(s - lse), divided by the row's sum: it needs the row's
lse, in both passes. Of the sparse kind it is max((alpha - 1) s - t, 0)^(1 / (alpha - 1)), and needs the row's threshold
t, at which the weights add up to 1 (Martins and Astudillo 2016, "From Softmax to Sparsemax"; Peters et al. 2019,
"Sparse Sequence-to-Sequence Models"). Of the other kind a weight is a function of its own score, and nothing of the row
is known or kept: sigmoid(s + E) (Ramapuram et al. 2024, "Theory, Analysis, and Best Practices for Sigmoid
Self-Attention"), relu(s)^n / k_len (Wortsman et al. 2023, "Replacing softmax with ReLU in Vision Transformers"), s
itself (Sun et al. 2023, "Retentive Network"), or the spec's own expression,
which its sum over the row may divide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from attncc.analysis.evaluate import Env, evaluate
from attncc.ir import NONE, SUM, AttentionSpec, Const, Expr, Op, Read, Var, children, walk

S = Var("s", "float")
ZERO = Const(0.0)
SPARSE = ("sparsemax", "entmax")
EXPONENTIAL = ("online", "two_pass", "sink", "off_by_one", "unified")


@dataclass(frozen=True)
class Normaliser:
    """`stages` turn a score into its weight, each reading as `s` what the one before gave; None: the row's lse or
    threshold does, this where there is an `alpha`.

    `sink` is one more score of the row, without a value; `fixed` is what the exponentials are to be relative to, in
    place of a maximum (Hong et al. 2023, "FlashDecoding++"), which the result does not show; `vanishes` says that an
    excluded score, -inf, has the weight 0 by the stages themselves, and `flat` that it has the slope 0. `summed`
    weights are divided by their sum, whose logarithm is then the row's lse.
    """

    stages: tuple[Expr, ...] | None = None
    sink: Expr | None = None
    fixed: Expr | None = None
    vanishes: bool = True
    flat: bool = True
    alpha: float | None = None
    summed: bool = False

    @property
    def statistic(self) -> bool:
        """Whether a row has a number by which its weights are worked out again: its lse, or its threshold."""
        return self.stages is None or self.summed

    @property
    def exponential(self) -> bool:
        """Whether weights are exp(s - lse)."""
        return self.stages is None and self.alpha is None

    @property
    def has_lse(self) -> bool:
        return self.statistic and self.alpha is None


def normaliser(spec: AttentionSpec) -> Normaliser:
    """That of a spec with its constants bound; NotImplementedError for a policy that is not built yet."""
    policy, args = spec.softmax.policy, spec.softmax.args
    if policy in EXPONENTIAL:
        sinks: dict[str, Expr] = {"sink": args[0] if args else ZERO, "off_by_one": ZERO}
        return Normaliser(sink=sinks.get(policy), fixed=args[0] if policy == "unified" else None)
    if policy in SPARSE:
        return Normaliser(alpha=float(evaluate(args[0], Env({}))) if args else 2.0)
    if policy == "sigmoid":
        return _of_stages((Op("sigmoid", (Op("+", (S, args[0]), "float"),), "float"),))
    if policy == "relu":
        return _of_stages((*_power(args[0]), Op("*", (S, Op("/", (Const(1.0), _float("k_len")), "float")), "float")))
    if policy == "none":
        return _of_stages(())
    if policy == "custom":
        weight, divide = (dict(spec.softmax.named)[name] for name in ("weight", "divide"))
        whole = divide in (SUM, NONE)
        made = _of_stages((weight if whole else Op("/", (weight, divide), "float"),))
        return replace(made, summed=divide == SUM)
    raise NotImplementedError(f"softmax {policy} is not built yet")


def _of_stages(stages: tuple[Expr, ...]) -> Normaliser:
    from attncc.analysis.derivative import derivative

    slope = derivative(stages[0], S) if stages else Const(1.0)
    return Normaliser(stages, vanishes=_limit(stages) == 0.0, flat=_limit((slope,)) == 0.0)


def _float(name: str) -> Expr:
    return Op("float", (Var(name, "int"),), "float")


def _power(n: Expr) -> tuple[Expr, ...]:
    """max(s, 0) to the power n, by n's prime factors: the derivative of each stays short. NaN passes."""
    made: list[Expr] = [Op("where", (Op("<=", (S, ZERO), "bool"), ZERO, S), "float")]
    power = left = int(evaluate(n, Env({})))
    for factor in range(2, power + 1):
        while left % factor == 0:
            product: Expr = S
            for _ in range(factor - 1):
                product = Op("*", (product, S), "float")
            made.append(product)
            left //= factor
    return tuple(made)


def _limit(stages: Sequence[Expr]) -> float | bool | None:
    """What the stages make of s = -inf, every other value being some finite number; None where that is not known."""
    value: float | bool | None = -math.inf
    for e in stages:
        value = _at(e, value)
    return value


def _at(e: Expr, s: float | bool | None) -> float | bool | None:
    if e == S:
        return s
    if isinstance(e, Const):
        return float(e.value) if e.type == "float" else e.value
    if isinstance(e, Var | Read) or not any(n == S for n in walk(e)):
        return None
    args = [_at(a, s) for a in children(e)]
    rule = _LIMITS.get(e.op)
    return None if rule is None else rule(*args)


def _sum(a: float | None, b: float | None) -> float | None:
    """An infinity and what is finite, known or not."""
    if a is not None and b is not None:
        return a + b
    known = b if a is None else a
    return known if known is not None and math.isinf(known) else None


def _product(a: float | None, b: float | None) -> float | None:
    """0 times what is finite; a 0 of s stays one."""
    if a is not None and b is not None:
        return None if math.isinf(a) or math.isinf(b) else a * b
    return 0.0 if 0.0 in (a, b) else None


_LIMITS: dict[str, Callable[..., float | bool | None]] = {
    "+": _sum, "*": _product,
    "sigmoid": lambda a: {-math.inf: 0.0, math.inf: 1.0}.get(a),
    "exp": lambda a: {-math.inf: 0.0}.get(a), "exp2": lambda a: {-math.inf: 0.0}.get(a),
    "-": lambda a, b: _sum(a, None if b is None else -b),
    "<=": lambda a, b: None if a is None or b is None else a <= b,
    "where": lambda c, a, b: None if c is None else a if c else b,
}  # fmt: skip
