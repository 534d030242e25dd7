"""Attention.tune with plans that only pretend to be compiled: what is caught, what is kept, what a later call takes."""

from __future__ import annotations

import json
from concurrent.futures import Future
from threading import Timer

import pytest
import torch

import attncc
from attncc import pipeline, planner
from attncc.errors import EnvironmentFault
from attncc.ir import Shape
from attncc.planner.hopper_backward import ADDED
from attncc.runtime import search, tune, winners
from attncc.runtime.attention import Attention
from attncc.runtime.cache import Cache
from attncc.runtime.winners import Device
from tests.tuning.conftest import HERE

TEXT = "attention small(window: int = 7, bias: f32[h] grad) { mask 0 <= q - k < window score s + bias[h] }"


PARAMS = {"window": 9, "bias": torch.ones(2)}


class Pretended:
    """The CPU program in the place of a plan's kernel, spoilt as `spoil` says."""

    def __init__(self, whole, spoil):
        self.whole, self.spoil, self.calls = whole, spoil, 0
        self.spec, self.ready, self.asked = whole.spec, whole.ready, set()

    def both(self, q, k, v, given, deterministic=None):
        if deterministic is not None:
            self.asked.add(("call", deterministic))
        out, lse = self.whole.both(q, k, v, given, deterministic=deterministic)
        self.calls += 1
        if self.spoil == "half":  # of the rows is never written
            rows = q.new_empty(out.shape)
            rows[:, :, : q.shape[2] // 2] = out.detach()[:, :, : q.shape[2] // 2]
            out = rows
        elif self.spoil == "half of a long call" and q.shape[2] == 80:
            out = out.index_fill(2, torch.tensor([79]), float("nan"))
        elif self.spoil == "off in a long call" and q.shape[2] == 80:
            out = out * 1.25
        elif self.spoil == "restless":
            out = out * (1 + 2.0**-10 * self.calls)
        elif self.spoil == "memory":
            raise torch.cuda.OutOfMemoryError("tried to allocate 2 GiB")
        return out, lse

    def gradients(self, ready, call, given, deterministic=None):
        self.asked.add(("gradients", deterministic))
        d_q, d_k, d_v, more = self.whole.gradients(ready, call, given)
        self.calls += 1
        if self.spoil == "gradient" and call[0].shape[2] == 80:
            d_q = d_q * 2
        if self.spoil in ("restless d_q", "restless d_k"):
            d_q, d_k = (
                x * (1 + 2.0**-10 * self.calls) if n in self.spoil else x for n, x in (("d_q", d_q), ("d_k", d_k))
            )
        return (d_q * self.calls if self.spoil == "wild d_q" else d_q), d_k, d_v, more


class Clock:
    """Says how long a pretended plan takes."""

    def __init__(self, by_call):
        self.by_call, self.left = by_call, []

    def time(self, call):
        return self.by_call(call)

    def in_turns(self, calls):
        return [self.by_call(c) for c in calls]


@pytest.fixture
def tuned(device, tensors, monkeypatch):
    """tuned(spoils, times, passes): tunes with the i-th candidate spoilt by spoils[i], taking times[i] milliseconds."""

    def run(spoils, times, passes=("forward",), text=TEXT, params=PARAMS, wider=1):
        call = [x.repeat(1, 1, 1, wider) for x in tensors]
        attn, whole = attncc.compile(text), attncc.compile(text)
        order: list[str] = []

        def having(self, choices, planned):
            name = json.dumps(choices, sort_keys=True)
            if name not in order:
                order.append(name)
            spoilt = Pretended(whole, spoils[order.index(name)] if order.index(name) < len(spoils) else "half")
            spoilt.ms = times[order.index(name)] if order.index(name) < len(times) else 9.0
            return spoilt

        monkeypatch.setattr(Attention, "having", having)
        monkeypatch.setattr(tune.OnDevice, "_run", _remembering(tune.OnDevice._run))
        monkeypatch.setattr(tune, "JUDGED", {"heads": 2, "kv_heads": 2, "q_len": 30, "k_len": 40})
        whole(*call, **params)  # found for the CPU, before the tuned one is for the device
        found = tune.tune(attn, *call, params, passes=passes, timer=Clock(lambda call: call.ms))
        return attn, found

    return run


def _remembering(whole):
    def run(self, pretended):
        call = whole(self, pretended)
        made = lambda: call()
        made.ms = pretended.ms
        return made

    return run


SPOILS = (None, "half", "half of a long call", "off in a long call", "restless", "memory", None, None)


def test_37_what_is_wrong_never_wins(tuned):
    attn, found = tuned(SPOILS, [3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 4.0])
    trials = found.found["forward"].trials
    assert [t.status for t in trials[:8]] == [
        search.OK, search.WRONG, search.WRONG, search.WRONG, search.UNSTEADY, search.NO_MEMORY, search.OK, search.OK,
    ]  # fmt: skip
    best = found.found["forward"].best
    assert best.candidate == trials[6].candidate and best.ms == 2.0
    kept = winners.find(attn.kernels.cache, attn.text, HERE, found.shape)
    assert kept == {"forward": best.candidate.choices}


def test_passes_are_tuned_each_for_itself(tuned):
    _, found = tuned([None, None, None, "gradient", None, None], [3.0, 2.0, 5.0] + [1.0] * 40, ("forward", "backward"))
    backward = found.found["backward"].trials
    assert {"forward", "backward"} == set(found.found)
    assert all(t.candidate.plan.direction == "backward" for t in backward)


@pytest.mark.parametrize(("spoil", "status"), [("restless d_q", search.OK), ("wild d_q", search.UNSTEADY),
                                               ("restless d_k", search.UNSTEADY)])  # fmt: skip
def test_a_plan_that_adds_in_any_order_may_round_otherwise_there(tuned, monkeypatch, spoil, status):
    """Its dQ alone, and by no more than roundings; a plan that keeps an order may not."""
    monkeypatch.setattr(tune.OnDevice, "_small", lambda self, tuned: [])
    _, found = tuned([spoil, spoil], [1.0, 1.0], ("backward",), "attention plain { mask k <= q }", {}, wider=4)
    trials = found.found["backward"].trials[:2]
    assert [t.candidate.plan.sums for t in trials] == ["turns", ""]
    assert [t.status for t in trials] == [status, search.UNSTEADY]


def test_a_plan_that_adds_is_judged_itself(tuned, monkeypatch):
    """Not the one for equal bits, which the memory that shows what is not written asks for."""
    made, having = [], tune.having
    monkeypatch.setattr(tune, "having", lambda *a: made.append(having(*a)) or made[-1])
    _, found = tuned([None] * 40, [1.0] * 40, ("backward",), "attention plain { mask k <= q }", {}, wider=4)
    assert found.found["backward"].trials[0].candidate.plan.sums in ADDED
    assert made[0].asked == {("call", False), ("gradients", False)}


def test_passes_share_the_time(device, tensors, monkeypatch):
    shares = []

    def searched(candidates, subject, *, budget, tell):
        shares.append(budget)
        return search.Found(seconds=35.0)

    monkeypatch.setattr(tune, "search", searched)
    attncc.compile(TEXT).tune(*tensors, passes=("forward", "backward"), budget=50.0, bias=torch.ones(2))
    assert shares == [25.0, 15.0]


def test_nothing_right_keeps_nothing(tuned):
    attn, found = tuned(["half"] * 40, [])
    assert found.found["forward"].best is None
    assert winners.find(attn.kernels.cache, attn.text, HERE, found.shape) == {}


def keep(attn, shape, direction="forward", at=3, device=HERE):
    """Make the at-th candidate the winner; gives it."""
    planned = pipeline.plan_parsed(attn.parsed, {}, {}, shape, "sm_90")
    if direction == "forward":
        found = planner.candidates(planned.spec, shape, planned.target, planned.visits)
        chosen = [c for c in found if c.plan.algorithm == "fa2"][at]
    else:
        chosen = planner.backward_candidates(planned.spec, shape, planned.target)[at]
    where = winners.key(attn.text, device, shape, direction)
    winners.keep(attn.kernels.cache, where, chosen.choices, {"ms": 1.0})
    return chosen


SHAPE = Shape(q_len=80, k_len=80, head_dim=16, head_dim_v=16, dtype="f16")
PLACE = ("sm_90", HERE)


def test_a_call_takes_what_was_kept(device):
    attn = attncc.compile(TEXT)
    won = keep(attn, SHAPE)
    back = keep(attn, SHAPE, "backward", 2)
    bucket = planner.bucket_of(SHAPE)
    planned = attn.kernels.planned(PLACE, bucket, 32)
    assert planner.choices_of(planned.choice.plan) == won.choices
    assert planner.choices_of(pipeline.backward(planned).choice.plan) == back.choices
    aligned, general = pipeline.every_kernel(planned)
    for name in planner.tuned.SHARED_BITS:
        assert getattr(general.choice.plan, name) == getattr(aligned.choice.plan, name)


OTHERS = (
    Device("Stub 9001", "sm_90", "12.8"),
    Device("Stub 9000", "sm_100", "12.8"),
    Device("Stub 9000", "sm_90", "13"),
)


@pytest.mark.parametrize("other", [*OTHERS, None])
def test_a_winner_of_another_device_or_driver_is_not_taken(device, other):
    attn = attncc.compile(TEXT)
    keep(attn, SHAPE)
    model = pipeline.plan_parsed(attn.parsed, {}, {}, planner.bucket_of(SHAPE), "sm_90").choice.plan
    assert attn.kernels.planned(("sm_90", other), planner.bucket_of(SHAPE), 32).choice.plan == model
    assert attn.kernels.planned(PLACE, planner.bucket_of(SHAPE), 32).choice.plan != model


def test_a_winner_that_is_no_longer_legal_is_not_taken(device):
    attn = attncc.compile(TEXT)
    bucket = planner.bucket_of(SHAPE)
    model = pipeline.plan_parsed(attn.parsed, {}, {}, bucket, "sm_90").choice.plan
    where = winners.key(attn.text, HERE, SHAPE, "forward")
    legal = planner.choices_of(model)
    for wrong in ({"stages": 400}, {"tile_q": 24}, {"warps": 64}, {"of_tomorrow": 1}, {"tile_k": {"a": 1}}):
        winners.keep(attn.kernels.cache, where, {**legal, **wrong}, {})
        assert attn.kernels.planned(PLACE, bucket, 32).choice.plan == model, wrong


def test_the_last_winner_counts_and_clear_leaves_it(device):
    attn = attncc.compile(TEXT)
    keep(attn, SHAPE, at=2)
    won = keep(attn, SHAPE, at=4)
    attn.kernels.cache.clear()
    assert winners.find(Cache(), attn.text, HERE, SHAPE) == {"forward": won.choices}
    attn.kernels.cache.clear(winners=True)
    assert winners.find(Cache(), attn.text, HERE, SHAPE) == {}


def test_buckets():
    of = lambda **sizes: planner.bucket_of(Shape(**sizes))
    assert [of(q_len=n).q_len for n in (1, 16, 17, 64, 65, 1024, 1025, 10**6)] == [
        16,
        16,
        64,
        64,
        1024,
        1024,
        4096,
        4096,
    ]
    assert of(batch=7, heads=3, kv_heads=3, k_len=5) == of()
    assert of(head_dim=64) != of() and of(dtype="f16") != of()
    assert all(planner.bucket_of(of(q_len=n)) == of(q_len=n) for n in (1, 60, 700, 9000))


def test_what_cannot_be_tuned_is_said(device, tensors):
    attn, q = attncc.compile(TEXT), tensors[0]
    params = {"bias": torch.ones(2)}
    with pytest.raises(ValueError, match="k must have a number of heads"):
        attn.tune(q, q[:, :0], q[:, :0], **params)
    with pytest.raises(TypeError, match="needs the parameter bias"):
        attn.tune(q, q, q)
    with pytest.raises(TypeError, match="q must be a tensor, and is an int"):
        attn.tune(1, q, q, **params)
    with pytest.raises(TypeError, match="bias must be a tensor"):
        attn.tune(q, q, q, bias=3)
    with pytest.raises(ValueError, match="passes are some of forward, backward"):
        attn.tune(q, q, q, passes=["sideways"], **params)
    for budget in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="budget is seconds above 0"):
            attn.tune(q, q, q, budget=budget, **params)
    device(None)
    with pytest.raises(EnvironmentFault, match="nothing to tune on a CPU"):
        attn.tune(q, q, q, **params)


