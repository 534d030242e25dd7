"""What a call may pass: every fault names the argument, what the spec expects, and what came."""

from __future__ import annotations

import difflib
import functools
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attncc import analysis, planner
from attncc.errors import shown_number
from attncc.ir import LEAST_INT, MOST_INT, AttentionSpec, Param, Precision, Shape

DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float64: "f64"}
EIGHT_BIT = {torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2"}  # which kernels take
NAMES = {**DTYPES, **EIGHT_BIT}
ELEMENTS = {
    "bit": torch.int32, "bool": torch.bool, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32,
    "i64": torch.int64, "u8": torch.uint8, "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32,
}  # fmt: skip
AUTOCAST, NARROW = ("cpu", "cuda"), (torch.bfloat16, torch.float16, torch.float32)
LONGEST = 2**31 - 1
TMA_BYTES, TMA_STRIDE = 16, 2**40  # what cuTensorMapEncodeTiled asks of addresses and strides, in bytes
FLAGS = ("return_lse", "return_max", "return_entropy", "return_pairs", "validate", "deterministic")


@dataclass(frozen=True)
class Sizes:
    """The extents of one call, as the language names them, and those of the free axes."""

    b_len: int
    h_len: int
    h_kv_len: int
    q_len: int
    k_len: int
    head_dim: int
    head_dim_v: int
    free: Mapping[str, int]

    def shape(self, dtype: str) -> Shape:
        return Shape(
            self.b_len, self.h_len, self.h_kv_len, self.q_len, self.k_len, self.head_dim, self.head_dim_v, dtype
        )

    def named(self) -> tuple[tuple[str, int], ...]:
        """Those that an expression can read, by name."""
        lengths = ("b_len", self.b_len), ("h_len", self.h_len), ("q_len", self.q_len), ("k_len", self.k_len)
        return (*lengths, *self.free.items())


@dataclass(frozen=True)
class Declared:
    """What a spec says of the tensors of its calls, gathered once: `tensors` with the axes that are stored."""

    tensors: tuple[Param, ...]
    free_axes: tuple[str, ...]
    dividing_axes: tuple[str, ...]
    scale_blocks: tuple[str, int] | None


def declared(spec: AttentionSpec) -> Declared:
    tensors = tuple(replace(p, axes=spec.stored_axes(p)) for p in spec.tensors)
    return Declared(tensors, spec.free_axes, tuple(sorted(analysis.divisors(spec) & set(spec.free_axes))),
                    spec.scale_blocks)  # fmt: skip


def autocast(q: Any, k: Any, v: Any, inputs: str | None) -> tuple[Any, Any, Any]:
    """q, k and v in the type of torch.autocast where it is on, as PyTorch's own attention takes them: 16-bit ones and
    float32, unless the spec's precision says what they are (`inputs`)."""
    if inputs is not None or not isinstance(q, torch.Tensor):
        return q, k, v
    if q.device.type not in AUTOCAST or not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in NARROW else x for x in (q, k, v))
    return q, k, v


FORMS = {"q": "[B, H, Q, D]", "k": "[B, H_kv, K, D]", "v": "[B, H_kv, K, D_v]"}
PACKED_FORMS = {"q": "[total_q, H, D]", "k": "[total_k, H_kv, D]", "v": "[total_k, H_kv, D_v]"}


