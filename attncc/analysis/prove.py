"""What is true of a mask for every call: proofs, and warnings where a mask is hardly what its author meant."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from attncc.analysis.emit import Emitter
from attncc.analysis.evaluate import Env, evaluate
from attncc.analysis.lift import Lift, spec_facts
from attncc.analysis.motzkin import refuted
from attncc.analysis.rows import every_row
from attncc.analysis.terms import Algebra, Term
from attncc.analysis.words import opaque_parts
from attncc.errors import Diagnostic
from attncc.ir import AttentionSpec, Expr, conjunction, names, tensors

CAUSAL_NAMES = re.compile(r"causal|autoregressive|decoder|left_to_right")
NOT_QUITE = re.compile(r"(anti|non|not|bi|block|chunk|chunked|frame|prefix|semi)_?(causal|directional)")


@dataclass(frozen=True)
class Proved:
    """Facts that hold for every call.

    `causal`: the bound that is proved of every kept pair, "k <= q" or "k <= row", else None. `always`, `never`: the
    mask is proved to keep every pair, no pair. `empty_rows`: "never", "always", "when" (exactly when `no_empty_row`
    does not hold), "maybe". `no_empty_row`: a condition on lengths and parameters under which every row sees a key,
    None where none is known. `opaque`: parts that no range could be derived from, in words, with the reason.
    `warnings`: in plain words.
    """

    causal: str | None
    always: bool
    never: bool
    empty_rows: str
    no_empty_row: Expr | None
    opaque: tuple[str, ...]
    warnings: tuple[Diagnostic, ...]


def prove(spec: AttentionSpec) -> Proved:
    """Everything that can be shown of the mask without any contents. Sound, not complete: what is not shown is
    unknown."""
    algebra = Algebra(spec_facts(spec))
    lift = Lift(spec, algebra)
    mask = lift.mask()
    never = refuted(mask)
    always = not never and refuted(~mask)
    causal = next(
        (name for name, end in (("k <= q", lift.q), ("k <= row", algebra.var("row"))) if _within(mask, end)), None
    )
    found = every_row(mask, lift)
    state = "always" if never else "never" if found.sure else "when" if found.exact else "maybe"
    shown = Emitter(spec)(found.condition) if found.condition is not None and state in ("when", "maybe") else None
    warnings = _warnings(spec, always, never, causal)
    return Proved(None if never else causal, always, never, state, shown, opaque_parts(spec), warnings)


@lru_cache(maxsize=16)  # for each of a kernel's masks the printer asks again
def sees_no_future(spec: AttentionSpec) -> bool:
    """Whether `prove` has "k <= q" as the bound of every kept pair, without its other proofs."""
    algebra = Algebra(spec_facts(spec))
    lift = Lift(spec, algebra)
    mask = lift.mask()
    return not refuted(mask) and _within(mask, lift.q)


def _within(mask: Term, end: Term) -> bool:
    """Does the mask keep no pair with k > end?"""
    return refuted(mask & mask.home.var("k").ge(end + 1))


# ---- warnings


def _warnings(spec: AttentionSpec, always: bool, never: bool, causal: str | None) -> tuple[Diagnostic, ...]:
    constant = [m for m in spec.masks if not names(m) and not tensors(m)]
    if len(constant) == len(spec.masks) or not all(evaluate(m, Env({})) for m in constant):
        return ()  # W106 says it, where it lies
    if never:
        return (Diagnostic(
            "W201", "the mask keeps no pair at all, whatever the lengths and parameters: every row of the output is 0",
            hint="two of its conditions exclude one another", severity="warning",
        ),)  # fmt: skip
    if always:
        return (Diagnostic(
            "W202", "the mask keeps every pair, whatever the lengths and parameters: it does nothing",
            hint="leave it out, and no kernel evaluates it", severity="warning",
        ),)  # fmt: skip
    named = [n for n in (spec.name, *(n for n, _ in spec.lets)) if CAUSAL_NAMES.search(n) and not NOT_QUITE.search(n)]
    if not named or causal is not None:
        return ()
    seen = future(spec)
    if seen is None:
        return ()
    return (Diagnostic(
        "W203", f"under the name {named[0]} a query sees the future: {seen}",
        hint="a causal mask needs k <= q in every alternative", severity="warning",
    ),)  # fmt: skip


def future(spec: AttentionSpec, size: int = 6) -> str | None:
    """A kept pair with k > q, found by trying small calls, in words; None where none was found."""
    mask = conjunction(spec.masks)
    scalars = [p for p in spec.params if not p.is_tensor]
    if mask is None or len(scalars) > 4 or any(p.type == "float" for p in scalars):
        return None
    at = np.arange(size)
    lengths = {"q_len": size, "k_len": size, "b": 0, "h": 0, "h_kv": 0, "b_len": 1, "h_len": 1}
    names = {**lengths, **dict.fromkeys(spec.free_axes, size), "row": at[:, None], "q": at[:, None], "k": at[None, :]}
    tensors = {p.name: np.full([a if isinstance(a, int) else size for a in p.axes], size // 2) for p in spec.tensors}
    for values in product((1, 2, 4), repeat=len(scalars)):
        given = dict(zip((p.name for p in scalars), values))
        kept = np.broadcast_to(np.asarray(evaluate(mask, Env({**names, **given}, tensors)), bool), (size, size))
        ahead = np.argwhere(kept & (at[None, :] > at[:, None]))
        if len(ahead):
            q, k = (int(i) for i in ahead[0])
            where = "".join(f", {n} = {v}" for n, v in given.items())
            ones = f", {', '.join(tensors)} all {size // 2}" if tensors else ""
            return f"with q_len = k_len = {size}{where}{ones}, row {q} sees key {k}"
    return None
