"""The search for the fastest plan: which candidates are measured, what throws one out, when the rest cannot win.

It knows neither GPU nor kernel: a Subject prepares, judges and times a candidate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from attncc.planner import Candidate

ENOUGH = 6  # measurements after which the model's error is known well enough to stop by it
MARGIN = 0.9  # a plan may be this much faster than the luckiest prediction so far and still be passed over
NEAR = 1.05  # finalists: within this of the fastest
FINALISTS = 3
TIE = 0.995  # the planner's own choice stays unless another takes less than this part of its time
BUDGET = 50.0  # seconds; what runs then is finished

OK, WRONG, UNSTEADY, FAILED, NO_MEMORY, PASSED_OVER = (
    "ok", "wrong", "not the same in two runs", "failed", "out of memory", "not measured",
)  # fmt: skip


class OutOfMemory(Exception):
    """The device has no room for a candidate; another may need less."""


class Late(Exception):
    """A candidate was not compiled in time."""


class Unsteady(Exception):
    """A candidate gave different bits in two runs."""


class Subject(Protocol):
    """What a candidate is run on."""

    def prepare(self, candidate: Candidate) -> None:
        """Wait until it is compiled. Raises Late, and for what the compiler does not take."""

    def judge(self, candidate: Candidate) -> Sequence[str]:
        """What is wrong with its numbers, in words. Raises OutOfMemory, Unsteady, or what a launch raises."""

    def time(self, candidate: Candidate) -> float:
        """Milliseconds of a run."""

    def more(self, measured: Mapping[Candidate, float]) -> Sequence[Candidate]:
        """What is worth a try after the others, given their milliseconds."""

    def duel(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        """Milliseconds of each, measured in turns."""


@dataclass(frozen=True)
class Trial:
    """What became of one candidate."""

    candidate: Candidate
    status: str
    ms: float | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"choices": self.candidate.choices, "predicted_ms": self.candidate.predicted_ms, "status": self.status,
                "ms": self.ms, "why": self.why}  # fmt: skip


@dataclass
class Found:
    """The outcome of a search. `best` is None where nothing right was measured."""

    trials: list[Trial] = field(default_factory=list)
    best: Trial | None = None
    interrupted: bool = False
    seconds: float = 0.0
    stopped: str = ""  # why the rest was not measured

    @property
    def first(self) -> Trial | None:
        """The planner's own choice."""
        return self.trials[0] if self.trials else None

    @property
    def thrown_out(self) -> list[Trial]:
        return [t for t in self.trials if t.status not in (OK, PASSED_OVER)]


Tell = Callable[[int, int, Found], None]


def search(
    candidates: Sequence[Candidate], subject: Subject, *, budget: float = BUDGET, tell: Tell | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Found:  # fmt: skip
    """Measure candidates in their order, the planner's choice first, and let the fastest meet at the end.

    Ctrl-C ends it with what was found. `tell` hears (done, all, found) after each.
    """
    found, start = Found(), clock()
    try:
        for i, candidate in enumerate(candidates):
            found.stopped = _stop(found, candidate, clock() - start, budget)
            if found.stopped:
                break
            found.trials.append(_try(candidate, subject))
            found.best = min(_right(found), key=_ms, default=None)
            if tell is not None:
                tell(i + 1, len(candidates), found)
        for candidate in () if found.stopped else subject.more({t.candidate: _ms(t) for t in _right(found)}):
            found.trials.append(_try(candidate, subject))
        _final(found, subject)
    except KeyboardInterrupt:
        found.interrupted, found.stopped = True, "interrupted"
    found.trials += [Trial(c, PASSED_OVER, why=found.stopped) for c in candidates[len(found.trials) :]]
    found.seconds = clock() - start
    return found


def _stop(found: Found, candidate: Candidate, seconds: float, budget: float) -> str:
    """Why nothing more is measured; empty to go on. Candidates come in the order of the model's times."""
    if not found.trials:
        return ""
    if seconds > budget:
        return f"out of time: {budget:.0f} s"
    if found.best is None or candidate.predicted_ms is None:
        return ""
    ratios = [_ms(t) / t.candidate.predicted_ms for t in _right(found) if t.candidate.predicted_ms]
    if len(ratios) < ENOUGH or candidate.predicted_ms * min(ratios) * MARGIN <= _ms(found.best):
        return ""
    return "by the model and what was measured the rest cannot win"


def _try(candidate: Candidate, subject: Subject) -> Trial:
    try:
        subject.prepare(candidate)
        faults = subject.judge(candidate)
        if faults:
            return Trial(candidate, WRONG, why="; ".join(faults))
        return Trial(candidate, OK, subject.time(candidate))
    except Late as fault:
        return Trial(candidate, PASSED_OVER, why=_line(fault))
    except OutOfMemory as fault:
        return Trial(candidate, NO_MEMORY, why=_line(fault))
    except Unsteady as fault:
        return Trial(candidate, UNSTEADY, why=_line(fault))
    except Exception as fault:
        return Trial(candidate, FAILED, why=f"{type(fault).__name__}: {_line(fault)}")


def _line(fault: BaseException) -> str:
    return (str(fault).strip().splitlines() or [type(fault).__name__])[-1][:200]


def _right(found: Found) -> list[Trial]:
    return [t for t in found.trials if t.status == OK]


def _ms(trial: Trial) -> float:
    assert trial.ms is not None
    return trial.ms


def _final(found: Found, subject: Subject) -> None:
    """The fastest and the planner's choice in turns: one measurement is too little to tell what is close."""
    right = sorted(_right(found), key=_ms)
    if not right:
        return
    near = [t for t in right if _ms(t) <= NEAR * _ms(right[0])][:FINALISTS]
    first = found.trials[0]
    finalists = near if first in near or first.status != OK else [first, *near]
    if len(finalists) == 1:
        found.best = finalists[0]
        return
    times = subject.duel([t.candidate for t in finalists])
    again = [replace(t, ms=ms) for t, ms in zip(finalists, times, strict=True)]
    for old, new in zip(finalists, again, strict=True):
        found.trials[found.trials.index(old)] = new
    best = min(again, key=_ms)
    own = next((t for t in again if t.candidate == first.candidate), None)
    found.best = own if own is not None and _ms(best) > TIE * _ms(own) else best
