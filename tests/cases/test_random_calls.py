"""The public API on random specs and calls against the float64 reference: out, lse and the gradients of q, k and v."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

import attncc
from attncc.runtime.reference import reference
from tests.cases.conftest import INTERPRETED
from tests.cases.random_calls import Call, calls, random_call

TARGET = "interpreter" if INTERPRETED else None
DTYPES = (torch.float32, torch.float32, torch.float16)
DTYPES += () if INTERPRETED else (torch.float64, torch.bfloat16)
PART = {torch.float32: 3e-5, torch.float64: 1e-11, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def near(got: torch.Tensor, want: torch.Tensor, part: float) -> bool:
    """Infinite and NaN where the reference is, else within a part of the largest element."""
    got = got.detach().double()
    if got.shape != want.shape or not torch.equal(torch.isfinite(got), torch.isfinite(want)):
        return False
    odd = ~torch.isfinite(want)
    finite = (got - want)[~odd].abs().max().item() if (~odd).any() else 0.0
    scale = want[~odd].abs().max().item() if (~odd).any() else 0.0
    return finite <= part * (scale + 1) and torch.equal(got[odd].nan_to_num(7.0), want[odd].nan_to_num(7.0))


def wrong(attn: attncc.api.Attention, call: Call) -> list[str]:
    """What of a call's results is not the reference's."""
    part = PART[call.q.dtype]
    q, k, v = (x.detach().requires_grad_(w) for x, w in zip((call.q, call.k, call.v), call.want, strict=True))
    out, lse = attn(q, k, v, return_lse=True, **call.params)
    params = {p.name: p.default for p in attn.spec.scalars} | call.params
    exact = [x.detach().double().requires_grad_(w) for x, w in zip((q, k, v), call.want, strict=True)]
    want, want_lse = reference.__wrapped__(attn.spec, *exact, params)
    found = [] if near(out, want.detach(), part) and out.dtype == q.dtype else ["out"]
    found += [] if near(lse, want_lse.detach(), 1e-11 if q.dtype == torch.float64 else 3e-5) else ["lse"]
    if not any(call.want):
        return found
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
    got = torch.autograd.grad(out, [x for x in (q, k, v) if x.requires_grad], d_out)
    by = [x for x in exact if x.requires_grad]
    known = want.requires_grad  # it may read nothing that requires a gradient
    right = torch.autograd.grad(want, by, d_out.double(), allow_unused=True) if known else [None] * len(by)
    for name, x, y in zip([n for n, w in zip("qkv", call.want, strict=True) if w], got, right, strict=True):
        y = torch.zeros_like(x, dtype=torch.float64) if y is None else y
        if not y.isnan().any() and not near(x, y, 10 * part):
            found.append(f"d_{name}")
    return found


def sweep(seed: int, specs: int) -> None:
    for text, random, dtypes in islice(calls(seed, DTYPES), specs):
        attn = attncc.compile(text, target=TARGET)
        for _ in range(2):
            call = random_call(attn.spec, random, dtypes)
            found = wrong(attn, call)
            sizes = [(tuple(x.shape), x.stride()) for x in (call.q, call.k, call.v)]
            assert not found, (text, found, sizes, call.q.dtype, call.want, call.params)


def test_random_calls_give_what_the_reference_gives():
    sweep(2, 6 if INTERPRETED else 20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 13))
def test_many_random_calls(seed):
    sweep(seed, 40)


def test_no_keys_give_no_gradient_whatever_the_scale():
    attn = attncc.compile("attention x { scale 1 / sqrt(k_len) softmax off_by_one }", target=TARGET)
    q, k, v = torch.ones(1, 1, 3, 16), torch.ones(1, 1, 0, 16), torch.ones(1, 1, 0, 16)
    q.requires_grad_()
    attn(q, k, v).sum().backward()
    assert torch.equal(q.grad, torch.zeros_like(q))
