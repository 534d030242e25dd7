"""Reverse-mode derivatives of a call: the generated backward pass as PyTorch's autograd wants it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from attncc.ir import AttentionSpec
    from attncc.runtime.attention import Attention, Ready

is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


class Gradients(torch.autograd.Function):
    """The backward pass as a call of its own, with a way further back that says that there is none."""

    @staticmethod
    def forward(compute: Callable[..., tuple[Tensor, ...]], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return compute(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise NotImplementedError("attention is differentiable once: the derivative of its gradients is not built yet")


class Differentiable(torch.autograd.Function):
    """A call of an Attention. Differentiable once: a derivative of its derivative raises, as do forward-mode
    derivatives and vmap. Incoming gradients may have any strides and any float type."""

    @staticmethod
    def forward(
        attention: Attention, ready: Ready, plain: Mapping[str, Any], names: tuple[str, ...], *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`tensors` are q, k, v and the parameters called `names`; `plain` are the other parameters."""
        q, k, v, *params = tensors
        with torch.no_grad():
            out, lse = attention.both(q, k, v, {**plain, **dict(zip(names, params, strict=True))})
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.attention, ctx.ready, ctx.plain, ctx.names, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_out is None and d_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        wanted = [i for i, want in enumerate(ctx.needs_input_grad[4:]) if want]
        compute = partial(_gradients, ctx.attention, ctx.ready, ctx.plain, ctx.names, wanted)
        found = dict(zip(wanted, Gradients.apply(compute, d_out, d_lse, *ctx.saved_tensors), strict=True))
        return (None, None, None, None, *map(found.get, range(3 + len(ctx.names))))


def _gradients(
    attention: Attention, ready: Ready, plain: Mapping[str, Any], names: tuple[str, ...], wanted: list[int],
    d_out: Tensor | None, d_lse: Tensor | None, *saved: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Those of q, k, v and the parameters called `names` that are wanted, in their types and on their devices."""
    *tensors, out, lse = saved
    given = {**plain, **dict(zip(names, tensors[3:], strict=True))}
    inputs = ("q", "k", "v", *names)
    learned = [inputs[i] for i in wanted if i >= 3]
    found = compute(attention, ready, given, learned, (*tensors[:3], out, lse, d_out, d_lse))
    every = dict(zip(("q", "k", "v", *learned), found, strict=True))
    return tuple(every[inputs[i]] for i in wanted)


def compute(
    attention: Attention, ready: Ready, given: Mapping[str, Any], learned: Sequence[str],
    call: tuple[Tensor | None, ...],
) -> tuple[Tensor, ...]:  # fmt: skip
    """d_q, d_k, d_v and the gradients of the parameters called `learned`, in their types and on their devices.

    `call` is (q, k, v, out, lse, d_out, d_lse); one of the last two may be None, and they may have any float type.
    """
    q, k, v, out, lse, d_out, d_lse = call
    assert out is not None
    d_lse = d_lse if attention.has_lse else None
    d_out = out.new_zeros(()).expand(out.shape) if d_out is None else d_out.to(out.dtype)
    d_q, d_k, d_v, more = attention.gradients(ready, (q, k, v, out, lse, d_out, d_lse), given)
    return d_q, d_k, d_v, *(more[n].to(given[n]) for n in learned)


def record(
    attention: Attention, ready: Ready, q: Tensor, k: Tensor, v: Tensor, given: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """out and lse of a call, with the way back."""
    names = tuple(n for n, x in given.items() if isinstance(x, Tensor))
    plain = {n: x for n, x in given.items() if n not in names}
    out, lse = Differentiable.apply(attention, ready, plain, names, q, k, v, *(given[n] for n in names))
    return out, lse


def refuse_ungiven(spec: AttentionSpec, given: Mapping[str, Any]) -> bool:
    """Whether a parameter requires a gradient. ValueError names one that the spec gives none."""
    learned = [n for n, x in given.items() if isinstance(x, Tensor) and x.requires_grad]
    for name in learned:
        p = spec.param(name)
        if not p.grad:
            what = f"{p.element}[{', '.join(map(str, p.axes))}]" if p.is_tensor else p.type
            raise ValueError(
                f"{name} requires a gradient, and {spec.name} gives it none: declare `{name}: {what} grad`, "
                f"or pass {name}.detach()"
            )
    return bool(learned)


def is_recorded(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, given: Mapping[str, Any]) -> bool:
    """Whether a derivative of the call is asked for. ValueError names a parameter that the spec gives no gradient."""
    learned = refuse_ungiven(spec, given)
    if learned or q.requires_grad or k.requires_grad or v.requires_grad or forward_ad._current_level >= 0:
        return True
    return is_wrapped(q) or is_wrapped(k) or is_wrapped(v)
