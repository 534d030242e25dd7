"""The host's part of parameter gradients: buffers for the partial sums, and the second pass that adds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attncc.codegen.backward_arguments import tabled
from attncc.codegen.backward_sites import Site
from attncc.ir import AttentionSpec


@dataclass(frozen=True)
class Collected:
    """Lines of the launcher: what is allocated before the kernels, and each parameter's gradient after them."""

    buffers: tuple[str, ...]
    gradients: tuple[tuple[str, str, str], ...]  # (name, expression, the zero of its shape)
    places: bool  # the function that puts rows in their places is wanted


def collected(spec: AttentionSpec, sites: Sequence[Site], names: Mapping[str, str]) -> Collected:
    buffers = [f"cells_{s.name} = {_cells(s, names[s.param.name])}" for s in sites if tabled(s)]
    if counts := [f"cells_{s.name}" for s in sites if s.kind == "table"]:
        buffers.append(
            f"slots = min(row_tiles, max(2 * q_len // ({' + '.join(counts)} + 1), 1))  # row tiles at a time"
        )
    buffers += [_buffer(s, names[s.param.name]) for s in sites]
    gradients = []
    for p in spec.params:
        mine = [s for s in sites if s.param == p]
        if not mine:
            continue
        total = " + ".join(_total(spec, s, names[p.name]) for s in mine)
        if p.is_tensor and not all(_direct(s) for s in mine):
            total = f"({total})" if len(mine) > 1 else total
            total += f".to({names[p.name]}.dtype)"
        zero = f"torch.zeros_like({names[p.name]})" if p.is_tensor else "torch.zeros((), device=q.device)"
        gradients.append((p.name, total, zero))
    return Collected(tuple(buffers), tuple(gradients), any("placed(" in text for _, text, _ in gradients))


def _direct(s: Site) -> bool:
    return s.kind == "cells" and not s.apart


def _cells(s: Site, tensor: str) -> str:
    return " * ".join(f"{tensor}.shape[{i}]" for i in _entries(s))


def _buffer(s: Site, tensor: str) -> str:
    """float32, one partial sum for each program or row, key or entry; cells are the gradient itself."""
    if s.kind == "cells":
        kind = f"{tensor}.dtype" if _direct(s) else "torch.float32"
        return f"{s.name} = torch.zeros({tensor}.shape, dtype={kind}, device=q.device)"
    shape = {"program": "row_tiles", "row": "q_len", "key": "k_len", "table": "slots", "row_table": "q_len"}[s.kind]
    if not tabled(s):
        return f"{s.name} = torch.empty((b_len, h_len, {shape}), dtype=torch.float32, device=q.device)"
    return f"{s.name} = torch.zeros((b_len, h_len, {shape}, cells_{s.name}), dtype=torch.float32, device=q.device)"


def _entries(s: Site) -> list[int]:
    """The axes that a table runs over."""
    return [i for i in s.rest if not (s.kind == "row_table" and s.index(i) in ("row", "q"))]


def _total(spec: AttentionSpec, s: Site, tensor: str) -> str:
    """The sums of a site in the parameter's own shape."""
    if s.kind == "cells":
        return s.name
    text, rest = s.name, list(s.rest)
    if s.kind in ("program", "table"):
        text += ".sum(2)"
    if tabled(s):
        entries = _entries(s)
        if len(entries) > 1:
            text += f".unflatten(-1, ({', '.join(f'{tensor}.shape[{i}]' for i in entries)}))"
        rest = [i for i in s.rest if i not in entries] + entries
    if s.kind in ("row", "key", "row_table"):
        i = rest[0]
        if (s.index(i), s.param.axes[i]) not in (("row", "row"), ("k", "k")):
            shift = "k_len - q_len" if s.index(i) == "q" and spec.align == "end" else "0"
            text = f"placed({text}, {tensor}.shape[{i}], {shift})"
    own = {axis: i for i, axis in s.own}
    order = [own[a] for a in ("b", "h", "h_kv") if a in own] + rest
    if "h_kv" in own:
        text += ".unflatten(1, (-1, group)).sum(2)"
    elif "h" not in own:
        text += ".sum(1)"
    if "b" not in own:
        text += ".sum(0)"
    back = [order.index(i) for i in range(len(order))]
    return text if back == sorted(back) else f"{text}.permute({', '.join(map(str, back))})"
