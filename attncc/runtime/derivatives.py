"""A call, its gradients and its tangents as functions of tensors alone, in the order in which PyTorch passes them on.

Each says where the batch stands in its tensors and its results, so that torch.vmap can make one call of many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from attncc.errors import NotBuilt
from attncc.runtime.rows import differentiable

if TYPE_CHECKING:
    from attncc.ir import Param
    from attncc.runtime.attention import Attention
    from attncc.runtime.ready import Ready

Axes = tuple["int | None", ...]
ASKED = "deterministic"  # beside a call's parameters, where it was asked for; no parameter has that name


def asking(given: Mapping[str, Any], deterministic: bool | None) -> Mapping[str, Any]:
    """The parameters of a call, and whether its gradients are to have equal bits, where the call says so."""
    return given if deterministic is None else {**given, ASKED: int(deterministic)}


def asked(given: Mapping[str, Any]) -> tuple[dict[str, Any], bool | None]:
    """The parameters alone, and what was asked for."""
    found = given.get(ASKED)
    return {n: x for n, x in given.items() if n != ASKED}, None if found is None else bool(found)


@dataclass(frozen=True)
class Call:
    """out and lse of q, k, v and the parameters called `names`; `plain` are those that are no tensors."""

    attention: Attention
    plain: Mapping[str, Any]
    names: tuple[str, ...]
    what: ClassVar[str] = "results"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *params: Tensor) -> tuple[Tensor, ...]:
        return self.attention.run(q, k, v, self.given(params))

    def given(self, params: Sequence[Any]) -> dict[str, Any]:
        return {**asked(self.plain)[0], **dict(zip(self.names, params, strict=True))}

    @property
    def params(self) -> tuple[Param, ...]:
        return tuple(self.attention.spec.param(n) for n in self.names)

    @property
    def of_inputs(self) -> Axes:
        """The axis of the batch in q, k, v and each parameter, None where a parameter has none."""
        return (0, 0, 0, *(p.axes.index("b") if "b" in p.axes else None for p in self.params))

    @property
    def of_results(self) -> Axes:
        return (0, 0 if self.attention.statistic else None)

    def axes(self) -> tuple[Axes, Axes]:
        """Of what goes in and of what comes out."""
        return self.of_inputs, self.of_results

    def labels(self) -> tuple[str, ...]:
        """What a message calls each of what goes in."""
        return ("q", "k", "v", *self.names)


@dataclass(frozen=True)
class Gradients(Call):
    """d_q, d_k, d_v and those of parameters, only those whose place among the inputs is `wanted`."""

    wanted: tuple[int, ...]
    what: ClassVar[str] = "gradients"

    def __call__(self, d_out: Tensor | None, d_lse: Tensor | None, *saved: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *params, out, lse = saved
        given, inputs = self.given(params), ("q", "k", "v", *self.names)
        learned = [inputs[i] for i in self.wanted if i >= 3]
        ready = self.attention.ready(q, k, v, given)
        call = (q, k, v, out, lse, d_out, d_lse)
        found = compute(self.attention, ready, given, learned, call, asked(self.plain)[1])
        every = dict(zip(("q", "k", "v", *learned), found, strict=True))
        return tuple(every[inputs[i]] for i in self.wanted)

    def axes(self) -> tuple[Axes, Axes]:
        return (*self.of_results, *self.of_inputs, *self.of_results), tuple(self.of_inputs[i] for i in self.wanted)

    def labels(self) -> tuple[str, ...]:
        return ("d_out", "d_lse", "q", "k", "v", *self.names, "out", "lse")


@dataclass(frozen=True)
class Tangents(Call):
    """Those of out and lse; the tensors are the inputs, out, lse and the tangents of the inputs, None for zero."""

    what: ClassVar[str] = "tangents"

    def __call__(self, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        count = 3 + len(self.names)
        q, k, v, *params = tensors[:count]
        out, lse, *moves = tensors[count:]
        assert q is not None and k is not None and v is not None
        given = self.given(params)
        refuse_several(moves, "tangents by forward-mode jacobian(vectorize=True)", "jvp")
        of_params = {n: x for n, x in zip(self.names, moves[3:], strict=True) if x is not None}
        ready = self.attention.ready(q, k, v, given)
        return self.attention.tangents(ready, (q, k, v, out, lse, *moves[:3]), given, of_params)

    def axes(self) -> tuple[Axes, Axes]:
        return (*self.of_inputs, *self.of_results, *self.of_inputs), self.of_results

    def labels(self) -> tuple[str, ...]:
        inputs = ("q", "k", "v", *self.names)
        return (*inputs, "out", "lse", *(f"the tangent of {n}" for n in inputs))


def refuse_several(given: Sequence[Tensor | None], what: str, instead: str = "") -> None:
    """NotBuilt where PyTorch passes many incoming gradients or tangents as one, of which no program can tell any."""
    if any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in given):
        hint = f"; torch.func.vmap of torch.func.{instead} gives them" if instead else ""
        raise NotBuilt(f"attention has no {what}{hint}")


def compute(
    attention: Attention, ready: Ready, given: Mapping[str, Any], learned: Sequence[str],
    call: tuple[Tensor | None, ...], deterministic: bool | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """d_q, d_k, d_v and the gradients of the parameters called `learned`, in their types and on their devices.

    `call` is (q, k, v, out, lse, d_out, d_lse); one of the last two may be None, and they may have any float type.
    """
    q, k, v, out, lse, d_out, d_lse = call
    refuse_several((d_out, d_lse), "gradients by is_grads_batched", "vjp")
    assert out is not None
    d_lse = d_lse if attention.has_lse else None
    lse, d_lse = (differentiable(attention, x) for x in (lse, d_lse))
    d_out = out.new_zeros(()).expand(out.shape) if d_out is None else d_out.to(out.dtype)
    d_q, d_k, d_v, more = attention.gradients(ready, (q, k, v, out, lse, d_out, d_lse), given, deterministic)
    return d_q, d_k, d_v, *(more[n].to(given[n]) for n in learned)
