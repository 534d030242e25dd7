"""The packed ones among the faults that users of other kernels met, against float64, forward and backward.

test_interpreter.py runs these with the Triton kernels in Triton's interpreter.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

import attncc
from tests.cases.oracle import causal, inputs, l1
from tests.varlen.sequences import drawn, one_by_one, packed, starts

TARGET = "interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else None
CAUSAL = "attention causal { mask k <= q }"
FULL = "attention full { }"


def everything(rows, keys):
    return np.ones((rows, keys), bool)


def close(have, want, known=None):
    """Within 1e-5 of the right answer's l1; `known` is that l1 as the case states it."""
    if known is not None:
        assert l1(want) == pytest.approx(known, rel=1e-9)
    assert np.abs(have - want).sum() <= 1e-5 * l1(want)


def call(text, tensors, rows, keys, grad=True, **params):
    """out, lse, and with `grad` the gradients, as float64 arrays in the oracle's shapes; memory is NaN beforehand."""
    q, k, v, d_out = (packed(x) for x in tensors)
    leaves = [x.requires_grad_(grad) for x in (q, k, v)]
    attn = attncc.compile(text, target=TARGET)
    out, lse = attn.varlen(*leaves, starts(rows), starts(keys), return_lse=True, **params)
    found = {"out": out.detach(), "lse": lse.detach()}
    if grad:
        found |= dict(zip("qkv", torch.autograd.grad(out, leaves, d_out), strict=True))
    lse = found.pop("lse").double().numpy()[None]
    return {n: x.double().numpy().swapaxes(0, 1)[None] for n, x in found.items()} | {"lse": lse}


def compare(have, want, known):
    for name, x in have.items():
        if name == "lse":
            assert (np.isneginf(x) == np.isneginf(want["lse"])).all()
            close(np.where(np.isneginf(x), 0, x), np.where(np.isneginf(want["lse"]), 0, want["lse"]))
        else:
            close(x, want[name], known.get(name))


def test_2_more_queries_than_keys():
    rows, keys = [76, 34, 146], [1, 1, 1]
    q, k, v, d_out = drawn(rows, keys, 2, 2, 32)
    tensors = [3 * q, 3 * k, 3 * v, d_out]
    have = call(CAUSAL, tensors, rows, keys)
    compare(have, one_by_one(tensors, rows, keys, causal), {})
    seen = (have["out"][0, 0] != 0).any(-1)
    assert seen.nonzero()[0].tolist() == [75, 109, 255]  # the last row of each


def test_11_documents_do_not_leak():
    lengths = [3, 5, 8]
    tensors = drawn(lengths, lengths, 2, 2, 8)
    have = call(FULL, tensors, lengths, lengths)
    known = {"out": 55.050528646, "q": 14.166741909, "k": 14.085281751, "v": 47.505690129}
    compare(have, one_by_one(tensors, lengths, lengths, everything), known)
    ids = torch.from_numpy(np.repeat([0, 1, 2], lengths)[None]).int()
    mask = attncc.compile("attention ids(doc: i32[b, k]) { mask doc[b, q] == doc[b, k] }", target=TARGET)
    q, k, v = (torch.from_numpy(x).float() for x in tensors[:3])
    out, lse = mask(q, k, v, doc=ids, return_lse=True)
    close(have["out"], out.double().numpy())
    close(have["lse"], lse.double().numpy())


def test_11_nor_does_what_is_not_finite():
    """The next sequence's keys stand behind the last ones of this, in the same tile."""
    lengths = [3, 5, 8]
    tensors = drawn(lengths, lengths, 2, 2, 8)
    want = call(CAUSAL, tensors, lengths, lengths)
    for x in tensors[:3]:
        x[:, :, 3:8] = np.nan
    have = call(CAUSAL, tensors, lengths, lengths)
    for name, x in have.items():
        others = np.arange(16)[(np.arange(16) < 3) | (np.arange(16) >= 8)]
        assert (x[:, :, others] == want[name][:, :, others]).all(), name


ZEROS = {
    "none among them": ([0, 1, 0, 1], [0, 3, 0, 5], 9, 3, 64, 1.0, CAUSAL, causal, {"out": 424.515771100}),
    "no rows": ([150, 0, 150], [100, 100, 100], 4, 1, 64, None, FULL, everything, {"out": 3526.704775544}),
}  # fmt: skip


