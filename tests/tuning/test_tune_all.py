"""The command that makes the table: the order of its searches, and a table that is whole at any time."""

from __future__ import annotations

import argparse
import json
import pickle
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from attncc import pipeline
from attncc.ir import Shape
from attncc.runtime import search, tune, winners
from attncc.runtime.attention import Attention
from attncc.runtime.winners import Device
from benchmarks import tune_all

HERE = Device("Stub 9000", "sm_90", "12.8")
OPTIONS = argparse.Namespace(
    specs="causal,full", head_dims="128,64", lengths="512,1024,8192", passes="forward,backward", candidates=3,
    quick=True, seconds=1.0,
)  # fmt: skip

SHAPE = Shape(q_len=1024, head_dim=64, head_dim_v=64)


@pytest.fixture
def stubbed(monkeypatch):
    """Searches that take the last plan; gives the lengths that were measured."""
    lengths = []

    def tune(attention, q, k, v, params, passes, budget, timer, workers, contests):
        trials = [search.Trial(c, search.OK, 9.0 - i) for i, c in enumerate(contests[passes[0]].candidates)]
        return SimpleNamespace(found={passes[0]: search.Found(trials, trials[-1])})

    def drawn(task, spec, shape, values):
        lengths.append(shape.q_len)
        return [None] * 3, {}

    monkeypatch.setattr(tune_all, "tune", tune)
    monkeypatch.setattr(tune_all, "drawn", drawn)
    monkeypatch.setattr(tune_all, "Events", lambda *_, **__: None)
    monkeypatch.setattr(winners, "device_of", lambda _: HERE)
    return lengths


def test_what_is_named_first_comes_first():
    found = tune_all.tasks(OPTIONS)
    assert [(t.name, t.lengths) for t in found[:3]] == [
        ("causal", (512, 1024)), ("causal", (8192,)), ("full", (512, 1024)),
    ]  # fmt: skip
    assert (
        {(t.direction, t.head_dim) for t in found[:4]} == {("forward", 128)}
        and len(found) == 16
        and {t.direction for t in found[8:]} == {"backward"}
    )


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_row_is_what_a_call_looks_up(stubbed, direction):
    task = tune_all.Task("causal", direction, 64, (512, 1024))
    contest = pickle.loads(pickle.dumps(tune_all.contest(task, "sm_90", 3)))  # it is made in another process
    row = tune_all.row(task, contest, OPTIONS, None)
    assert stubbed == [512, 1024] and row["choices"] == json.loads(json.dumps(contest.candidates[-1].choices))
    assert row["ms"] == {"512": 7.0, "1024": 7.0} and row["planner_ms"] == {"512": 9.0, "1024": 9.0}
    where = winners.key(contest.planned.parsed.text, HERE, next(task.shapes()), direction)
    assert row["key"].split(" ", 1)[1] == winners.row_of(where).split(" ", 1)[1]


class Submitted:
    """Stands where processes compile."""

    def __init__(self):
        self.jobs = []

    def submit(self, job):
        self.jobs.append(job)
        return done()


def done(value=None, fault=None):
    future = Future()
    if fault is None:
        future.set_result(value)
    else:
        future.set_exception(fault)
    return future


def test_buckets_of_the_same_plans_are_compiled_and_judged_once():
    tasks = [tune_all.Task("causal", "forward", 128, (n,)) for n in (1024, 8192)]
    made = [tune_all.contest(t, "sm_90", 2) for t in tasks]
    assert made[0].planned.shape != made[1].planned.shape
    workers = Submitted()
    ahead = tune_all.Ahead(tasks, [done(c) for c in made], workers)
    assert ahead.compiled(0) is made[0] and ahead.contest(1) is made[0]
    assert len(set(map(repr, workers.jobs))) == 2
    made[1].candidates = made[1].candidates[::-1]
    ahead = tune_all.Ahead(tasks, [done(c) for c in made], workers)
    assert ahead.contest(1) is made[1]


