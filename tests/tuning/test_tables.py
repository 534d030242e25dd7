"""The winners that come with attncc: each is of a spec of the library, legal today, and found by a call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attncc import frontend, pipeline, planner
from attncc.ir import Shape
from attncc.runtime import winners
from attncc.runtime.cache import Cache
from attncc.runtime.winners import Device

SPECS = Path(__file__).resolve().parents[2] / "specs"
TABLES = sorted(winners.TABLES.glob("*.json"))
ROWS = [(path.stem, row) for path in TABLES for row in json.loads(path.read_text())["winners"]]


def planned(row, capability):
    parsed = frontend.parse((SPECS / f"{row['spec']}.attn").read_text())
    consts, _ = pipeline.split_values(parsed.spec, {})
    shape = Shape(q_len=row["q_len"], head_dim=row["head_dim"], head_dim_v=row["head_dim"])
    return pipeline.plan_parsed(parsed, consts, {}, shape, capability, tuned={row["pass"]: row["choices"]})


@pytest.mark.parametrize(("table", "row"), ROWS, ids=lambda x: x if isinstance(x, str) else x["key"].split(" ", 1)[1])
def test_every_winner_is_legal_today(table, row):
    """Where a spec or the planner has changed: tune it again (benchmarks/tune_all.py), or drop the row."""
    head = json.loads((winners.TABLES / f"{table}.json").read_text())
    made = planned(row, head["capability"])
    where = winners.key(
        frontend.canonical(made.spec), Device(head["device"], head["capability"], ""), made.shape, row["pass"]
    )
    assert winners.row_of(where) == row["key"], f"{row['spec']} has changed"
    plan = pipeline.backward(made).choice.plan if row["pass"] == "backward" else made.choice.plan
    assert {n: planner.choices_of(plan)[n] for n in row["choices"]} == row["choices"]
    assert pipeline.every_kernel(made)


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
