"""Faults that users of other attention kernels met, made small (the dense forward ones), against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import attncc
from attncc import analysis, frontend
from attncc.ir import Shape
from attncc.runtime import check
from attncc.runtime.cache import Cache
from tests.cases.oracle import attention, causal, inputs, l1, qkv

CAUSAL = "attention causal { mask k <= q }"
START = "attention causal { align start mask k <= q }"
FULL = "attention full { }"


def close(got, want, known: float | None = None) -> None:
    """Within 1e-5 of the right answer's l1 and never NaN; `known` is that l1 as the case states it."""
    out, lse = got
    want_out, want_lse = want
    if known is not None:
        assert l1(want_out) == pytest.approx(known, rel=1e-9)
    assert not np.isnan(out).any() and not np.isnan(lse).any()
    assert np.abs(out - want_out).sum() <= 1e-5 * l1(want_out)
    finite = np.isfinite(want_lse)
    assert (np.isneginf(lse) == np.isneginf(want_lse)).all()
    assert np.abs(lse[finite] - want_lse[finite]).sum() <= 1e-5 * np.maximum(np.abs(want_lse[finite]), 1).sum()


def test_1_rows_with_nothing_to_see(runner):
    q, k, v = qkv(1, 1, 1, 8, 8, 8)
    keep = np.zeros((8, 8), bool)
    keep[:4, :4] = True
    out, lse = runner("attention corner { mask q < 4 and k < 4 }", q, k, v)
    close((out, lse), attention(q, k, v, keep), 6.212991295)
    assert (out[:, :, 4:] == 0).all() and np.isneginf(lse[:, :, 4:]).all()


@pytest.mark.parametrize("low, high", [(0, 1), (39, 40), (16, 32), (5, 40), (0, 40)])
def test_1_an_empty_row_first_last_and_filling_a_tile(runner, low, high):
    q, k, v = qkv(1, 2, 1, 40, 40, 16)
    rows = np.arange(40)[:, None]
    keep = ((rows < low) | (rows >= high)) & (np.arange(40) % 3 == 0)
    text = "attention gap(low: int, high: int) { mask (q < low or q >= high) and k % 3 == 0 }"
    text += " schedule { tile q = 16, k = 16 }"
    out, lse = runner(text, q, k, v, low=low, high=high)
    close((out, lse), attention(q, k, v, keep))
    assert (out[:, :, low:high] == 0).all() and np.isneginf(lse[:, :, low:high]).all()


def test_2_more_queries_than_keys(runner):
    q, k, v = qkv(1, 1, 1, 8, 4, 16)
    out, lse = runner(CAUSAL, q, k, v)
    close((out, lse), attention(q, k, v, causal(8, 4)), 22.329819425)
    assert (out[:, :, :4] == 0).all() and np.isneginf(lse[:, :, :4]).all()


@pytest.mark.parametrize("text, align, known", [(START, "start", 14.484369516), (CAUSAL, "end", 6.515519058)])
def test_3_alignment_is_stated(runner, text, align, known):
    q, k, v = qkv(1, 1, 1, 2, 5, 16)
    close(runner(text, q, k, v), attention(q, k, v, causal(2, 5, align)), known)


def test_3_one_query_row(runner):
    q, k, v = qkv(1, 1, 1, 1, 8, 16)
    close(runner(CAUSAL, q, k, v), attention(q, k, v, causal(1, 8)), 2.045679671)
    assert (runner(START, q, k, v)[0] == v[:, :, :1]).all()


@pytest.mark.parametrize("length, head", [(130, 16), (1025, 64)])
def test_4_ragged_length_with_a_relative_score(runner, length, head):
    q, k, v = qkv(1, 1, 1, length, length, head)
    distance = np.arange(length)[:, None] - np.arange(length)
    want = attention(q, k, v, causal(length, length), score=lambda s: s + distance)
    close(runner("attention relative { mask k <= q score s + (q - k) }", q, k, v), want)


@pytest.mark.parametrize("text, score", [("tanh(0.5)", 0.0), ("0.1 * q", 0.0), ("h", 0.0), ("0.1 * k", 0.1)])
def test_4_a_score_without_s_is_one_for_each_pair(runner, text, score):
    """What is the same for all keys of a row changes nothing of its weights, which are then equal."""
    q, k, v = qkv(1, 2, 2, 40, 70, 16)
    want, _ = attention(q, k, v, causal(40, 70), score=lambda s: 0 * s + score * np.arange(70))
    tiles = "schedule { tile q = 16, k = 16 }"  # whole ones among them, which no mask brings into shape
    out, _ = runner(f"attention flat {{ mask k <= q score {text} }} {tiles}", q, k, v)
    assert np.abs(out - want).sum() <= 1e-5 * l1(want)