def test_parameters_may_be_called_as_its_arguments_are(device, tensors, monkeypatch):
    attn = attncc.compile("attention named(budget: int, cold: int = 3) { mask 0 <= q - k < budget + cold }")
    given = []

    def measured(subject, candidate):
        given.append(dict(subject.call.given))
        raise KeyboardInterrupt

    monkeypatch.setattr(tune.OnDevice, "judge", measured)
    attn.tune(*tensors, {"budget": 5, "cold": 1}, budget=9.0)
    with pytest.raises(TypeError, match="needs the parameter budget"):
        attn.tune(*tensors, budget=9.0)
    assert given == [{"budget": 5, "cold": 1}]


def test_packed_calls_are_refused(device, tensors):
    with pytest.raises(NotImplementedError, match="small: calls of packed sequences are not tuned yet"):
        attncc.compile(TEXT).packed.tune(*tensors)


def test_searches_of_a_bucket_share_what_they_know(device, tensors, monkeypatch):
    """A plan is compared with float64 once, whatever the lengths that it is then timed at."""
    attn, whole, small = attncc.compile("attention plain { mask k <= q }"), attncc.compile("attention plain {}"), []
    monkeypatch.setattr(tune.OnDevice, "_small", lambda self, tuned: small.append(tuned) or [])
    monkeypatch.setattr(Attention, "having", lambda self, choices, planned: whole)
    whole(*tensors)
    planned = pipeline.plan_parsed(attn.parsed, {}, {}, planner.bucket_of(SHAPE), "sm_90")
    contest = tune.Contest.of(planned, "forward")
    contest.candidates = contest.candidates[:3]
    for _ in range(2):
        found = tune.tune(attn, *tensors, {}, timer=Clock(lambda call: 1.0), contests={"forward": contest})
    assert [t.status for t in found.found["forward"].trials] == [search.OK] * 3 and len(small) == 3


