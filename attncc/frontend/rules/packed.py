"""Rules on the tensors of packed sequences (layout ragged)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attncc.errors import Span
from attncc.frontend.report import Report
from attncc.frontend.rules.lints import expressions
from attncc.ir import AttentionSpec, Param, Read, Var, walk

LENGTHS = ("row", "k")


def check_packed(spec: AttentionSpec, spans: Mapping[str, Span], report: Report) -> None:
    """E608 for each tensor of a ragged spec that has no packed form."""
    for p in spec.tensors:
        for why, hint in _faults(spec, p):
            report.error("E608", spans.get(f"param:{p.name}"), f"{p.name} in a packed call: {why}", hint)


def _faults(spec: AttentionSpec, p: Param) -> Iterator[tuple[str, str]]:
    axis = spec.packed_axis(p)
    if not axis:
        return
    if sum(a in LENGTHS for a in p.axes) > 1 or p.axes.count("b") > 1:
        yield "it has a cell for each pair of a sequence", "leave out its axis b, or read what has one of the two"
    elif p.element == "bit" and p.axes[-1] == axis:
        yield f"words of 32 bits do not end where a sequence does along {axis}", "make it bool, or its last axis free"
    for _, e in expressions(spec):
        for node in walk(e):
            if isinstance(node, Read) and node.tensor == p.name and node.indices[p.axes.index("b")] != Var("b", "int"):
                yield "it is read in another sequence", "read it at b"
                return
