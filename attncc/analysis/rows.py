"""Does every row see a key, and if not always, when?"""

from __future__ import annotations

from dataclasses import dataclass

from attncc.analysis.bounds import numeric
from attncc.analysis.interval import Domain, Unbounded, reads
from attncc.analysis.lift import Lift
from attncc.analysis.motzkin import refuted
from attncc.analysis.normal import Clause, Solver, merged, ordered, simplify
from attncc.analysis.terms import Term, rebuild, visit

SHOWN = 20  # terms of a condition that a person is asked to read


@dataclass(frozen=True)
class EveryRow:
    """`condition`: under which every row sees a key (None: nothing is known); `exact`: and only then; `sure`:
    always."""

    condition: Term | None
    exact: bool
    sure: bool


def every_row(mask: Term, lift: Lift) -> EveryRow:
    """Either some clause leaves room in every row (max lower <= min upper, everywhere), or one key is seen by every
    row."""
    if refuted(mask):
        return EveryRow(mask.home.false, True, False)
    found, exact = _condition(mask, lift)
    if refuted(~found):
        return EveryRow(found, exact, True)
    if exact:
        return EveryRow(_shortest(found), True, False)
    short = [w for w in _alternatives(_shortest(found)) if _length(w) <= SHOWN]
    return EveryRow(mask.home.some(sorted(short, key=_length)[:2]) if short else None, False, False)


def always(mask: Term, lift: Lift) -> bool:
    """Is it proved that every row sees a key, in every call?"""
    return refuted(~_condition(mask, lift)[0])


def _condition(mask: Term, lift: Lift) -> tuple[Term, bool]:
    home = mask.home
    solver = Solver("k")
    clauses = merged(simplify(solver.clauses(mask)), "k")
    rows = Domain(home, {"row": (home.const(0), home.var("q_len") - 1)}, {}, {}, False)
    ways, exact = [], len(clauses) == 1 and not solver.overflow
    for c in clauses:
        room, sharp = _room(c, rows)
        exact &= sharp
        ways.append(room)
    for key in (lift.q, home.var("row"), home.const(0), home.var("k_len") - 1):
        ways.append(_witness(mask, key, rows))
    return home.some(ways), exact


def _length(e: Term) -> int:
    return len(list(visit(e)))


def _alternatives(b: Term) -> tuple[Term, ...]:
    return b.args if b.op == "or" else () if b.op == "bool" else (b,)


def _shortest(b: Term) -> Term:
    """Without alternatives that the others cover."""
    kept = sorted(_alternatives(b), key=_length, reverse=True)
    for w in list(kept):
        others = [x for x in kept if x is not w]
        if others and any(refuted(w & ~x) for x in others):
            kept = others
    return b.home.some(kept) if kept else b


def _room(c: Clause, rows: Domain) -> tuple[Term, bool]:
    home = rows.algebra
    if c.opaque:
        return home.false, False
    need, exact = [], True
    for g in ordered(c.conditions):
        must, _ = rows.holds(g)
        need.append(must)
        exact &= not g.on
    for low in [home.const(0), *ordered(c.lower)]:
        for high in [home.var("k_len") - 1, *ordered(c.upper)]:
            holds, sharp = _everywhere(low - high, rows)
            need.append(holds)
            exact &= sharp
    return home.every(need), exact


def _everywhere(e: Term, rows: Domain) -> tuple[Term, bool]:
    """Where e <= 0 in every row; sharp where that is no more than needed (e rises or falls with the row)."""
    home = rows.algebra
    try:
        highest = rows.extremes(_gathered(e))[1]
    except Unbounded:
        return home.false, False
    most = numeric(e)[1]
    return highest.le(0), direction(_gathered(e)) is not None or (most is not None and most <= 0)


def _gathered(e: Term) -> Term:
    """c X - c n (X // n) as c (X % n)."""
    for t in e.affine[0]:
        for d in [t] if t.op == "div" else [a for a in t.args if a.op == "div"] if t.op == "mul" else []:
            x, n = d.args
            remainder = x - n * d
            for c in (1, -1):
                other = e - c * remainder + c * (x % n)
                if len(other.affine[0]) < len(e.affine[0]):
                    return _gathered(other)
    return e


def _witness(mask: Term, key: Term, rows: Domain) -> Term:
    """The condition under which this key is a key and every row sees it."""
    home = rows.algebra
    if any(n.op == "raw" and "k" in n.free for n in visit(mask)):
        return home.false
    here = put(mask, "k", key)
    if any(reads(n, frozenset(("row",))) for n in visit(here)):
        return home.false
    low, high = rows.extremes(key)
    return rows.holds(here)[0] & low.ge(0) & high.lt(home.var("k_len"))


def put(e: Term, name: str, value: Term) -> Term:
    """The term with a value in place of a variable."""
    if name not in e.free:
        return e
    return value if e.op == "var" else rebuild(e, tuple(put(a, name, value) for a in e.args))


def direction(e: Term, x: str = "row") -> int | None:
    """1 where e never falls as x rises, -1 where it never rises, 0 where it does not move, None where nothing is
    known."""
    if x not in e.free:
        return 0
    if e.op == "var":
        return 1
    if e.op == "sum":
        moves = [(direction(t, x), c) for c, t in zip(e.val[0], e.args)]
        return _joined([None if m is None else m if c > 0 else -m for m, c in moves])
    if e.op == "mul":
        return _joined([direction(a, x) for a in e.args]) if all(a.ge(0) is e.home.true for a in e.args) else None
    if e.op == "div":
        return direction(e.args[0], x) if x not in e.args[1].free else None
    if e.op in ("min", "max"):
        return _joined([direction(a, x) for a in e.args])
    if e.op == "where" and x not in e.args[0].free:
        return _joined([direction(a, x) for a in e.args[1:]])
    return None


def _joined(moves: list[int | None]) -> int | None:
    if any(m is None for m in moves):
        return None
    kinds = {m for m in moves if m}
    return None if len(kinds) > 1 else kinds.pop() if kinds else 0
