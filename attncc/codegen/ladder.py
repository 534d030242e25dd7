"""The older algorithms, as text: standard attention in three kernels, and FA1 with K and V outside and Q inside.

Dao et al. 2022, "FlashAttention", algorithms 0 and 1. Both take the lowering, the normalisers and the walks over tiles
of fa2; the state that FA1 keeps of a row in HBM is not divided before the end, so that it is exact in every type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from attncc.analysis.normaliser import S
from attncc.codegen import launch
from attncc.codegen.lower import level
from attncc.codegen.naming import Names, parameter_names, reserved
from attncc.codegen.signature import Argument, arguments
from attncc.ir import AttentionSpec, Const, KernelPlan, Softmax, Visits, conjuncts

if TYPE_CHECKING:
    from attncc.codegen.triton import KernelView

Make = Callable[[AttentionSpec, Visits, KernelPlan, Sequence[str]], "KernelView"]

TENSORS = {  # of a stage, in the call and in HBM between
    "scores": ("Q", "K", "Scores"), "weights": ("Scores", "Weights", "Lse"), "output": ("Weights", "V", "Out"),
}  # fmt: skip
UNREAD = {"fa1": ("together", "b_len")}  # lengths that only expressions could name
PRINTED = (  # fields of a view that end up in its kernel
    "program_lines", "row_lines", "own_lines", "key_lines", "score_lines", "scores", "weight_lines", "weight", "sparse",
    "weighing_lines", "weighing", "mask_lines", "mask", "key_mask", "sink", "dropout", "visits",
)  # fmt: skip


def standard_view(
    spec: AttentionSpec, visits: Visits, plan: KernelPlan, whole: KernelView, make: Make
) -> KernelView:  # fmt: skip
    """The view of the file, `whole`, with a view for each of its kernels."""
    names, made = stage_names(spec), []
    for stage, part in parts(spec).items():
        view = replace(make(part, visits, plan, ()), stage=stage, kernel=names[stage])
        if stage == "scores":
            view = replace(view, scale_first=True, d_parts=view.k_parts)
        else:  # where the scale is in them already
            view = replace(view, program_lines=view.program_lines[:-1], d_parts=view.v_parts)
        if stage == "weights":
            view = replace(view, d_parts=(), v_parts=())
        every = arguments(spec, plan, parameter_names(spec))
        made.append(with_arguments(view, spec, tuple(a for a in every if _takes(a, stage)), ()))
    return replace(whole, kernels=tuple(made))


def fa1_view(
    spec: AttentionSpec, visits: Visits, plan: KernelPlan, whole: KernelView, make: Make
) -> KernelView:  # fmt: skip
    """`visits` are those of keys."""
    return with_arguments(whole, spec, arguments(spec, plan, parameter_names(spec)), UNREAD["fa1"])


def parts(spec: AttentionSpec) -> dict[str, AttentionSpec]:
    """What each kernel of standard attention computes, as a spec of its own: what is left out is done elsewhere."""
    bare = replace(spec, weight=None, dropout=None, softmax=Softmax("none"))
    by_key = tuple(t for m in spec.masks for t in conjuncts(m) if level(t) == "key")
    return {
        "scores": bare,
        "weights": replace(spec, scores=(S,), scale=Const(1.0), masks=()),
        "output": replace(bare, scores=(S,), scale=Const(1.0), masks=by_key),
    }


def stage_names(spec: AttentionSpec) -> dict[str, str]:
    """How the kernels of standard attention are called, in the order in which they run."""
    fresh = Names(reserved() | set(parameter_names(spec).values()))
    return {stage: fresh.fresh(f"{spec.name}_forward_{stage}") for stage in TENSORS}


def with_arguments(
    view: KernelView, spec: AttentionSpec, args: Sequence[Argument], unread: Sequence[str]
) -> KernelView:  # fmt: skip
    """The view with those arguments that its kernel reads: of parameters, and of `unread`, those that lines name."""
    named = {word for n in PRINTED for text in _texts(getattr(view, n)) for word in re.findall(r"\w+", text)}
    kept = tuple(a for a in args if (a.owner != "parameter" and a.name not in unread) or a.name in named)
    if not view.dropout:
        kept = tuple(a for a in kept if a.name != "seed")
    return replace(
        view, signature=launch.signature_lines(kept), jit_options=launch.jit_options(kept),
        general=launch.general(kept), launch=launch.launch_lines(kept, parameter_names(spec)),
    )  # fmt: skip


def _takes(a: Argument, stage: str) -> bool:
    """Whether a stage has this tensor, or a stride of it; everything else goes to all."""
    if a.kind == "pointer" and a.owner in ("call", "output"):
        return a.name in TENSORS[stage]
    if "stride" in a.kind and a.owner == "call":
        return a.name.removeprefix("stride_")[0].upper() in TENSORS[stage]
    return True


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for v in value:
            yield from _texts(v)
    elif is_dataclass(value):
        for f in fields(value):
            yield from _texts(getattr(value, f.name))