def check_qkv(q: Any, k: Any, v: Any, precision: Precision, packed: bool = False) -> None:
    """Of FORMS, or PACKED_FORMS: one device, and one dtype but where k and v are of 8 bits. TypeError or ValueError."""
    inputs, kept = precision.inputs, precision.kept
    forms, rank, length = (PACKED_FORMS, 3, 0) if packed else (FORMS, 4, 2)
    dtype, device = getattr(q, "dtype", None), getattr(q, "device", None)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, and is {kind_of(x)}")
        _check_dense(name, x)
        if x.dim() != rank:
            raise ValueError(f"{name} must be {forms[name]}, and has shape {list(x.shape)}")
        if kept is not None and name != "q" and EIGHT_BIT.get(x.dtype) != kept:
            raise TypeError(f"{name} must be {kept}, as the spec's precision says, and is {x.dtype}")
        if kept is None and x.dtype != dtype:
            raise TypeError(f"{name} must have the dtype of q, {dtype}, and has {x.dtype}")
        if x.device != device:
            raise ValueError(f"{name} must be on the device of q, {device}, and is on {x.device}")
    if q.is_meta:
        raise TypeError("q must be a tensor with elements, and is on meta, where there are none")
    if q.dtype not in DTYPES:
        raise TypeError(f"q must be bfloat16, float16 or float32 (float64 too on a CPU), and is {q.dtype}")
    if inputs is not None and DTYPES[q.dtype] != inputs:
        raise TypeError(f"q must be {inputs}, as the spec's precision says, and is {q.dtype}")
    if q.dtype == torch.float64 and q.device.type != "cpu":
        raise TypeError("q is float64: only the CPU program takes that")
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    if not packed:
        _same("q's batch size B", of_q[0], "k", of_k[0])
        _same("q's batch size B", of_q[0], "v", of_v[0])
    _same("k's number of heads H_kv", of_k[1], "v", of_v[1])
    _same("q's head size D", of_q[-1], "k", of_k[-1])
    _same("k's length total_k" if packed else "k's length K", of_k[length], "v", of_v[length])
    heads, kv_heads = of_q[1], of_k[1]
    if (kv_heads == 0) != (heads == 0) or (kv_heads and heads % kv_heads):
        raise ValueError(f"k must have a number of heads that divides q's {heads}, and has {kv_heads}")
    if not of_q[-1] >= 1 or not of_v[-1] >= 1:
        raise ValueError(f"head sizes must be at least 1: D is {of_q[-1]}, D_v is {of_v[-1]}")
    if max(of_q[-1], of_v[-1]) > planner.MAX_HEAD_DIM:
        raise ValueError(f"head sizes go up to {planner.MAX_HEAD_DIM}: D is {of_q[-1]}, D_v is {of_v[-1]}")
    if max(of_q[length], of_k[length]) > LONGEST:
        raise ValueError(f"lengths must be below 2^31: {of_q[length]} rows of q, {of_k[length]} keys")


def _check_dense(name: str, x: torch.Tensor) -> None:
    """TypeError for sparse and nested tensors, and others whose elements have no strides."""
    if x.is_nested or x.layout != torch.strided:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise TypeError(f"{name} must be a dense tensor, and is {_a(kind)} one")


def _same(what: str, size: int, name: str, found: int) -> None:
    if found != size:
        raise ValueError(f"{name} must have {what}, {size}, and has {found}")


def refuse_quantised(attention: Any, x: Any, **given: Any) -> Any:
    """TypeError: what attncc.quantize gives whole is for 8-bit inputs, and how others are called."""
    name, precision = attention.name, attention.spec.precision
    if precision.kept is None:
        raise TypeError(f"{name} has no 8-bit inputs: quantised() is of specs that say inputs f8e4m3 or f8e5m2")
    scaled = 'attn(q, x.k, x.values, k_scales=x.k_scales, v_scales=x.v_scales) of attncc.quantize(..., rotate="none")'
    how = "attn(q, k, v), whose elements are the numbers" if precision.scales is None else scaled
    raise TypeError(f"{name} takes q as floats beside k and v of 8 bits, so that it is called with it: {how}")


def check_flags(*flags: Any) -> None:
    """FLAGS, in their order: bools, and None for `deterministic`. TypeError."""
    for name, flag in zip(FLAGS, flags, strict=True):
        if flag is not True and flag is not False and not (flag is None and name == "deterministic"):
            kind = "a bool or None" if name == "deterministic" else "a bool"
            raise TypeError(f"{name} must be {kind}, and is {kind_of(flag)}: {flag!r}")


def addressable(loaded: Sequence[torch.Tensor]) -> bool:
    """Whether TMA takes the strides of these, and there are any keys."""
    strides = [s * x.element_size() for x in loaded for s in x.stride()[:-1]]
    rows = loaded[-1].numel() > 0 and all(x.stride(-1) == 1 for x in loaded)
    return rows and all(s % TMA_BYTES == 0 and 0 < s < TMA_STRIDE for s in strides)


