"""What an algorithm that a schedule pins cannot express, whatever is built: said with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from attncc.ir import LOOP_OF, AttentionSpec, Schedule

if TYPE_CHECKING:
    from attncc.frontend.parse import Parsed

BY_PIECES = {  # normalisers that want a whole row before its first weight
    "two_pass": "two_pass finds the maximum of a whole row before any weight",
    "sparsemax": "the threshold of sparsemax follows from a whole row",
    "entmax": "the threshold of entmax follows from a whole row",
}
ORDER = "its loops run the other way round"


def inexpressible(spec: AttentionSpec) -> Iterator[tuple[str, str, str]]:
    """Key of the place, what is wrong, and a hint, for the schedule of every target and for each target's own."""
    for target in dict.fromkeys((None, *(s.target for s in spec.schedules))):
        pinned = spec.schedule(target or "")
        if (pinned.algorithm, pinned.loop) == (None, None):
            continue
        why = _obstacle(spec, pinned)
        if why:
            yield _place(spec, target), *why


def pinned(parsed: Parsed, algorithm: str) -> Parsed:
    """The same spec with this algorithm for every target; what is pinned beside another one is not about it."""
    spec = parsed.spec
    mine = [replace(s, algorithm=None, loop=None) if s.algorithm in (None, algorithm) else Schedule(s.target)
            for s in spec.schedules]  # fmt: skip
    general = next((s for s in mine if s.target is None), Schedule())
    others = (s for s in mine if s.target is not None and s != Schedule(s.target))
    return replace(parsed, spec=replace(spec, schedules=(replace(general, algorithm=algorithm), *others)))


def _obstacle(spec: AttentionSpec, pinned: Schedule) -> tuple[str, str] | None:
    algorithm = pinned.asked
    if algorithm not in LOOP_OF:
        return None
    if pinned.loop not in (None, LOOP_OF[algorithm]):
        return f"algorithm {algorithm} has not the loop {pinned.loop}: {ORDER}", f"write loop {LOOP_OF[algorithm]}"
    if spec.reports and algorithm != "fa2":
        return f"algorithm {algorithm} returns nothing of a row but its lse, and not {spec.layout.rows}", ROWS
    if algorithm not in ("standard", "fa1"):
        return None
    for axis, form in (("q", spec.layout.q), ("kv", spec.layout.kv)):
        if form != "dense":
            what = "scores and weights" if algorithm == "standard" else "the state of its rows"
            return f"algorithm {algorithm} puts {what} into one dense block, and the layout of {axis} is {form}", FA2
    if algorithm == "fa1" and spec.softmax.policy in BY_PIECES:
        return f"algorithm fa1 meets the keys of a row piece by piece: {BY_PIECES[spec.softmax.policy]}", WHOLE
    return None


FA2 = "algorithm fa2 takes every layout"
ROWS = "algorithm fa2 returns them"
WHOLE = "algorithm standard has whole rows"


def _place(spec: AttentionSpec, target: str | None) -> str:
    """Where the algorithm that holds for `target` is written, or else its loop."""
    for name in ("algorithm", "loop"):
        for own in dict.fromkeys((target, None)):
            if any(s.target == own and getattr(s, name) is not None for s in spec.schedules):
                return f"schedule.{name}" if own is None else f"schedule.{own}.{name}"
    return "attention"
