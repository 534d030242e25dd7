"""What both backends' tangent files have in common: the dual spec's names, the call, and the check against differences.

With p = exp(score - lse): the mean of a row is its sum of p score_t, the tangent of its lse; out_t =
sum p (weight score_t + weight_t) v + sum p weight v_t - mean out. `x_t` is the tangent of x. A sink E moves the lse by
exp(E - lse) E_t more. It is taken from every score_t, which leaves out_t with the mean of what scores move by alone:
where the sink holds almost all, it is far more than they do, and would come times the rounding of out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from attncc.analysis.tangent import learned, moved
from attncc.codegen.naming import Names, parameter_names, reserved
from attncc.ir import FUNCTIONS, AttentionSpec, Const, Expr, Op, Var, names, walk

SHARED = tuple(f for f in FUNCTIONS if f not in ("abs", "min", "max", "floor", "where"))  # worth a name of their own


@dataclass(frozen=True)
class TangentCall:
    """The file's function `tangent(q, k, v, out, lse, q_t, k_t, v_t, *, parameters, their tangents)`."""

    arguments: str
    absent: tuple[tuple[str, str], ...]  # tensors whose tangent may be left out, and of what: it is zeros then
    inputs: str  # of the file's own check: q, k, v and what has a tangent
    directions: tuple[tuple[str, str, bool], ...]  # (name, name of its tangent, whether it is a tensor)


def tangent_names(spec: AttentionSpec) -> dict[str, str]:
    """The keyword of the tangent of each parameter marked `grad`, by the parameter's name."""
    called = spelled_names(spec)
    return {p.name: called[moved(p.name)] for p in learned(spec)}


def spelled_names(spec: AttentionSpec) -> dict[str, str]:
    """How each parameter, free axis and tangent of the dual of `spec` is called in the file."""
    called = parameter_names(spec)
    fresh = Names(reserved() | set(called.values()))
    return called | {moved(p.name): fresh.fresh(f"{called[p.name]}_t") for p in learned(spec)}


def call_of(spec: AttentionSpec, called: Mapping[str, str]) -> TangentCall:
    """For the spec itself, not its dual; `called` is spelled_names(spec)."""
    params = [called[p.name] + ("" if p.default is None else f"={p.default!r}") for p in spec.params]
    params += [f"{called[moved(p.name)]}={None if p.is_tensor else 0.0}" for p in learned(spec)]
    absent = [(f"{n}_t", n) for n in "qkv"]
    absent += [(called[moved(p.name)], called[p.name]) for p in learned(spec) if p.is_tensor]
    tensors = ["q", "k", "v", "out", "lse", "q_t=None", "k_t=None", "v_t=None"]
    return TangentCall(
        ", ".join([*tensors, *(["*", *params] if params else [])]),
        tuple(absent),
        ", ".join(["Q", "K", "V", *(called[p.name] for p in learned(spec))]),
        tuple((called[p.name], called[moved(p.name)], p.is_tensor) for p in learned(spec)),
    )  # fmt: skip


def shared(e: Expr, tangent: Expr) -> list[Op]:
    """Functions of s that a score and its tangent both hold, inner ones first: worth working out once."""
    found = dict.fromkeys(f for f in _functions(e) if f in set(walk(tangent)))
    return sorted(found, key=lambda f: sum(1 for _ in walk(f)))


def _functions(e: Expr) -> Iterator[Op]:
    for node in walk(e):
        if isinstance(node, Op) and node.op in SHARED and "s" in names(node):
            yield node


def is_wild(e: Expr, divisor: Callable[[Expr], bool] = lambda d: isinstance(d, (Const, Var))) -> bool:
    """Whether a factor may be infinite where p is 0: functions without a bound, quotients by what is no parameter."""
    for node in walk(e):
        if isinstance(node, Op) and node.op in ("exp", "exp2", "log", "log2", "sqrt"):
            return True
        if isinstance(node, Op) and node.op == "/" and not divisor(node.args[1]):
            return True
    return False
