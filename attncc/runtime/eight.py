"""Attention with 8-bit inputs: a call quantises its floats, and its gradients go through as if it had not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attncc.errors import NotBuilt
from attncc.ir import Precision
from attncc.runtime import arguments, autograd, derivatives, dropout
from attncc.runtime.attention import Attention, dispatch_modes
from attncc.runtime.device import INTERPRETER
from attncc.runtime.quantise import Quantised, quantised, rotation, scale_count

if TYPE_CHECKING:
    from attncc.frontend import Parsed

SCALES = ("_q_scales", "_k_scales", "_v_scales")  # no parameter of a spec begins like that


class EightBit(Attention):
    """Takes and returns floats, or what attncc.quantize gives (`quantised`). On a GPU the kernel multiplies 8 bits; on
    a CPU the spec's program runs on the same numbers, dequantised. Gradients are those of the dequantised inputs: on a
    GPU in bfloat16."""

    @cached_property
    def plain(self) -> Attention:
        """The same attention of floats: of what is dequantised."""
        bare = replace(self.parsed.spec, precision=Precision())
        return Attention(replace(self.parsed, spec=bare), self.consts)

    @cached_property
    def fed(self) -> Fed:
        """The kernel, whose scales are parameters by name."""
        return Fed(self.parsed, self.consts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.parsed.text, self.parsed.filename, self.consts, self.target)

    def quantised(
        self, x: Quantised, *, return_lse: bool = False, dtype: torch.dtype = torch.bfloat16, **given: Any
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """out [B, H, Q, D_v] in `dtype`, and with `return_lse` the lse, of inputs that attncc.quantize gave with the
        settings of this spec; parameters by name. No gradients. TypeError for anything else."""
        if not isinstance(x, Quantised):
            raise TypeError(f"x is what attncc.quantize gives, and is of type {type(x).__name__}")
        arguments.check_flags(return_lse, False, False, False, False, None)
        self._refuse_transforms()
        precision = self.spec.precision
        sides = (x.q, x.q_scales), (x.k, x.k_scales), (x.k, x.v_scales)
        blocks = all(scales.shape[2] == scale_count(of.shape[2], precision) for of, scales in sides)
        if not blocks or x.rotated != precision.rotates or arguments.EIGHT_BIT[x.q.dtype] != precision.inputs:
            raise ValueError(f"these inputs were quantised otherwise than {self.name} says")
        with torch.no_grad():
            out, lse = self.of(x, given)
        return (out.to(dtype), lse) if return_lse else out.to(dtype)

    @torch.compiler.disable
    def both(
        self, q: Tensor, k: Tensor, v: Tensor, given: Mapping[str, Any], validate: bool = False,
        deterministic: bool | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if dispatch_modes():
            raise NotBuilt(f"{self.name}: 8-bit inputs under a dispatch mode are not built yet")
        self._refuse_transforms()
        q, k, v = arguments.autocast(q, k, v, None)
        if self.spec.dropout is not None:
            given = {**given, "seed": dropout.seed_of(given)}
        self._check(q, k, v, given)
        if validate:
            self._validate(q, k, given)
        if not autograd.is_recorded(self.spec, q, k, v, given):
            out, lse = self.of(quantised(q, k, v, self.spec.precision), given)
            return out.to(q.dtype), lse
        given = derivatives.asking(given, deterministic)
        names = tuple(n for n, x in given.items() if isinstance(x, Tensor))
        rest = {n: x for n, x in given.items() if n not in names}
        out, lse = Through.apply(self, rest, names, q, k, v, *(given[n] for n in names))
        return out, lse

    def _refuse_transforms(self) -> None:
        if autograd.transforms_are_active():
            raise NotBuilt(
                f"{self.name}: 8-bit inputs under torch.func (vmap, grad, jvp and the like) are not built yet; "
                "backward() gives gradients"
            )

    def of(self, x: Quantised, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """out and lse: in bfloat16 on a GPU, in float32 on a CPU."""
        if not x.q.is_cuda or not x.k.shape[2]:  # without keys there is nothing that a kernel could load
            return self.plain.run(*x.dequantised(torch.bfloat16 if x.q.is_cuda else torch.float32), given)
        scales = zip(SCALES, (x.q_scales, x.k_scales, x.v_scales), strict=True)
        return self.fed.run(x.q, x.k, x.v, {**given, **dict(scales)})

    def tune(self, *args: Any, **given: Any) -> Any:
        """NotBuilt: kernels of 8-bit inputs take the planner's plan."""
        raise NotBuilt(f"{self.name}: 8-bit inputs are not tuned yet; they take the planner's plan")

    def _check(self, q: Any, k: Any, v: Any, given: Mapping[str, Any]) -> arguments.Sizes:
        self._check_layout()
        if self.target == INTERPRETER:
            raise NotBuilt(f"{self.name}: Triton's interpreter knows no Gluon, in which kernels of 8 bits are")
        arguments.check_qkv(q, k, v, Precision())
        arguments.check_names(self.spec, given)
        return arguments.check_tensors(self._declared, q, k, v, given)


