"""The host's part of parameter gradients: buffers for the partial sums, and the second pass that adds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attncc.codegen.backward_arguments import tabled
from attncc.codegen.backward_sites import Site
from attncc.codegen.signature import stored_places
from attncc.ir import AttentionSpec


@dataclass(frozen=True)
class Collected:
    """Lines of the launcher: what is allocated before the kernels, and each parameter's gradient after them."""

    buffers: tuple[str, ...]
    gradients: tuple[tuple[str, str, str], ...]  # (name, expression, the zero of its shape)
    places: bool  # the function that puts rows in their places is wanted
    by_sequence: bool  # and the one that adds up the slots of each packed sequence


def collected(spec: AttentionSpec, sites: Sequence[Site], names: Mapping[str, str], tile_q: int) -> Collected:
    """`tile_q`: rows of a program that leaves sums."""
    buffers = [f"cells_{s.name} = {_cells(spec, s, names[s.param.name])}" for s in sites if tabled(s)]
    if counts := [f"cells_{s.name}" for s in sites if s.kind == "table"]:
        buffers.append(
            f"slots = min(row_tiles, max(2 * {rows_of(spec)} // ({' + '.join(counts)} + 1), 1))  # row tiles at a time"
        )
    buffers += [_buffer(spec, s, names[s.param.name]) for s in sites]
    gradients = []
    for p in spec.params:
        mine = [s for s in sites if s.param == p]
        if not mine:
            continue
        total = " + ".join(_total(spec, s, names[p.name], tile_q) for s in mine)
        if p.is_tensor and not all(_direct(s) for s in mine):
            total = f"({total})" if len(mine) > 1 else total
            total += f".to({names[p.name]}.dtype)"
        zero = f"torch.zeros_like({names[p.name]})" if p.is_tensor else "torch.zeros((), device=q.device)"
        gradients.append((p.name, total, zero))
    asked = (any(f"{name}(" in text for _, text, _ in gradients) for name in ("placed", "by_sequence"))
    return Collected(tuple(buffers), tuple(gradients), *asked)


def rows_of(spec: AttentionSpec) -> str:
    return "total_q" if spec.ragged else "q_len"


def _direct(s: Site) -> bool:
    return s.kind == "cells" and not s.apart


def _cells(spec: AttentionSpec, s: Site, tensor: str) -> str:
    stored = stored_places(spec, s.param)
    return " * ".join(f"{tensor}.shape[{stored[i]}]" for i in s.entries)


def _buffer(spec: AttentionSpec, s: Site, tensor: str) -> str:
    """float32, one partial sum for each program or row, key or entry; cells are the gradient itself. What no program
    writes is 0: of packed sequences, slots without a tile and keys without a row."""
    if s.kind == "cells":
        kind = f"{tensor}.dtype" if _direct(s) else "torch.float32"
        return f"{s.name} = torch.zeros({tensor}.shape, dtype={kind}, device=q.device)"
    rows, keys, heads = (rows_of(spec), "total_k", "1, h_len") if spec.ragged else ("q_len", "k_len", "b_len, h_len")
    shape = {"program": "row_tiles", "row": rows, "key": keys, "table": "slots", "row_table": rows, "key_table": keys}[
        s.kind
    ]
    if not tabled(s):
        new = "zeros" if spec.ragged else "empty"
        return f"{s.name} = torch.{new}(({heads}, {shape}), dtype=torch.float32, device=q.device)"
    return f"{s.name} = torch.zeros(({heads}, {shape}, cells_{s.name}), dtype=torch.float32, device=q.device)"


def _total(spec: AttentionSpec, s: Site, tensor: str, tile_q: int) -> str:
    """The sums of a site in the parameter's own shape."""
    if s.kind == "cells":
        return s.name
    text, rest, stored = s.name, list(s.rest), stored_places(spec, s.param)
    own = {axis: i for i, axis in s.own if i in stored}
    if spec.ragged and "b" in own:
        text = f"by_sequence({text}, cu_seqlens_q, {tile_q})"
    elif s.kind in ("program", "table"):
        text += ".sum(2)"
    if tabled(s):
        entries = s.entries
        if len(entries) > 1:
            text += f".unflatten(-1, ({', '.join(f'{tensor}.shape[{stored[i]}]' for i in entries)}))"
        rest = [*(i for i in s.rest if i not in entries), *entries]
    if s.kind in ("row", "key", "row_table", "key_table"):
        i = rest[0]
        if (s.index(i), s.param.axes[i]) not in (("row", "row"), ("k", "k")):
            text = f"placed({text}, {tensor}.shape[{stored[i]}], {_shift(spec, s, i)})"
    order = [own[a] for a in ("b", "h", "h_kv") if a in own] + rest
    if "h_kv" in own:
        text += ".unflatten(1, (-1, group)).sum(2)"
    elif "h" not in own:
        text += ".sum(1)"
    if "b" not in own:
        text += ".sum(0)"
    back = [order.index(i) for i in sorted(order)]
    return text if back == sorted(back) else f"{text}.permute({', '.join(map(str, back))})"


def _shift(spec: AttentionSpec, s: Site, axis: int) -> str:
    """How far along an axis a row or key stands from its own number; of packed sequences, in which of them."""
    moved = s.index(axis) == "q" and spec.align == "end"
    if not spec.ragged:
        return "k_len - q_len" if moved else "0"
    source = "cu_seqlens_k" if s.of_keys else "cu_seqlens_q"
    place = "cu_seqlens_k" if s.param.axes[axis] == "k" else "cu_seqlens_q"
    return f"{source}, {place}, " + ("(cu_seqlens_k - cu_seqlens_q).diff()" if moved else f"torch.zeros_like({place})")
