"""Tuning of a spec for a shape, with tensors that are drawn at random where nobody gave them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from attncc.ir import AttentionSpec, Shape
from attncc.pipeline import Number, Planned
from attncc.runtime.attention import Attention
from attncc.runtime.draw import ELEMENTS, Draw
from attncc.runtime.precompile import Workers
from attncc.runtime.tune import Tell, Tuning, tune


def drawn(spec: AttentionSpec, values: Mapping[str, Number], tensors: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the parameters that have neither a value nor a default, which a search would draw."""
    return tuple(p.name for p in spec.params if not p.const and p.name not in tensors and p.name not in values)


def tune_drawn(
    planned: Planned, tensors: Mapping[str, np.ndarray[Any, Any]], passes: Sequence[str], cold: bool, budget: float,
    tell: Tell | None = None, workers: Workers | None = None, device: str = "cuda",
) -> Tuning:  # fmt: skip
    """Tune `planned`'s spec for its shape and values on this machine's GPU. Errors are those of Attention.tune."""
    shape: Shape = planned.shape
    attention = Attention(planned.parsed, planned.consts)
    draw = Draw(planned.spec, 0, planned.values)
    q, k, v = draw.inputs(shape, shape.dtype, "contiguous", device)
    params = draw.params(shape, device)
    params |= {n: x for n, x in planned.values.items() if n not in planned.spec.free_axes}
    for name, array in tensors.items():
        kind = ELEMENTS[planned.spec.param(name).element or ""]
        params[name] = torch.from_numpy(np.ascontiguousarray(array)).to(device, kind)
    return tune(attention, q, k, v, params, passes=passes, cold=cold, budget=budget, tell=tell, workers=workers)
