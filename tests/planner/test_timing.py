"""Predicted times beside the recorded ones, and the parts that a prediction is made of."""

import json
import re
import statistics
from dataclasses import replace

import pytest

from attncc import frontend, pipeline
from attncc.analysis import spread, tile_counts
from attncc.commands.costs import forward_costs, visited_tiles
from attncc.ir import Schedule
from attncc.planner import backward_costs, special_functions
from attncc.planner.timing import unevenness
from tests.house.tree import read

GIVEN = {"window": {"window": 1025}, "prefix": {"prefix": 4096}, "streaming": {"window": 1025}}
NEAR = 0.25  # the median error of predictions, at most


def planned(name, algorithm):
    """The plan of a row of a record, and the values of its parameters."""
    spec, *sizes = re.fullmatch(r"(\w+) D(\d+) H(\d+) B(\d+) S(\d+)", name).groups()
    d, h, b, s = map(int, sizes)
    parsed = frontend.parse(read(f"specs/{spec}.attn"))
    if algorithm:
        parsed = replace(parsed, spec=replace(parsed.spec, schedules=(Schedule(algorithm=algorithm),)))
    consts, values = pipeline.split_values(parsed.spec, GIVEN.get(spec, {}))
    shape = pipeline.shape_of({"batch": b, "heads": h, "q_len": s, "k_len": s, "head_dim": d})
    return pipeline.plan_parsed(parsed, consts, values, shape, "sm_90"), values


def rows(record):
    known = ("full", "causal", "window", "softcap", "prefix", "streaming")
    return [r for r in record["rows"] if r["row"].split()[0] in known and "attncc" in r.get("ms", {})]


def test_forward_passes_take_what_is_predicted():
    record, off = json.loads(read("benchmarks/results/forward.json")), []
    for row in rows(record):
        plan, values = planned(row["row"], record["algorithm"])
        chosen = plan.choice.plan
        counts = tile_counts(plan.spec, plan.shape, chosen.tile_q, chosen.tile_k, values, plan.visits)
        guess = forward_costs(plan, counts["partial"] + counts["full"]).predicted_ms
        off.append(abs(guess / row["ms"]["attncc"] - 1))
    assert len(off) >= 10 and statistics.median(off) <= NEAR


def test_backward_passes_take_what_is_predicted():
    record, off = json.loads(read("benchmarks/results/backward.json")), []
    for row in rows(record):
        plan, values = planned(row["row"], "fa2")
        back = pipeline.backward(plan).choice.plan
        tiles = visited_tiles(plan, back, values)
        guess = backward_costs(back, plan.shape, plan.target, tiles, spread(plan.spec, plan.visits))[0].predicted_ms
        off.append(abs(guess / row["ms"]["attncc"] - 1))
    assert len(off) >= 8 and statistics.median(off) <= NEAR


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("attention a { }", 0),
        ("attention a { score 30 * tanh(s / 30) }", 2),
        ("attention a { score 1 / (1 + abs(s)) }", 1),
        ("attention a { score s + exp(q - k) }", 1),
        ("attention a(t: f32[h]) { score s * exp(t[h]) }", 0),  # of a head, not of a pair
        ("attention a(e: f32[h]) { softmax sigmoid(e[h]) }", 1),
        ("attention a { softmax none }", -1),
    ],
)
def test_special_functions_of_a_pair(text, wanted):
    assert special_functions(frontend.parse(text).spec) == wanted


def test_how_programs_fall_on_a_gpu():
    assert unevenness(2.0, 1, "all") == 1.0
    assert unevenness(1.25, 1, "all") == 2 / 1.25  # the second round keeps a quarter of the SMs busy
    assert unevenness(0.5, 2, "all") > 2.0  # half of the SMs, each with one block of two
    assert unevenness(100.0, 2, "all") == 1.0
    assert unevenness(1.0, 1, "dense") == 2.0  # the longest program is twice the mean
    assert unevenness(16.0, 1, "dense") == 1.0
