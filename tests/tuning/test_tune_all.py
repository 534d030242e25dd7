"""The command that makes the table: the order of its searches, and a table that is whole at any time."""

from __future__ import annotations

import argparse
import json
import pickle
from types import SimpleNamespace

import pytest

from attncc.runtime import search, winners
from attncc.runtime.winners import Device
from benchmarks import tune_all

HERE = Device("Stub 9000", "sm_90", "12.8")
OPTIONS = argparse.Namespace(
    specs="causal,full", head_dims="128,64", lengths="512,1024,8192", passes="forward,backward", candidates=3,
    quick=True, seconds=1.0,
)  # fmt: skip


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
