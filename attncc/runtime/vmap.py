"""torch.vmap over calls: the examples join the batch, so that one launch serves all of them.

That goes where the spec has nothing that is different for them but what has an axis b; anything else is refused, never
looped over in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from attncc.errors import NotBuilt
from attncc.ir import AttentionSpec, Expr, Read, Var, children
from attncc.runtime.derivatives import Call


def vmapped(
    apply: Callable[..., tuple[Tensor, ...]], call: Call, count: int, dims: Sequence[int | None],
    tensors: Sequence[Tensor | None],
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:  # fmt: skip
    """Results of `call` for `count` examples and the axis that these have in each, as a vmap rule returns them.

    `apply` calls it; `dims` are the examples' axes of `tensors`, None for what they share. NotBuilt where
    they cannot join the batch.
    """
    name = call.attention.name
    if call.attention.spec.ragged:
        raise NotBuilt(f"{name}: vmap over packed sequences: pack those of all examples behind one another")
    if call.attention.spec.dropout is not None:
        raise NotBuilt(f"{name}: vmap over dropout, whose examples would share a seed or not: call it for each")
    if by := _number_of_batch(call.attention.spec):
        raise NotBuilt(f"{name}: vmap makes its examples a part of the batch, and the spec reads {by}")
    axes_in, axes_out = call.axes()
    joined = []
    for axis, dim, x, label in zip(axes_in, dims, tensors, call.labels(), strict=True):
        if axis is None and dim is not None and x is not None and x.numel():
            raise NotBuilt(f"{name}: vmap over {label}, which has no axis b for its examples: call it for each of them")
        joined.append(x if axis is None or x is None else _join(x, axis, dim, count))
    results = apply(call, *joined)
    made = []
    for axis, x in zip(axes_out, results, strict=True):
        if axis is None and x.numel():
            raise NotBuilt(
                f"{name}: {call.what} for each example of a parameter without an axis b: call it for each of them"
            )
        made.append(x if axis is None else x.unflatten(axis, (count, x.shape[axis] // max(count, 1))))
    return tuple(made), axes_out


def _join(x: Tensor, axis: int, dim: int | None, count: int) -> Tensor:
    """Examples along `dim` into the batch at `axis`; what they share is repeated."""
    if dim is None:
        return x.unsqueeze(axis).expand(*x.shape[:axis], count, *x.shape[axis:]).flatten(axis, axis + 1)
    return x.movedim(dim, axis).flatten(axis, axis + 1)


def _number_of_batch(spec: AttentionSpec) -> str:
    """How a spec tells the entries of a batch apart other than by an axis of its own, in words."""
    found: list[str] = []

    def look(e: Expr) -> Expr:
        stack = [e]
        while stack:
            node = stack.pop()
            if isinstance(node, Var) and node.name in ("b", "b_len"):
                found.append(node.name)
            own = spec.param(node.tensor).axes if isinstance(node, Read) else ()
            plain = {i for i, at in enumerate(children(node)) if isinstance(node, Read) and _is_own(at, own[i])}
            stack.extend(c for i, c in enumerate(children(node)) if i not in plain)
        return e

    spec.map(look)
    return found[0] if found else ""


def _is_own(index: Any, axis: Any) -> bool:
    return isinstance(index, Var) and index.name == axis == "b"