def test_dropout_drops_the_same_in_each_run(device, tensors, monkeypatch):
    attn = attncc.compile("attention dropped { mask k <= q dropout 0.25 }")
    seeds = []

    def measured(subject, candidate):
        seeds.append(subject.call.given["seed"])
        raise KeyboardInterrupt

    monkeypatch.setattr(tune.OnDevice, "judge", measured)
    for given in ({}, {"seed": 7}, {"seed": torch.tensor(8)}):
        assert attn.tune(*tensors, passes=("forward",), **given).found["forward"].interrupted
    assert seeds == [tune.SEED, 7, 8]


def test_the_planners_choice_is_waited_for(device, tensors, monkeypatch):
    """However little time there is, a search has what the others are compared with."""
    slow: Future[None] = Future()

    class Slow:
        def submit(self, job):
            if not begun:
                Timer(0.3, slow.set_result, [None]).start()
            begun.append(job)
            return slow if len(begun) == 1 else Future()

        def close(self):
            pass

    begun: list[object] = []
    monkeypatch.setattr(tune, "Workers", Slow)
    monkeypatch.setattr(tune.OnDevice, "judge", lambda self, candidate: ())
    monkeypatch.setattr(tune.OnDevice, "time", lambda self, candidate: 1.0)
    found = attncc.compile("attention plain {}").tune(*tensors, budget=0.1).found["forward"]
    assert found.best is not None and found.best.candidate == found.trials[0].candidate
    assert {t.status for t in found.trials[1:]} == {search.PASSED_OVER}
