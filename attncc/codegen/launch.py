"""The kernel's argument list as text: in its signature, in Triton's options, and in the call of the launcher."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from attncc.codegen.signature import SCALES, Argument
from attncc.ir import AttentionSpec, KernelPlan

WIDTH = 112  # of a line of arguments


def _group(a: Argument) -> str:
    """Arguments that stand on one line."""
    if a.kind in ("pointer", "descriptor", "constexpr"):
        return "tiles" if a.kind == "constexpr" else "tensors"
    if "stride" in a.kind:
        return a.name[: len("stride_q")] if a.owner == "call" else "strides of parameters"
    return a.owner


def _lines(parts: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Texts by group, a line for each, longer ones wrapped."""
    groups: dict[str, list[str]] = {}
    for group, text in parts:
        groups.setdefault(group, []).append(text.replace(" ", "\0"))
    wrapped = (textwrap.wrap(", ".join(texts) + ",", WIDTH, break_long_words=False) for texts in groups.values())
    return tuple(line.replace("\0", " ") for lines in wrapped for line in lines)


def signature_lines(args: Sequence[Argument]) -> tuple[str, ...]:
    def text(a: Argument) -> str:
        if a.kind in ("pointer", "descriptor", "last_stride"):
            return a.name
        return f"{a.name}: tl.constexpr" if a.kind == "constexpr" else f'{a.name}: "{a.type}"'

    return _lines((_group(a), text(a)) for a in args)


def launch_lines(args: Sequence[Argument], names: Mapping[str, str]) -> tuple[str, ...]:
    """What the launcher passes, in order."""

    def value(a: Argument) -> str:
        if a.owner != "parameter":
            return a.value
        name, dot, rest = a.value.partition(".")
        return names[name] + dot + rest

    passed = [(_group(a), value(a)) for a in args if a.kind != "constexpr"]
    return _lines(_spread(passed))


def _spread(passed: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """`x.stride(0), x.stride(1), ...` as `*x.stride()`: nobody passes only some of them."""
    for group, text in passed:
        one = re.fullmatch(r"(\w+)\.stride\((\d+)\)", text)
        if one is None:
            yield group, text
        elif one[2] == "0":
            yield group, f"*{one[1]}.stride()"


def jit_options(args: Sequence[Argument]) -> tuple[str, ...]:
    """Lengths and parameters never specialise, nor do addresses and strides of parameters on their alignment."""
    options = {
        "do_not_specialize": [a.name for a in args if a.kind == "scalar"],
        "do_not_specialize_on_alignment": [
            a.name for a in args if a.owner in ("parameter", "starts") and a.kind != "scalar"
        ],
    }
    return _options(options)


def general(args: Sequence[Argument]) -> tuple[str, ...]:
    """The same for tensors of any strides and addresses."""
    values = [a.name for a in args if a.kind == "scalar" or (a.owner == "call" and "stride" in a.kind)]
    pointers = [a.name for a in args if a.kind == "pointer" and a.owner != "output"]
    pointers += [a.name for a in args if a.owner == "parameter" and "stride" in a.kind]
    return _options({"do_not_specialize": values, "do_not_specialize_on_alignment": pointers})


def _options(options: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Keyword arguments that are lists of names, wrapped: `key=[`, lines of names, `],`."""
    lines: list[str] = []
    for name, listed in options.items():
        if listed:
            quoted = ", ".join(f'"{n}"' for n in listed)
            lines += [f"{name}=[", *("    " + line for line in textwrap.wrap(quoted, WIDTH - 4)), "],"]
    return tuple(lines)


def forward_arguments(spec: AttentionSpec, names: Mapping[str, str]) -> str:
    """Tensors by position, parameters by name."""
    params = [names[p.name] + (f"={p.default!r}" if p.default is not None else "") for p in spec.params]
    params += ["seed"] if spec.dropout is not None else []
    return ", ".join(["q", "k", "v", *starts(spec), *(["*", *params] if params else [])])


def starts(spec: AttentionSpec) -> list[str]:
    """What says where each of packed sequences starts, or scales: arguments of every call of the file."""
    scales = SCALES if spec.precision.is_eight_bit else ()
    return ["cu_seqlens_q", "cu_seqlens_k"] if spec.ragged else [*scales]


def extent(spec: AttentionSpec, axis: str, names: Mapping[str, str]) -> str:
    """The host's expression for the extent of a free axis, from the first tensor that has it."""
    owner = next(p for p in spec.tensors if axis in p.axes)
    at = spec.stored_axes(owner).index(axis)
    bits = " * 32" if owner.element == "bit" and owner.axes[-1] == axis else ""
    return f"{names[owner.name]}.shape[{at}]{bits}"


def file_name(spec_name: str, plan: KernelPlan) -> str:
    """`NAME_DIRECTION_TARGET.py`, for a kernel that takes any strides beside one that does not `..._any_stride.py`; of
    packed sequences `NAME_DIRECTION_ragged_TARGET.py`; `NAME_backward_deterministic_TARGET.py` beside a backward pass
    that adds in any order."""
    layout = "_ragged" if plan.layout == "ragged" else "_deterministic" if plan.sums == "apart" else ""
    return f"{spec_name}_{plan.direction}{layout}_{plan.target}{'_any_stride' if plan.any_stride else ''}.py"


def build_command(spec: AttentionSpec, plan: KernelPlan) -> str:
    """What makes the files of a spec again."""
    which = "" if plan.direction == "forward" else f" --pass {plan.direction}"
    return f"attncc build {spec.name}.attn{' --layout ragged' if spec.ragged else ''}{which} --target {plan.target}"


def _rows(spec: AttentionSpec, has_lse: bool) -> str:
    if spec.reports:
        found = (*(("lse",) if has_lse else ()), *spec.reports)
        return f"{', '.join(found)} of each row, side by side, [B, H, Q, {len(found)}] in float32 (natural log)."
    return "lse [B, H, Q] in float32 (natural log)." if has_lse else "and an empty lse: there is none."


def docstring(spec: AttentionSpec, plan: KernelPlan, has_lse: bool) -> str:
    d, dv, dtype = plan.head_dim, plan.head_dim_v, plan.dtype
    types = f"{dtype}, k and v in {plan.kept}" if plan.kept else dtype
    if spec.ragged:
        return (
            f"q [total_q, H, {d}], k [total_k, H_kv, {d}], v [total_k, H_kv, {dv}] in {types}; sequence i has rows\n"
            "    cu_seqlens_q[i] to cu_seqlens_q[i + 1] and keys cu_seqlens_k[i] to cu_seqlens_k[i + 1], both int32 →\n"
            f"    out [total_q, H, {dv}] in {dtype}, lse [H, total_q] in float32 (natural log)."
        )
    if plan.scales:
        blocks = "one for each 128 rows or keys" if plan.scales == "block" else "m = 1"
        return (
            f"q [B, H, Q, {d}], k [B, H_kv, K, {d}], v [B, H_kv, {dv}, n] in {dtype}, n = K rounded up to 16: key\n"
            "    8b + 2i + c of each 16 stands at 4i + 2b + c, and 0 behind the last; scales [B, H, m] and\n"
            f"    [B, H_kv, m] in float32, {blocks} → out [B, H, Q, {dv}] in bf16,\n"
            "    lse [B, H, Q] in float32 (natural log)."
        )
    return (
        f"q [B, H, Q, {d}], k [B, H_kv, K, {d}], v [B, H_kv, K, {dv}] in {types} → out [B, H, Q, {dv}] in {dtype},\n"
        + f"    {_rows(spec, has_lse)}"
    )
