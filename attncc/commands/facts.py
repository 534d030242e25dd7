"""What `explain` says, as plain data: the same facts are printed and given out as JSON."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from attncc.commands.contents import unknown_in_mask
from attncc.commands.costs import io_facts
from attncc.errors import Diagnostic, PlanError
from attncc.runtime.keys import plain

if TYPE_CHECKING:
    from attncc.commands.contents import Contents
    from attncc.ir import Param, Summary
    from attncc.pipeline import Planned

PLAN = ("algorithm", "loop", "tile_q", "tile_k", "stages", "warps", "shared_bytes")


def facts(planned: Planned, known: Contents) -> dict[str, Any]:
    """Meaning, mask, plan, costs. Mask numbers are sums over batch and heads; None where contents would be needed."""
    from attncc import frontend, pipeline
    from attncc.planner.ladder import scratch_bytes

    spec = planned.spec
    mask = mask_facts(planned, known)
    tiles = mask["tiles"]
    visited = None if tiles["partial"] is None else tiles["partial"] + tiles["full"]
    return {
        "name": spec.name,
        "spec": frontend.canonical(spec),
        "target": planned.target.name,
        "shape": plain(planned.shape),
        "align": spec.align,
        "params": [_param(p, planned, known) for p in planned.parsed.spec.params],
        "mask": mask,
        "plan": {**{n: getattr(planned.choice.plan, n) for n in PLAN}, **plain(planned.choice.plan)},
        "scratch_bytes": scratch_bytes(planned.choice.plan, planned.shape),
        "pinned": [n for n, x in plain(spec.schedule(planned.target.name)).items() if x is not None],
        "backward": backward_facts(planned),
        "rejected": [{"plan": plain(plan), "reason": reason} for plan, reason in planned.choice.rejected],
        "io": io_facts(planned, known, visited),
        "product": planned.target.product,
        "warnings": [_warning(d) for d in pipeline.warnings(planned)],
    }


def backward_facts(planned: Planned) -> dict[str, Any] | None:
    """The kernels of the backward pass that walk over tiles, by what they make; or why there are none; None on CPUs."""
    from attncc import pipeline, planner
    from attncc.planner.hopper_backward import ADDED

    if not planned.target.is_gpu:
        return None
    try:
        plan = pipeline.backward(planned).choice.plan
    except (PlanError, NotImplementedError) as fault:
        return {"reason": str(fault)}
    titles = {"dq": "dQ", "dkdv": "dK and dV" if plan.dv is None else "dK", "dv": "dV"}
    kernels = {titles[n]: plain(own) for n, own in plan.passes.items()}
    if plan.sums in ADDED:  # one kernel makes them all
        kernels = {"dQ, dK and dV": plain(plan.dkdv)}
    refused = planner.backward_refused(planned.spec, planned.shape, planned.target, plan.int_bits)
    return {
        "algorithm": plan.algorithm, "kernels": kernels, "shared_bytes": plan.shared_bytes,
        "rejected": [{"algorithm": "fa3", "reason": refused}] if refused else [],
    }  # fmt: skip


def mask_facts(planned: Planned, known: Contents) -> dict[str, Any]:
    """Counts for this call, and what is proved of every call. `drawn`: from how many rows and query tiles counts are
    estimated, None where they are exact."""
    from attncc import analysis, frontend

    spec, shape, plan, visits = planned.spec, planned.shape, planned.choice.plan, planned.visits
    proved = analysis.prove(spec)
    rows = tiles = None
    if not unknown_in_mask(planned.spec, known):
        rows = analysis.row_counts(spec, shape, known.values)
        tiles = analysis.visited_tiles(spec, shape, plan.tile_q, plan.tile_k, known.values, visits)
    return {
        "pairs": rows.pairs if rows else None,
        "total": shape.batch * shape.heads * shape.q_len * shape.k_len,
        "empty_rows": rows.empty if rows else None,
        "tiles": {name: getattr(tiles, name) if tiles else None for name in ("skipped", "partial", "full")},
        "balance": {**plain(tiles.balance), "ratio": tiles.balance.ratio} if tiles else None,
        "drawn": {"rows": rows.drawn if rows else None, "tiles": tiles.drawn if tiles else None},
        "causal": proved.causal,
        "always": proved.always,
        "never": proved.never,
        "empty_rows_proved": proved.empty_rows,
        "no_empty_row": frontend.expression_text(proved.no_empty_row) if proved.no_empty_row is not None else None,
        "opaque": list(proved.opaque),
        "class_tests": visits.may is not None or visits.must is not None,
        "segments": {"masked": len(visits.masked), "full": len(visits.full)},
        "listed": visits.listed,
        "tables": [*map(partial(_table, planned), _stored(planned)), *([_list(planned)] if visits.listed else [])],
    }


def _stored(planned: Planned) -> tuple[Summary, ...]:
    """The summaries that stand in memory: a kernel works those of its own rows out where it needs them."""
    from attncc.codegen.tables import tables_of

    tables = tables_of(planned.visits)
    return (*tables.reduced, *tables.scanned) if planned.target.is_gpu else planned.visits.summaries


def _table(planned: Planned, summary: Summary) -> dict[str, Any]:
    """A table that is made before the kernel, and its bytes in this call: four for each tile, of scans mostly two."""
    shape, plan = planned.shape, planned.choice.plan
    length, tile = (shape.q_len, plan.tile_q) if summary.axis == "q" else (shape.k_len, plan.tile_k)
    extents = {"b": shape.batch, "h": shape.heads, "h_kv": shape.kv_heads}
    element = 2 if summary.reduce in ("first", "stop", "run") and planned.target.is_gpu and _few_tiles(planned) else 4
    size = element * -(-length // tile) * prod(extents[axis] for axis in summary.over)
    facts = {"name": summary.name, "axis": summary.axis, "reduce": summary.reduce, "over": list(summary.over)}
    return {**facts, "bytes": size}


def _few_tiles(planned: Planned) -> bool:
    """Whether 16 bits hold the number of a tile."""
    shape, plan = planned.shape, planned.choice.plan
    return max(-(-shape.q_len // plan.tile_q), -(-shape.k_len // plan.tile_k)) < 2**15


def _list(planned: Planned) -> dict[str, Any]:
    """The lists of tiles that a kernel before the kernel makes: a place for each pair of tiles, and two numbers."""
    from attncc.codegen.tables import tables_of

    shape, plan, over = planned.shape, planned.choice.plan, tables_of(planned.visits).over
    programs = prod({"b": shape.batch, "h": shape.heads}[axis] for axis in over)
    size = 4 * programs * -(-shape.q_len // plan.tile_q) * (-(-shape.k_len // plan.tile_k) + 2)
    return {"name": "tiles", "axis": "q", "reduce": "list", "over": list(over), "bytes": size}


def _param(param: Param, planned: Planned, known: Contents) -> dict[str, Any]:
    value = planned.consts.get(param.name, planned.values.get(param.name))
    given = list(known.tensors[param.name].shape) if param.name in known.tensors else None
    return {
        "name": param.name, "type": param.element or param.type, "axes": list(param.axes), "const": param.const,
        "sorted": param.sorted, "grad": param.grad, "default": param.default, "value": value, "given_shape": given,
    }  # fmt: skip


def _warning(found: Diagnostic) -> dict[str, Any]:
    where = found.span
    return {
        "code": found.code, "message": found.message, "hint": found.hint,
        "line": where.line if where else None, "column": where.column if where else None,
    }  # fmt: skip