@pytest.mark.parametrize("name", ZEROS)
def test_12_zero_lengths(name):
    rows, keys, heads, kv_heads, d, scale, text, keep, known = ZEROS[name]
    tensors = drawn(rows, keys, heads, kv_heads, d)
    text = text if scale is None else text.replace("{", "{ scale 1")
    have = call(text, tensors, rows, keys)
    compare(have, one_by_one(tensors, rows, keys, keep, scale), known)
    if name == "no rows":
        assert (have["k"][:, :, 100:200] == 0).all() and (have["v"][:, :, 100:200] == 0).all()


def test_12_nothing_at_all():
    for rows, keys in (([], []), ([0, 0], [0, 0]), ([0], [7]), ([5, 2], [0, 0])):
        have = call(CAUSAL, drawn(rows, keys, 2, 1, 16), rows, keys)
        assert all((x == 0).all() for n, x in have.items() if n != "lse")
        assert np.isneginf(have["lse"]).all()


def test_20_learned_bias_table():
    """One table for all sequences, read by positions of their own."""
    lengths = [64, 1, 30]
    tensors = drawn(lengths, lengths, 2, 2, 32)
    table = torch.from_numpy(inputs((128,), 5)).float().requires_grad_()
    attn = attncc.compile("attention learned(bias: f32[n] grad) { score s + bias[q + k] mask k <= q }", target=TARGET)
    q, k, v, d_out = (packed(x) for x in tensors)
    out = attn.varlen(q, k, v, starts(lengths), bias=table)
    (found,) = torch.autograd.grad(out, table, d_out)
    whole = torch.zeros(128)
    at = 0
    for n in lengths:
        one = (x[at : at + n].transpose(0, 1)[None] for x in (q, k, v))
        alone = attn(*one, bias=table)
        assert torch.allclose(alone[0].transpose(0, 1), out[at : at + n], atol=1e-6)
        whole += torch.autograd.grad(alone, table, d_out[at : at + n].transpose(0, 1)[None])[0]
        at += n
    assert (found - whole).abs().sum() <= 1e-5 * l1(whole.numpy()) + 1e-6 and abs(float(found.sum())) < 1e-4


def test_21_the_gradient_of_lse():
    lengths = [33, 0, 7]
    tensors = drawn(lengths, lengths, 2, 1, 32)
    q, k, v, d_out = (packed(x) for x in tensors)
    attn = attncc.compile(CAUSAL, target=TARGET)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attn.varlen(*leaves, starts(lengths), return_lse=True)
    found = torch.autograd.grad((d_out * out * lse.mT[..., None].exp()).sum(), leaves)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    total, at = torch.zeros((), dtype=torch.float64), 0
    for n in lengths:
        one_q, one_k, one_v = (x[at : at + n].transpose(0, 1) for x in wide)
        s = (one_q @ one_k.repeat_interleave(2, 0).mT) / 32**0.5
        s = s.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        alone = s.softmax(-1) @ one_v.repeat_interleave(2, 0)
        total = total + (d_out[at : at + n].transpose(0, 1) * alone * s.logsumexp(-1)[..., None].exp()).sum()
        at += n
    for have, want in zip(found, torch.autograd.grad(total, wide), strict=True):
        close(have.double().numpy(), want.numpy())


def test_36_the_same_bits_beside_other_sequences():
    lengths = [40, 70, 9]
    tensors = drawn(lengths, lengths, 2, 1, 32)
    have = call(CAUSAL, tensors, lengths, lengths)
    again = call(CAUSAL, tensors, lengths, lengths)
    alone = call(CAUSAL, [x[:, :, 40:110] for x in tensors], [70], [70])
    for name, x in have.items():
        assert (x == again[name]).all() and (x[:, :, 40:110] == alone[name]).all(), name


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_random_lengths(seed):
    g = np.random.default_rng(seed)
    count = int(g.integers(3, 9))
    rows, keys = (list(map(int, g.integers(0, 90, count) * (g.random(count) < 0.8))) for _ in range(2))
    tensors = drawn(rows, keys, 4, 2, 24, 40)
    have = call(CAUSAL, tensors, rows, keys)
    compare(have, one_by_one(tensors, rows, keys, causal), {})
