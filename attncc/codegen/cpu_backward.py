"""The CPU program's backward pass: one PyTorch file, tiled like the forward, scores worked out again from lse.

With p = exp(score - lse) and dp = weight * (d_out · v): delta = sum(d_out * out) - d_lse, ds = p * (dp - delta),
d_v = sum (weight * p) d_out, d_k = sum ds (scale * q), d_q = scale * sum ds k, where ds went back through the scores by
the chain rule; a sink E gets -exp(E - lse) * delta of each row. Where the entropy H = -sum p log p of a row has a
gradient d_H too, that adds -p * (log p + H) * d_H to ds, and likewise to what the sink gets.
Dao et al. 2022, "FlashAttention", appendix B.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from attncc.analysis.derivative import ONE, ZERO, derivative, differentiable, multiply, variables
from attncc.analysis.normaliser import Normaliser
from attncc.codegen import launch
from attncc.codegen.cpu import common_helpers, policy, uses
from attncc.codegen.cpu_lower import BACKWARD, CpuLowering, is_tensor, of_dtype, prepared
from attncc.codegen.cpu_ranges import ranges_of
from attncc.codegen.environment import rendered
from attncc.codegen.layout import provenance
from attncc.codegen.naming import parameter_names
from attncc.codegen.selfcheck import DenseCheck, comment, dense_check, free_axes, in_order, of_sequence
from attncc.ir import FUNCTIONS, AttentionSpec, Expr, KernelPlan, Op, Param, Read, Var, Visits, names, walk

# What the template calls its values; no parameter can have these names.
VALUES = {"_ds": "ds", "_dp": "dp", "_p": "p", "_share": "share", "_d_scale": "d_scale"}
DS, DP, P, SHARE, D_SCALE = (Var(name, "float") for name in VALUES)
S = Var("s", "float")
SHARED = tuple(f for f in FUNCTIONS if f not in ("abs", "min", "max", "floor", "where"))  # worth a name of their own


@dataclass(frozen=True)
class CpuBackwardView:
    """Finished text for the template: what cpu.CpuView has of the tiles, and the lines of the gradients."""

    comment: list[str]
    softmax: str
    lse_words: str
    helpers: list[str]
    own_helpers: list[str]
    signature: str
    ragged: bool
    starts: str  # what a call of packed sequences passes beside
    sums: str  # ", NAME" for each buffer of a parameter's gradient
    parts: str  # the same for one of packed sequences
    programs: str
    align: str
    position: str
    uses: frozenset[str]
    scale: str
    is_masked: str
    call: list[str]
    summaries: list[str]
    program: list[str]
    row: list[str]
    ranges: list[str]
    tile_class: list[str]
    pair: list[str]
    mask: list[str]
    stages: list[str]  # from the scores to p
    weight: list[str]  # parameters of the weight, then dp by the unweighted p
    weighted: str  # the name of weight * p
    dropout: str  # the probability
    alpha: float | None  # of sparse weights
    powers: tuple[str, str]  # of what lies above the threshold, and then of that: the weight, and its slope
    gained: str  # dp, weighted
    chain: list[str]  # back through the scores, parameters on the way
    reports: tuple[str, ...]  # of rows, beside their lse
    sink: list[str]  # for each tile of rows
    scaling: list[str]
    gradients: list[tuple[str, str, str, str]]  # of parameters: buffer, shape, key, value
    returned: str
    inputs: str  # of the file's own check
    checked: str
    check: DenseCheck
    tile_q: int
    tile_k: int
    head_dim: int
    head_dim_v: int


def render_cpu_backward(spec: AttentionSpec, visits: Visits, plan: KernelPlan, text: str = "") -> str:
    """The file's text: `backward(q, k, v, out, lse, d_out, d_lse=None, *, parameters)` ->
    (d_q, d_k, d_v, {parameter: gradient}), for the parameters that the spec marks `grad`.

    `spec` has its consts bound; `visits` is analysis.visits(spec, "q"); `text` is the spec as written.
    Equal arguments give equal bytes.
    """
    return rendered(BACKWARD, view_of(spec, visits, plan, text))


def view_of(spec: AttentionSpec, visits: Visits, plan: KernelPlan, text: str) -> CpuBackwardView:
    spec = prepared(spec)
    spelled = parameter_names(spec)
    low = CpuLowering(spec, spelled)
    low.printer.names = {**low.printer.names, **VALUES}
    gradients = Gradients(low)
    scale = low.scale()
    sink, scaling = gradients.sink(), gradients.scale()
    pair, chain = gradients.scores()
    stages, through = gradients.stages(pair)
    weight = gradients.weight(pair)
    mask = low.masks()
    ranges, check = ranges_of(spec, visits, low), dense_check(spec, spelled)
    made = [(name, _shape(p, spelled), p.name, _typed(name, p, spelled)) for p, name in gradients.buffers.items()]
    helpers = {*common_helpers(low.normaliser), *low.printer.helpers, *check.helpers, *ranges.helpers}
    helpers |= {"Mean"} if low.normaliser.alpha is not None else set()
    inputs = ", ".join(["Q", "K", "V", *(spelled[p.name] for p in spec.params)])
    at = {p.name: 3 + i for i, p in enumerate(spec.params)}
    checked = [f'({i}, ("{n}", d_{n}))' for i, n in enumerate("qkv")]
    checked += [f'({at[key]}, ("{key}", found["{key}"]))' for _, _, key, _ in made]
    return CpuBackwardView(
        comment=[
            *comment(text),
            f"# backward · cpu · tile {plan.tile_q} × {plan.tile_k} · deterministic · memory linear in length",
            *provenance(launch.build_command(spec, plan), f"python {launch.file_name(spec.name, plan)}"),
        ],
        helpers=in_order(helpers),
        own_helpers=[h for h in ("add", "add_at") if h in gradients.helpers],
        signature=_signature(spec, spelled), ragged=spec.ragged,
        starts="".join(f", {name}={name}" for name in launch.starts(spec)),
        sums="".join(f", {name}" for name in gradients.buffers.values()),
        parts="".join(f", {of_sequence(spec, p, name)}" for p, name in gradients.buffers.items()),
        programs=ranges.programs, align=spec.align, position=check.position,
        uses=uses(spec), scale=scale, is_masked=ranges.is_masked, call=free_axes(spec, spelled),
        summaries=ranges.summaries, program=low.program, row=low.row, ranges=ranges.lines, tile_class=ranges.tile_class,
        softmax=policy(low.normaliser), dropout="" if spec.dropout is None else low.text(spec.dropout, []),
        lse_words=_lse_words(low.normaliser, spec),
        alpha=low.normaliser.alpha, powers=_powers(low.normaliser.alpha), gained=gradients.gained,
        pair=pair, mask=mask, stages=stages, weight=weight, weighted="weighted" if spec.weight is not None else "p",
        chain=[*through, *chain],
        reports=spec.reports, sink=sink, scaling=scaling, gradients=made,
        returned="{" + ", ".join(f'"{key}": {value}' for _, _, key, value in made) + "}",
        inputs=inputs, checked=f"({', '.join(checked)})", check=check,
        tile_q=plan.tile_q, tile_k=plan.tile_k, head_dim=plan.head_dim, head_dim_v=plan.head_dim_v,
    )  # fmt: skip


class Gradients:
    """Puts the derivatives of a spec's expressions into lines of Python, and what parameters get into their buffers."""

    def __init__(self, low: CpuLowering) -> None:
        self.low, self.spec = low, low.spec
        self.helpers: set[str] = set()
        self.gained = "dp"
        self.buffers = {
            p: low.free.fresh(f"d_{low.spelled[p.name]}")
            for p in self.spec.params
            if p.grad and any(True for e in differentiable(self.spec) for _ in self._partials(e, p))
        }

    def _partials(self, e: Expr, p: Param) -> Iterator[tuple[Expr, Expr]]:
        """(what of the parameter, derivative by it) where that is not always 0."""
        for at in variables(e, p):
            if (slope := derivative(e, at)) != ZERO:
                yield at, slope

    def sink(self) -> list[str]:
        """What the rows give to parameters of the sink."""
        low, sink = self.low, self.low.sink
        found = [] if sink is None else self._all(sink)
        if sink is None or not found:
            return []
        value = low.number(sink, low.row)
        lines = [f"share = -torch.exp({value} - top) * delta"]
        if self.spec.reports:
            lines = [f"exponent = ({value} - top).clamp(min=-1000.0)"]
            lines.append("share = -torch.exp(exponent) * (delta + tilt * exponent)")
        return lines + [line for p, at, d in found for line in self._once(p, at, SHARE, d, low.row)]

    def scale(self) -> list[str]:
        """Parameters of the scale: a row's sum of ds and the unscaled product is its d_query times q."""
        found = [] if self.spec.scale is None else self._all(self.spec.scale)
        if not found:
            return []
        product = "d_query * copy(Q[batch, heads, rows], dtype)"
        lines = [f"d_scale = torch.where(d_query == 0, 0.0, {product}).sum(-1, keepdim=True)"]
        return lines + [self._give(p, at, D_SCALE, d, self.low.row) for p, at, d in found]

    def weight(self, pair: list[str]) -> list[str]:
        """Parameters of the weight, the weighted p, and dp with the weight in it; loads go to `pair`."""
        e = self.spec.weight
        if e is None:
            return []
        given = multiply(P, DP)
        lines = [line for p, at, d in self._all(e) for line in self._once(p, at, given, d, pair, "p")]
        text = self.low.number(e, pair)
        both = ("weighted", "p"), ("dp", "dp")
        self.gained = f"dp * ({text})"
        without = "p == 0" if self.low.normaliser.exponential else "excluded"
        if lines:  # what v holds at an excluded pair reaches no parameter
            lines.insert(0, f"dp = torch.where({without}, 0.0, dp)")
        return lines + [f"{name} = torch.where({without}, 0.0, {old} * ({text}))" for name, old in both]

    def stages(self, pair: list[str]) -> tuple[list[str], list[str]]:
        """The lines from the scores to the weights of a normaliser that knows nothing of the row, and those back."""
        lines: list[str] = []
        back: list[list[str]] = []
        before = self.low.printer.names
        for e in self.low.normaliser.stages or ():
            back.insert(0, self._score(e, pair, lines, "p"))
            self.low.printer.names = {**before, "s": "p"}
        self.low.printer.names = before
        return [*lines, *self.low.excluded()], [line for each in back for line in each]

    def scores(self) -> tuple[list[str], list[str]]:
        """The lines of the scores, and the chain rule's lines back through them, the last score first."""
        pair: list[str] = []
        back: list[list[str]] = []
        for e in self.spec.scores:
            back.insert(0, self._score(e, pair, pair))
        return pair, [line for lines in back for line in lines]

    def _score(self, e: Expr, pair: list[str], lines: list[str], result: str = "s") -> list[str]:
        """One score or stage: its lines go to `lines`, what it reads to `pair`, those of the way back are returned.
        An `s` that these read is kept."""
        low, before = self.low, self.low.printer.names
        slope, partials = derivative(e, S), self._all(e)
        slopes = [slope, *(d for _, _, d in partials)]
        held = [f for f in dict.fromkeys(_functions(e)) if any(f in set(walk(d)) for d in slopes)]
        known: dict[Expr, str] = {}
        if any(_reads_s(d, held) for d in slopes):
            kept = low.free.fresh("s_before")
            lines.append(f"{kept} = {before.get('s', 's')}")
            low.printer.names = {**before, "s": kept}
        for f in sorted(held, key=lambda f: sum(1 for _ in walk(f))):
            name = low.free.fresh(f"{f.op}_s")
            lines.append(f"{name} = {low.number(f, pair)}")
            known[f] = name
            low.remember(f, name)
        text = low.number(e, pair)
        made = f"{text}.clone()" if e in known else text  # later lines change s in place
        whole = of_dtype(e) and "s" in names(e)
        lines.append(f"{result} = {made}" if whole else f"{result} = torch.empty_like(s).copy_({text})")
        back = [line for p, at, d in partials for line in self._once(p, at, DS, d, pair)]
        if slope == ZERO:
            back.append("ds = torch.zeros_like(ds)")
        elif slope != ONE:
            back.append(f"ds = {self._product(DS, slope, pair, 'ds')}")
        for held_one in known:
            low.forget(held_one)
        low.printer.names = before
        return back

    def _all(self, e: Expr) -> list[tuple[Param, Expr, Expr]]:
        return [(p, at, d) for p in self.spec.params if p.grad for at, d in self._partials(e, p)]

    def _product(self, given: Expr, slope: Expr, lines: list[str], zero: str) -> str:
        """given * slope in the products' type; 0 where `zero` is, whatever the slope is there."""
        text = self.low.text(multiply(given, slope), lines)
        if is_tensor(slope) and not of_dtype(slope):
            text = f"({text}).to(dtype)"
        return text if _tame(slope) else f"torch.where({zero} == 0, 0.0, {text})"

    def _once(self, *what: Any) -> list[str]:
        """What `_give` says, in the one pass that parameters get their sums in."""
        return ["if of_rows:", f"    {self._give(*what)}"]

    def _give(self, p: Param, at: Expr, given: Expr, slope: Expr, lines: list[str], zero: str = "") -> str:
        """The line that adds given * slope to the parameter's cells; `zero` names what is 0 for excluded pairs."""
        buffer = self.buffers[p]
        zero = zero or self.low.printer(given)
        text = self._product(given, slope, lines, zero)
        if not isinstance(at, Read):
            self.helpers.add("add")
            return f"add({buffer}, {text})"
        self.low.text(at, lines)
        where = self.low.slices(at)
        self.helpers.add("add" if where else "add_at")
        if where:
            return f"add({buffer}[{where}], {text})"
        return f"add_at({buffer}, {text}, {', '.join(map(self.low.printer, at.indices))})"


