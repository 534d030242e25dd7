"""The lines between two products of the backward pass: from the scores to p, and from dp to ds and what parameters get.

Notation, of one pair: s the scaled score, p its weight exp(score - lse), dp the derivative of the loss by p's factor
in the output, ds that by the score, and after the chain rule that by s. `delta` is the row's sum of p dp, less the
gradient of its lse. The entropy H = -sum p log p of a row, where it has a gradient d_H, adds -p (log p + H) d_H to ds:
H d_H joins `delta`, and `tilt` is d_H for logarithms to the base 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from attncc.analysis.derivative import ONE, ZERO, derivative, multiply
from attncc.analysis.normaliser import Normaliser, normaliser
from attncc.codegen.backward_sites import Site
from attncc.codegen.lower import Lowering, level, score_text
from attncc.codegen.printer import BIT_AND, TERM
from attncc.codegen.sparse import sparse_view
from attncc.ir import FUNCTIONS, Const, Expr, Op, Read, Var, names, rewrite, walk

# What the templates call the values between the products; no parameter can have these names.
VALUES = {"_ds": "ds", "_dp": "dp", "_p": "p", "_product": "product", "_share": "share"}
DS, DP, P, PRODUCT, SHARE = (Var(name, "float") for name in VALUES)
S = Var("s", "float")
SHARED = tuple(f for f in FUNCTIONS if f not in ("abs", "min", "max", "floor", "where"))  # worth a name of their own


@dataclass(frozen=True)
class Pairs:
    """`lines` are loads that nothing of a score precedes; `scores` and `chain` are statements in order."""

    lines: tuple[str, ...]
    scores: tuple[str, ...]
    score: str  # the name of the last
    weighted: str  # the weights of the values
    weighing: tuple[str, ...]  # from the masked score to p
    mean: tuple[str, ...]  # of sparse weights: from dp to the sums that a row's delta is made of
    chain: tuple[str, ...]  # from dp to ds by the scaled score
    product: bool  # the unscaled product is wanted


@dataclass(frozen=True)
class _Stage:
    """One score: how it is worked out, its slope by the score before it, its derivatives by what parameters give."""

    lines: tuple[str, ...]
    slope: Expr
    partials: tuple[tuple[Site, Expr], ...]
    before: str  # the name of its `s`
    wild: bool  # a derivative may be infinite where p is 0


def pairs(lowering: Lowering, sites: Sequence[Site], unit: str, which: str) -> Pairs:
    """For one kernel: its own lowering, and the sites that it sums. `unit` brings a score to units of log 2, `which` of
    the kernels it is."""
    spec, current, rule = lowering.spec, "s", normaliser(lowering.spec)
    lowering.names |= VALUES
    stages: list[_Stage] = []
    for score in spec.scores:
        made, current = stage(lowering, score, sites, current)
        stages.append(made)
    weighing, through = _weights(lowering, rule, sites, current, unit)
    chain: list[str] = []
    weighted = "p"
    if spec.dropout is not None:
        by_rows = which in ("dq", "cells")
        mine = "tile, TILE_Q, TILE_K, False" if by_rows else "mine, TILE_Q, TILE_K, True"
        weighing = (
            *weighing,
            f"survives = survivors(seed, threshold, b, h, row, {mine})",
            "p_kept = tl.where(survives, p * rescue, 0.0)",
        )
        weighted = "p_kept"
        chain.append("dp = tl.where(survives, dp * rescue, 0.0)")
    mean = list(chain)
    if spec.weight is not None:
        for site, slope in _partials(spec.weight, sites):
            chain += _add(lowering, site, multiply(multiply(P, DP), slope), _wild(slope))
        weight = lowering.text(spec.weight, TERM)
        chain.append(f"dp = dp * {weight}")
        mean.append(chain[-1])
        weighted = f"({weighted} * {weight})"
    mean = [*mean, *_mean_lines(rule)] if rule.alpha is not None else []
    chain += through
    none = "p == 0" if rule.exponential else "ds == 0"
    for made in reversed(stages):
        chain += _back(lowering, made, none)
    lowering.names["s"] = "s"
    scale = _partials(spec.scale, sites) if spec.scale is not None else ()
    for site, slope in scale:
        chain += _add(lowering, site, multiply(multiply(DS, PRODUCT), slope), False)
    return Pairs(
        lowering.take("pair"), tuple(line for s in stages for line in s.lines), current, weighted, weighing,
        tuple(mean), tuple(chain), bool(scale),
    )  # fmt: skip


def _back(lowering: Lowering, stage: _Stage, none: str) -> list[str]:
    """Through one score: what it gives to parameters, and ds by the score before it. `none`: a pair without effect."""
    lowering.names["s"] = stage.before
    lines = []
    for site, slope in stage.partials:
        lines += _add(lowering, site, multiply(DS, slope), stage.wild, none)
    if stage.slope == ZERO:
        lines.append("ds = tl.zeros_like(ds)")
    elif stage.slope != ONE:
        lines.append(f"ds = {_safe(lowering, multiply(DS, stage.slope), stage.wild, none)}")
    return lines


def _weights(
    lowering: Lowering, rule: Normaliser, sites: Sequence[Site], score: str, unit: str
) -> tuple[tuple[str, ...], list[str]]:  # fmt: skip
    """From the masked score to p, and from dp to ds by that score."""
    if sparse := sparse_view(rule):
        above = f"above = tl.maximum({score} * {unit} - lse, 0.0, propagate_nan=tl.PropagateNan.ALL)"
        worked_out = (above, f"p = {sparse.weight}", f"slope = {sparse.slope}")
        return worked_out, ["ds = tl.where(slope == 0, 0.0, slope * (dp - delta))"]
    if rule.stages is None and lowering.spec.reports:
        exponent = f"tl.maximum({score} * {unit} - lse, NOTHING, propagate_nan=tl.PropagateNan.ALL)"
        return (f"exponent_s = {exponent}", "p = tl.exp2(exponent_s)"), ["ds = p * (dp - delta - tilt * exponent_s)"]
    if rule.stages is None:
        return (f"p = tl.exp2({score} * {unit} - lse)",), ["ds = p * (dp - delta)"]
    stages: list[_Stage] = []
    lines: list[str] = []
    current = score
    for i, e in enumerate(rule.stages):
        after = "p" if i + 1 == len(rule.stages) else lowering.fresh.fresh("p_then")
        made, current = stage(lowering, e, sites, current, after)
        stages.append(made)
        lines += made.lines
    if not rule.vanishes:
        lines.append(f'p = tl.where({score} == float("-inf"), 0.0, {current})')
    safe = rule.flat and rule.vanishes  # what is excluded adds nothing by itself
    given = "dp"
    if rule.summed:
        lines.append("p = p * tl.exp2(-lse)")
        given = "tl.exp2(-lse) * (dp - delta)"
    chain = [f"ds = {given}" if safe else f'ds = tl.where({score} == float("-inf"), 0.0, {given})']
    for made in reversed(stages):
        chain += _back(lowering, made if safe else replace(made, wild=True), "ds == 0")
    return tuple(lines), chain


def _mean_lines(rule: Normaliser) -> tuple[str, ...]:
    return (
        "slopes = tl.sum(slope, 1, keep_dims=True)",
        "steepness += slopes",
        "held |= tl.where((slopes == 0) & (lse == lse), 0, bit_of(tile >> sharing))",  # where a row is NaN all is
        "total += tl.sum(tl.where(slope == 0, 0.0, slope * dp), 1, keep_dims=True)",
    )


def _partials(e: Expr, sites: Sequence[Site]) -> tuple[tuple[Site, Expr], ...]:
    found = ((site, derivative(e, site.at)) for site in sites)
    return tuple((site, slope) for site, slope in found if slope != ZERO)


def stage(
    lowering: Lowering, score: Expr, sites: Sequence[Site], before: str, after: str = ""
) -> tuple[_Stage, str]:  # fmt: skip
    """One score, and the name that its result has: `after`, else another one where the chain rule asks for what it was
    made of."""
    lowering.names["s"] = before
    found, plain = _partials(score, sites), level(score) != "pair"
    wild = any(_wild(e) for e in (derivative(score, S), *(e for _, e in found)))
    lines, (score, slope, *slopes) = _share(lowering, [score, derivative(score, S), *(e for _, e in found)])
    asked = any("s" in names(e) for e in (slope, *slopes))
    after = after or (lowering.fresh.fresh("s_then") if asked else before)
    lines.append(f"{after} = {score_text(lowering, score) if plain else lowering.text(score)}")
    partials = tuple((site, e) for (site, _), e in zip(found, slopes, strict=True))
    return _Stage(tuple(lines), slope, partials, before, wild), after


def _share(lowering: Lowering, exprs: list[Expr]) -> tuple[list[str], list[Expr]]:
    """A name for each function of s that both the score and a derivative hold, inner ones first."""
    lines: list[str] = []
    while True:
        held = [e for e in _functions(exprs[0]) if any(e in set(walk(other)) for other in exprs[1:])]
        if not held:
            return lines, exprs
        inner = min(held, key=lambda e: sum(1 for _ in walk(e)))
        name = Var(lowering.fresh.fresh(f"{inner.op}_s"), "float")
        lines.append(f"{name.name} = {lowering.text(inner)}")
        exprs = [rewrite(e, lambda n, old=inner, new=name: _put(n, old, new)) for e in exprs]  # type: ignore[misc]


def _functions(e: Expr) -> Iterator[Op]:
    for node in walk(e):
        if isinstance(node, Op) and node.op in SHARED and "s" in names(node):
            yield node


def _put(node: Expr, old: Expr, new: Expr) -> Expr | None:
    return new if node == old else node if isinstance(node, Read) else None


def _wild(e: Expr) -> bool:
    """Whether a factor may be infinite where p is 0: functions without a bound, quotients by what is no parameter."""
    for node in walk(e):
        if isinstance(node, Op) and node.op in ("exp", "exp2", "log", "log2", "sqrt"):
            return True
        if isinstance(node, Op) and node.op == "/" and not isinstance(node.args[1], (Const, Var)):
            return True
    return False


def _safe(lowering: Lowering, e: Expr, wild: bool, none: str = "p == 0") -> str:
    """`e`, and 0 where the pair has no effect, even if a factor overflows there."""
    return f"tl.where({none}, 0.0, {lowering.text(e)})" if wild else lowering.text(e)


def _add(lowering: Lowering, site: Site, e: Expr, wild: bool, none: str = "p == 0") -> list[str]:
    """What one pair of a tile gives to a site, added up as far as the loop can."""
    if site.gathers or site.kind == "key":
        return [f"{site.name} += tl.sum({_safe(lowering, e, wild, none)}, 1, keep_dims=True)"]
    if site.kind == "cells":
        if site.apart:
            return [f"{site.name} += {_safe(lowering, e, wild, none)}"]
        value = f"({_safe(lowering, e, wild, none)}).to({site.pointer}.dtype.element_ty)"
        return [f"tl.store({cell_pointer(lowering, site)}, {value}, {cell_inside(lowering, site)})"]
    if site.kind == "alike":
        within = " & ".join(_inside(lowering, site)) or "True"
        entry = f"{site.pointer} + {table_cell(lowering, site)}"
        return [f"tally_one({entry}, {_safe(lowering, e, wild, none)}, {within})"]
    inside = " & ".join(["(row < q_len)", "(k < k_len)", *_inside(lowering, site)])
    value, entries = _safe(lowering, e, wild, none), site.pointer
    if site.kind == "key_table":
        entries += f" + ({_key(lowering)}) * cells_{site.name}"
    return [f"{_helper(site)}({entries}, {table_cell(lowering, site)}, {value}, {inside})"]


def _helper(site: Site) -> str:
    return "tally" if site.kind == "table" else "tally_rows"


def row_lines(lowering: Lowering, site: Site, e: Expr) -> list[str]:
    """What a row gives to a site by itself, outside its pairs: the sink's share."""
    return [f"{site.name} += {lowering.text(e)}"]


