"""The float64 reference of gradients and tangents: the same expressions over all pairs, differentiated by autograd.

It knows nothing of analysis.derivative, whose rules the generated programs follow. `reference.reference` stays the
judge of outputs; the form here avoids what autograd cannot pass through, infinities less infinities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attncc.ir import AttentionSpec
from attncc.runtime.reference import (
    Env,
    alpha_of,
    chosen,
    environment,
    evaluate,
    has_lse,
    keep_mask,
    reference,
    rows,
    sink_logits,
    sparse,
    summed,
    undivided,
    weighed,
    weighted_values,
)

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Gradients:
    """By name (q, k, v, parameters marked grad), in float64. `summed` is the l1 of what a gradient adds up before signs
    cancel, those of other pairs and rows among them, dp and delta taken apart, and a slope of a score not below 1, the
    unit that its own rounding is relative to (1 - tanh^2): rounding errors are in proportion to that. Left empty for an
    unfused computation."""

    values: Mapping[str, Tensor]
    summed: Mapping[str, float]


def learned(spec: AttentionSpec, params: Mapping[str, Any]) -> dict[str, Any]:
    """The values of parameters marked `grad`."""
    return {p.name: params.get(p.name, p.default) for p in spec.params if p.grad}


def gradients(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, params: Mapping[str, Any], d_out: Tensor, d_lse: Tensor,
    rounded: torch.dtype | None = None,
) -> Gradients:  # fmt: skip
    """Of sum(out * d_out) + sum(lse * d_lse) over rows whose lse is finite. Shapes and parameters as for `reference`,
    d_out [B, H, Q, D_v], d_lse [B, H, Q].

    `rounded` rounds every intermediate, on the way and on the way back: an unfused computation in that type.
    """
    leaves = _leaves(spec, q, k, v, params)
    round_to: Step = _exact if rounded is None else (lambda x: Rounded.apply(x, rounded))
    out, lse, _, _, _ = dense(spec, *_call(leaves, params), round_to)
    d_out, d_lse = (x.to(q.device, torch.float64) for x in (d_out, d_lse))
    d_lse = torch.where(lse.isfinite(), d_lse, 0.0)
    finite = torch.where(lse.isfinite(), lse, 0.0)
    ends = ([out, finite], [d_out, d_lse]) if has_lse(spec) else ([out], [d_out])
    found = torch.autograd.grad(ends[0], list(leaves.values()), ends[1], allow_unused=True, materialize_grads=True)
    summed = {} if rounded is not None else _summed(spec, q, k, v, params, d_out, d_lse)
    return Gradients(dict(zip(leaves, found, strict=True)), summed)


def _summed(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, params: Mapping[str, Any], d_out: Tensor, d_lse: Tensor
) -> dict[str, float]:
    leaves = _leaves(spec, q, k, v, params)
    out, lse, scaled, s, p = dense(spec, *_call(leaves, params), _exact, apart=True)
    finite, d_lse = _of_lse(spec, torch.where(lse.isfinite(), lse, 0.0), d_lse)
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
    d_p = d_out.abs() @ leaves["v"].detach().abs().repeat_interleave(q.shape[1] // v.shape[1], 1).mT
    if has_lse(spec):
        slope = p.detach()  # of the lse by a score
        if summed(spec):
            (slope,) = torch.autograd.grad([finite], [s], [torch.ones_like(finite)], **options)
        dp = slope.abs() * d_p
        delta = ((d_out * out).abs().sum(-1) + d_lse.abs()).detach()
        flat = dp + slope.abs() * delta[..., None]
        ends, flows = [finite, s, scaled], [delta, dp, flat]
        if p.requires_grad:  # by what the spec's own weight reads
            ends, flows = [*ends, p], [*flows, d_p]
    else:
        (flat,) = torch.autograd.grad([p], [scaled], [d_p], **options)
        ends, flows = [p, scaled], [d_p, flat.abs()]
    found = torch.autograd.grad(ends, list(leaves.values()), flows, **options)
    return {n: float(x.abs().sum()) for n, x in zip(leaves, found, strict=True)}


def _of_lse(spec: AttentionSpec, lse: Tensor, d_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The lse alone where more lies beside it, and a gradient of it as large as that of the others can make."""
    if not spec.reports or not has_lse(spec):
        return lse, d_lse
    size = 1 + lse.detach().abs()  # an entropy has slopes as large as itself and the logarithm of a weight
    return lse[..., 0], (d_lse.abs() * size).sum(-1)


