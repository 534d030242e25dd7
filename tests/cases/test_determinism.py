"""Case 36: equal calls give equal bits, learned bias included; a row's output is the same in other batches."""

from __future__ import annotations

import torch

import attncc

BIASED = "attention biased(bias: f32[h, far] grad) { mask k <= q score s + bias[h, min(q - k, far - 1)] }"


def test_36_the_same_bits_in_every_run_and_batch():
    g = torch.Generator().manual_seed(0)
    attn = attncc.compile(BIASED)
    q, k, v = (torch.randn(2, 4, 300, 32, generator=g).requires_grad_() for _ in range(3))
    bias = torch.randn(4, 30, generator=g).requires_grad_()

    def run():
        out = attn(q, k, v, bias=bias)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v, bias))]

    first = run()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))
    with torch.no_grad():
        alone = attn(q[:1], k[:1], v[:1], bias=bias)
        more = attn(*(torch.cat([x, x, x]) for x in (q, k, v)), bias=bias)
    assert torch.equal(alone, first[0][:1]) and torch.equal(more[2:4], first[0])