def test_the_forward_kernel_beside_a_backward_pass_is_compiled_ahead_too():
    """The very one that the candidates are run with."""
    task, workers = tune_all.Task("causal", "backward", 64, (1024,)), Submitted()
    made = tune_all.contest(task, "sm_90", 2)
    tune_all.Ahead([task], [done(made)], workers).contest(0)
    first, *others = workers.jobs
    assert [j.direction for j in workers.jobs] == ["forward", "backward", "backward"]
    compiled = pipeline.plan_parsed(made.planned.parsed, first.consts, {}, first.shape, first.target, tuned=first.tuned)
    attention = Attention(made.planned.parsed, made.planned.consts)
    for candidate, job in zip(made.candidates, others, strict=True):
        run = tune.having(attention, made.planned, "backward", candidate).kernels.planned(("sm_90", HERE), SHAPE, 32)
        assert run.choice.plan == compiled.choice.plan and run.tuned == job.tuned


def test_what_cannot_be_planned_fails_in_its_turn():
    tasks = [tune_all.Task("causal", "forward", d, (1024,)) for d in (64, 128)]
    made = tune_all.contest(tasks[0], "sm_90", 2)
    ahead = tune_all.Ahead(tasks, [done(made), done(fault=ValueError("no plan"))], Submitted())
    assert ahead.contest(0) is made
    with pytest.raises(ValueError, match="no plan"):
        ahead.contest(1)


def test_each_pass_has_its_number_of_candidates():
    limits = lambda text: tune_all.limits(argparse.Namespace(passes="forward,backward", candidates=text))
    assert limits("4,2") == {"forward": 4, "backward": 2} and limits("3") == {"forward": 3, "backward": 3}
    assert limits(None) == {"forward": None, "backward": None}
    with pytest.raises(ValueError):
        limits("1,2,3")


def test_a_run_goes_on_with_what_the_table_lacks(tmp_path):
    todo, path = tune_all.tasks(OPTIONS), tmp_path / "table.json"
    assert tune_all.lacking(todo, path) == todo
    row = {"key": "a", "spec": "causal", "pass": "backward", "head_dim": 64, "q_len": 4096}
    tune_all.write(path, HERE, [row])
    left = tune_all.lacking(todo, path)
    assert [t for t in todo if t not in left] == [tune_all.Task("causal", "backward", 64, (8192,))]


def test_the_planners_own_plan_stays_unless_another_gains_two_percent():
    candidates = tune_all.contest(tune_all.Task("causal", "forward", 64, (512,)), "sm_90", 2).candidates
    for ms, best in ((0.985, 0), (0.97, 1)):
        trials = [search.Trial(c, search.OK, x) for c, x in zip(candidates, (1.0, ms), strict=True)]
        for times in (1, 2):
            assert tune_all.nearest([search.Found(trials, trials[1])] * times)[0] == candidates[best].choices


def test_of_lengths_that_disagree_the_plan_is_kept_that_loses_least():
    task = tune_all.Task("causal", "forward", 64, (512, 1024))
    first, second, third = tune_all.contest(task, "sm_90", 3).candidates
    times = ([1.0, 3.0, 1.1], [3.0, 1.0, 1.1])
    found = []
    for ms in times:
        trials = [search.Trial(c, search.OK, x) for c, x in zip((first, second, third), ms, strict=True)]
        found.append(search.Found(trials, min(trials, key=lambda t: t.ms)))
    assert tune_all.nearest(found) == (third.choices, [1.1, 1.1])
    assert tune_all.nearest(found[:1]) == (first.choices, [1.0])
    assert tune_all.nearest([*found, search.Found()]) is None


def test_a_table_grows_and_is_never_half_written(tmp_path, monkeypatch):
    path = tmp_path / "tuned" / "Stub_9000.json"
    row = lambda key, ms: {"key": key, "spec": key, "pass": "forward", "head_dim": 64, "q_len": 4096, "ms": ms}
    tune_all.write(path, HERE, [row("b", 1), row("a", 1)])
    tune_all.write(path, HERE, [row("a", 2)])
    content = json.loads(path.read_text())
    assert [(r["key"], r["ms"]) for r in content["winners"]] == [("a", 2), ("b", 1)]
    assert (content["device"], content["capability"]) == ("Stub 9000", "sm_90")
    monkeypatch.setattr(tune_all.os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        tune_all.write(path, HERE, [row("c", 3)])
    assert json.loads(path.read_text()) == content
