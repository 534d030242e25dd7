"""Partial results over disjoint sets of keys, joined: what split keys, pages and shards of a sequence end with."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor


def merge(
    outs: Sequence[Tensor], lses: Sequence[Tensor], sink: Tensor | float | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [B, H, Q, D_v] and lse [B, H, Q] of the whole from those of its parts, in the parts' types.

    `outs` and `lses` have one [B, H, Q, D_v] and one [B, H, Q] for each part; a row that saw nothing in a part has the
    lse -inf there, and its out does not count. Parts are made without a sink: `sink` adds it once, a number, a tensor
    [H], or one that broadcasts to [B, H, Q]. With m the greatest lse, l = sum exp(lse_i - m) + exp(sink - m):
    lse = m + log(l), out = sum exp(lse_i - lse) out_i (Dao et al. 2023, "Flash-Decoding"). Sums are float32, float64
    for float64 parts. Differentiable by all arguments, any number of times. A row that saw nothing anywhere gives 0,
    lse -inf or the sink, and no gradient but the sink's.

    TypeError or ValueError name the argument that is wrong. Results of a normaliser without an lse (sigmoid, relu,
    none) are not divided by a sum: theirs are joined by adding them up.
    """
    _check_lists(outs=outs, lses=lses)
    _check(outs, lses)
    dtype = torch.float64 if outs[0].dtype == torch.float64 else torch.float32
    parts = [lse.to(dtype) for lse in lses]
    logits = parts if sink is None else [*parts, _sink(sink, parts[0])]
    top = torch.stack([x.detach() for x in logits]).amax(0)
    top = torch.where(top == -torch.inf, 0.0, top)
    shares = [torch.exp(torch.where(x == torch.inf, 0.0, x - top)) for x in logits]
    total = torch.stack(shares).sum(0)
    some = total != 0  # a NaN is passed on
    whole = torch.where(some, total, 1.0)
    out = sum(_part(x, share / whole) for x, share in zip(outs, shares, strict=False))
    lse = torch.where(some, top + torch.log(whole), -torch.inf)
    assert isinstance(out, Tensor)
    return out.to(outs[0].dtype), lse.to(lses[0].dtype)


def _check_lists(**given: object) -> None:
    for name, parts in given.items():
        if isinstance(parts, Tensor) or not isinstance(parts, Sequence):
            what = type(parts).__name__
            raise TypeError(f"{name} must be a list of tensors, one for each part, and is of type {what}")


def _part(out: Tensor, share: Tensor) -> Tensor:
    """A part's contribution; nothing where it saw nothing, whatever stands there."""
    kept = torch.where(share[..., None] == 0, 0.0, out.to(share.dtype))
    return kept * share[..., None]


def _sink(sink: Tensor | float, like: Tensor) -> Tensor:
    if isinstance(sink, Real) and not isinstance(sink, bool):
        return torch.full_like(like, float(sink))
    if not isinstance(sink, Tensor):
        raise TypeError(f"sink must be a number or a tensor, and is of type {type(sink).__name__}")
    heads = sink.view(-1, 1) if sink.dim() == 1 else sink
    try:
        return heads.to(like).expand(like.shape)
    except RuntimeError:
        shape, wanted = list(sink.shape), list(like.shape)
        raise ValueError(
            f"sink must be [H] or broadcast to [B, H, Q], which is {wanted} here, and has shape {shape}"
        ) from None


def _check(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    if len(outs) != len(lses) or not outs:
        raise ValueError(f"merge takes an lse for each out, at least one: there are {len(outs)} and {len(lses)}")
    for name, given, dims in (("outs", outs, 4), ("lses", lses, 3)):
        first = given[0]
        for i, x in enumerate(given):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                what = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
                raise TypeError(f"{name}[{i}] must be a tensor of floats, and is {what}")
            if x.dim() != dims:
                form = "[B, H, Q, D_v]" if dims == 4 else "[B, H, Q]"
                raise ValueError(f"{name}[{i}] must be {form}, and has shape {list(x.shape)}")
            if (x.shape, x.dtype, x.device) != (first.shape, first.dtype, first.device):
                one, other = (f"{list(y.shape)} of {y.dtype} on {y.device}" for y in (first, x))
                raise ValueError(f"{name}[{i}] is {other}, and {name}[0] is {one}: parts are alike")
    if outs[0].shape[:3] != lses[0].shape or outs[0].device != lses[0].device:
        raise ValueError(
            f"outs are {list(outs[0].shape)} on {outs[0].device}, lses {list(lses[0].shape)} on {lses[0].device}"
        )
