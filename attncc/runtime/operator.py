"""A call as a registered operator, for graphs: torch.compile and torch.export see one node with known shapes.

The operator is a function of its arguments alone, the spec's canonical text among them, so that an exported program
runs in a process that has imported torch and attncc, or attncc.ops, and nothing else.
"""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch._library.autograd import make_autograd_impl
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from attncc.errors import NotBuilt

if TYPE_CHECKING:
    from attncc.ir import AttentionSpec
    from attncc.runtime.attention import Attention

KNOWN_SPECS = 1024
CALL = "str spec, str target, str names, Tensor q, Tensor k, Tensor v, Tensor[] tensors, SymInt[] ints, float[] floats"
Numbers = Sequence[Any]


def call(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, given: Mapping[str, Any], text: str = ""
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse as one node of a graph; parameters by name, tensors and numbers. `text` is the spec's, or one that
    asks for more of each row."""
    given = {
        n: torch.as_tensor(x, device="cpu") if isinstance(x, (np.ndarray, np.floating)) else x for n, x in given.items()
    }
    tensors = {n: x for n, x in given.items() if isinstance(x, Tensor)}
    real = (float, numbers.Real, torch.SymFloat)
    floats = {n: x for n, x in given.items() if isinstance(x, real) and not isinstance(x, numbers.Integral)}
    ints = {n: x for n, x in given.items() if n not in tensors and n not in floats}
    names = ",".join([*tensors, *ints, *floats])
    return torch.ops.attncc.attention(
        text or attention.text, attention.target or "", names, q, k, v, [*tensors.values()], [*ints.values()],
        [*floats.values()],
    )  # fmt: skip


def packed(
    attention: Attention, tensors: tuple[Tensor, Tensor, Tensor], given: Mapping[str, Any], return_lse: bool,
    validate: bool, deterministic: bool | None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """A call of packed sequences in a graph, which has the text of what it calls, and cannot make an Attention."""
    from attncc.runtime import arguments, rows

    arguments.check_flags(return_lse, False, False, False, validate, deterministic)
    if return_lse and not attention.has_lse:
        rows.refuse_lse(attention)
    spec = attention.spec
    asked = f"  rows {spec.layout.rows}" if spec.reports else ""
    text = attention.text if spec.ragged else f"{attention.bare}\nlayout {{ q ragged  kv ragged{asked} }}\n"
    tensors = arguments.autocast(*tensors, spec.precision.inputs)
    out, lse = attention.in_graph(*tensors, given, validate, deterministic, text)
    return (out, lse) if return_lse else out


@lru_cache(KNOWN_SPECS)
def attention_of(text: str, target: str) -> Attention:
    from attncc import frontend
    from attncc.runtime.attention import Attention

    found = Attention(frontend.parse(text), {}, target or None)
    return found.packed if found.spec.ragged else found


@torch.library.custom_op("attncc::attention", mutates_args=(), schema=f"({CALL}) -> (Tensor out, Tensor lse)")
def _attention(
    spec: str, target: str, names: str, q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], ints: Numbers,
    floats: Numbers,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from attncc.runtime.derivatives import asked

    with torch.no_grad():
        return attention_of(spec, target).run(q, k, v, asked(_given(names, tensors, ints, floats))[0])


@_attention.register_fake
def _shapes(
    spec: str, target: str, names: str, q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], ints: Numbers,
    floats: Numbers,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from attncc.runtime.rows import columns

    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows: tuple[Any, ...] = (0,)
    attention = attention_of(spec, target)
    if attention.statistic:  # [B, H, Q], or [H, total_q] of packed sequences
        rows = tuple(q.shape[:-1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    if attention.spec.reports:
        rows = (*rows, len(columns(attention.spec, attention.has_statistic)))
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(rows, dtype=dtype)


@torch.library.custom_op(
    "attncc::attention_backward", mutates_args=(),
    schema=f"({CALL}, Tensor out, Tensor lse, Tensor? d_out, Tensor? d_lse) -> Tensor[]",
)  # fmt: skip
def _backward(
    spec: str, target: str, names: str, q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], ints: Numbers,
    floats: Numbers, out: Tensor, lse: Tensor, d_out: Tensor | None, d_lse: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """d_q, d_k, d_v and those of the tensors that the spec marks `grad`, in their order."""
    from attncc.runtime.derivatives import asked, compute

    attention = attention_of(spec, target)
    given, deterministic = asked(_given(names, tensors, ints, floats))
    learned = _learned(attention.spec, names, tensors)
    with torch.no_grad():
        call, ready = (q, k, v, out, lse, d_out, d_lse), attention.ready(q, k, v, given)
        found = compute(attention, ready, given, learned, call, deterministic)
    return [x.contiguous() for x in found]


@_backward.register_fake
def _backward_shapes(
    spec: str, target: str, names: str, q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], ints: Numbers,
    floats: Numbers, out: Tensor, lse: Tensor, d_out: Tensor | None, d_lse: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    given = _given(names, tensors, ints, floats)
    learned = _learned(attention_of(spec, target).spec, names, tensors)
    return [x.new_empty(x.shape) for x in (q, k, v, *(given[n] for n in learned))]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.spec, ctx.target, ctx.names, q, k, v, tensors, ctx.ints, ctx.floats = inputs
    ctx.save_for_backward(q, k, v, *output, *tensors)
    ctx.set_materialize_grads(False)


def _pass_back(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    if d_out is None and d_lse is None:
        return (None,) * 9
    learned = _learned(attention_of(ctx.spec, ctx.target).spec, ctx.names, tensors)
    d_q, d_k, d_v, *found = torch.ops.attncc.attention_backward(
        ctx.spec, ctx.target, ctx.names, q, k, v, tensors, ctx.ints, ctx.floats, out, lse, d_out, d_lse
    )
    each = dict(zip(learned, found, strict=True))
    given = [each.get(n) for n in ctx.names.split(",")[: len(tensors)]]
    none: list[Any] = [None if len(numbers) else [] for numbers in (ctx.ints, ctx.floats)]  # [] is a list of tensors
    return None, None, None, d_q, d_k, d_v, given, *none


def _refuse(ctx: Any, gradients: Any) -> None:
    raise NotBuilt("attention is differentiable once: the derivative of its gradients is not built yet")


_attention.register_autograd(_pass_back, setup_context=_save)
_backward.register_autograd(_refuse)


def _guard(op: Any) -> None:
    """Let an operator refuse forward-mode derivatives, for which it would return tangents of zero in silence.

    That has to be seen in its autograd kernel: below it there are no tangents any more. PyTorch warns of replacing it.
    """
    kernel = make_autograd_impl(op._opoverload, op)

    def guarded(keyset: Any, *args: Any) -> Any:
        if forward_ad._current_level >= 0:
            for x in tree_leaves(args):
                if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
                    raise NotBuilt(
                        "in a graph there is no forward-mode derivative: call the attention outside torch.compile"
                    )
        return kernel(keyset, *args)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        op._lib.impl(op._name, guarded, "Autograd", with_keyset=True, allow_override=True)


_guard(_attention)
_guard(_backward)


def _given(names: str, tensors: Sequence[Tensor], ints: Numbers, floats: Numbers) -> dict[str, Any]:
    return dict(zip(names.split(","), [*tensors, *ints, *floats], strict=True)) if names else {}


def _learned(spec: AttentionSpec, names: str, tensors: Sequence[Tensor]) -> list[str]:
    """Names of the tensors that the spec gives a gradient."""
    marked = {p.name for p in spec.params if p.grad}
    return [n for n in names.split(",")[: len(tensors)] if n in marked]
