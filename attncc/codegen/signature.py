"""The arguments of a Triton kernel, in order: one list for the template, the launcher and the cross-compiler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attncc.analysis.normaliser import normaliser
from attncc.codegen.parts import split
from attncc.ir import AttentionSpec, KernelPlan, Param
from attncc.planner.hopper import WIDEST, value_columns
from attncc.planner.shared_memory import ELEMENT_BYTES

CONSUMER_ROWS = 64  # rows of a warp group, the least that its matrix instruction takes

POINTEES = {
    "f32": "fp32", "f16": "fp16", "bf16": "bf16", "bool": "i1", "bit": "i32",
    "f8e4m3": "fp8e4nv", "f8e5m2": "fp8e5", "i8": "i8", "i16": "i16", "i32": "i32", "i64": "i64", "u8": "u8",
}  # fmt: skip


@dataclass(frozen=True)
class Argument:
    """One argument: its name in the kernel, its Triton type, and what the launcher passes for it.

    kind: pointer | descriptor | stride | last_stride | scalar | constexpr. A last stride that is 1 is baked in, so that
        neighbours are loaded together; Triton does that only for arguments without a declared type, then 32 bits wide.
    owner: call (q, k, v, lengths) | starts (of packed sequences) | output | parameter | tables | tile
    """

    name: str
    type: str
    kind: str
    owner: str
    value: str  # the host's expression


SCRATCH = {  # of algorithms that put more than the output into HBM: pointer, type (of q, where empty), how it is called
    "standard": (("Scores", "*fp32", "scores"), ("Weights", "", "weights")),
    "fa1": (("Sums", "*fp32", "sums"), ("Maxima", "*fp32", "maxima"), ("Totals", "*fp32", "totals")),
}  # fmt: skip
SCALES = ("q_scales", "k_scales", "v_scales")  # of 8-bit inputs
TILES = tuple(Argument(name, "constexpr", "constexpr", "tile", name) for name in ("TILE_Q", "TILE_K"))


def arguments(spec: AttentionSpec, plan: KernelPlan, names: Mapping[str, str]) -> tuple[Argument, ...]:
    """Those of the main kernel, or of all kernels of an algorithm of several, of which each takes what it reads and
    writes; `names` gives each parameter's and free axis's name in it."""
    pointer = "*" + POINTEES[plan.dtype]
    integer = f"i{plan.int_bits}"
    made = _hopper_tensors(plan) if plan.algorithm == "fa3" else _tensors(spec, plan, pointer)
    if normaliser(spec).statistic:
        made.append(Argument("Lse", "*fp32", "pointer", "output", "lse"))
    made += [Argument(f"Row_{name}", "*fp32", "pointer", "output", f"row_{name}") for name in spec.reports]
    for name, type_, value in SCRATCH.get(plan.algorithm, ()):
        if name not in ("Maxima", "Totals") or normaliser(spec).has_lse:
            made.append(Argument(name, type_ or pointer, "pointer", "output", value))
    if plan.algorithm == "fa3":
        made.append(Argument("Drawn", "*i32", "pointer", "output", "drawn"))
    if plan.scales:
        made += [Argument(name.capitalize(), "*fp32", "pointer", "call", name) for name in SCALES]
    made += [
        Argument(names[p.name], "*" + POINTEES[p.element or ""], "pointer", "parameter", p.name) for p in spec.tensors
    ]
    if spec.ragged:
        made += [Argument(f"Starts_{s}", "*i32", "pointer", "starts", f"cu_seqlens_{s}") for s in "qk"]
    for tensor in "qkv" if plan.loads == "pointer" else "q" if plan.algorithm != "fa3" else "":
        made += strides(spec, tensor, tensor)
    for p in spec.tensors:
        for i, stored in stored_places(spec, p).items():
            kind, name = "last_stride" if vectorized(p, i) else "stride", stride_name(spec, p, names[p.name], i)
            made.append(Argument(name, "i64", kind, "parameter", f"{p.name}.stride({stored})"))
    lengths = ("total_q", "total_k") if spec.ragged else ("q_len", "k_len")
    for name in (*lengths, "b_len", "h_len", "group", "together"):
        made.append(Argument(name, "i32", "scalar", "call", name))
    if plan.scales == "block":
        made += [Argument(f"{s}_scale_count", "i32", "scalar", "call", f"{s}_scales.shape[2]") for s in "qk"]
    if spec.dropout is not None:
        made.append(Argument("seed", "i64", "scalar", "call", "seed"))
    if plan.tables:
        widths = {"Tables": plan.int_bits, "Scans": 16, "Ranked": 32}
        read = (name for name in plan.tables if name != "Ranked" or plan.algorithm == "fa3")  # others draw no tiles
        made += [Argument(name, f"*i{widths[name]}", "pointer", "tables", name.lower()) for name in read]
        made += [Argument(name, "i32", "scalar", "tables", name) for name in tile_counts(spec)]
    for p in spec.scalars:
        made.append(Argument(names[p.name], "fp32" if p.type == "float" else integer, "scalar", "parameter", p.name))
    for axis in spec.free_axes:
        made.append(Argument(names[axis], "i32", "scalar", "parameter", axis))
    if plan.algorithm != "fa3":  # whose layouts depend on them: there they are constants of the file
        made += TILES
    return tuple(made)


def _tensors(spec: AttentionSpec, plan: KernelPlan, pointer: str) -> list[Argument]:
    """Q, K, V and Out of a Triton kernel."""
    made = [Argument("Q", pointer, "pointer", "call", "q")]
    element = POINTEES[plan.kept or plan.dtype]
    for name, size in (("k", plan.head_dim), ("v", plan.head_dim_v)):
        if plan.loads == "descriptor":
            for part in split(size, ""):
                sizes = (plan.tile_k, 1, part.size) if spec.ragged else (1, 1, plan.tile_k, part.size)
                block = f"{element}[{','.join(map(str, sizes))}]"
                value = f"TensorDescriptor({name}, {name}.shape, {name}.stride(), {list(sizes)})"
                made.append(Argument(name.upper() + part.tag, f"tensordesc<{block}>", "descriptor", "call", value))
        else:
            made.append(Argument(name.upper(), f"*{element}", "pointer", "call", name))
    return [*made, Argument("Out", pointer, "pointer", "output", "out")]


def _hopper_tensors(plan: KernelPlan) -> list[Argument]:
    """Q, K, V and Out by TMA, for each part of a head: tiles of a consumer's rows, or of keys. Of 8-bit inputs V has a
    column's keys side by side, and the output 16 bits."""
    made, most, eight = [], value_columns(plan), bool(plan.scales)
    every = (
        ("q", plan.head_dim, CONSUMER_ROWS, WIDEST), ("k", plan.head_dim, plan.tile_k, WIDEST),
        ("v", plan.head_dim_v, plan.tile_k, most), ("out", plan.head_dim_v, CONSUMER_ROWS, most),
    )  # fmt: skip
    for name, size, rows, widest in every:
        element = "bf16" if eight and name == "out" else plan.dtype
        width = ELEMENT_BYTES[element]
        for part in split(size, "", widest):
            tile = (part.size, rows) if eight and name == "v" else (rows, part.size)
            swizzle = min(128, width * tile[1])
            layout = f"NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth={8 * width}, rank=4)"
            type_ = f"tensordesc<{POINTEES[element]}[1, 1, {tile[0]}, {tile[1]}],{layout}>"
            owner = "output" if name == "out" else "call"
            value = f"described({name}, {tile[0]}, {tile[1]})"
            made.append(Argument(name.capitalize() + part.tag, type_, "descriptor", owner, value))
    return made