def test_6_a_table_of_exactly_as_many_entries_as_rows(runner):
    q, k, v = qkv(1, 2, 2, 70, 70, 16)
    kept = inputs((70,), 7)
    buffer = torch.full((1000,), 1e30)  # what lies before the table must not be read
    buffer[-70:] = torch.from_numpy(kept)
    keep = causal(70, 70) & (kept > 0)[:, None]
    got = runner("attention table(table: f32[row]) { mask table[row] > 0 and k <= q }", q, k, v, table=buffer[-70:])
    close(got, attention(q, k, v, keep), 122.013008812)


SHAPES_7 = {
    "64x64": ((1, 1, 1, 64, 64, 64), FULL, 278.609077536),
    "296x296": ((1, 2, 2, 296, 296, 96), FULL, 1598.586567382),
    "causal 137": ((1, 1, 1, 137, 137, 64), CAUSAL, 732.764416701),
    "one row": ((4, 32, 32, 1, 20, 128), FULL, 1794.752666937),
    "5x3": ((1, 1, 1, 5, 3, 16), FULL, 21.482189191),
    "1x1": ((1, 1, 1, 1, 1, 16), FULL, None),
}


@pytest.mark.parametrize("name", SHAPES_7)
def test_7_tails_and_short_shapes(runner, name):
    (batch, heads, kv, rows, keys, head), text, known = SHAPES_7[name]
    q, k, v = qkv(batch, heads, kv, rows, keys, head)
    keep = causal(rows, keys) if text == CAUSAL else np.ones((rows, keys), bool)
    got = runner(text, q, k, v)
    close(got, attention(q, k, v, keep), known)
    if name == "1x1":
        assert (got[0] == v).all()


LENGTHS = (1, 2, 5, 15, 16, 17, 33, 63, 64, 65, 127, 129)
TILES = (16, 32, 64, 128, 256)
SAMPLE = [(a, LENGTHS[-1 - i], TILES[i % 5], TILES[i * 3 % 5]) for i, a in enumerate(LENGTHS)]
SWEEP = [(a, b, c, d) for a in LENGTHS for b in LENGTHS for c in TILES for d in TILES]


def _tail(runner, rows, keys, tile_q, tile_k):
    q, k, v = qkv(1, 2, 1, rows, keys, 16)
    text = CAUSAL + f" schedule {{ tile q = {tile_q}, k = {tile_k} }}"
    close(runner(text, q, k, v), attention(q, k, v, causal(rows, keys)))


@pytest.mark.parametrize("rows, keys, tile_q, tile_k", SAMPLE)
def test_7_a_sample_of_lengths_and_tiles(runner, rows, keys, tile_q, tile_k):
    _tail(runner, rows, keys, tile_q, tile_k)


@pytest.mark.slow
def test_7_every_length_at_every_tile(runner):
    for shape in SWEEP:
        _tail(runner, *shape)


HEADS_8 = {
    (8, 8): 78.538303188, (24, 24): 227.454832188, (31, 31): 297.384517099, (72, 72): 694.640412668,
    (80, 80): 779.796757119, (96, 96): 942.469587369, (120, 120): 1172.619067314, (192, 128): 1292.290151,
    (64, 16): 154.260518968,
}  # fmt: skip


@pytest.mark.parametrize("sizes", HEADS_8, ids=str)
def test_8_head_sizes(runner, sizes):
    q, k, v = qkv(1, 2, 2, 33, 33, *sizes)
    close(runner(CAUSAL, q, k, v), attention(q, k, v, causal(33, 33)), HEADS_8[sizes])


@pytest.mark.parametrize("name", ["d", "e", "d_1", "e_0", "out_0", "query_1", "key_0", "value_1"])
def test_8_no_name_of_a_spec_meets_those_of_the_parts_of_a_head(runner, name):
    q, k, v = qkv(1, 2, 2, 33, 33, 24, 8) if len(name) == 1 else qkv(1, 2, 2, 33, 33, 40, 24)
    distance = np.arange(33)[:, None] - np.arange(33)
    want = attention(q, k, v, (distance >= 0) & (distance < 9), score=lambda s: s - 0.1 * distance)
    let = f"{{ let {name} = q - k mask 0 <= {name} < 9 score s - 0.1 * {name} }}"
    close(runner(f"attention named {let}", q, k, v), want)
    param = f"({name}: int) {{ mask 0 <= q - k < {name} score s - 0.1 * (q - k) }}"
    close(runner(f"attention named{param}", q, k, v, **{name: 9}), want)


