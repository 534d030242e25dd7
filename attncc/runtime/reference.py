"""The float64 reference: a spec evaluated densely, straight from its expressions.

Every generated program is measured against it, so it shares nothing with the code printer: a small evaluator over torch
int64, float64 and bool tensors, and the formulas of docs/language.md written out over the whole score matrix, on the
device of the call.
Memory is B * H * Q * K * 8 bytes a few times over: for tests and `check`, not for use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attncc.ir import NONE, SUM, AttentionSpec, Const, Expr, Read, Var, children, conjunction
from attncc.runtime.dropout import survivors

WORD = 32  # bits in one element of a `bit` tensor's storage
WITHOUT_LSE = ("sigmoid", "relu", "none", "custom", "sparsemax", "entmax")
DTYPES = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}


@dataclass(frozen=True)
class Env:
    """What names mean: `values` by name (numbers, or tensors that broadcast), `tensors` with a dimension for each axis.

    `bits` gives, for each `bit` tensor, the number of bits on its last axis; its storage holds 32 of them in an i32.
    What is evaluated lies on `device`. `apart` is a shape, [B, H, Q, K] or of rows, for each place of which a leaf is
    read by itself, so that its gradient is the sum of absolute values.
    """

    values: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    bits: Mapping[str, int]
    device: torch.device | str = "cpu"
    apart: tuple[int, ...] | None = None

    def having(self, **more: Any) -> Env:
        return replace(self, values={**self.values, **more})


def evaluate(e: Expr, env: Env) -> Tensor:
    """The value of `e`: int64, float64 or bool, of the shape that the values in it broadcast to.

    Reads outside an axis give 0 or false; `//` and `%` floor and give 0 where the divisor is below 1. Gradients flow
    through. Raises KeyError for a name that `env` lacks.
    """
    done: dict[int, Tensor] = {}
    stack = [e]
    while stack:  # without recursion: a sum of thousands of terms is as deep as it is long
        node = stack[-1]
        missing = [c for c in children(node) if id(c) not in done]
        if missing:
            stack.extend(missing)
            continue
        stack.pop()
        if id(node) not in done:
            done[id(node)] = _node(node, [done[id(c)] for c in children(node)], env)
    return done[id(e)]


def _node(e: Expr, args: list[Tensor], env: Env) -> Tensor:
    if isinstance(e, Const):
        return torch.tensor(e.value, dtype=DTYPES[e.type], device=env.device)
    if isinstance(e, Var):
        found = torch.as_tensor(env.values[e.name], dtype=DTYPES[e.type], device=env.device)
        return _apart(found, env) if found.is_leaf else found
    if isinstance(e, Read):
        return _apart(_read(e, args, env), env)
    return OPERATIONS[e.op](*args)


def _apart(x: Tensor, env: Env) -> Tensor:
    return Apart.apply(x, env.apart) if env.apart is not None and x.requires_grad else x


class Apart(torch.autograd.Function):
    """A value of its own for each place of a shape; its gradient is the sum of the absolute values of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.shape = x.shape
        return x.expand(shape).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.abs().sum_to_size(ctx.shape), None