def differences(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, params: Mapping[str, Any], d_out: Tensor, d_lse: Tensor,
    directions: Mapping[str, Tensor], step: float = 1e-6,
) -> dict[str, float]:  # fmt: skip
    """The same loss's derivative along a direction of each argument by itself, by central differences of `reference`.

    Where a spec jumps or has a corner within `step` it means little.
    """

    def loss(name: str, by: float) -> float:
        moved = {"q": q, "k": k, "v": v, **params}
        moved[name] = torch.as_tensor(moved[name], dtype=torch.float64, device=q.device) + by * directions[name]
        given = {n: x for n, x in moved.items() if n not in ("q", "k", "v")}
        out, lse = reference(spec, moved["q"], moved["k"], moved["v"], given)
        total = (out * d_out.to(torch.float64)).sum()
        if not has_lse(spec):
            return float(total)
        return float(total + torch.where(lse.isfinite(), lse, 0.0).mul(d_lse.to(torch.float64)).sum())

    return {name: (loss(name, step) - loss(name, -step)) / (2 * step) for name in directions}


def tangents(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, params: Mapping[str, Any], directions: Mapping[str, Tensor],
    rounded: torch.dtype | None = None,
) -> Gradients:  # fmt: skip
    """Those of out and lse, by name, along `directions` of q, k, v and parameters marked grad; 0 where the lse is -inf.

    `rounded` rounds every intermediate and its tangent: an unfused computation in that type.
    """
    round_to: Step = (lambda x: x) if rounded is None else (lambda x: Rounded.apply(x, rounded))
    given = {"q": q, "k": k, "v": v, **learned(spec, params)}
    primals = {n: _leaf(x, q.device).detach() for n, x in given.items()}
    with forward_ad.dual_level(), torch.no_grad():
        duals = {n: forward_ad.make_dual(x, directions[n].to(torch.float64)) for n, x in primals.items()}
        mine = {n: x for n, x in duals.items() if n not in ("q", "k", "v")}
        made = dense(spec, duals["q"], duals["k"], duals["v"], {**params, **mine}, round_to)
        (out, out_t), (lse, lse_t), (_, scaled_t), (_, s_t), (p, p_t) = (forward_ad.unpack_dual(x) for x in made)
    moves = p * torch.where(p == 0, 0.0, s_t) if has_lse(spec) else p_t
    flat = moves.abs() + p.abs() * scaled_t.abs()
    group = q.shape[1] // v.shape[1]
    values = [x.abs().repeat_interleave(group, 1) for x in (primals["v"], directions["v"].to(torch.float64))]
    summed = (flat @ values[0] + p.abs() @ values[1]).sum()
    if not has_lse(spec):
        return Gradients({"out": out_t}, {"out": float(summed)})
    lse_t = torch.where(lse.isfinite(), lse_t, 0.0)
    summed = summed + (lse_t[..., None] * out).abs().sum()
    return Gradients({"out": out_t, "lse": lse_t}, {"out": float(summed), "lse": float(flat.sum() + lse_t.abs().sum())})


class _Sparse(torch.autograd.Function):
    """Sparse weights; their Jacobian is diag(u) - u u' / sum(u) with u = p^(2 - alpha) where p > 0 (Peters et al. 2019,
    "Sparse Sequence-to-Sequence Models", proposition 1)."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, alpha: float) -> Tensor:
        p, _ = sparse(s, alpha)
        ctx.save_for_backward(torch.where(p > 0, p ** (2 - alpha), 0.0))
        return p

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (u,) = ctx.saved_tensors
        total = u.sum(-1, keepdim=True)
        mean = (u * gradient).sum(-1, keepdim=True) / torch.where(total == 0, 1.0, total)
        return u * (gradient - mean), None


class Rounded(torch.autograd.Function):
    """A value and its gradient or tangent, rounded to a type and kept in float64."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.to(dtype).to(torch.float64)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype).to(torch.float64), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent.to(ctx.dtype).to(torch.float64)


