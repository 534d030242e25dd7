"""The comparisons that a solved mask comes down to, and what may be clamped in them without a change of meaning."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attncc.analysis.bounds import numeric
from attncc.analysis.normal import Clause, Solver
from attncc.analysis.terms import Term, rebuild, visit


def literals(mask: Term, x: str) -> list[Term]:
    """The integers whose comparisons with 0 make up the mask, solved for x."""
    return [e for c in Solver(x).clauses(mask) for e in _of_clause(c, mask.home.var(x))]


def _of_clause(c: Clause, x: Term) -> list[Term]:
    bounds = [low - x for low in c.lower] + [x - high for high in c.upper]
    atoms = [a for g in (*c.conditions, *c.opaque) for a in visit(g) if a.op in ("le0", "eq0", "ne0")]
    return bounds + [a.args[0] for a in atoms]


def far(e: Term) -> Term:
    """q_len + k_len: no two positions lie farther apart."""
    return e.home.var("q_len") + e.home.var("k_len")


def settled(e: Term, t: Term) -> bool:
    """Is `e` the term, once, plus something that stays inside -far and far? Then beyond those nothing changes."""
    factor = e.affine[0].get(t, 0)
    rest = e - factor * t
    if abs(factor) != 1 or any(n is t for n in visit(rest)):
        return False
    high, low = numeric(rest - far(e))[1], numeric(rest + far(e))[0]
    return high is not None and high < 0 and low is not None and low > 0


def tamed(mask: Term, x: str) -> Term:
    """Elements of tensors that are added to something are clamped first, where that changes nothing.

    They may be any 32-bit integer, so that sums of them would leave 32 bits; what is only compared is left as it is.
    """
    found = literals(mask, x)
    loads = {t.id: t for e in found for t in e.affine[0] if t.op == "load" and None in numeric(t)}
    changes = {}
    for t in loads.values():
        uses = [e for e in found if any(n is t for n in visit(e))]
        if all(settled(e, t) for e in uses) and any(_added(e, t, x) for e in uses):
            changes[t.id] = t.home.least(t.home.most(t, -far(t)), far(t))
    return replaced(mask, lambda t: changes.get(t.id)) if changes else mask


def _added(e: Term, t: Term, x: str) -> bool:
    """Does the literal hold more than the element and the position x?"""
    return any(k is not t and not (k.op == "var" and k.val == x) for k in e.affine[0])


def replaced(e: Term, change: Callable[[Term], Term | None], memo: dict[int, Term] | None = None) -> Term:
    """Rebuilt from the top: where `change` gives a term it takes the place of the one that it was given."""
    memo = {} if memo is None else memo
    if e.id not in memo:
        new = change(e)
        memo[e.id] = new if new is not None else rebuild(e, _parts(e.args, change, memo)) if e.args else e
    return memo[e.id]


def _parts(args: Sequence[Term], change: Callable[[Term], Term | None], memo: dict[int, Term]) -> tuple[Term, ...]:
    return tuple(replaced(a, change, memo) for a in args)