GROUPS_9 = {
    (9, 3, 5, 5, 64): 917.376155729, (12, 2, 1, 4096, 16): 1.539202292, (28, 4, 1, 40, 64): 141.589623372,
    (10, 2, 3, 40, 32): 87.520215428, (64, 4, 1, 40, 32): 172.311937451,
}  # fmt: skip


@pytest.mark.parametrize("shape", GROUPS_9, ids=str)
def test_9_every_group_size(runner, shape):
    heads, kv_heads, rows, keys, head = shape
    q, k, v = qkv(1, heads, kv_heads, rows, keys, head)
    close(runner(CAUSAL, q, k, v), attention(q, k, v, causal(rows, keys)), GROUPS_9[shape])


def test_11_documents_do_not_leak(runner):
    q, k, v = qkv(1, 2, 2, 16, 16, 8)
    ids = np.repeat([0, 1, 2], [3, 5, 8])
    text = "attention documents(doc: i32[b, k]) { mask doc[b, q] == doc[b, k] }"
    got = runner(text, q, k, v, doc=torch.from_numpy(ids[None]).int())
    close(got, attention(q, k, v, ids[:, None] == ids), 55.050528646)
    loud = v.copy()
    loud[:, :, 3:] = 1e30  # what other documents hold changes no bit
    assert (runner(text, q, k, loud, doc=torch.from_numpy(ids[None]).int())[0][:, :, :3] == got[0][:, :, :3]).all()