def _exact(x: Tensor) -> Tensor:
    return x


def _leaves(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, params: Mapping[str, Any]) -> dict[str, Tensor]:
    given = {"q": q, "k": k, "v": v, **learned(spec, params)}
    return {n: _leaf(x, q.device) for n, x in given.items()}


def _call(leaves: Mapping[str, Tensor], params: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    mine = {n: x for n, x in leaves.items() if n not in ("q", "k", "v")}
    return leaves["q"], leaves["k"], leaves["v"], {**params, **mine}


def _leaf(x: Any, device: torch.device) -> Tensor:
    made = x.detach() if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)
    return made.to(device, torch.float64, copy=True).requires_grad_()


def dense(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, params: Mapping[str, Any], to: Step, part: Env | None = None,
    apart: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out, lse, the scaled products, the scores before any is excluded, and the weights; differentiable.

    `part` says where the rows and heads of q, k and v stand that are a part of a call's, all in float64. With `apart`
    gradients of parameters add up absolute values of pairs, and weights beside an lse have but those of the spec's own
    weight, since the lse and the scores have the others.
    """
    env = part or environment(spec, q, k, params)
    if apart:
        env = replace(env, apart=(*q.shape[:3], k.shape[2]))
    product = to(q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT)
    s = scaled = to(product * (q.shape[-1] ** -0.5 if spec.scale is None else evaluate(spec.scale, env)))
    for score in spec.scores:
        s = to(evaluate(score, env.having(s=s)).expand(product.shape))
    keep = keep_mask(spec, env, tuple(s.shape)) & (s != -math.inf)
    e, lse = _weights(spec, env, s, keep)
    lse = rows(spec, env, torch.where(keep, s, -math.inf), e, lse) if spec.reports else lse
    p, keep = to(e.detach() if apart and has_lse(spec) else e), chosen(spec, e, keep)
    if spec.weight is not None or spec.dropout is not None:
        p = to(weighed(spec, p, keep, env, params))
    return to(weighted_values(p, v, keep)), lse, scaled, s, p


def _weights(spec: AttentionSpec, env: Env, s: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and lse, without anything that autograd cannot pass through."""
    if (alpha := alpha_of(spec)) is not None:
        shown = torch.where(keep, s, -math.inf)
        return _Sparse.apply(shown, alpha), sparse(shown.detach(), alpha)[1]
    if summed(spec):
        weights = torch.where(keep, undivided(spec, torch.where(keep, s, 1.0), env), 0.0)
        total = weights.sum(-1, keepdim=True)
        some = torch.where(total > 0, total, 1.0)
        return weights / some, torch.where(total > 0, torch.log(some), -math.inf)[..., 0]
    if not has_lse(spec):
        return torch.where(keep, undivided(spec, torch.where(keep, s, 1.0), env), 0.0), s.new_empty(0)
    extra = sink_logits(spec, env, tuple(s.shape))
    top = s.new_full((*s.shape[:3], 1), -math.inf) if extra is None else extra.detach()
    if s.shape[-1]:
        top = torch.maximum(top, torch.where(keep, s.detach(), -math.inf).amax(-1, keepdim=True))
    top = torch.where(top == -math.inf, 0.0, top)
    e = torch.where(keep, torch.exp(torch.where(keep, s, top) - top), 0.0)
    total = e.sum(-1, keepdim=True) + (0.0 if extra is None else torch.exp(extra - top))
    some = torch.where(total > 0, total, 1.0)
    lse = torch.where(total > 0, top + torch.log(some), -math.inf)
    return e / some, lse[..., 0]