def strides(spec: AttentionSpec, letter: str, tensor: str) -> list[Argument]:
    """Of a tensor like q (m its rows) or like k (n its keys), which `letter` tells apart."""
    side = "n" if letter in "kv" else "m"
    axes = f"{side}hd" if spec.ragged else f"bh{side}d"
    kinds = {"d": "last_stride"}
    return [
        Argument(f"stride_{letter}{axis}", "i64", kinds.get(axis, "stride"), "call", f"{tensor}.stride({i})")
        for i, axis in enumerate(axes)
    ]


def tile_counts(spec: AttentionSpec) -> tuple[str, str]:
    """What the launcher calls the numbers of tiles on both sides; of packed sequences, of slots for them."""
    return ("q_slots", "k_slots") if spec.ragged else ("q_tiles", "k_tiles")


def table_arguments(args: tuple[Argument, ...]) -> tuple[Argument, ...]:
    """Those of the kernels that make the tables: no q, k, v, and no outputs."""
    call = ("q_len", "k_len", "total_q", "total_k", "b_len", "h_len", "group")
    used = (a for a in args if a.owner in ("parameter", "starts", "tables") or a.name in call)
    return (*used, *TILES)  # also where they are constants of the main kernel's file


def vectorized(p: Param, axis: int) -> bool:
    """Whether neighbours along this axis of a parameter are read side by side: the last axis, unless it is b or h."""
    return axis == len(p.axes) - 1 and p.axes[axis] not in ("b", "h", "h_kv")


def stored_places(spec: AttentionSpec, p: Param) -> dict[int, int]:
    """Which dimension of the tensor that a call passes each axis is; packed sequences have no axis b."""
    packed = bool(spec.packed_axis(p))
    return {i: at for at, i in enumerate(i for i, axis in enumerate(p.axes) if not (packed and axis == "b"))}


def stride_name(spec: AttentionSpec, p: Param, tensor: str, axis: int) -> str:
    places = stored_places(spec, p)
    return f"stride_{tensor}" if len(places) == 1 else f"stride_{tensor}_{places[axis]}"