def _lse_words(rule: Normaliser, spec: AttentionSpec) -> str:
    if spec.reports:
        return "lse and\n    entropy side by side and their gradients d_lse [B, H, Q, 2], or None"
    if rule.alpha is not None:
        return "the\n    thresholds of forward in place of an lse [B, H, Q]"
    return "lse and its\n    d_lse [B, H, Q], or None" if rule.has_lse else "no lse"


def _powers(alpha: float | None) -> tuple[str, str]:
    """max(x - t, 0)^(1 / (alpha - 1)) is p, whose slope by the score is p^(2 - alpha)."""
    if alpha is None:
        return "", ""
    slope = {2.0: ".pow(0)", 1.5: ".sqrt()"}.get(alpha, f".pow({2 - alpha!r})")
    return {2.0: "", 1.5: ".square_()"}.get(alpha, f".pow_({1 / (alpha - 1)!r})"), slope


def _functions(e: Expr) -> Iterator[Op]:
    for node in walk(e):
        if isinstance(node, Op) and node.op in SHARED and "s" in names(node):
            yield node


def _reads_s(e: Expr, held: list[Op]) -> bool:
    """Whether s itself is read, beside the functions of it that have names."""
    stack: list[Expr] = [e]
    while stack:
        node = stack.pop()
        if node == S:
            return True
        if isinstance(node, Op) and node not in held:
            stack.extend(node.args)
    return False


def _tame(e: Expr) -> bool:
    """Whether `e` is finite whatever the inputs hold: made of positions, constants and scalars, without quotients."""
    return not any(
        n == S or (isinstance(n, Read) and n.type == "float")
        or (isinstance(n, Op) and n.op in ("/", "exp", "exp2", "log", "log2", "sqrt"))
        for n in walk(e)
    )  # fmt: skip


def _shape(p: Param, spelled: Mapping[str, str]) -> str:
    return f"{spelled[p.name]}.shape" if p.is_tensor else "()"


def _typed(name: str, p: Param, spelled: Mapping[str, str]) -> str:
    return f"{name}.to({spelled[p.name]}.dtype)" if p.is_tensor else name


def _signature(spec: AttentionSpec, spelled: Mapping[str, str]) -> str:
    params = [spelled[p.name] + ("" if p.default is None else f"={p.default!r}") for p in spec.params]
    params += ["seed"] if spec.dropout is not None else []
    params = [*launch.starts(spec), *params]
    return ", ".join(["q", "k", "v", "out", "lse", "d_out", "d_lse=None", *(["*", *params] if params else [])])
