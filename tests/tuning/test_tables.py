"""The winners that come with attncc: each is of a spec of the library, legal today, and found by a call."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from attncc import frontend, pipeline, planner
from attncc.ir import Shape
from attncc.runtime import winners
from attncc.runtime.cache import Cache
from attncc.runtime.winners import Device

SPECS = Path(__file__).resolve().parents[2] / "specs"
TABLES = {path.stem: json.loads(path.read_text()) for path in sorted(winners.TABLES.glob("*.json"))}
ROWS = [(table, row) for table, content in TABLES.items() for row in content["winners"]]
KINDS = sorted({(table, row["spec"], row["head_dim"]) for table, row in ROWS})
EACH = 25  # of so many rows one is held against the whole road in each run


def planned(table, row, **tuned):
    parsed = frontend.parse((SPECS / f"{row['spec']}.attn").read_text())
    consts, _ = pipeline.split_values(parsed.spec, {})
    shape = Shape(q_len=row["q_len"], head_dim=row["head_dim"], head_dim_v=row["head_dim"])
    return pipeline.plan_parsed(parsed, consts, {}, shape, TABLES[table]["capability"], tuned=tuned)


@pytest.mark.parametrize(("table", "spec", "head_dim"), KINDS)
def test_every_winner_is_legal_today(table, spec, head_dim):
    """Where a spec or the planner has changed: tune it again (benchmarks/tune_all.py), or drop the row."""
    head, rows = TABLES[table], [r for t, r in ROWS if (t, r["spec"], r["head_dim"]) == (table, spec, head_dim)]
    made = planned(table, rows[0])
    device = Device(head["device"], head["capability"], "")
    models = {pipeline.FORWARD: made.choice.plan}
    for row in rows:
        where = winners.key(frontend.canonical(made.spec), device, replace(made.shape, q_len=row["q_len"]), row["pass"])
        assert winners.row_of(where) == row["key"], f"{spec} has changed"
        if row["pass"] not in models:
            models[row["pass"]] = pipeline.backward(made).choice.plan
        plan = planner.with_choices(models[row["pass"]], row["choices"], made.target)
        assert plan is not None and planner.choices_of(plan) == row["choices"], row["key"]


def test_no_winner_took_longer_than_the_planners_choice():
    """In the lengths of its bucket together, as they were measured in turns; where that choice was right at all."""
    for _, row in ROWS:
        own = {n: ms for n, ms in row["planner_ms"].items() if ms is not None}
        assert own.keys() <= row["ms"].keys() and sum(row["ms"][n] / own[n] for n in own) <= len(own), row["key"]


@pytest.mark.parametrize(
    ("table", "row"), [pytest.param(*r, marks=pytest.mark.slow if i % EACH else ()) for i, r in enumerate(ROWS)],
    ids=lambda x: x if isinstance(x, str) else x["key"].split(" ", 1)[1],
)  # fmt: skip
def test_a_winner_is_what_a_call_runs(table, row):
    """The plan that is made of it, with the kernel beside it for any strides."""
    made = planned(table, row, **{row["pass"]: row["choices"]})
    plan = pipeline.backward(made).choice.plan if row["pass"] == pipeline.BACKWARD else made.choice.plan
    assert planner.choices_of(plan) == row["choices"] and pipeline.every_kernel(made)


def test_a_call_finds_a_shipped_winner_and_the_users_own_before_it(tmp_path, monkeypatch):
    cache, device = Cache(tmp_path / "cache"), Device("Stub 9000", "sm_90", "12.8")
    where = winners.key("attention a {\n}\n", device, Shape(), "forward")
    content = {"device": device.name, "capability": device.capability,
               "winners": [{"key": winners.row_of(where), "choices": {"tile_q": 64}}]}  # fmt: skip
    (tmp_path / "Stub_9000.json").write_text(json.dumps(content))
    monkeypatch.setattr(winners, "TABLES", tmp_path)
    winners._table.cache_clear()
    try:
        find = lambda device, shape=where: winners.find(cache, where.spec, device, Shape() if shape is where else shape)
        assert find(device) == {"forward": {"tile_q": 64}}
        assert find(Device("Stub 9000", "sm_90", "99.0")) == {"forward": {"tile_q": 64}}
        assert find(Device("Stub 9000", "sm_80", "12.8")) == find(None) == find(device, Shape(q_len=9)) == {}
        winners.keep(cache, where, {"tile_q": 32}, {})
        assert find(device) == {"forward": {"tile_q": 32}}
    finally:
        winners._table.cache_clear()