class Fed(Attention):
    """The kernel of 8-bit inputs. Its v is [B, H_kv, D_v, n]: see Quantised."""

    def __init__(self, parsed: Parsed, consts: Mapping[str, int]) -> None:
        super().__init__(parsed, consts)
        self._tensors = {**{name: name.removeprefix("_") for name in SCALES}, **self._tensors}
        self._same_names = False

    def _check(self, q: Any, k: Any, v: Any, given: Mapping[str, Any]) -> arguments.Sizes:
        mine = {n: x for n, x in given.items() if n not in SCALES}
        arguments.check_names(self.spec, mine)
        sizes = arguments.check_tensors(self._declared, q, k, v, mine)
        return replace(sizes, head_dim_v=v.shape[2])

    def _addressable(self, loaded: Any) -> bool:
        return True  # as they were made


class Through(torch.autograd.Function):
    """A call whose gradients are those of its dequantised inputs, and pass through the rounding."""

    @staticmethod
    def forward(
        ctx: Any, attention: EightBit, plain: Mapping[str, Any], names: tuple[str, ...], q: Tensor, k: Tensor,
        v: Tensor, *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x = quantised(q, k, v, attention.spec.precision)
        given = {**derivatives.asked(plain)[0], **dict(zip(names, tensors, strict=True))}
        out, lse = attention.of(x, given)
        ctx.attention, ctx.plain, ctx.names, ctx.rotated, ctx.dtype = attention, plain, names, x.rotated, q.dtype
        parts = (getattr(x, f.name) for f in fields(x) if f.name != "rotated")
        ctx.save_for_backward(out, lse, *parts, *tensors)
        ctx.set_materialize_grads(False)
        return out.to(q.dtype), lse.clone()

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> None:
        raise NotBuilt(f"{ctx.attention.name}: forward-mode derivatives of 8-bit inputs are not built yet")

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        derivatives.refuse_several((d_out, d_lse), "gradients of 8-bit inputs by is_grads_batched")
        if torch.is_grad_enabled():  # create_graph: what would be lost is the way back to the floats
            raise NotBuilt(f"{ctx.attention.name}: {autograd.ONCE.format('gradients of 8-bit inputs')}")
        wanted = ctx.needs_input_grad[6:]
        if d_out is None and d_lse is None:
            return (None,) * (6 + len(wanted))
        out, lse, q8, k8, v8, *rest = ctx.saved_tensors
        (qs, ks, vs), tensors = rest[:3], rest[3:]
        x = Quantised(q8, k8, v8, qs, ks, vs, ctx.rotated)
        q, k, v = x.dequantised(torch.bfloat16 if out.is_cuda else torch.float32)
        attention, (plain, deterministic) = ctx.attention.plain, derivatives.asked(ctx.plain)
        given = {**plain, **dict(zip(ctx.names, tensors, strict=True))}
        learned = [n for n, want in zip(ctx.names, wanted, strict=True) if want]
        ready = attention.ready(q, k, v, given)
        call = (q, k, v, out, lse, d_out, d_lse)
        with torch.no_grad():
            found = derivatives.compute(attention, ready, given, learned, call, deterministic)
        d_q, d_k, d_v = (_turned_back(x, ctx.rotated and i < 2).to(ctx.dtype) for i, x in enumerate(found[:3]))
        more = dict(zip(learned, found[3:], strict=True))
        return None, None, None, d_q, d_k, d_v, *(more.get(n) for n in ctx.names)


def _turned_back(x: Tensor, rotated: bool) -> Tensor:
    return (x.float() @ rotation(x.shape[-1], x.device).mT) if rotated else x


def _restored(text: str, filename: str, consts: Mapping[str, int], target: str | None) -> Attention:
    """What a pickle leads to."""
    from attncc import frontend

    return EightBit(frontend.parse(text, filename), consts, target)