def cell_pointer(lowering: Lowering, site: Site) -> str:
    """Where the gradient of one pair's own cell stands; the buffer is contiguous."""
    return f"{site.pointer} + {_cell(lowering, site, tuple(range(len(site.param.axes))), 'tl.int64')}"


def cell_inside(lowering: Lowering, site: Site) -> str:
    return " & ".join(["(row < q_len)", "(k < k_len)", *_inside(lowering, site)])


def end_lines(lowering: Lowering, site: Site) -> list[str]:
    """What is kept in the loop goes to memory."""
    if site.kind == "program":
        total = f"tl.sum(tl.where(row < q_len, {site.name}, 0.0))"
        own = "h * tiles + slot" if lowering.spec.ragged else "head * tl.cdiv(q_len, TILE_Q) + mine"
        return [f"tl.store({site.pointer} + ({own}), {total})"]
    if site.apart:
        return [f"tl.store({cell_pointer(lowering, site)}, {site.name}, {cell_inside(lowering, site)})"]
    if site.kind == "row":
        return [f"tl.store({site.pointer} + at, {site.name}, row < q_len)"]
    if site.kind == "key":
        return [f"tl.store({site.pointer} + {_key(lowering)}, {site.name}, k < k_len)"]
    inside = " & ".join(["(row < q_len)", *_inside(lowering, site)])
    return [f"tally({site.pointer}, {table_cell(lowering, site)}, {site.name}, {inside})"]


