"""The search alone, on candidates that only pretend: who wins, who is thrown out, when it stops."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from attncc.ir import KernelPlan
from attncc.planner import Candidate
from attncc.runtime import search as s
from attncc.runtime.search import search

PLAN = KernelPlan("sm_90", "fa2", "q_outer", 128, 64, 2, 8, 128, 128, "bf16")


def candidates(*predicted):
    return [Candidate(replace(PLAN, stages=i), p) for i, p in enumerate(predicted)]


@dataclass
class Pretender:
    """Takes `times[stages]` milliseconds; an exception in its place is raised when it is judged, a text is a fault."""

    times: list[object]
    timed: list[int] = field(default_factory=list)
    uncompiled: tuple[int, ...] = ()
    late: tuple[Candidate, ...] = ()
    duel_times: dict[int, float] = field(default_factory=dict)

    def prepare(self, candidate):
        if candidate.plan.stages in self.uncompiled:
            raise RuntimeError("a tile is too large\nptxas: out of registers")

    def judge(self, candidate):
        what = self.times[candidate.plan.stages]
        if isinstance(what, BaseException):
            raise what
        return [what] if isinstance(what, str) else []

    def time(self, candidate):
        self.timed.append(candidate.plan.stages)
        return self.times[candidate.plan.stages]

    def more(self, measured):
        return self.late

    def duel(self, candidates):
        return [self.duel_times.get(c.plan.stages, self.times[c.plan.stages]) for c in candidates]


def statuses(found):
    return [t.status for t in found.trials]


def test_the_fastest_right_one_wins():
    subject = Pretender([2.0, "out is beyond its bound", 1.0, s.Unsteady("bits"), s.OutOfMemory("2 GiB"),
                         ValueError("no\nlaunch"), 0.5, 1.5], uncompiled=(6,))  # fmt: skip
    found = search(candidates(*[None] * 8), subject)
    assert found.best.candidate.plan.stages == 2 and found.best.ms == 1.0
    assert statuses(found) == [s.OK, s.WRONG, s.OK, s.UNSTEADY, s.NO_MEMORY, s.FAILED, s.FAILED, s.OK]
    assert [t.why for t in found.thrown_out] == [
        "out is beyond its bound", "bits", "2 GiB", "ValueError: launch", "RuntimeError: ptxas: out of registers",
    ]  # fmt: skip
    assert found.first.ms == 2.0 and not found.interrupted and not found.stopped


def test_nothing_right_leaves_no_winner():
    found = search(candidates(1.0, 2.0), Pretender(["wrong", s.OutOfMemory("x")]))
    assert found.best is None and statuses(found) == [s.WRONG, s.NO_MEMORY]


def test_it_stops_when_the_rest_cannot_win():
    predicted = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 2.5, 3.0, 4.0]
    subject = Pretender([2 * p for p in predicted])
    found = search(candidates(*predicted), subject)
    assert subject.timed == list(range(6)) and found.best.candidate.plan.stages == 0
    assert statuses(found)[6:] == [s.PASSED_OVER] * 4 and "cannot win" in found.stopped


def test_it_goes_on_while_the_model_may_be_wrong():
    predicted = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.6, 1.6, 1.65]
    times = [2 * p for p in predicted]
    times[5], times[8] = 0.9, 0.5  # the model was off by a third once, so that it may be again
    subject = Pretender(times)
    assert search(candidates(*predicted), subject).best.candidate.plan.stages == 8
    assert len(subject.timed) == 10


def test_what_is_close_is_decided_in_turns():
    for duel, winner in (([1.0, 0.9, 1.0], 1), ([1.0, 0.999, 1.0], 0), ([1.0, 1.0, 0.98], 2)):
        subject = Pretender([1.0, 0.99, 1.01, 3.0], duel_times=dict(enumerate(duel)))
        found = search(candidates(*[None] * 4), subject)
        assert found.best.candidate.plan.stages == winner and found.first.ms == duel[0]


def test_the_planners_choice_is_in_the_final_however_slow_it_was():
    subject = Pretender([5.0, 1.0, 1.01, 1.02, 1.03], duel_times={0: 0.9})
    found = search(candidates(*[None] * 5), subject)
    assert found.best.candidate.plan.stages == 0 and found.best.ms == 0.9


@pytest.mark.parametrize("at", [0, 2, "final"])
def test_an_interruption_keeps_what_was_found(at):
    subject = Pretender([2.0, 1.0, KeyboardInterrupt() if at == 2 else 3.0, 4.0])
    if at == 0:
        subject.times[0] = KeyboardInterrupt()
    elif at == "final":
        subject.times[0] = 1.01
        subject.duel = lambda candidates: (_ for _ in ()).throw(KeyboardInterrupt)
    found = search(candidates(*[None] * 4), subject)
    assert found.interrupted and len(found.trials) == 4
    assert found.best is None if at == 0 else found.best.candidate.plan.stages == 1


def test_time_runs_out():
    ticks = iter(range(0, 1000, 10))
    subject = Pretender([3.0, 2.0, 1.0, 0.5, 0.4])
    heard = []
    found = search(candidates(*[None] * 5), subject, budget=35, clock=lambda: next(ticks),
                   tell=lambda done, whole, f: heard.append((done, whole, f.best.ms)))  # fmt: skip
    assert found.stopped == "out of time: 35 s" and found.best.ms == 1.0
    assert heard == [(1, 5, 3.0), (2, 5, 2.0), (3, 5, 1.0)]


def test_what_is_compiled_too_late_is_passed_over_and_not_thrown_out():
    subject = Pretender([3.0, s.Late("not compiled in time")])
    found = search(candidates(None, None), subject)
    assert statuses(found) == [s.OK, s.PASSED_OVER] and not found.thrown_out
    assert found.trials[1].why == "not compiled in time"


def test_what_is_tried_last_may_win():
    *early, late = candidates(*[None] * 3)
    found = search(early, Pretender([2.0, 1.0, 0.5], late=(late,)))
    assert found.best.candidate == late and len(found.trials) == 3