def check_names(spec: AttentionSpec, given: Mapping[str, Any]) -> None:
    """Every parameter without a default is there, and nothing else is. TypeError, which names all that are wrong."""
    known, faults = {p.name: p for p in spec.params}, []
    unknown, missing = [], []  # filled in loops: every call comes here, and nearly none has a fault
    for name in given:
        if name not in known and name != "seed":
            unknown.append(name)
    for name, p in known.items():
        if name not in given and p.default is None:
            missing.append(f"{name}: {declaration(p)}")
    if "seed" in given and spec.dropout is None:
        faults.append(f"{spec.name} drops nothing, and takes no seed")
    if unknown:
        faults.append(f"{spec.name} has no {_several('parameter', map(repr, unknown))}: {_hint(unknown, known)}")
    if missing:
        faults.append(f"{spec.name} needs the {_several('parameter', missing)}")
    if faults:
        raise TypeError("; ".join(faults))


def _several(noun: str, names: Iterable[str]) -> str:
    listed = list(names)
    return f"{noun}{'s' if len(listed) > 1 else ''} {', '.join(listed)}"


def _hint(unknown: Sequence[str], known: Iterable[str]) -> str:
    """What was meant by unknown names, where all have one that is like them; else all that are known."""
    known = list(known)
    near = [found for name in unknown for found in difflib.get_close_matches(name, known, n=1)]
    if near and len(near) == len(unknown):
        return f"did you mean {', '.join(near)}?"
    return f"it has {', '.join(known)}" if known else "it has none"


def declaration(p: Param) -> str:
    """The parameter as the spec declares it."""
    return f"{p.element}[{', '.join(map(str, p.axes))}]" if p.is_tensor else p.type


def check_tensors(
    declared: Declared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Mapping[str, Any],
    sequences: int | None = None,
) -> Sizes:  # fmt: skip
    """Element types, devices, ranks and extents of tensor parameters; free axes agree wherever they stand.

    `sequences`: so many are packed; their lengths are then those of all together."""
    length, rows, keys = (2, "Q", "K") if sequences is None else (0, "total_q", "total_k")
    b_len, q_len, k_len = q.shape[0] if sequences is None else sequences, q.shape[length], k.shape[length]
    extents: dict[str, tuple[int, str]] = {
        "b": (b_len, "B"), "h": (q.shape[1], "H"), "h_kv": (k.shape[1], "H_kv"), "row": (q_len, rows),
        "k": (k_len, keys),
    }  # fmt: skip
    for p in declared.tensors:
        x = given[p.name]
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{p.name} must be a tensor {declaration(p)}, and is {kind_of(x)}")
        _check_dense(p.name, x)
        wanted = ELEMENTS[p.element or ""]
        if x.dtype != wanted:
            packed = " (bits are packed 32 to an int32, lowest first)" if p.element == "bit" else ""
            raise TypeError(f"{p.name} must be {wanted} for {declaration(p)}{packed}, and is {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{p.name} must be on the device of q, {q.device}, and is on {x.device}")
        if x.dim() != len(p.axes):
            raise ValueError(f"{p.name} must have the axes {declaration(p)}, and has shape {list(x.shape)}")
        for i, axis in enumerate(p.axes):
            _check_axis(p, i, axis, x.shape[i], extents)
    free = {a: extents[a][0] for a in declared.free_axes}
    if declared.scale_blocks is not None and sequences is None:
        check_scales(declared.scale_blocks, free, k_len)
    for axis in declared.dividing_axes:
        if free[axis] < 1:
            raise ValueError(f"the axis {axis} divides, so that it must be at least 1 long, and is {free[axis]}")
    return Sizes(b_len, q.shape[1], k.shape[1], q_len, k_len, q.shape[-1], v.shape[-1], free)