def _read(e: Read, indices: list[Tensor], env: Env) -> Tensor:
    table = env.tensors[e.tensor].to(env.device)
    extents = list(table.shape)
    if e.tensor in env.bits:
        extents[-1] = env.bits[e.tensor]
    at = torch.broadcast_tensors(*indices)
    inside = torch.ones_like(at[0], dtype=torch.bool)
    for i, n in zip(at, extents, strict=True):
        inside &= (i >= 0) & (i < n)
    safe = [torch.where(inside, i, 0) for i in at]
    if 0 in extents:
        return torch.zeros_like(inside, dtype=DTYPES[e.type])
    if e.tensor in env.bits:
        word = (*safe[:-1], safe[-1] // WORD)
        words = table[word].to(torch.int64)
        found = (words >> (safe[-1] % WORD)) & 1
    else:
        found = table[tuple(safe)]
    found = found.to(DTYPES[e.type])
    return torch.where(inside, found, torch.zeros((), dtype=found.dtype, device=found.device))


def _floor_divide(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(y < 1, 0, torch.div(x, y.clamp(min=1), rounding_mode="floor"))


def _modulo(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(y < 1, 0, torch.remainder(x, y.clamp(min=1)))


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "+": torch.add, "-": torch.sub, "*": torch.mul, "/": torch.true_divide, "//": _floor_divide, "%": _modulo,
    "neg": torch.neg, "<": torch.lt, "<=": torch.le, ">": torch.gt, ">=": torch.ge, "==": torch.eq, "!=": torch.ne,
    "and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not,
    "abs": torch.abs, "min": torch.minimum, "max": torch.maximum, "exp": torch.exp, "exp2": torch.exp2,
    "log": torch.log, "log2": torch.log2, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "sqrt": torch.sqrt,
    "floor": lambda x: torch.floor(x).to(torch.int64), "where": torch.where, "float": lambda x: x.to(torch.float64),
}  # fmt: skip


def environment(
    spec: AttentionSpec, q: Tensor, k: Tensor, params: Mapping[str, Any], device: torch.device | str | None = None
) -> Env:
    """Names of one call, shaped to broadcast over [B, H, Q, K].

    `q` [B, H, Q, D], `k` [B, H_kv, K, D]; `params` by name, else the spec's defaults. A 0-d tensor serves as
    scalar. On `device`, or where `q` lies. Raises KeyError for a parameter without value or default.
    """
    (B, H, Q), (H_kv, K), device = q.shape[:3], k.shape[1:3], device or q.device
    b, heads, row, keys = (torch.arange(n, device=device) for n in (B, H, Q, K))
    heads, row = heads.view(H, 1, 1), row.view(Q, 1)
    values: dict[str, Any] = {
        "b": b.view(B, 1, 1, 1), "h": heads, "h_kv": heads // (H // max(H_kv, 1) or 1), "row": row, "k": keys,
        "q": row + (K - Q) if spec.align == "end" else row,
        "b_len": B, "h_len": H, "q_len": Q, "k_len": K,
    }  # fmt: skip
    sizes = {"b": B, "h": H, "h_kv": H_kv, "row": Q, "k": K}
    tensors: dict[str, Tensor] = {}
    bits: dict[str, int] = {}
    for p in spec.params:
        given = params.get(p.name, p.default)
        if given is None:
            raise KeyError(p.name)
        if not p.is_tensor:
            values[p.name] = given
            continue
        tensors[p.name] = given
        for i, axis in enumerate(p.axes):
            packed = p.element == "bit" and i == len(p.axes) - 1
            if isinstance(axis, str) and axis in p.free_axes:
                values[axis] = given.shape[i] * (WORD if packed else 1)
            if packed:
                bits[p.name] = axis if isinstance(axis, int) else sizes.get(axis, given.shape[i] * WORD)
    return Env(values, tensors, bits, device)


def has_lse(spec: AttentionSpec) -> bool:
    """Whether weights are divided by a sum of their row, whose logarithm a call can return."""
    return spec.softmax.policy not in WITHOUT_LSE or summed(spec)


def summed(spec: AttentionSpec) -> bool:
    """Whether weights of one's own that are no exponentials are divided by their sum."""
    return dict(spec.softmax.named).get("divide") == SUM


def undivided(spec: AttentionSpec, s: Tensor, env: Env) -> Tensor:
    """The weights of a policy that makes each of its own score, as docs/language.md has them."""
    policy, args = spec.softmax.policy, spec.softmax.args
    if policy == "sigmoid":
        return torch.sigmoid(s + evaluate(args[0], env))
    if policy == "relu":
        return torch.relu(s) ** evaluate(args[0], env) / max(1, int(env.values["k_len"]))
    if policy == "none":
        return s
    if policy == "custom":
        weight, divide = (dict(spec.softmax.named)[name] for name in ("weight", "divide"))
        p = evaluate(weight, env.having(s=s)).to(torch.float64).expand(s.shape)
        return p if divide in (NONE, SUM) else p / evaluate(divide, env)
    raise NotImplementedError(f"softmax {policy} has no reference yet")


def sink_of(spec: AttentionSpec) -> Expr | None:
    """The sink's expression, None for a policy without one; NotImplementedError for one that is not built yet."""
    policy = spec.softmax.policy
    if policy == "sink":
        return spec.softmax.args[0]
    if policy == "off_by_one":
        return Const(0.0)
    if policy in ("online", "two_pass", "unified"):
        return None
    raise NotImplementedError(f"softmax {policy} has no reference yet")


def sink_logits(spec: AttentionSpec, env: Env, shape: tuple[int, ...]) -> Tensor | None:
    """The sink of each row, [B, H, Q, 1], of scores of `shape`; None for a policy without one."""
    sink = sink_of(spec)
    if sink is None:
        return None
    rows = (*shape[:3], 1)
    by_rows = env if env.apart is None else replace(env, apart=rows)
    return evaluate(sink, by_rows).to(torch.float64).expand(rows)


def keep_mask(spec: AttentionSpec, env: Env, shape: tuple[int, ...]) -> Tensor:
    """The mask as a bool tensor of `shape` [B, H, Q, K]; true where the pair is kept."""
    mask = conjunction(spec.masks)
    return torch.ones(shape, dtype=torch.bool, device=env.device) if mask is None else evaluate(mask, env).expand(shape)


def scores(spec: AttentionSpec, q: Tensor, k: Tensor, env: Env) -> Tensor:
    """Scaled and changed scores [B, H, Q, K] in float64, excluded pairs not yet excluded."""
    q, k = q.to(torch.float64), k.to(torch.float64)
    scale = q.shape[-1] ** -0.5 if spec.scale is None else evaluate(spec.scale, env)
    s = (q @ k.repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1).mT) * scale
    for score in spec.scores:
        s = evaluate(score, env.having(s=s)).expand(s.shape)
    return s


def sparse(s: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Weights max((alpha - 1) s - t, 0)^(1 / (alpha - 1)) of scores [..., K], excluded ones -inf, and the threshold t
    [...] at which they add up to 1, by bisection; +inf for a row that sees nothing."""
    x, power = (alpha - 1) * s, 1 / (alpha - 1)
    top = x.amax(-1, keepdim=True) if x.shape[-1] else x.new_full((*x.shape[:-1], 1), -math.inf)
    low, high = top - 1, top
    for _ in range(80):
        middle = (low + high) / 2
        enough = ((x - middle).clamp(min=0) ** power).sum(-1, keepdim=True) >= 1
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    t = torch.where(top == -math.inf, math.inf, low)
    return torch.where(s == -math.inf, 0.0, (x - t).clamp(min=0) ** power), t[..., 0]


def alpha_of(spec: AttentionSpec) -> float | None:
    """That of a sparse policy, None for the others."""
    policy = spec.softmax.policy
    if policy == "entmax":
        return float(evaluate(spec.softmax.args[0], Env({}, {}, {})))
    return 2.0 if policy == "sparsemax" else None


def normalised(spec: AttentionSpec, s: Tensor, env: Env) -> tuple[Tensor, Tensor]:
    """Weights [B, H, Q, K] of scores, excluded ones -inf, and what is kept of a row, [B, H, Q]: its lse, the threshold
    of a sparse policy, or nothing."""
    if (alpha := alpha_of(spec)) is not None:
        return sparse(s, alpha)
    if summed(spec):
        weights = torch.where(s == -math.inf, 0.0, undivided(spec, s, env))
        total = weights.sum(-1)
        return weights / torch.where(total == 0, 1.0, total)[..., None], total.log()
    if not has_lse(spec):
        return torch.where(s == -math.inf, 0.0, undivided(spec, s, env)), s.new_empty(0)
    extra = sink_logits(spec, env, tuple(s.shape))
    lse = torch.logsumexp(s if extra is None else torch.cat([s, extra], -1), -1)
    return torch.where(s == -math.inf, 0.0, torch.exp(s - lse[..., None])), lse


@torch.no_grad()
def reference(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, params: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Output [B, H, Q, D_v] and natural-log lse [B, H, Q], both float64, where `q` lies.

    `q` [B, H, Q, D], `k` [B, H_kv, K, D], `v` [B, H_kv, K, D_v], of any float type; consts are bound already, given in
    `params`, or have defaults. out = sum over kept pairs of weight * exp(s - lse) * v, lse = log(sum exp(s) +
    exp(sink)); a row that sees nothing gives 0, its lse is -inf or the sink. A policy without an
    lse gives an empty one, and its own weights; a sparse one its thresholds, +inf where a row sees nothing.
    With `layout { rows … }` the lse and what these are lie side by side, [B, H, Q, n].
    """
    spec = spec.bind({p.name: int(params[p.name]) for p in spec.consts if p.name in params})
    env = environment(spec, q, k, params)
    s = scores(spec, q, k, env)
    keep = keep_mask(spec, env, tuple(s.shape))
    s = torch.where(keep, s, -math.inf)
    p, lse = normalised(spec, s, env)
    kept = chosen(spec, p, s != -math.inf)
    lse = rows(spec, env, s, p, lse) if spec.reports else lse
    return weighted_values(weighed(spec, p, kept, env, params), v, kept), lse


def rows(spec: AttentionSpec, env: Env, s: Tensor, p: Tensor, lse: Tensor) -> Tensor:
    """The lse and the spec's reports side by side, [B, H, Q, n], of scores, excluded ones -inf, and their weights."""
    kept = s != -math.inf
    found = [lse] if lse.numel() else []
    for report in spec.reports:
        if report == "max":
            found.append(s.detach().amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -math.inf))
        elif report == "pairs":
            found.append(kept.sum(-1).to(torch.float64))
        else:
            found.append(_entropy(spec, env, torch.where(kept, s, 0.0), torch.where(kept, p, 0.0), lse))
    return torch.stack(found, -1)


def _entropy(spec: AttentionSpec, env: Env, s: Tensor, p: Tensor, lse: Tensor) -> Tensor:
    """-sum p log p over the pairs and the sink, as the lse less the mean score; 0 where a row has neither."""
    mean = (p * s).sum(-1)
    if (extra := sink_logits(spec, env, tuple(s.shape))) is not None:
        mean = mean + torch.exp(extra[..., 0] - lse) * extra[..., 0]
    return torch.where(lse.isfinite(), lse - mean, 0.0)


def chosen(spec: AttentionSpec, p: Tensor, keep: Tensor) -> Tensor:
    """The pairs that count: those that are kept, and of a sparse policy those that have a weight."""
    return keep if alpha_of(spec) is None else keep & (p != 0)


def weighed(spec: AttentionSpec, p: Tensor, keep: Tensor, env: Env, params: Mapping[str, Any]) -> Tensor:
    """What stands behind the normaliser: the spec's weight, and dropout at the seed in `params`."""
    if spec.weight is not None:
        p = torch.where(keep, p * evaluate(spec.weight, env), 0.0)
    if spec.dropout is not None:
        q = float(evaluate(spec.dropout, env))
        at = (torch.as_tensor(env.values[name], device=env.device) for name in ("b", "h", "row", "k"))
        p = torch.where(survivors(params["seed"], q, *at), p / (1 - q), 0.0)
    return p


def weighted_values(p: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Sum over kept keys of p * v, [B, H, Q, D_v]; what is not kept adds nothing even where `v` is not finite."""
    values = v.to(torch.float64).repeat_interleave(p.shape[1] // max(v.shape[1], 1), 1)
    if torch.isfinite(values).all():
        return p @ values
    each = p[..., None] * values[:, :, None]
    return torch.where(keep[..., None], each, 0.0).sum(-2)
