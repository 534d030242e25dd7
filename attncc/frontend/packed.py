"""A spec over packed sequences: `layout { q ragged kv ragged }`, and what its tensors are then.

An axis `row` or `k` beside `b` is packed: the sequences lie one behind another, and no axis `b` is stored. Without `b`
it is one table for all sequences, as long as the tensor that a call passes: a free axis.
"""

from __future__ import annotations

from dataclasses import replace

from attncc.errors import SpecError
from attncc.frontend.parse import Parsed
from attncc.frontend.report import Report
from attncc.frontend.scaled import fresh
from attncc.ir import Param

TABLES = {"row": "rows", "k": "keys"}  # what an axis over all rows or keys of a sequence is called as a free axis


def packed(parsed: Parsed) -> Parsed:
    """The same attention with the layout ragged. Raises SpecError (E608) for a tensor that has no packed form."""
    from attncc.frontend.rules.packed import check_packed

    spec = parsed.spec
    ragged = replace(spec, layout=replace(spec.layout, q="ragged", kv="ragged"))
    report = Report()
    check_packed(ragged, parsed.spans, report)
    if report.errors:
        raise SpecError(report.sorted_errors(), parsed.text, parsed.filename)
    taken = {*(p.name for p in spec.params), *spec.free_axes, *(n for n, _ in spec.lets)}
    called = {axis: fresh(name, taken) for axis, name in TABLES.items()}
    params = (_table(p, called) for p in ragged.params)
    return replace(parsed, spec=replace(ragged, params=tuple(params)))


def _table(p: Param, called: dict[str, str]) -> Param:
    return p if "b" in p.axes else replace(p, axes=tuple(called.get(str(a), a) for a in p.axes))