def check_scales(blocks: tuple[str, int], free: Mapping[str, int], keys: int) -> None:
    """ValueError where there are fewer scales than so many keys have: others would be 0."""
    axis, size = blocks
    wanted = -(-keys // size)
    if free[axis] < wanted:
        where = f"along their last axis, one for each {size} of {keys} keys"
        raise ValueError(f"k_scales and v_scales must have {wanted} {where}, and have {free[axis]}")


def _check_axis(p: Param, i: int, axis: str | int, extent: int, extents: dict[str, tuple[int, str]]) -> None:
    packed = p.element == "bit" and i == len(p.axes) - 1
    unit = " words of 32 bits" if packed else ""
    if isinstance(axis, str) and axis not in extents:
        extents[axis] = (extent * 32 if packed else extent, f"the axis {axis} of {p.name}")
        return
    size, source = (axis, "") if isinstance(axis, int) else extents[axis]
    wanted = -(-size // 32) if packed else size
    if extent != wanted:
        whence = f" ({source})" if source else ""
        raise ValueError(
            f"{p.name} must have {wanted}{unit}{whence} along axis {i} of {declaration(p)}, and has {extent}"
        )


def scalar(p: Param, value: Any, divides: bool) -> int | float:
    """A run-time scalar as a Python number, from one, NumPy's, or a 0-d tensor.

    TypeError for another kind, ValueError for a divisor below 1 and for what 64 bits do not hold.
    """
    if isinstance(value, torch.Tensor):
        _check_dense(p.name, value)
        if value.is_meta:
            raise ValueError(f"{p.name} must be {_a(p.type)}, and is a tensor on meta, which has no value")
        if value.dim() or (p.type == "int" and value.is_floating_point()) or value.dtype == torch.bool:
            what = f"{list(value.shape)} of {value.dtype}"
            raise TypeError(f"{p.name} must be {_a(p.type)}, or a 0-d tensor of one, and is a tensor {what}")
        value = value.item()
    kind = numbers.Real if p.type == "float" else numbers.Integral
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{p.name} must be {_a(p.type)}, and is {kind_of(value)}: {value!r}")
    number: Any = value
    if p.type == "float":
        try:
            return float(number)
        except OverflowError:
            raise ValueError(f"{p.name} must be a float, and is {shown_number(number)}, too large for one") from None
    whole = int(number)
    if not LEAST_INT <= whole <= MOST_INT:
        raise ValueError(f"{p.name} must be a 64-bit int, and is {shown_number(whole)}")
    if divides and whole < 1:
        raise ValueError(f"{p.name} divides, so that it must be at least 1, and is {whole}")
    return whole


Lengths = tuple[tuple[str, int], ...]  # by their names in a spec


def value_check(
    spec: AttentionSpec, of_sequence: bool = False
) -> Callable[[tuple[int | float, ...], Lengths], None] | None:
    """What takes values of spec.scalars and lengths, `of_sequence` those of a packed one, and raises ValueError where
    an int that is computed of them alone is beyond 64 bits, or a divisor that is computed of the values is below 1;
    None where there is neither. What passed passes again at once."""
    ints, divisors = analysis.computed_ints(spec, of_sequence), analysis.computed_divisors(spec)
    scalars = [p.name for p in spec.scalars]

    @functools.lru_cache(maxsize=256)
    def check(values: tuple[int | float, ...], lengths: Lengths) -> None:
        named = dict(zip(scalars, values, strict=True))
        fault = analysis.wide_int(ints, {**named, **dict(lengths)}) or analysis.low_divisor(divisors, named)
        if fault is not None:
            raise ValueError(f"{spec.name}: {fault}")

    return check if ints or divisors else None


def check_sorted(
    spec: AttentionSpec, given: Mapping[str, Any], starts: Mapping[str, torch.Tensor] | None = None
) -> None:
    """With `validate=True`: what is declared `sorted` ascends along its last axis. Waits for the device.

    Of packed sequences `starts` says by axis where each begins: there it may fall.
    """
    for p in spec.tensors:
        if p.sorted:
            x = given[p.name]
            fallen = x[..., 1:] < x[..., :-1]
            if starts is not None and "b" in p.axes:
                begin = starts[str(p.axes[-1])].long()
                fallen[..., begin[(begin > 0) & (begin < x.shape[-1])] - 1] = False
            falls = fallen.nonzero()
            if len(falls):
                *lead, at = falls[0].tolist()
                before, here = x[tuple(lead)][at : at + 2].tolist()
                raise ValueError(
                    f"{p.name} is declared sorted along {p.axes[-1]}, and falls from {before} to {here} "
                    f"at index {[*lead, at + 1]}"
                )


def kind_of(x: Any) -> str:
    """What x is: with its package where that is not Python, as NumPy's bool has the same name."""
    kind = type(x)
    return _a(kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}")


def _a(noun: str) -> str:
    return f"{'an' if noun[:1] in 'aeio' else 'a'} {noun}"
