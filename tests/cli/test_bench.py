"""`attncc bench` on the CPU: its rows, its peers, what it refuses, and wrong numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from attncc import frontend, pipeline
from attncc.ir import Shape
from attncc.runtime import bench, peers
from attncc.runtime.attention import Attention
from attncc.runtime.draw import Draw
from attncc.runtime.reference import reference
from attncc.runtime.written import Written, unfused_bytes

SPECS = sorted((Path(__file__).resolve().parents[2] / "specs").glob("*.attn"), key=lambda p: p.stem)
SMALL = ("--shape", "batch=2,heads=4,kv_heads=2,q_len=70,k_len=70,head_dim=16", "--dtype", "f32", "--rounds", "2")
HERE = ("--device", "cpu")


def rows(program, *args):
    found = program("bench", *args, *HERE, "--json")
    assert found.status == 0, found.err
    return json.loads(found.out)["rows"]


def call_of(spec, shape, seed=0):
    """A random call of a spec with the defaults of its scalars; in float32."""
    parsed = frontend.parse(spec)
    consts, values = pipeline.split_values(parsed.spec, {})
    draw = Draw(frontend.bind(parsed, consts), seed, values)
    q, k, v = draw.inputs(shape, "f32", "contiguous")
    return peers.Call(Attention(parsed, consts), q, k, v, {**draw.params(shape), **values})


def test_both_passes_beside_sdpa_and_unfused(program):
    found = rows(program, "causal.attn", *SMALL, "--lengths", "40,70")
    assert {(r["length"], r["direction"]) for r in found} == {(n, d) for n in (40, 70) for d in ("forward", "backward")}
    timed = [r for r in found if r["refused"] is None]
    assert {r["who"] for r in timed} >= {"attncc", "math", "unfused"}
    for r in timed:
        assert 0 < r["least_ms"] <= r["ms"] <= r["most_ms"] and r["right"]
        assert r["error"] < 1e-5 and r["peak_bytes"] is None
        pairs = 2 * 4 * r["length"] * (r["length"] + 1) // 2
        flops = pairs * 16 * (4 if r["direction"] == "forward" else 10)
        assert r["tflops"] * r["ms"] == pytest.approx(flops / 1e9)
    assert all(r["bound"] is not None for r in timed if r["who"] == "attncc")
    assert {r["who"] for r in found if r["refused"]} == {"cudnn", "efficient"}


def test_the_length_of_k_is_shown_where_it_is_another(program):
    shape = ("--shape", "heads=1,q_len=3,k_len=70,head_dim=16", "--dtype", "f32", "--rounds", "1")
    against = ("--against", "standard,math", "--pass", "forward")
    said = program("bench", "causal.attn", *shape, *HERE, *against).out
    assert [line.split()[:4] for line in said.splitlines()[2:4]] == [["3", "x", "70", "forward"]] * 2
    assert "(forward at 3 x 70)" in said
    assert {(r["length"], r["k_length"]) for r in rows(program, "causal.attn", *shape, *against)} == {(3, 70)}


def test_the_table_says_what_others_cannot(program):
    text = program("bench", "causal.attn", *SMALL, *HERE, "--against", "cudnn,standard,math", "--pass", "forward")
    assert text.status == 0 and text.out.startswith("causal: batch 2, heads 4/2, head size 16, f32")
    assert "standard: the CPU program has one algorithm (forward at 70)" in text.out
    assert "cudnn: this backend of SDPA has no kernel" in text.out and "backward" not in text.out


def test_numbers_beyond_their_bound_exit_4(program, monkeypatch):
    right = Attention.__call__
    monkeypatch.setattr(Attention, "__call__", lambda self, *args, **given: right(self, *args, **given) * 1.001)
    for passes in ("forward", "backward"):
        found = program("bench", "causal.attn", *SMALL, *HERE, "--against", "math", "--pass", passes)
        assert found.status == 4 and "1 results of causal are beyond their bounds" in found.err


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (torch.OutOfMemoryError("full"), "out of memory beside the others"),
        (RuntimeError("no\nmore"), "fails: no"),
        (KeyError(), "fails: KeyError"),
    ],
)
def test_who_fails_beside_the_others_is_left_out(program, monkeypatch, fault, told):
    def unfused(call):
        calls = []

        def run(q, k, v):
            calls.append(q)
            if len(calls) > 1:  # the first is the one that is compared
                raise fault
            return right(call)(q, k, v)

        return run

    right = peers._unfused
    monkeypatch.setattr(peers, "_unfused", unfused)
    found = rows(program, "causal.attn", *SMALL, "--against", "math,unfused", "--pass", "forward")
    assert {r["who"]: r["refused"] for r in found} == {
        "attncc": None, "math": None, "unfused": told,
    }  # fmt: skip
    assert all(r["ms"] for r in found if r["refused"] is None)


def test_a_plot(program, monkeypatch):
    args = ("causal.attn", *SMALL, *HERE, "--against", "math", "--lengths", "16,32", "--plot", "times.png")
    assert program("bench", *args).status == 0
    assert Path("times.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("attncc.runtime.bench.sweep", lambda *a: pytest.fail("measured before"))
    found = program("bench", *args[:-1], "nowhere/times.png")
    assert found.status == 5 and "nowhere/times.png cannot be written: there is no such folder" in found.err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = program("bench", *args)
    assert found.status == 5 and "attncc[plot]" in found.err


def test_what_is_asked_wrongly(program):
    assert program("bench", "causal.attn", "--against", "fa9").status == 2
    assert program("bench", "causal.attn", "--lengths", "0").status == 2
    Path("packed.attn").write_text("attention p { mask k <= q } layout { q ragged kv ragged }")
    found = program("bench", "packed.attn", *HERE)
    assert found.status == 2 and "bench times dense calls" in found.err
    found = program("bench", "causal.attn", "--device", "cuda")
    assert found.status in (0, 5)


def test_drawn_tensors_are_named(program):
    Path("b.attn").write_text("attention b(t: f32[h], w: int = 9) { mask q - k < w score s + t[h] * (q - k) }")
    found = program("bench", "b.attn", *SMALL, *HERE, "--against", "math,unfused", "--set", "w=20")
    assert found.status == 0 and "drawn at random: t;" in found.err


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_a_spec_written_out_is_what_it_means(path):
    call = call_of(path.read_text(), Shape(2, 4, 2, 33, 47, 16, 16, "f32"))
    spec, args = call.attention.spec, (call.q, call.k, call.v)
    want, _ = reference(spec, *args, call.params)
    written = Written(spec, call.shape, call.params)
    if written.beyond:
        assert spec.dropout is not None or path.stem in ("sparsemax", "entmax15")
        with pytest.raises(NotImplementedError, match="PyTorch"):
            written.unfused(*args)
        return
    have = written.unfused(*args)
    assert (have - want).abs().sum() <= 1e-5 * want.abs().sum()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("attention a { }", set()),
        ("attention a { mask k <= q }", {"is_causal"}),
        ("attention a(w: int = 9) { mask 0 <= q - k < w }", {"attn_mask"}),
        ("attention a(t: f32[h]) { mask k <= q score s + t[h] * (k - q) }", {"attn_mask"}),
        ("attention a { mask k <= q mask k != 3 }", {"attn_mask"}),
    ],
)
def test_sdpa_is_told_the_same(text, told):
    for lengths in ((33, 33), (20, 33)):
        call = call_of(text, Shape(2, 4, 2, *lengths, 16, 16, "f32"))
        options = peers._sdpa_options(call)
        wanted = {"attn_mask"} if told == {"is_causal"} and lengths == (20, 33) else told
        assert set(options) - {"scale"} == wanted
        want, _ = reference(call.attention.spec, call.q, call.k, call.v, call.params)
        have = peers.peer("math", call)(call.q, call.k, call.v)
        assert (have - want).abs().sum() <= 1e-5 * want.abs().sum()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("attention a(e: f32[h]) { softmax sink(e[h]) }", "no softmax sink"),
        ("attention a { softmax relu(2) }", "no softmax relu"),
        ("attention a { score 30 * tanh(s / 30) }", "in no other way"),
        ("attention a { weight 2.0 }", "no weight behind"),
    ],
)
def test_sdpa_refuses_what_it_cannot_express(text, why):
    call = call_of(text, Shape(1, 2, 2, 8, 8, 16, 16, "f32"))
    with pytest.raises(peers.Refused, match=why):
        peers.peer("math", call)


def test_flex_refuses_what_it_cannot_express():
    call = call_of("attention a(e: f32[h]) { softmax sink(e[h]) }", Shape(1, 2, 2, 8, 8, 16, 16, "f32"))
    with pytest.raises(peers.Refused, match="FlexAttention has no softmax sink"):
        peers.peer("flex", call)


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of its compiler
def test_the_backward_pass_of_a_compiled_peer_is_timed_over_one_graph():
    """It would give buffers of that away, and refuse to be walked back once more."""
    torch._dynamo.reset()
    call = call_of("attention a { mask k <= q }", Shape(1, 2, 2, 8, 8, 16, 16, "f32"))
    compiled = torch.compile(call.written.unfused, backend="aot_eager", dynamic=False)
    threads = []

    def run(q, k, v):
        threads.append(torch._C._is_multithreading_enabled())
        return compiled(q, k, v)

    ours = bench.Meeting(call, "backward", lambda text: None, 2)
    (row,) = ours.rows({"flex": run})
    assert row.refused is None and row.ms > 0 and row.error < 1e-5
    assert not any(threads) and torch._C._is_multithreading_enabled()  # on a GPU others would not know of it


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "alibi", "document"])
def test_flex_is_told_the_same(name):
    (path,) = (p for p in SPECS if p.stem == name)
    call = call_of(path.read_text(), Shape(1, 2, 2, 256, 256, 32, 32, "f32"))
    want, _ = reference(call.attention.spec, call.q, call.k, call.v, call.params)
    with torch.no_grad():
        have = peers.peer("flex", call)(call.q, call.k, call.v)
    assert (have - want).abs().sum() <= 1e-5 * want.abs().sum()


def test_what_unfused_attention_holds():
    assert unfused_bytes(Shape(2, 3, 3, 5, 7), 2) == 2 * 3 * 5 * 7 * (2 + 4 + 4 + 2)
