"""What benchmarks/planner.py measures, without a GPU."""

import queue
import sys
import time
from concurrent.futures import Future
from contextlib import suppress

import pytest
import torch

from tests.house.tree import ROOT


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import planner as made

    yield made
    sys.path.remove(str(ROOT / "benchmarks"))
    for name in ("planner", "forward", "records", "turns", "peers"):
        sys.modules.pop(name, None)


def test_the_grid_begins_with_the_first_choice_and_holds_both_algorithms(bench):
    planned = bench.planned_of(("dense", "causal", 128))
    grid = bench.grid(planned, every=False)
    assert grid[0].plan == planned.choice.plan
    assert len(set(grid)) == len(grid) and {c.plan.algorithm for c in grid} == {"fa2", "fa3"}
    told = [bench.told(c) for c in grid]
    assert len(set(told)) == len(told)  # a name stands for one plan
    assert set(grid) < set(bench.grid(planned, every=True))


def test_a_row_is_told_with_its_share(bench):
    row = {
        "row": "causal", "share": 0.95, "measured": 2, "plans": 4, "beyond": 1, "first": "a", "best": "b",
        "best_ms": 1.0, "share_fa2": None, "wrong": [], "failed": ["c"],
    }  # fmt: skip
    assert "0.950  2 of 4 plans, 1 left out; first a, best b 1.0000 ms; wrong 0, failed 1" in bench.shown(row)


def test_the_rest_of_a_grid_is_what_no_record_has_with_the_fastest_of_each_algorithm(bench):
    planned = bench.planned_of(("dense", "full", 64))
    grid = bench.grid(planned, every=False)
    names = {a: [bench.told(c) for c in grid if c.plan.algorithm == a] for a in ("fa2", "fa3")}
    known = names["fa2"][:20] + names["fa3"]
    times = {name: 1.0 + i for i, name in enumerate(reversed(known))}
    found = [bench.told(c) for c in bench.rest(grid, [times, times])]
    ahead = {names["fa3"][0], names["fa2"][0], *names["fa3"][-3:], *names["fa2"][17:20]}
    assert found[0] == bench.told(grid[0]) and set(found[:8]) == ahead
    assert found[8:] == names["fa2"][20:]
    assert set(bench.rest(grid, [times, {}])) == set(grid)  # the second row has no times yet


def test_plans_far_behind_in_the_model_are_left_out_but_for_the_first_of_an_algorithm(bench):
    family, row = ("dense", "full", 64), "full D64 H32 B4 S4096"
    whole = bench.Contest(family, row, False, "", {})
    least = min(c.predicted_ms for c in whole.candidates if c.predicted_ms)
    near = bench.Contest(family, row, False, "", {}, 1.05)
    first = {c.plan.algorithm: c for c in reversed(whole.candidates)}
    assert not whole.beyond and near.names == whole.names
    assert first["fa2"].predicted_ms > 1.05 * least
    kept = {c for c in whole.candidates if c.predicted_ms is None or c.predicted_ms <= 1.05 * least} | {*first.values()}
    assert near.candidates == [c for c in whole.candidates if c in kept]
    assert near.beyond == {bench.told(c) for c in whole.candidates if c not in kept} != set()


def test_times_of_a_record_are_those_of_plans_that_are_in_the_grid_today(bench):
    grid = [bench.told(c) for c in bench.grid(bench.planned_of(("dense", "full", 256)), every=False)]
    row = "full D256 H8 B4 S4096"
    known = {row: {**dict.fromkeys(grid[:-1], 1.0), "fa3 of another day": 0.5}}
    made = bench.Contest(("dense", "full", 256), row, False, "", known)
    assert made.known[row].keys() == set(grid[:-1]) and made.names == set(grid)
    assert bench.told(made.candidates[-1]) == grid[-1] and len(made.candidates) < len(grid)


class Compiled:
    """Stands in for the processes that compile: all is done at once."""

    def __init__(self, count):
        pass

    def submit(self, job):
        done = Future()
        done.set_result(None)
        return done

    def close(self):
        pass


def contest_without_gpu(bench, monkeypatch, known, most):
    """What a family's process puts into its queue, and what it measured, where it is ended after so many plans."""
    family, row, measured = ("dense", "full", 256), "full D256 H8 B4 S4096", []

    def measure(self, candidate):
        if len(measured) == most:
            raise KeyboardInterrupt
        measured.append(bench.told(candidate))
        self.compiled[candidate] = None
        self.times[row][candidate] = 1.0 + len(measured)

    monkeypatch.setattr(bench, "Workers", Compiled)
    monkeypatch.setattr(bench, "KEPT", -1.0)
    monkeypatch.setattr(bench.Contest, "measure", measure)
    monkeypatch.setattr(bench.Contest, "_in_turns", lambda self, row, some: {c: self.times[row.name][c] for c in some})
    out = queue.Queue()
    with suppress(KeyboardInterrupt):
        bench.contest(family, row, False, "", known, float("inf"), 1, time.time() + 60, out)
    return [out.get() for _ in range(out.qsize())], measured


def test_a_run_that_was_ended_is_gone_on_with(bench, monkeypatch):
    told, first = contest_without_gpu(bench, monkeypatch, {}, 8)
    assert all(rows is not None for _, rows in told)  # it was not done
    (kept,) = told[-1][1]
    assert list(kept["times"]) == first and kept["measured"] == 8 and kept["left"] == kept["plans"] - 8
    again, second = contest_without_gpu(bench, monkeypatch, {kept["row"]: kept["times"]}, None)
    assert again[-1][1] is None
    (whole,) = again[-2][1]
    assert whole["measured"] == whole["plans"] == len(first) + len(set(second) - set(first)) and whole["left"] == 0
    assert len(second) < whole["plans"] and whole["first"] == first[0] == second[0]
    both = set(first) & set(second)
    assert both and all(whole["times"][name] <= kept["times"][name] for name in both)  # held up once, not twice


def test_the_call_that_loads_a_kernel_takes_the_first_rows_of_a_mask_s_tensors(bench):
    import forward

    doc, slopes = torch.arange(4096)[None], torch.ones(16)
    small = bench.shortened(forward.Row("masks", "document", 4, 16, 4096, 128, {"doc": doc, "slopes": slopes, "n": 7}))
    assert (small.batch, small.length) == (1, bench.SMALL)
    assert small.params["doc"].tolist() == [list(range(bench.SMALL))]
    assert small.params["slopes"] is slopes and small.params["n"] == 7
