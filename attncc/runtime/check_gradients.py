"""Gradients of one random call against float64: part of `check`.

Bounds: float32 within 1e-5 of the right gradient's l1, 16-bit at most twice the error of an unfused computation in the
same type. A parameter's gradient may be a sum that cancels: its rounding is allowed for by the l1 of what is summed.
Rows that see nothing have a gradient of exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attncc.ir import AttentionSpec
from attncc.runtime.gradients import differences, gradients, learned
from attncc.runtime.poison import poisoned
from attncc.runtime.reference import environment, has_lse, keep_mask
from attncc.runtime.rows import columns

if TYPE_CHECKING:
    from attncc.runtime.check import Run

RELATIVE = {torch.float32: 1e-5, torch.float64: 1e-12}
STEP_ERROR = 1e-5  # of a central difference in float64, as a part of the gradient's norm
Errors = dict[str, tuple[float, float]]
Once = Callable[[str, Callable[[], Any]], Any]  # (what, how to make it): for calls of one seed, it may be kept


def gradient_errors(
    spec: AttentionSpec, run: Run, call: tuple[Tensor, Tensor, Tensor], params: Mapping[str, Any], seed: int,
    by_differences: bool = False, once: Once = lambda name, make: make(),
) -> tuple[Errors, list[str]]:  # fmt: skip
    """Error and bound of each gradient by its name, sums of absolute differences; and faults in words.

    `by_differences` adds entries that compare the derivative along a random direction with central differences.
    """
    q, k, v = (x.detach().requires_grad_() for x in call)
    mine = {n: _wanted(x, q.device) for n, x in learned(spec, params).items()}
    inputs = {"q": q, "k": k, "v": v, **mine}
    g = torch.Generator().manual_seed(seed)
    with poisoned():
        out, lse = run(q, k, v, **{**params, **mine})
        d_out, d_lse = (torch.randn(x.shape, generator=g).to(x) for x in (out, lse))
        if "max" in spec.reports:  # without a gradient
            d_lse[..., columns(spec, has_lse(spec)).index("max")] = 0.0
        found = torch.autograd.grad(
            [out, lse], list(inputs.values()), [d_out, d_lse], materialize_grads=True, allow_unused=True
        )
    have = {n: x.detach() for n, x in zip(inputs, found, strict=True)}
    want = once("gradients", lambda: gradients(spec, q, k, v, params, d_out, d_lse))
    errors = {n: (difference(have[n], want.values[n]), RELATIVE.get(q.dtype, 0.0) * l1(want.values[n])) for n in have}
    if q.dtype not in RELATIVE or any(error > bound for error, bound in errors.values()):
        kind = None if q.dtype == torch.float64 else q.dtype
        unfused = once("unfused gradients", lambda: gradients(spec, q, k, v, params, d_out, d_lse, kind))
        for n, (error, bound) in errors.items():
            errors[n] = (
                error,
                max(bound, allowed(have[n], want.values[n], unfused.values[n], want.summed.get(n, 0.0), q)),
            )
    faults = [f"the gradient of {n} is beyond its bound" for n, (error, bound) in errors.items() if not error <= bound]
    faults += [f"the gradient of {n} is {list(x.shape)} {x.dtype}" for n, x in have.items()
               if x.shape != inputs[n].shape or x.dtype != inputs[n].dtype]  # fmt: skip
    empty = ~keep_mask(spec, environment(spec, q, k, params), (*q.shape[:3], k.shape[2])).any(-1)
    if have["q"][empty].any():
        faults.append("a row that sees nothing has a gradient")
    if by_differences:
        along = _along(spec, (q, k, v), params, d_out, d_lse, have, g)
        errors |= along
        faults += [f"{n} disagree" for n, (error, bound) in along.items() if not error <= bound]
    return errors, faults


def _wanted(x: Any, device: torch.device) -> Tensor:
    """A parameter that asks for its gradient; a float as a 0-d tensor."""
    made = x.detach().clone() if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64, device=device)
    return made.requires_grad_()


def allowed(have: Tensor, want: Tensor, unfused: Tensor, summed: float, q: Tensor) -> float:
    """Twice the unfused error, the rounding of the answer itself, and that of a sum that cancels."""
    own = torch.finfo(have.dtype).eps / 2 * l1(want)
    parts = 4 * torch.finfo(q.dtype).eps * summed
    return 2 * difference(unfused, want) + own + parts


def _along(
    spec: AttentionSpec, call: tuple[Tensor, Tensor, Tensor], params: Mapping[str, Any], d_out: Tensor, d_lse: Tensor,
    have: Mapping[str, Tensor], g: torch.Generator,
) -> Errors:  # fmt: skip
    directions = {n: torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.device) for n, x in have.items()}
    q, k, v = (x.detach() for x in call)
    moved = differences(spec, q, k, v, params, d_out, d_lse, directions)
    errors: Errors = {}
    for n, x in have.items():
        part = max(STEP_ERROR, 4 * torch.finfo(x.dtype).eps, 4 * torch.finfo(call[0].dtype).eps)
        error = abs(float((x.double() * directions[n]).sum()) - moved[n])
        errors[f"differences by {n}"] = error, part * (float(x.double().norm()) + 1)
    return errors


def l1(x: Tensor) -> float:
    return float(x[torch.isfinite(x)].abs().sum())


def difference(x: Tensor, want: Tensor) -> float:
    x = x.to(torch.float64)
    same = (x == want) | (x.isnan() & want.isnan())
    return float(torch.where(same, 0.0, (x - want).abs().nan_to_num(torch.inf, torch.inf)).sum())