APART = {
    "i64 ids that agree in their low half": ("i64", [0, 2**32, 2**33], "doc[b, q] == doc[b, k]", {}),
    "i64 ids at the ends": ("i64", [-(2**63), 0, 2**63 - 1], "doc[b, q] == doc[b, k]", {}),
    "i32 ids far apart": ("i32", [-(2**31), 0, 2**31 - 1], "doc[b, q] - doc[b, k] == 0", {}),
    "ids beside a large number": ("i32", [5, 6, 7], "doc[b, q] == doc[b, k] and k * w >= 0", {"w": 2**40}),
    "a float beyond 32 bits": ("i32", [0, 1, 2], "doc[b, q] == doc[b, k] and k < floor(x)", {"x": 3e9}),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_11_nor_where_ids_and_what_stands_beside_them_are_large(runner, name):
    """Beyond 32 bits the kernel of 64-bit integers runs, tables of the mask's tensors included."""
    element, values, mask, more = APART[name]
    q, k, v = qkv(1, 2, 2, 16, 16, 8)
    ids = np.repeat(np.array(values), [3, 5, 8])
    scalars = "".join(f", {n}: {type(x).__name__}" for n, x in more.items())
    doc = torch.from_numpy(ids[None]).to(torch.int64 if element == "i64" else torch.int32)
    got = runner(f"attention apart(doc: {element}[b, k]{scalars}) {{ mask {mask} }}", q, k, v, doc=doc, **more)
    close(got, attention(q, k, v, ids[:, None] == ids), 55.050528646)


def test_11_flags_beside_a_large_number(runner):
    q, k, v = qkv(1, 2, 2, 40, 40, 8)
    on = np.arange(40) % 11 == 3
    text = "attention flags(on: bool[b, k], w: int) { mask (on[b, k] or on[b, q]) and k * w <= q * w }"
    got = runner(text, q, k, v, on=torch.from_numpy(on[None]), w=2**40)
    close(got, attention(q, k, v, (on | on[:, None]) & causal(40, 40)))


@pytest.mark.parametrize("window, pairs, known", [(4, 58, 64.699415525), (5, 70, 59.544952306)])
def test_15_window_off_by_one(runner, window, pairs, known):
    q, k, v = qkv(1, 1, 1, 16, 16, 16)
    distance = np.arange(16)[:, None] - np.arange(16)
    keep = (distance >= 0) & (distance < window)
    assert keep.sum() == pairs
    text = "attention window(window: int) { mask 0 <= q - k < window }"
    shape = Shape(heads=1, kv_heads=1, q_len=16, k_len=16)
    assert analysis.kept_pairs(frontend.parse(text).spec, shape, {"window": window}) == pairs
    close(runner(text, q, k, v, window=window), attention(q, k, v, keep), known)


def test_15_a_window_of_everything_is_causal_to_the_bit(runner):
    q, k, v = qkv(1, 1, 1, 16, 16, 16)
    text = "attention window(window: int) { mask 0 <= q - k < window }"
    for window in (16, 2**31 - 1, 2**40):
        for got, want in zip(runner(text, q, k, v, window=window), runner(CAUSAL, q, k, v), strict=True):
            assert (got == want).all()


SINK = "attention learned(sinks: f32[h]) { mask k <= q softmax sink(sinks[h]) }"


def test_18_learned_sink(runner):
    q, k, v = qkv(1, 2, 2, 4, 4, 16)
    sink = np.array([0.25, -0.5])
    got = runner(SINK, q, k, v, sinks=torch.from_numpy(sink).float())
    close(got, attention(q, k, v, causal(4, 4), sink=sink), 25.597107805)


def test_18_all_masked_leaves_the_sink(runner):
    q, k, v = qkv(1, 2, 2, 4, 4, 16)
    text = "attention nothing(sinks: f32[h]) { mask k < 0 softmax sink(sinks[h]) }"
    out, lse = runner(text, q, k, v, sinks=torch.tensor([0.25, -0.5]))
    assert (out == 0).all() and (lse == np.array([0.25, -0.5])[None, :, None]).all()


def test_18_a_sink_of_minus_infinity_is_none(runner):
    q, k, v = qkv(1, 2, 2, 8, 4, 16)  # with rows that see nothing
    out, lse = runner(SINK, q, k, v, sinks=torch.full((2,), -torch.inf))
    close((out, lse), attention(q, k, v, causal(8, 4)))
    assert (out[:, :, :4] == 0).all()


def test_23_precedence_and_what_a_forgotten_half_keeps(runner):
    shape = Shape(batch=2, heads=1, kv_heads=1, q_len=25, k_len=25)
    count = lambda text: analysis.kept_pairs(frontend.parse(text).spec, shape, {})
    assert count("attention half { mask q - k < 6 }") == 2 * 435
    assert count("attention whole { mask 0 <= q - k < 6 }") == 2 * 135
    text = "attention even { mask q >= k and b % 2 == 0 }"
    assert count(text) == 325
    q, k, v = qkv(2, 1, 1, 25, 25, 16)
    keep = causal(25, 25)[None, None] & (np.arange(2) % 2 == 0)[:, None, None, None]
    close(runner(text, q, k, v), attention(q, k, v, keep))


def test_25_bf16_of_integers_is_exact_where_it_is_trusted(runner, request):
    device = request.node.callspec.params["runner"]
    q, k, v = (np.round(x * 2) for x in qkv(1, 1, 1, 16, 16, 16))
    exact, lse = runner(FULL, q, k, v)
    if "bf16" not in check.TYPES[device]:
        assert device == "interpreter"  # it multiplies the bit patterns of bf16: no verdict may rest on them
        return
    rounded, same = runner(FULL, q, k, v, dtype=torch.bfloat16)
    assert (lse == same).all()
    assert (rounded == torch.from_numpy(exact).bfloat16().double().numpy()).all()


def test_27_lengths_that_change_build_few_kernels(tmp_path, monkeypatch):
    """On the CPU one program serves every length, batch and mask tensor; row counts have three classes of plans."""
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path / "cache"))
    attn = attncc.compile("attention padded(length: i32[b]) { mask k < length[b] and k <= q }")
    lengths = sorted({*range(1, 80), *(int(80 * 1.2**j) for j in range(22))})
    assert len(lengths) >= 100 and lengths[-1] > 3600
    for i, n in enumerate(lengths):
        batch = i % 5 + 1
        q, k, v = (torch.from_numpy(x).float() for x in qkv(batch, 1, 1, n, n, 8))
        length = torch.arange(batch, dtype=torch.int32) * 7 % n + 1
        out, lse = attn(q, k, v, length=length, return_lse=True)
        if n < 70 or i % 10 == 0:
            keep = causal(n, n) & (np.arange(n) < length.numpy()[:, None])[:, None, None]
            close((out.double().numpy(), lse.double().numpy()), attention(q.numpy(), k.numpy(), v.numpy(), keep))
    assert 1 <= sum(e.kind == "kernel" for e in Cache().entries()) <= 3
