"""The error of 8-bit inputs on inputs that are hard for them, beside that of bfloat16, and a bound that it keeps to.

Errors are told twice: from the answer for the inputs as they were given, which is what quantisation costs, and from
the answer for the dequantised ones, which is what the program adds. The bound is of the second. With w a row's
weights, o its output, A = sum of w |v|, and r the largest relative error of a weight before it is divided by their
sum, |error| <= r / (1 - r) (A + |o|), and no more than max |v| + |o|. A weight is off by the rounding of P, and by
exp(e) - 1 where its score is off by e, (D / 32 + 2) units of accumulation of scale sum |q k|; a weight below P's least
normal number is off by half of the least one there is. To these come the sum's own rounding, and that of the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attncc.ir import AttentionSpec, Precision, Shape
from attncc.runtime.draw import Draw
from attncc.runtime.quantise import quantised
from attncc.runtime.reference import (
    environment,
    evaluate,
    has_lse,
    keep_mask,
    normalised,
    reference,
    scores,
    weighed,
    weighted_values,
)

SEEDS = (0,)
SHAPES = {
    "cpu": (Shape(1, 4, 2, 256, 320, 64, 64), Shape(2, 2, 1, 33, 150, 96, 32)),
    "cuda": (Shape(1, 4, 2, 515, 700, 64, 64), Shape(1, 4, 2, 515, 1030, 128, 128), Shape(1, 2, 2, 200, 333, 256, 256)),
}
SINKS = 4  # first keys that every row looks at


@dataclass(frozen=True)
class Units:
    """Relative errors of one step: of weights P in their type, the half of its least number beside its largest
    weight, of products of 8 bits as they are added up, and of such sums among themselves."""

    weights: float
    least: float
    products: float


CPU = Units(2.0**-20, 2.0**-126, 2.0**-21)
TENSOR_CORE = Units(2.0**-4, 2.0**-18, 2.0**-13)  # e4m3 times 2^8; sums keep 14 bits


@dataclass(frozen=True)
class Row:
    """One kind of inputs in one shape: root mean squares and maxima of errors, and the largest part of its bound."""

    inputs: str
    shape: str
    rmse: float
    largest: float
    rmse_dequantised: float
    largest_dequantised: float
    of_bound: float
    rmse_bf16: float
    lse: float  # largest error from the dequantised inputs'

    @property
    def passed(self) -> bool:
        return self.of_bound <= 1


@dataclass(frozen=True)
class Report:
    name: str
    device: str
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(r.passed for r in self.rows)

    def to_json(self) -> dict[str, Any]:
        rows = [{**asdict(r), "passed": r.passed} for r in self.rows]
        return {"name": self.name, "device": self.device, "passed": self.passed, "rows": rows}


def gaussian(shape: tuple[int, ...], draw: Callable[..., Tensor]) -> Tensor:
    return draw(*shape)


def outliers(shape: tuple[int, ...], draw: Callable[..., Tensor]) -> Tensor:
    """N(0, 1) + N(0, 100) at 0.1% of the entries: those of FlashAttention-3."""
    return draw(*shape) + 10 * draw(*shape) * (draw(*shape) > 3.09)


def entries(shape: tuple[int, ...], draw: Callable[..., Tensor]) -> Tensor:
    """0.1% of the entries times 50."""
    return draw(*shape) * torch.where(draw(*shape) > 3.09, 50.0, 1.0)


def channels(shape: tuple[int, ...], draw: Callable[..., Tensor]) -> Tensor:
    """One column times 50."""
    made = draw(*shape)
    made[..., shape[-1] // 3] *= 50
    return made


def inputs(kind: str, shape: Shape, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of one of KINDS in bfloat16, [B, H, Q, D] and so on."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator)
    b, h, h_kv, n, m, d, dv = (shape.batch, shape.heads, shape.kv_heads, shape.q_len, shape.k_len, shape.head_dim,
                               shape.head_dim_v)  # fmt: skip
    sizes = (b, h, n, d), (b, h_kv, m, d), (b, h_kv, m, dv)
    q, k, v = (KINDS[kind](size, draw) for size in sizes)
    if kind == "flat":
        q, k, v = 0.1 * q, k, v + 1
    if kind == "sink":  # scores of 12 beside those of variance 1
        k[:, :, :SINKS] += 12 / d**0.5
        q += 1
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


KINDS: Mapping[str, Callable[..., Tensor]] = {
    "gaussian": gaussian, "outliers": outliers, "entries": entries, "channels": channels, "flat": gaussian,
    "sink": gaussian,
}  # fmt: skip


def check(
    spec: AttentionSpec, device: str = "cpu", *, seeds: Sequence[int] = SEEDS, shapes: Sequence[Shape] | None = None,
    values: Mapping[str, Any] | None = None,
) -> Report:  # fmt: skip
    """Every kind of inputs in every shape, on `device` cpu or cuda, with out and lse of what attncc.compile makes of
    the spec's text. `values` pins scalars and consts. A row within its bound has passed."""
    from attncc import frontend
    from attncc.runtime.eight import EightBit

    values = dict(values or {})
    spec = spec.bind({p.name: int(values.pop(p.name, 4 if p.default is None else p.default)) for p in spec.consts})
    attention = EightBit(frontend.parse(frontend.canonical(spec)), {})
    rows = [
        _row(attention, kind, shape, seed, device, values)
        for shape in (SHAPES[device] if shapes is None else shapes) for seed in seeds for kind in KINDS
    ]  # fmt: skip
    return Report(spec.name, device, tuple(rows))


