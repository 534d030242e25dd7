"""From terms back to expressions that a person reads: sums in order, comparisons with both sides, shared parts
named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attncc.analysis.interval import Table
from attncc.analysis.lift import taken
from attncc.analysis.terms import Term, is_bool, visit
from attncc.ir import ELEMENTS, AttentionSpec, Const, Expr, Op, Read, Summary, Var, names, tensors, tile_names

PROGRAM = ("b", "h", "h_kv")
SIDES = {"row": "q", "k": "k"}
TILE_SIZES = frozenset(("_TILE_Q", "_TILE_K"))


class Emitter:
    """Prints terms as expressions. `folds` are (name, term) that may stand for a part of a sum.

    `lets` collects, in the order of need, the named values that were used. Summaries are collected on the way.
    """

    def __init__(self, spec: AttentionSpec, folds: Sequence[tuple[str, Term]] = ()) -> None:
        self.spec = spec
        self.types = {p.name: ELEMENTS[p.element] for p in spec.tensors if p.element}
        self.lets: dict[str, Expr] = {}
        self.summaries: dict[tuple[str, str, int], Summary] = {}
        self._named: dict[int, str] = {}
        self._memo: dict[int, Expr] = {}
        self._taken = set(taken(spec))
        self._public = {"_" + inner: name for inner, name in tile_names(self._taken).items()}
        self.folds = tuple((self._free(n), whole) for n, whole in folds)

    def name(self, name: str, e: Term) -> Expr:
        """Give e a name from here on, unless it is as short itself."""
        value = self(e)
        if e.op in ("const", "var", "bool") or isinstance(value, Var):
            return value
        name = self._free(name)
        self.lets[name] = value
        self._named[e.id] = name
        self._memo.pop(e.id, None)
        return Var(name, "bool" if is_bool(e) else "int")

    def share(self, roots: Iterable[Term], least: int = 2) -> None:
        """Name the parts that several of the roots, or several places of one, hold in common."""
        uses: dict[int, int] = {}
        order = list(visit(*roots))
        for e in order:
            for a in e.args:
                uses[a.id] = uses.get(a.id, 0) + 1
        count = 0
        for e in order:
            costly = e.op not in ("const", "var", "bool", "load") and (e.op != "sum" or len(e.args) > 2)
            if costly and uses.get(e.id, 0) >= least and e.id not in self._named and not isinstance(self(e), Var):
                count += 1
                self.name(f"part_{count}", e)

    def _free(self, name: str) -> str:
        fresh, i = name, 2
        while fresh in self._taken:
            fresh, i = f"{name}_{i}", i + 1
        self._taken.add(fresh)
        return fresh

    def __call__(self, e: Term) -> Expr:
        name = self._named.get(e.id)
        if name is not None:
            return Var(name, "bool" if is_bool(e) else "int")
        known = self._memo.get(e.id)
        if known is None:
            known = self._memo[e.id] = self._bool(e) if is_bool(e) else self._int(e)
        return known

    def _int(self, e: Term) -> Expr:
        if e.op == "const":
            return Const(e.val)
        if e.op == "var":
            return Var(self._public.get(e.val, e.val), "int")
        if e.op == "sum":
            return self._sum(e)
        if e.op == "raw":
            return e.val if e.val.type == "int" else Op("where", (e.val, Const(1), Const(0)), "int")
        if e.op == "load":
            read = Read(e.val, tuple(map(self, e.args)), self.types[e.val])
            return read if read.type == "int" else Op("where", (read, Const(1), Const(0)), "int")
        if e.op == "table":
            return self._table(e)
        if e.op == "search":
            axis = Var(e.val[1], "int")
            read = Read(e.val[0], (*map(self, e.args[:-1]), axis), "int")
            return Op("search", (read, self(e.args[-1])), "int")
        op = {"mul": "*", "div": "//", "mod": "%"}.get(e.op, e.op)
        args = e.args[::-1] if op in ("min", "max") and e.args[0].op == "const" else e.args
        return Op(op, tuple(map(self, args)), "int")

    def _sum(self, e: Term) -> Expr:
        left, right, c = self._sides(e)
        if not left:
            whole: Expr = Const(c) if c or not right else Op("neg", (right.pop(0),), "int")
            c = 0
        else:
            whole = left[0]
        for x in left[1:]:
            whole = Op("+", (whole, x), "int")
        for x in right:
            whole = Op("-", (whole, x), "int")
        return _plus(whole, c)

    def _sides(self, e: Term) -> tuple[list[Expr], list[Expr], int]:
        """The positive parts, the negated negative parts, the constant; names put in where that shortens."""
        parts, c = self._folded(e)
        left = [self._times(v, x) for x, v in parts if v > 0]
        right = [self._times(-v, x) for x, v in parts if v < 0]
        return left, right, c

    def _folded(self, e: Term) -> tuple[list[tuple[Expr, int]], int]:
        parts, c = e.affine
        parts = dict(parts)
        front: list[tuple[Expr, int]] = []
        for name, whole in self.folds:
            inside, c0 = whole.affine
            lead = next(iter(inside))
            factor = parts.get(lead, 0) // inside[lead] if inside else 0
            if not factor or len(inside) < 2:
                continue
            rest = {t: v for t in {**parts, **inside} if (v := parts.get(t, 0) - factor * inside.get(t, 0))}
            if len(rest) + 1 < len(parts):
                self._use(name, whole)
                front.append((Var(name, "int"), factor))
                parts, c = rest, c - factor * c0
        ordered = sorted(parts.items(), key=lambda p: (p[0].free <= TILE_SIZES, p[0].op != "mul"))
        return front + [(self(t), v) for t, v in ordered], c

    def _use(self, name: str, whole: Term) -> None:
        if name not in self.lets:
            plain = Emitter(self.spec)
            self.lets[name] = plain(whole)

    @staticmethod
    def _times(factor: int, e: Expr) -> Expr:
        return e if factor == 1 else Op("*", (Const(factor), e), "int")

    def _bool(self, e: Term) -> Expr:
        if e.op == "bool":
            return Const(bool(e.val))
        if e.op in ("and", "or"):
            whole = self(e.args[0])
            for a in e.args[1:]:
                whole = Op(e.op, (whole, self(a)), "bool")
            return whole
        truth = self._truth(e)
        if truth is not None:
            return truth
        left, right, c = self._sides(e.args[0])
        op = {"le0": "<=", "eq0": "==", "ne0": "!="}[e.op]
        if op == "<=" and c == 1 and (left or right):
            op, c = "<", 0
        return Op(op, (_joined(left, max(c, 0)), _joined(right, max(-c, 0))), "bool")

    def _truth(self, e: Term) -> Expr | None:
        """A bool that was counted 0 or 1 is itself again."""
        parts, c = e.args[0].affine
        if e.op != "le0" or len(parts) != 1:
            return None
        ((t, v),) = parts.items()
        is_truth = (t.op == "load" and self.types[t.val] == "bool") or (t.op == "raw" and t.val.type == "bool")
        if not is_truth or (v, c) not in ((-1, 1), (1, 0)):
            return None
        value = t.val if t.op == "raw" else Read(t.val, tuple(map(self, t.args)), "bool")
        return value if v < 0 else Op("not", (value,), "bool")

    def _table(self, e: Term) -> Expr:
        table: Table = e.val
        key = (table.kind, table.axis, table.body.id)
        if key not in self.summaries:
            made = self._summary(table)
            self.summaries[key] = made  # behind those that it reads itself
        summary = self.summaries[key]
        over = tuple(Var(n, "int") for n in summary.over)
        return Read(summary.name, (*over, self(e.args[0])), "int")

    def _summary(self, table: Table) -> Summary:
        """Named after the tensor that it sums up and the side of the tile."""
        folds = [("q", _q(table.body))] if self.spec.align == "end" and table.kind in ("min", "max") else ()
        inner = Emitter(self.spec, folds)
        inner.summaries, inner._taken = self.summaries, self._taken
        value = inner(table.body)
        side = SIDES[table.axis]
        inside = [s for s in self.summaries.values() if s.name in tensors(value)]
        over = names(value) | {n for s in inside for n in s.over}
        read = sorted((tensors(value) - {s.name for s in inside}) | {t for s in inside for t in tensors(s.value)})
        name = self._free(f"{'_'.join(read[:2]) or 'part'}_{side}_{table.label}")
        return Summary(name, side, table.kind, value, tuple(n for n in PROGRAM if n in over))


def _q(like: Term) -> Term:
    home = like.home
    return home.var("row") + home.var("k_len") - home.var("q_len")


def _joined(parts: list[Expr], c: int) -> Expr:
    if not parts:
        return Const(c)
    whole = parts[0]
    for x in parts[1:]:
        whole = Op("+", (whole, x), "int")
    return _plus(whole, c)


def _plus(e: Expr, c: int) -> Expr:
    if c == 0:
        return e
    return Op("+" if c > 0 else "-", (e, Const(abs(c))), "int")
