"""Expressions in the language's own spelling, and why a part of a mask is opaque, for people to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attncc.analysis.divisors import below_one, beyond
from attncc.analysis.emit import Emitter
from attncc.analysis.interval import pair_by_pair
from attncc.analysis.lift import Lift, spec_facts
from attncc.analysis.normal import Solver, ordered
from attncc.analysis.terms import Algebra, Term, visit
from attncc.errors import shown_number
from attncc.ir import COMPARISON, AttentionSpec, Const, Expr, Read, Var, names, tensors

BINDS = {
    "or": 1,
    "and": 2,
    "not": 3,
    **dict.fromkeys(COMPARISON, 4),
    "+": 5,
    "-": 5,
    "*": 6,
    "/": 6,
    "//": 6,
    "%": 6,
    "neg": 7,
}
ATOM = 8


def text(e: Expr) -> str:
    """The expression as a spec would have it."""
    return _text(e)[0]


def _text(e: Expr) -> tuple[str, int]:
    if isinstance(e, Const):
        shown = str(e.value).lower() if isinstance(e.value, bool) else str(e.value)
        return shown, ATOM if e.type == "bool" or e.value >= 0 else BINDS["neg"]
    if isinstance(e, Var):
        return e.name, ATOM
    if isinstance(e, Read):
        return f"{e.tensor}[{', '.join(map(text, e.indices))}]", ATOM
    if e.op == "float":
        return _text(e.args[0])
    binds = BINDS.get(e.op)
    if binds is None:
        return f"{e.op}({', '.join(map(text, e.args))})", ATOM
    if len(e.args) == 1:
        return f"{'-' if e.op == 'neg' else 'not '}{_operand(e.args[0], binds)}", binds
    a, b = e.args
    tight = binds if e.op in ("and", "or") else binds + 1
    return f"{_operand(a, binds + (binds == 4))} {e.op} {_operand(b, tight)}", binds


def _operand(e: Expr, binds: int) -> str:
    shown, own = _text(e)
    return shown if own >= binds else f"({shown})"


def why_opaque(o: Term, x: str) -> str:
    """What keeps an atom from being solved for the position x."""
    inner = [n for n in visit(o) if n.on]
    both = frozenset(("row", "k"))
    if any(n.op == "load" and both <= n.free and pair_by_pair(n, both) for n in inner):
        return "a tensor is read there pair by pair, so that it leaves no tile out"
    read = any(n.op == "load" and x in n.free for n in inner)
    if read or any(n.op == "raw" and tensors(n.val) for n in inner):
        return "a tensor is read there: its contents are known at run time only"
    if any(n.op == "raw" for n in inner):
        return "it is worked out in floating point"
    if any(n.op == "mod" and x in n.free for n in inner):
        return "a remainder comes round again, so that no one range holds it"
    if any(n.op == "mul" and len(n.on) > 1 for n in inner):
        return "positions are multiplied with one another"
    return f"{x} stands in it several times, in ways that do not move alike"


def opaque_parts(spec: AttentionSpec) -> tuple[str, ...]:
    """Parts of the mask that no range of keys follows from, with the reason."""
    algebra = Algebra(spec_facts(spec))
    solver = Solver("k", search=True)
    clauses = solver.clauses(Lift(spec, algebra).mask())
    shift = algebra.var("k_len") - algebra.var("q_len")
    emitter = Emitter(spec, [("q", algebra.var("row") + shift)] if spec.align == "end" else ())
    atoms = {o.id: o for c in clauses for o in ordered(c.opaque)}
    found = [f"{text(emitter(o))}: {why_opaque(o, 'k')}" for o in atoms.values()]
    if solver.overflow:
        found.append("the mask has too many alternatives to keep apart: some are taken together")
    return tuple(found)


def wide_int(ints: Iterable[Expr], values: Mapping[str, int | float]) -> str | None:
    """Which int in these expressions does not fit 64 bits with these values, and what makes it so; or None."""
    found = beyond(ints, values)
    if found is None:
        return None
    given = ", ".join(f"{name} = {values[name]}" for name in sorted(names(found[0])))
    where = f" with {given}" if given else ""
    return f"{text(found[0])} is {shown_number(found[1])}{where}, which does not fit 64 bits"


def low_divisor(divisors: Iterable[Expr], values: Mapping[str, int | float]) -> str | None:
    """Which of these computed divisors is below 1 with these values of parameters, and what makes it so; or None."""
    found = below_one(divisors, values)
    if found is None:
        return None
    given = ", ".join(f"{name} = {values[name]}" for name in sorted(names(found[0])))
    return f"{text(found[0])} divides, so that it must be at least 1, and is {found[1]} with {given}"
