"""Every way in which a parameter's gradient is summed, packed, against dense calls one by one.

test_interpreter.py runs these with the Triton kernels in Triton's interpreter; what is expected comes from the CPU
program of dense tensors, which other tests compare with float64.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

import attncc
from tests.varlen.sequences import starts

TARGET = "interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else None
ROWS, KEYS = (0, 5, 40, 1, 0, 17), (3, 5, 51, 0, 0, 9)
Q, K, B, H = sum(ROWS), sum(KEYS), len(ROWS), 4


@dataclass(frozen=True)
class Case:
    """`make` draws parameters, packed ones among them."""

    name: str
    text: str
    make: Callable[[], dict[str, torch.Tensor]]


def randn(**shapes):
    return lambda: {n: torch.randn(shape) for n, shape in shapes.items()}


QUICK = [
    Case("both", "(c: f32[b, h, k] grad) { score s + c[b, h, q] - c[b, h, k] mask k <= q }", randn(c=(H, K))),
    Case("of_a_sequence", """(u: f32[b] grad, t: f32[b, h_kv] grad, x: f32[h] grad, a: float grad = 1.3) {
        score s * t[b, h_kv] + u[b] * s * s / 9 + a * s * x[h] mask k <= q }""",
        lambda: {"u": torch.randn(B), "t": torch.randn(B, 2), "x": torch.randn(H), "a": torch.tensor(1.2)}),
    Case("row_table", "(t: f32[b, h, row, n] grad) { score s + t[b, h, row, (q - k) // 4] mask k <= q }",
         randn(t=(H, Q, 11))),
    Case("keys", "(n: i32[b], on: bool[b, k]) { mask k < n[b] and on[b, k] }",
         lambda: {"n": torch.randint(0, 60, (B,)).int(), "on": torch.rand(K) < 0.7}),
]  # fmt: skip
MORE = [
    Case("gates", "(g: f32[b, h, row] grad, w: f32[b, k] grad) { weight g[b, h, row] * w[b, k] mask k <= q }",
         randn(g=(H, Q), w=(K,))),
    Case("row_sink", "(e: f32[b, h, row] grad) { softmax sink(2 * e[b, h, row]) mask k < q - 9 }", randn(e=(H, Q))),
    Case("tables", "(t: f32[n] grad, z: f32[m, h] grad) { score s + t[q + k] + z[row % 7, h] * s mask k <= q }",
         randn(t=(80,), z=(6, H))),
    Case("start", "(c: f32[b, k] grad) { align start score s + c[b, q] + c[b, row] * s mask k <= q }", randn(c=(K,))),
    Case("sigmoid", "(c: f32[h] grad) { mask k <= q score s * c[h] softmax sigmoid(-1.0) }", randn(c=(H,))),
    Case("stack", """(a: float grad, cap: float grad = 3.0, t: f32[h] grad) {
        score a * s score cap * tanh(s / cap) + t[h] score s + t[h] * s * s mask abs(q - k) < 9 }""",
        lambda: {"a": torch.tensor(1.3), "t": torch.randn(H) / 9}),
]  # fmt: skip


def of(spec, p, x, b, rows, keys):
    """A parameter for one sequence by itself, a batch of one."""
    axis = spec.packed_axis(p)
    if axis:
        a, e = rows if axis == "row" else keys
        return x.narrow(spec.stored_axes(p).index(axis), a, e - a).unsqueeze(p.axes.index("b"))
    return x[b : b + 1] if "b" in p.axes else x


def run(case: Case, target):
    """Results by name: out, lse where there is one, gradients; of a packed call, or (target "dense") one by one."""
    torch.manual_seed(0)
    q, k, v = torch.randn(Q, H, 32), torch.randn(K, 2, 32), torch.randn(K, 2, 48)
    params = case.make()
    attn = attncc.compile(f"attention {case.name}{case.text}", target=None if target == "dense" else target)
    spec = attn.packed.spec
    leaves = {"q": q, "k": k, "v": v, **{p.name: params[p.name] for p in spec.params if p.grad and p.name in params}}
    leaves = {n: x.requires_grad_() for n, x in leaves.items()}
    cu_q, cu_k = starts(ROWS), starts(KEYS)
    if target == "dense":
        outs, lses = [], []
        for b, (rows, keys) in enumerate(zip(*(pairwise(x.tolist()) for x in (cu_q, cu_k)), strict=True)):
            inputs = (x[a:e].transpose(0, 1)[None] for x, (a, e) in ((q, rows), (k, keys), (v, keys)))
            mine = {p.name: of(spec, p, params[p.name], b, rows, keys) for p in spec.params if p.name in params}
            out, lse = attn.both(*inputs, mine)
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0] if attn.has_lse else lse)
        out, lse = torch.cat(outs), torch.cat(lses, -1)
    else:
        out, lse = attn.packed.both(q, k, v, {**params, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k})
    torch.manual_seed(1)
    loss = (out * torch.randn(out.shape)).sum()
    if attn.has_lse:
        loss = loss + (torch.where(lse.isfinite(), lse, 0.0) * torch.randn(lse.shape)).sum()
    found = torch.autograd.grad(loss, list(leaves.values()))
    return {"out": out.detach(), "lse": lse.detach().nan_to_num(neginf=0.0), **dict(zip(leaves, found, strict=True))}


def check(case: Case) -> None:
    have, want = run(case, TARGET), run(case, "dense")
    for name, x in want.items():
        assert have[name].shape == x.shape
        assert (have[name] - x).abs().sum() <= 2e-5 * x.abs().sum(), name


@pytest.mark.slow
def test_equal_calls_give_equal_bits():
    first, again = run(QUICK[0], TARGET), run(QUICK[0], TARGET)
    assert all(torch.equal(x, again[n]) for n, x in first.items())


@pytest.mark.parametrize("case", QUICK, ids=lambda c: c.name)
def test_gradients(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=lambda c: c.name)
def test_more_gradients(case):
    check(case)


UNBUILT = {
    "(t: f32[h, row, k] grad) { score s + t[h, row, k] }": "one for the positions of all",
    "(t: f32[k] grad) { score s * t[k] }": "one for the positions of all",
    "(t: f32[b, n] grad) { score s + t[b, q - k] }": "a table for each",
}


@pytest.mark.skipif(TARGET is None, reason="the CPU program has them all")
@pytest.mark.parametrize("text", UNBUILT)
def test_what_is_not_built_says_so(text):
    attn = attncc.compile(f"attention x{text}", target=TARGET)
    q, k, v = (torch.randn(9, 2, 16, requires_grad=True) for _ in range(3))
    shape = {"h": 2, "row": 9, "k": 9, "n": 9, "b": 1}
    t = torch.randn([shape[a] for a in attn.spec.param("t").axes], requires_grad=True)
    out = attn.varlen(q, k, v, starts([9]), t=t)
    with pytest.raises(NotImplementedError, match=f"a gradient of t, of packed sequences {UNBUILT[text]}"):
        out.sum().backward()
