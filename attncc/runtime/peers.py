"""What others run for the computation of a spec: SDPA's backends and FlexAttention from PyTorch itself, unfused
attention, and the spec's own kernels with another algorithm pinned. What one cannot express it refuses, and says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attncc import analysis, pipeline
from attncc.errors import AttnError
from attncc.ir import Schedule, Shape, names
from attncc.runtime.attention import Attention
from attncc.runtime.written import Written, unfused_bytes

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "efficient":
    SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip
NO_KERNEL = ("No available kernel", "No viable backend")
EAGER = 2**29  # pairs whose block mask is made without compiling that, which takes longer
ROOM = 0.8  # of the free memory that a peer may fill with pairs


class Refused(Exception):
    """A peer that cannot run this call, with the reason."""


@dataclass(frozen=True)
class Call:
    """One call of an attention: its tensors, and parameters by name."""

    attention: Attention
    q: Tensor
    k: Tensor
    v: Tensor
    params: Mapping[str, Any]

    @property
    def shape(self) -> Shape:
        (b, h, q_len, d), (h_kv, k_len) = self.q.shape, self.k.shape[1:3]
        return Shape(b, h, h_kv, q_len, k_len, d, self.v.shape[3])

    @property
    def written(self) -> Written:
        return Written(self.attention.spec, self.shape, self.params)


def expanded(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names of peers, each once; `sdpa` stands for all its backends."""
    return tuple(dict.fromkeys(n for name in names for n in (SDPA if name == "sdpa" else (name,))))


def peer(name: str, call: Call) -> Run:
    """That peer as a function of q, k and v. Refused."""
    if name in SDPA:
        return _sdpa(SDPA[name], call)
    if name == "flex":
        return _flex(call)
    return _unfused(call) if name == "unfused" else _pinned(name, call)


def sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """scaled_dot_product_attention by this backend and no other."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options)


def _sdpa(backend: SDPBackend, call: Call) -> Run:
    options = _sdpa_options(call)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        try:
            return sdpa(backend, q, k, v, **options)
        except RuntimeError as fault:
            if not any(said in str(fault) for said in NO_KERNEL):
                raise
            what = "a mask tensor" if "attn_mask" in options else "these sizes and types"
            raise Refused(f"this backend of SDPA has no kernel for {what} here") from None

    return run


def _sdpa_options(call: Call) -> dict[str, Any]:
    """How SDPA is told the scale, mask and scores of a spec: `is_causal`, or all pairs as a tensor. Refused."""
    written, spec, shape = call.written, call.attention.spec, call.shape
    if not written.plain:
        raise Refused(f"SDPA has no {_beyond(call)}")
    if not written.additive:
        raise Refused("SDPA adds to scores, and can change them in no other way")
    options: dict[str, Any] = {"scale": written.scale}
    if not spec.scores and is_causal(call):
        return {**options, "is_causal": True}
    if not spec.masks and not spec.scores:
        return options
    names = written.names(call.q.device)
    keep = written.mask(names)
    if not spec.scores:
        return {**options, "attn_mask": _of_pairs(keep, shape)}
    _fits(call.q, shape.batch * shape.heads * shape.q_len * shape.k_len * 8, "its table of what is added to scores")
    bias = torch.as_tensor(written.score(0.0, names), device=call.q.device)
    bias = bias if keep is True else torch.where(keep, bias, -torch.inf)
    return {**options, "attn_mask": _of_pairs(bias.to(call.q.dtype), shape)}


def _of_pairs(x: Tensor, shape: Shape) -> Tensor:
    """[B or 1, H or 1, Q, K]: rows of keys have to lie one behind another."""
    x = x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))
    return x.expand(x.shape[0], x.shape[1], shape.q_len, shape.k_len).contiguous()


def is_causal(call: Call) -> bool:
    """Whether the mask is k <= row and nothing else, as SDPA's `is_causal` has it."""
    spec, shape = call.attention.spec, call.shape
    square = shape.q_len == shape.k_len or spec.align == "start"
    if not square or len(spec.masks) == 0 or analysis.prove(spec).causal != "k <= q":
        return False
    values = {n: x for n, x in call.params.items() if not isinstance(x, Tensor)}
    rows = min(shape.q_len, shape.k_len)
    beyond = max(0, shape.q_len - shape.k_len) * shape.k_len
    whole = shape.batch * shape.heads * (rows * (rows + 1) // 2 + beyond)
    return analysis.kept_pairs(spec, shape, values) == whole


def _flex(call: Call) -> Run:
    """FlexAttention compiled for exactly these shapes, with a block mask of the batch
    entries and heads that its mask tells apart; both made once, outside what is timed."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    written, shape = call.written, call.shape
    if not written.plain:
        raise Refused(f"FlexAttention has no {_beyond(call)}")
    group = shape.heads // shape.kv_heads

    def named(b: Any, h: Any, row: Any, k: Any) -> dict[str, Any]:
        return {"b": b, "h": h, "h_kv": h // group, "row": row, "q": row + written.shift, "k": k}

    def score(s: Any, b: Any, h: Any, row: Any, k: Any) -> Any:
        return written.score(s, named(b, h, row, k))

    def mask(b: Any, h: Any, row: Any, k: Any) -> Any:
        return written.mask(named(b, h, row, k))

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(flex_attention, dynamic=False)
        blocks = None
        if written.spec.masks:
            read = frozenset().union(*map(names, written.spec.masks))
            size = (shape.batch if "b" in read else 1, shape.heads if read & {"h", "h_kv"} else 1)
            few = size[0] * size[1] * shape.q_len * shape.k_len <= EAGER
            make = create_block_mask if few else torch.compile(create_block_mask, dynamic=False)
            blocks = make(mask, *size, shape.q_len, shape.k_len, device=call.q.device)
    options = {"score_mod": score if written.spec.scores else None, "block_mask": blocks, "scale": written.scale,
               "enable_gqa": group > 1}  # fmt: skip
    return lambda q, k, v: compiled(q, k, v, **options)


@contextmanager
def kept_graphs() -> Iterator[None]:
    """Where the graph of a compiled function can be walked back again and again: its buffers are not given away.

    That is read when the function is compiled and when it is walked back, each time by the thread that does it, which
    for tensors on a GPU is another one unless there are none."""
    from torch._functorch import config

    with config.patch(donated_buffer=False), torch.autograd.set_multithreading_enabled(False):
        yield


def _beyond(call: Call) -> str:
    """What of a spec is no plain softmax."""
    spec = call.attention.spec
    plain = Written(replace(spec, weight=None, dropout=None), call.shape, call.params).plain
    if not plain:
        return f"softmax {spec.softmax.policy}"
    return "weight behind the softmax" if spec.weight is not None else "dropout with these bits"


def _unfused(call: Call) -> Run:
    written = call.written
    if written.beyond:
        raise Refused(written.beyond)
    _fits(call.q, unfused_bytes(call.shape, call.q.element_size()), "its scores and weights")
    return written.unfused


def _pinned(algorithm: str, call: Call) -> Run:
    """The same spec with that algorithm for its forward pass. Refused where it cannot be made."""
    own = call.attention
    if not call.q.is_cuda:
        raise Refused("the CPU program has one algorithm")
    parsed = replace(own.parsed, spec=replace(own.parsed.spec, schedules=(Schedule(algorithm=algorithm),)))
    try:
        pipeline.refuse(parsed)
        other = Attention(parsed, own.consts, own.target)
        other.ready(call.q, call.k, call.v, call.params)
    except AttnError as fault:
        raise Refused(str(fault).strip().splitlines()[0]) from None
    return lambda q, k, v: other(q, k, v, **call.params)


def _fits(x: Tensor, size: int, what: str) -> None:
    """Refused where that many bytes are more than the GPU has free."""
    if not x.is_cuda:
        return
    free = torch.cuda.mem_get_info(x.device)[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if size > ROOM * free:
        raise Refused(f"{what} would take {size:,} bytes, and {free:,} are free")
