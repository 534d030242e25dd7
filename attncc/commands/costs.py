"""What a call costs, for `explain`: bytes, work and time of both passes, as numbers and as formulas."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from attncc.commands.console import amount, digits, duration
from attncc.errors import PlanError
from attncc.runtime.keys import plain

if TYPE_CHECKING:
    from attncc.commands.contents import Contents
    from attncc.pipeline import Planned

BOUNDS = {"memory": "memory transfers", "tensor": "the products", "exp": "the exponentials"}
LETTERS = {
    "B": "batch", "H": "heads", "H_kv": "heads of K and V", "N_q": "queries", "N_k": "keys", "d": "head size",
    "d_v": "head size of V", "T_q": "rows of a tile", "T_k": "keys of a tile", "tiles": "those visited, of all heads",
    "e": "bytes of an element", "p": "bytes of tensors for each pair", "R": "programs side by side",
    "G": "heads of K and V they belong to",
}  # fmt: skip
TITLES = {"delta": "delta", "dq": "dQ", "dkdv": "dK and dV", "dk": "dK", "dv": "dV"}


def io_facts(planned: Planned, known: Contents, visited: int | None) -> dict[str, Any]:
    """Bytes, operations and predicted time of one call, and their formulas as text; over all tiles where the visited
    ones are not known. `backward` is the same of the backward pass, and of each of its kernels; None where there is
    no plan of it."""
    from attncc import analysis, planner

    plan, shape, target = planned.choice.plan, planned.shape, planned.target
    spread = analysis.spread(planned.spec, planned.visits)
    costs = planner.costs(plan, shape, target, visited, spread)
    forms = planner.closed_forms(plan, target, planner.sizes_of(plan, shape, target, visited))
    return {
        **plain(costs), "visited_tiles": visited, "formulas": {name: str(form) for name, form in forms.items()},
        "backward": _backward(planned, known, visited is not None),
    }  # fmt: skip


def _backward(planned: Planned, known: Contents, counted: bool) -> dict[str, Any] | None:
    from attncc import analysis, pipeline, planner

    if not planned.target.is_gpu:
        return None
    try:
        plan = pipeline.backward(planned).choice.plan
    except (PlanError, NotImplementedError):
        return None
    shape, target, spec = planned.shape, planned.target, planned.spec
    counts = {
        name: analysis.tile_counts(spec, shape, own.tile_q, own.tile_k, known.values, planned.visits)
        for name, own in plan.passes.items()
    } if counted else {}  # fmt: skip
    found = {name: count["partial"] + count["full"] for name, count in counts.items() if count is not None}
    tiles = found if found.keys() == plan.passes.keys() else None
    whole, kernels = planner.backward_costs(plan, shape, target, tiles)
    forms = planner.backward_forms(plan, shape, target, tiles)
    called = {name: "dk" if name == "dkdv" and plan.dv is not None else name for name in kernels}
    return {
        **plain(whole),
        "kernels": {
            TITLES[called[name]]: {**plain(own), "formulas": {n: str(form) for n, form in forms[name].items()}}
            for name, own in kernels.items()
        },
    }


def rows(io: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines of `explain`: label and text."""
    ratio = io["standard_hbm_bytes"] / io["hbm_bytes"]
    unfused = f"unfused attention moves {amount(io['standard_hbm_bytes'], 'B')}, {digits(ratio)} times as much"
    over = "" if io["visited_tiles"] is not None else ", over all tiles: how many are visited is not known"
    lines = [
        ("memory", f"{amount(io['hbm_bytes'], 'B')}{_cache(io)}; {unfused}"),
        ("formula", f"{io['formulas']['hbm_bytes']} bytes; without a cache {io['formulas']['streamed_bytes']}, "
                    f"{amount(io['streamed_bytes'], 'B')}; unfused {io['formulas']['standard_hbm_bytes']}"),
        ("", _letters(io["formulas"])),
        ("work", f"{amount(io['flops'], 'FLOP')}, {amount(io['exponentials'], '')} exponentials{over}"),
        ("time", _time(io)),
    ]  # fmt: skip
    back = io["backward"]
    if back is not None:
        lines.append(("backward", f"{amount(back['hbm_bytes'], 'B')}{_cache(back)}, {amount(back['flops'], 'FLOP')}, "
                                  f"{amount(back['exponentials'], '')} exponentials; {_time(back)}"))  # fmt: skip
        lines += [("", f"{name}: {amount(own['hbm_bytes'], 'B')} = {own['formulas']['hbm_bytes']}")
                  for name, own in back["kernels"].items()]  # fmt: skip
    return lines


def _letters(formulas: dict[str, str]) -> str:
    """What the names in formulas mean."""
    used = {name for form in formulas.values() for name in re.findall(r"[A-Za-z]\w*", form)}
    return "; ".join(f"{name} {what}" for name, what in LETTERS.items() if name in used)


def _cache(io: dict[str, Any]) -> str:
    """Whether the L2 keeps what streams by; nothing where it plays no part."""
    return "" if io["held"] else ", since the L2 does not hold what streams by from one use to the next"


def _time(io: dict[str, Any]) -> str:
    alone = f"{BOUNDS[io['bound']]}, which alone take {duration(io['roofline_ms'])}"
    return f"{duration(io['predicted_ms'])} predicted; bound by {alone}"