def _key(lowering: Lowering) -> str:
    """The number of a key of a head among those of all heads."""
    return (
        "h.to(tl.int64) * total_k + k_start + k" if lowering.spec.ragged else "(b * h_len + h).to(tl.int64) * k_len + k"
    )


def _inside(lowering: Lowering, site: Site) -> Iterator[str]:
    """Comparisons for axes that an index can leave; what is read there is 0, and has no gradient."""
    if not isinstance(site.at, Read):
        return
    for i in site.rest:
        index, axis = site.at.indices[i], site.param.axes[i]
        part = replace(site.param, axes=(axis,)), Read(site.param.name, (index,), site.at.type)
        if not (isinstance(index, Var) and (index.name, axis) in (("row", "row"), ("k", "k"))):
            yield from lowering.inside(part[1], part[0])


def table_cell(lowering: Lowering, site: Site) -> str:
    """Which entry of a program's table an index names."""
    return _cell(lowering, site, site.entries)


def _cell(lowering: Lowering, site: Site, positions: Sequence[int], cast: str = "") -> str:
    """The number of an entry, the last axis running fastest."""
    assert isinstance(site.at, Read)
    text = ""
    for n, i in enumerate(positions):
        index = lowering.text(site.at.indices[i], TERM if n + 1 < len(positions) else BIT_AND + 2)
        index = f"tl.cast({index}, {cast})" if cast and not n else index
        text = f"{_times(text)} * {lowering.extent(site.param.axes[i])} + {index}" if text else index
    return text


def _times(text: str) -> str:
    return f"({text})" if " " in text else text
