"""Packed calls that follow one another: what one promised of its lengths binds no other, and faults are named."""

from __future__ import annotations

import pickle

import pytest
import torch

import attncc

WINDOW = "attention near(window: int = 5) { mask 0 <= q - k < window }"
LAST = torch.tensor([0] * 25 + [100]).int()


def x(total=100, head_dim=8):
    return torch.randn(total, 1, head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def test_a_promise_binds_no_later_call():
    attn, q = attncc.compile(WINDOW), x()
    attn.varlen(q, q, q, torch.arange(0, 101, 4).int(), max_seqlen_q=4, max_seqlen_k=4, window=60)
    out = attn.varlen(q, q, q, LAST, max_seqlen_q=100, max_seqlen_k=100, window=60)
    assert torch.equal(out, attncc.compile(WINDOW).varlen(q, q, q, LAST, window=60))


@pytest.mark.parametrize("given", ["x", 4.5, True, torch.tensor(3)], ids=["str", "float", "bool", "tensor"])
def test_a_promise_is_an_int_in_every_call(given):
    attn, q = attncc.compile(WINDOW), x()
    attn.varlen(q, q, q, LAST, max_seqlen_q=100)
    with pytest.raises(TypeError, match="max_seqlen_q must be an int"):
        attn.varlen(q, q, q, LAST, max_seqlen_q=given)


def test_sorted_tensors_start_anew_with_each_sequence():
    attn, q = attncc.compile("attention d(doc: i32[b, k] sorted) { mask doc[b, q] == doc[b, k] }"), x(6)
    starts = torch.tensor([0, 3, 6]).int()
    attn.varlen(q, q, q, starts, doc=torch.tensor([0, 1, 2, 0, 1, 2]).int())
    with pytest.raises(ValueError, match="falls from 2 to 1 at index"):
        attn.varlen(q, q, q, starts, doc=torch.tensor([0, 2, 1, 0, 1, 2]).int())


def test_the_probability_of_dropout_may_read_how_many_sequences_there_are_and_not_how_long_they_are():
    q, starts = x(70), torch.tensor([0, 70]).int()
    assert attncc.compile("attention d { dropout b_len / 64 }").varlen(q, q, q, starts).any()
    with pytest.raises(ValueError, match="reads k_len, and packed sequences have one each"):
        attncc.compile("attention d { dropout k_len / 64 }").varlen(q, q, q, starts)


def test_where_sequences_start_is_given_and_dense():
    attn, q = attncc.compile(WINDOW), x()
    with pytest.raises(TypeError, match="cu_seqlens_q must be a dense tensor"):
        attn.varlen(q, q, q, LAST.to_sparse())
    with pytest.raises(TypeError, match="cu_seqlens_q must be an int32 tensor"):
        attn.packed(q, q, q)


def test_a_pickle_stays_packed():
    attn, q = attncc.compile(WINDOW).packed, x()
    again = pickle.loads(pickle.dumps(attn))
    given = {"cu_seqlens_q": LAST, "cu_seqlens_k": LAST}
    assert torch.equal(again(q, q, q, **given), attn(q, q, q, **given))
