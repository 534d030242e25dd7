"""Derivatives of a call, reverse and forward mode: the generated files for them as PyTorch's autograd wants it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attncc.errors import NotBuilt
from attncc.pipeline import refuse_kept
from attncc.runtime.derivatives import Call, Gradients, Tangents, asking
from attncc.runtime.vmap import vmapped

if TYPE_CHECKING:
    from attncc.ir import AttentionSpec
    from attncc.runtime.attention import Attention

transforms_are_active = torch._C._are_functorch_transforms_active
ONCE = "attention is differentiable once: the derivative of its {} is not built yet"


def _computed(call: Call, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """What a generated program gives. Where torch.compile has left a graph, it would trace the program in pieces."""
    with torch.no_grad():
        if "torch._dynamo" not in sys.modules:
            return call(*tensors)
        return _untraced()(call, *tensors)


@cache
def _untraced() -> Callable[..., tuple[Tensor, ...]]:
    """What calls and is left alone by torch.compile: one, made when it is first wanted."""
    made: Callable[..., tuple[Tensor, ...]] = torch._dynamo.disable(lambda call, *tensors: call(*tensors))
    return made


class Once(torch.autograd.Function):
    """A derivative as a call of its own, whose own derivatives say that there are none."""

    @staticmethod
    def forward(call: Call, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return _computed(call, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.what = inputs[0].what

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise NotBuilt(ONCE.format(ctx.what))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> None:
        raise NotBuilt(ONCE.format(ctx.what))

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], call: Call, *tensors: Tensor | None) -> Any:
        return vmapped(Once.apply, call, info.batch_size, dims[1:], tensors)


def once(call: Call, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """A derivative; as a call of its own, which takes longer, only where its derivatives could be asked for."""
    if torch.is_grad_enabled() or transforms_are_active() or forward_ad._current_level >= 0:
        made: tuple[Tensor, ...] = Once.apply(call, *tensors)
        return made
    return _computed(call, tensors)


class Differentiable(torch.autograd.Function):
    """A call of an Attention. Differentiable once, in reverse or forward mode: a derivative of its derivative raises.
    Incoming gradients and tangents may have any strides, gradients any float type."""

    @staticmethod
    def forward(call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _computed(call, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_out is None and d_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        call, needed = ctx.call, ctx.needs_input_grad[1:]
        wanted = tuple(i for i, want in enumerate(needed) if want)
        gradients = Gradients(call.attention, call.plain, call.names, wanted)
        found = dict(zip(wanted, once(gradients, d_out, d_lse, *ctx.saved_tensors), strict=True))
        return (None, *map(found.get, range(len(needed))))

    @staticmethod
    def jvp(ctx: Any, *moves: Tensor | None) -> tuple[Tensor, ...]:
        call, saved = ctx.call, ctx.saved_tensors
        moving = [n for n, x in zip(call.names, moves[4:], strict=True) if x is not None]
        refuse_ungiven(call.attention.spec, moving, "tangent")
        tangents = Tangents(call.attention, call.plain, call.names)
        return once(tangents, *saved, *moves[1:])

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], call: Call, *tensors: Tensor) -> Any:
        return vmapped(Differentiable.apply, call, info.batch_size, dims[1:], tensors)


def record(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, given: Mapping[str, Any], deterministic: bool | None = None
) -> tuple[Tensor, Tensor]:
    """out and lse of a call, with the way to its derivatives."""
    refuse_kept(attention.spec)
    given = asking(given, deterministic)
    names = tuple(n for n, x in given.items() if isinstance(x, Tensor))
    plain = {n: x for n, x in given.items() if n not in names}
    out, lse = Differentiable.apply(Call(attention, plain, names), q, k, v, *(given[n] for n in names))
    return out, lse


def refuse_ungiven(spec: AttentionSpec, learned: Sequence[str], what: str = "gradient") -> None:
    """ValueError for one of these parameters, which have or require a `what`, that the spec gives none."""
    for name in learned:
        p = spec.param(name)
        if not p.grad:
            kind = f"{p.element}[{', '.join(map(str, p.axes))}]" if p.is_tensor else p.type
            declare = f"declare `{name}: {kind} grad`, or " if p.type == "float" else ""  # no other has one
            verb = "requires a gradient" if what == "gradient" else f"has a {what}"
            raise ValueError(f"{name} {verb}, and {spec.name} gives it none: {declare}pass {name}.detach()")


def refuse(spec: AttentionSpec, q: Tensor, given: Mapping[str, Any]) -> None:
    """Whatever derivative of a call is asked for and has no way."""
    if torch.is_grad_enabled():
        learned = requiring(given)
        refuse_ungiven(spec, learned)
        if learned or q.requires_grad:
            refuse_kept(spec)


def requiring(given: Mapping[str, Any]) -> list[str]:
    """Names of the parameters that require a gradient."""
    return [n for n, x in given.items() if isinstance(x, Tensor) and x.requires_grad]


def is_recorded(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, given: Mapping[str, Any]) -> bool:
    """Whether a derivative of the call is asked for, or a transform of functions sees it (torch.func.vmap).

    ValueError names a parameter that requires a gradient, and that the spec gives none.
    """
    if torch.is_grad_enabled():
        learned = requiring(given)
        refuse_ungiven(spec, learned)
        if learned or q.requires_grad or k.requires_grad or v.requires_grad:
            return True
    return bool(forward_ad._current_level >= 0 or transforms_are_active())
