"""What a call costs, for `explain`: bytes, work and time of both passes, as numbers and as formulas."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attncc.commands.console import amount, digits, duration
from attncc.errors import PlanError
from attncc.runtime.keys import plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attncc.commands.contents import Contents
    from attncc.ir import KernelPlan
    from attncc.pipeline import Planned
    from attncc.planner import Costs

BOUNDS = {"memory": "memory transfers", "tensor": "the products", "exp": "the exponentials"}
LETTERS = {
    "B": "batch", "H": "heads", "H_kv": "heads of K and V", "N_q": "queries", "N_k": "keys", "d": "head size",
    "d_v": "head size of V", "T_q": "rows of a tile", "T_k": "keys of a tile", "tiles": "those visited, of all heads",
    "e": "bytes of an element", "p": "bytes of tensors for each pair", "R": "programs side by side",
    "G": "heads of K and V they belong to",
}  # fmt: skip
TITLES = {"delta": "delta", "dq": "dQ", "dkdv": "dK and dV", "dqkv": "dQ, dK and dV", "dk": "dK", "dv": "dV"}


def io_facts(planned: Planned, known: Contents, visited: int | None) -> dict[str, Any]:
    """Bytes, operations and predicted time of one call, and their formulas as text; over all tiles where the visited
    ones are not known. `backward` is the same of the backward pass, and of each of its kernels; None where there is
    no plan of it."""
    from attncc import planner

    plan, shape, target = planned.choice.plan, planned.shape, planned.target
    forms = planner.closed_forms(plan, target, planner.sizes_of(plan, shape, target, visited))
    back = _backward(planned, known.values if visited is not None else None)
    return {
        **plain(forward_costs(planned, visited)), "units": target.units, "visited_tiles": visited,
        "formulas": {name: str(form) for name, form in forms.items()}, "backward": back,
    }  # fmt: skip


def forward_costs(planned: Planned, visited: int | None) -> Costs:
    """Those of the forward pass with so many visited tiles (None: all)."""
    from attncc import analysis, planner

    spread = analysis.spread(planned.spec, planned.visits)
    special = planner.special_functions(planned.spec)
    return planner.costs(planned.choice.plan, planned.shape, planned.target, visited, spread, special)


def backward_costs(
    planned: Planned, plan: KernelPlan, tiles: Mapping[str, int] | None
) -> tuple[Costs, Mapping[str, Costs]]:  # fmt: skip
    """Those of a backward plan and of each of its kernels, with so many visited tiles by their names (None: all)."""
    from attncc import analysis, planner

    spread = analysis.spread(planned.spec, planned.visits)
    special = planner.special_functions(planned.spec)
    return planner.backward_costs(plan, planned.shape, planned.target, tiles, spread, special)


def predicted_ms(planned: Planned, plan: KernelPlan, known: Contents) -> float:
    """What the model says of this call with a plan of either pass; over all tiles where those visited are not known."""
    from attncc import analysis

    if plan.direction == "backward":
        return backward_costs(planned, plan, visited_tiles(planned, plan, known.values))[0].predicted_ms
    counts = analysis.tile_counts(planned.spec, planned.shape, plan.tile_q, plan.tile_k, known.values, planned.visits)
    visited = None if counts is None else counts["partial"] + counts["full"]
    return forward_costs(replace(planned, choice=replace(planned.choice, plan=plan)), visited).predicted_ms


def visited_tiles(planned: Planned, plan: KernelPlan, values: Mapping[str, Any]) -> dict[str, int] | None:
    """Tiles that each kernel of a backward plan visits, by name; None where a value is missing."""
    from attncc import analysis

    found = {}
    for name, own in plan.passes.items():
        counts = analysis.tile_counts(planned.spec, planned.shape, own.tile_q, own.tile_k, values, planned.visits)
        if counts is None:
            return None
        found[name] = counts["partial"] + counts["full"]
    return found


def _backward(planned: Planned, values: Mapping[str, Any] | None) -> dict[str, Any] | None:
    from attncc import pipeline, planner

    if not planned.target.is_gpu:
        return None
    try:
        plan = pipeline.backward(planned).choice.plan
    except (PlanError, NotImplementedError):
        return None
    shape, target = planned.shape, planned.target
    tiles = None if values is None else visited_tiles(planned, plan, values)
    whole, kernels = backward_costs(planned, plan, tiles)
    forms = planner.backward_forms(plan, shape, target, tiles)
    called = {name: "dk" if name == "dkdv" and plan.dv is not None else name for name in kernels}
    return {
        **plain(whole),
        "kernels": {
            TITLES[called[name]]: {**plain(own), "formulas": {n: str(form) for n, form in forms[name].items()}}
            for name, own in kernels.items()
        },
    }


def rows(io: dict[str, Any], on_cpu: bool) -> list[tuple[str, str]]:
    """Lines of `explain`: label and text. What is called HBM and L2 on a GPU has other names on a CPU."""
    memory, cache = ("main memory", "cache") if on_cpu else ("HBM", "L2")
    ratio = io["standard_hbm_bytes"] / io["hbm_bytes"]
    standard = f"algorithm standard {amount(io['standard_hbm_bytes'], 'B')}, {digits(ratio)} times as much"
    over = "" if io["visited_tiles"] is not None else ", over all tiles: how many are visited is not known"
    lines = [
        ("memory", f"{amount(io['hbm_bytes'], 'B')} of {memory}{_cached(io, cache)}; {standard}"),
        ("formula", io["formulas"]["hbm_bytes"]),
        ("no cache", f"{io['formulas']['streamed_bytes']}: {amount(io['streamed_bytes'], 'B')}"),
        ("standard", io["formulas"]["standard_hbm_bytes"]),
        ("", _letters(io["formulas"])),
        ("work", f"{amount(io['flops'], 'FLOP')}, {amount(io['exponentials'], '')} exponentials{over}"),
        ("", f"{io['formulas']['flops']} operations, {io['formulas']['exponentials']} exponentials"),
        *_shared(io),
        ("time", _time(io) + _rest(io)),
    ]  # fmt: skip
    back = io["backward"]
    if back is not None:
        moved, work = f"{amount(back['hbm_bytes'], 'B')}{_cached(back, cache)}", amount(back["flops"], "FLOP")
        exponentials = f"{amount(back['exponentials'], '')} exponentials"
        lines.append(("backward", f"{moved}, {work}, {exponentials}; {_time(back)}"))
        lines += [("", f"{name}: {amount(own['hbm_bytes'], 'B')} = {own['formulas']['hbm_bytes']}")
                  for name, own in back["kernels"].items()]  # fmt: skip
    return lines


def _shared(io: dict[str, Any]) -> list[tuple[str, str]]:
    form = io["formulas"].get("shared_bytes")
    return [("shared", f"{form}: {io['shared_bytes']:,} bytes of a block's shared memory")] if form else []


def _letters(formulas: dict[str, str]) -> str:
    """What the names in formulas mean."""
    used = {name for form in formulas.values() for name in re.findall(r"[A-Za-z]\w*", form)}
    return "; ".join(f"{name} {what}" for name, what in LETTERS.items() if name in used)


def _cached(io: dict[str, Any], cache: str) -> str:
    """Whether the cache keeps what streams by; nothing where it plays no part."""
    return "" if io["held"] else f", what the {cache} does not hold from use to use read again"


def _time(io: dict[str, Any]) -> str:
    """The model's time, and what of it is the work that binds; it may be all, where none is told apart or the measured
    rate is beyond the one that is told reachable."""
    few = 0 < io["programs"] < io.get("units", 0)
    busy = f", {io['programs']} of {io['units']} multiprocessors busy" if few else ""
    bound = f"{duration(io['predicted_ms'])} predicted{busy}; bound by {BOUNDS[io['bound']]}"
    if io["predicted_ms"] <= io["roofline_ms"]:
        return bound
    return f"{bound}, {duration(io['roofline_ms'])} at their full rate"


def _rest(io: dict[str, Any]) -> str:
    rest = "; launching, starting programs, uneven shares and steps that wait for each other take the rest"
    return rest if io["predicted_ms"] > io["roofline_ms"] else ""
