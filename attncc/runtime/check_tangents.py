"""Tangents of one random call against float64: part of `check`, for forward-mode derivatives.

Bounds as for gradients: float32 within 1e-5 of the right tangent's l1, 16-bit at most twice the error of an unfused
computation in the same type; where a sum cancels, its rounding is allowed for. Rows that see nothing have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attncc.ir import AttentionSpec
from attncc.runtime.check_gradients import RELATIVE, Errors, allowed, difference, l1
from attncc.runtime.gradients import learned, tangents
from attncc.runtime.poison import poisoned
from attncc.runtime.reference import environment, keep_mask

if TYPE_CHECKING:
    from attncc.runtime.check import Run


def tangent_errors(
    spec: AttentionSpec, run: Run, call: tuple[Tensor, Tensor, Tensor], params: Mapping[str, Any], seed: int
) -> tuple[Errors, list[str]]:
    """Error and bound of the tangents of out and lse along one random direction of q, k, v and every parameter that
    has a gradient, sums of absolute differences; and faults in words."""
    q, k, v = (x.contiguous() if 0 in x.stride() else x for x in call)  # expanded, it can have no tangent
    moving = {"q": q, "k": k, "v": v, **{n: _tensor(x, q) for n, x in learned(spec, params).items()}}
    g = torch.Generator().manual_seed(seed)
    directions = {n: torch.randn(x.shape, generator=g).to(x) for n, x in moving.items()}
    with poisoned(), forward_ad.dual_level():
        duals = {n: forward_ad.make_dual(x, directions[n]) for n, x in moving.items()}
        results = run(duals.pop("q"), duals.pop("k"), duals.pop("v"), **{**params, **duals})
        have = dict(zip(("out", "lse"), (forward_ad.unpack_dual(x).tangent for x in results), strict=True))
    want = tangents(spec, q, k, v, params, directions)
    rounded = None if q.dtype == torch.float64 else q.dtype
    unfused = tangents(spec, q, k, v, params, directions, rounded)
    errors: Errors = {}
    faults = []
    for n in want.values:
        x = have[n]
        result = x if x is not None else torch.full_like(want.values[n], torch.nan)
        right, narrow = want.values[n], RELATIVE.get(q.dtype, 0.0)
        bound = allowed(result, right, unfused.values[n], want.summed[n], q)
        errors[f"tangent of {n}"] = error, bound = difference(result, right), max(narrow * l1(right), bound)
        if not error <= bound:
            faults.append(f"the tangent of {n} is beyond its bound")
    empty = ~keep_mask(spec, environment(spec, q, k, params), (*q.shape[:3], k.shape[2])).any(-1)
    if have["out"] is not None and have["out"][empty].any():
        faults.append("a row that sees nothing has a tangent")
    return errors, faults


def _tensor(x: Any, q: Tensor) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64, device=q.device)
