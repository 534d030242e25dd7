"""Standard attention, FA1 and FA2 of one spec, in Triton's interpreter: right, and equal where they have to be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attncc import analysis, frontend, pipeline
from attncc.errors import SpecError
from attncc.ir import Schedule
from attncc.runtime.check import check
from tests.scripts import interpreted

SCRIPT = Path(__file__).with_name("interpreted.py")
SPECS = sorted((Path(__file__).parents[2] / "specs").glob("*.attn"))
ALGORITHMS = ("standard", "fa1", "fa2")


def test_each_algorithm_is_right():
    rows = interpreted(SCRIPT, "right:row_sink,scaled,sigmoid,two_pass,entmax")
    assert [(r["name"], r["algorithm"]) for r in rows] == [
        ("row_sink", "standard"), ("row_sink", "fa1"), ("row_sink", "fa2"),
        ("scaled", "standard"), ("scaled", "fa1"), ("scaled", "fa2"),
        ("sigmoid", "standard"), ("sigmoid", "fa1"), ("sigmoid", "fa2"),
        ("two_pass", "standard"), ("two_pass", "fa2"), ("entmax", "standard"), ("entmax", "fa2"),
    ]  # fmt: skip
    assert not [r for r in rows if r["faults"]]


@pytest.mark.slow
def test_more_of_them_are_and_so_are_gradients_from_their_lse():
    rows = interpreted(SCRIPT, "right:learned,window_alibi_sinks,document,unified")
    assert not [r for r in rows if r["faults"]]
    assert all("e" in r["gradients"] for r in rows[:3])


def test_which_weights_are_dropped_depends_on_no_algorithm_and_no_tile():
    *rows, why, first, second = interpreted(SCRIPT, "dropped", "large", "packed")
    assert len(rows) == 6 and all(r["same"] for r in rows), rows
    assert 2 * 40 * 64 * 0.5 < rows[0]["kept"] < 2 * 40 * 64 * 0.7
    assert f"take {2**40 * 8} bytes" in why["why"]  # float32 scores and weights
    assert "E708: algorithm standard puts scores and weights into one dense block" in first["why"]
    assert "E708: algorithm fa1 puts the state of its rows into one dense block" in second["why"]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_the_library(path, algorithm):
    spec = frontend.parse(path.read_text(encoding="utf-8")).spec
    if algorithm == "fa1" and spec.softmax.policy in ("sparsemax", "entmax"):
        pytest.skip("fa1 cannot express it")
    report = check(replace(spec, schedules=(Schedule(None, algorithm=algorithm),)), "interpreter", seeds=(0,))
    assert report.passed, str(report)


def planned(schedule: str, target: str = "sm_90") -> pipeline.Planned:
    text = f"attention a {{ mask k <= q }} schedule {{ {schedule} }}"
    return pipeline.plan(pipeline.Request(text=text, target=target))


@pytest.mark.parametrize(
    ("schedule", "algorithm", "loop"),
    [("algorithm fa1", "fa1", "kv_outer"), ("loop kv_outer", "fa1", "kv_outer"),
     ("algorithm standard", "standard", "q_outer"),
     ("algorithm fa1 loop kv_outer tile q = 64, k = 64", "fa1", "kv_outer")],
)  # fmt: skip
def test_a_schedule_chooses_the_algorithm(schedule, algorithm, loop):
    plan = planned(schedule).choice.plan
    assert (plan.algorithm, plan.loop) == (algorithm, loop)
    back = pipeline.backward(planned(schedule)).choice.plan  # from lse, which all give
    assert back.algorithm == ("fa2" if "algorithm" in schedule else "fa3")


def test_a_cpu_has_its_one_program():
    plan = planned("algorithm fa1", "cpu").choice.plan
    assert (plan.algorithm, plan.loop) == ("fa2", "q_outer")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("attention a { softmax two_pass } schedule { algorithm fa1 }", "meets the keys of a row piece by piece"),
        ("attention a { } schedule { algorithm fa2 loop kv_outer }", "algorithm fa2 has not the loop kv_outer"),
        ("attention a { } schedule { algorithm standard } layout { q ragged kv ragged }", "the layout of q is ragged"),
    ],
)  # fmt: skip
def test_what_an_algorithm_cannot_express_is_refused_with_the_reason(text, words):
    with pytest.raises(SpecError, match="E708") as caught:
        pipeline.plan(pipeline.Request(text=text, target="sm_90"))
    assert words in str(caught.value)


def test_kernels_of_standard_attention_take_what_they_read():
    text = """
        attention a(t: f32[h, row, k], c: f32[h], w: f32[k]) { score s + t[h, row, k] softmax sink(c[h]) weight w[k] }
        schedule { algorithm standard }"""
    source = pipeline.render(pipeline.plan(pipeline.Request(text=text, target="sm_90")))
    heads = [part.partition("\n    stride")[0] for part in source.split("def a_forward_")[1:4]]
    assert [h.splitlines()[1].strip() for h in heads] == [
        "Q, K, Scores, t,", "Lse, Scores, Weights, c_, w,", "V, Out, Weights,",
    ]  # fmt: skip


def test_fa1_walks_over_the_rows_that_see_a_tile_of_keys():
    source = pipeline.render(planned("algorithm fa1"))
    assert "for mine in range(tl.cdiv(k_len, TILE_K)):" in source and "row_low = first_key + q_len - k_len" in source
    assert analysis.kernel_visits(planned("algorithm fa1").spec, "k").outer == "k"


@pytest.mark.parametrize(
    ("schedules", "kept"),
    [
        ("", (Schedule(algorithm="fa1"),)),
        ("schedule { tile q = 64 warps 4 }", (Schedule(algorithm="fa1", tile_q=64, warps=4),)),
        ("schedule { algorithm fa2 loop q_outer tile q = 64 }", (Schedule(algorithm="fa1"),)),
        ("schedule { stages 2 } schedule sm_90 { algorithm fa3 tile q = 128 }", (Schedule(algorithm="fa1", stages=2),)),
        ("schedule sm_90 { tile q = 32 }", (Schedule(algorithm="fa1"), Schedule("sm_90", tile_q=32))),
    ],
)
def test_what_is_pinned_beside_another_algorithm_is_not_about_this_one(schedules, kept):
    asked = frontend.pinned(frontend.parse(f"attention a {{ }} {schedules}"), "fa1")
    assert asked.spec.schedules == kept
    assert frontend.parse(frontend.canonical(asked.spec)).spec.schedules == kept