def _row(attention: Any, kind: str, shape: Shape, seed: int, device: str, values: Mapping[str, Any]) -> Row:
    spec, bare = attention.spec, replace(attention.spec, precision=Precision())
    q, k, v = inputs(kind, shape, seed)
    params = Draw(spec, seed, values).params(shape, "cpu")
    place = lambda x: x.to(device) if isinstance(x, Tensor) else x
    given = {n: place(x) for n, x in params.items()}
    with torch.no_grad():
        out, lse = attention.both(place(q), place(k), place(v), given)
        usual, _ = attention.plain.both(place(q), place(k), place(v), given)
    want, _ = reference(bare, q, k, v, params)
    x = quantised(q, k, v, spec.precision)
    dequantised = x.dequantised()
    near, near_lse = reference(bare, *dequantised, params)
    limit = bound(bare, dequantised, params, near, CPU if device == "cpu" else TENSOR_CORE)
    error = (out.cpu().double() - near).abs()
    beyond = torch.where(error == 0, 0.0, error / limit).nan_to_num(math.inf)
    text = f"B{shape.batch} H{shape.heads}/{shape.kv_heads} Q{shape.q_len} K{shape.k_len} D{shape.head_dim}"
    off = torch.where(lse.cpu() == near_lse, 0.0, lse.cpu() - near_lse).abs() if lse.numel() else lse.new_zeros(1)
    return Row(
        kind, text, _rms(out, want), _most(out, want), _rms(out, near), _most(out, near), float(beyond.max()),
        _rms(usual, want), float(off.max()),
    )  # fmt: skip


def bound(
    spec: AttentionSpec, given: tuple[Tensor, Tensor, Tensor], params: Mapping[str, Any], want: Tensor, units: Units
) -> Tensor:
    """Of |out - want|, [B, H, Q, D_v], for dequantised q, k and v: see the head of this module."""
    q, k, v = (x.double() for x in given)
    env = environment(spec, q, k, params)
    rounding = torch.finfo(torch.bfloat16).eps / 2 * want.abs()
    if not has_lse(spec):
        return 1e-5 * want.abs().max() + rounding
    s = scores(spec, q, k, env)
    keep = keep_mask(spec, env, tuple(s.shape)) & (s != -math.inf)
    p, _ = normalised(spec, torch.where(keep, s, -math.inf), env)
    r = ((1 + units.weights) * torch.exp(torch.where(keep, _off(spec, q, k, env, s, units), 0.0)) - 1).amax(-1, True)
    p = weighed(spec, p, keep, env, params).abs()
    sizes = weighted_values(p, v.abs(), keep)
    spread = torch.where(r < 0.9, r / (1 - r.clamp(max=0.9)), math.inf) * (sizes + want.abs())
    top = v.abs().amax((-1, -2)).repeat_interleave(q.shape[1] // k.shape[1], 1)[..., None, None] + want.abs()
    low = (
        units.least
        * p.amax(-1, True)
        * (weighted_values(keep.double(), v.abs(), keep) + keep.sum(-1, True) * want.abs())
    )
    summed = 6 * units.products * 2 * sizes
    return torch.minimum(spread + low, top) + summed + rounding


def _off(spec: AttentionSpec, q: Tensor, k: Tensor, env: Any, s: Tensor, units: Units) -> Tensor:
    """How far a score can be off, [B, H, Q, K]: by its product's own error, as the spec's scores pass it on, up or
    down, and twice, for the row's greatest beside it."""
    plain = replace(spec, scores=())
    size = (q.shape[-1] / 32 + 2) * units.products * scores(plain, q.abs(), k.abs(), env).abs()
    raw, made = scores(plain, q, k, env), []
    for sign in (1, -1):
        moved = raw + sign * size
        for score in spec.scores:
            moved = evaluate(score, env.having(s=moved)).expand(moved.shape)
        made.append((moved - s).abs().nan_to_num(0.0))
    return 2 * torch.maximum(*made)


def _rms(x: Tensor, want: Tensor) -> float:
    return float((x.cpu().double() - want).square().mean().sqrt())


def _most(x: Tensor, want: Tensor) -> float:
    return float((x.cpu().double() - want).abs().max())
