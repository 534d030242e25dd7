"""What a call returns of each row beside its lse: by formulas of these lines, gradients too, and what is refused."""

from __future__ import annotations

import pytest
import torch

import attncc
from attncc import frontend
from attncc.errors import SpecError
from attncc.ir import Shape
from attncc.pipeline import Request, backward, plan, render
from attncc.runtime.check import SHAPES, check

SPECS = {
    "sink": "attention a(e: f32[h] grad) { mask k < q softmax sink(e[h]) } layout { rows max, entropy, pairs }",
    "scores": "attention a(c: float grad = 2.0) { mask k < q - 2 score c * tanh(s / c) dropout 0.2 } "
    "layout { rows max, entropy, pairs }",
    "two_pass": "attention a { mask 0 <= q - k < 9 softmax two_pass } layout { rows entropy, pairs }",
    "relu": "attention a { mask k <= q softmax relu(2) } layout { rows max, pairs }",
}
ALL = {"return_lse": True, "return_max": True, "return_entropy": True, "return_pairs": True}


def tensors(*shape: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("text", SPECS.values(), ids=SPECS)
def test_on_the_cpu(text):
    report = check(frontend.parse(text).spec, "cpu", seeds=(0,), shapes=SHAPES["cpu"][:2], differences=True)
    assert report.passed, str(report)


def test_in_the_interpreter():
    shapes = (Shape(1, 2, 1, 9, 17, 16, 16),)
    report = check(frontend.parse(SPECS["sink"]).spec, "interpreter", seeds=(0,), shapes=shapes)
    assert report.passed, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "interpreter"])
@pytest.mark.parametrize("text", SPECS.values(), ids=SPECS)
def test_everything(text, device):
    report = check(frontend.parse(text).spec, device, differences=True)
    assert report.passed, str(report)


def rows(q, k, v, e):
    """out, lse, max, entropy and pairs of causal attention with a sink, by torch's own softmax."""
    length = q.shape[2]
    s = (q @ k.mT / 4).masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(-1), -torch.inf)
    scores = torch.cat([s, e.double().view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    p = scores.softmax(-1)
    entropy = -(p * torch.where(p > 0, p, 1.0).log()).sum(-1)
    return p[..., :-1] @ v, scores.logsumexp(-1), s.amax(-1), entropy, (s > -torch.inf).sum(-1)


def test_by_their_formula():
    """Beside the reference, which check uses: these lines know nothing of attncc."""
    q, k, v = tensors(2, 4, 33, 16)
    e = torch.linspace(-1, 2, 4, requires_grad=True)
    attn = attncc.compile("attention a(e: f32[h] grad) { mask k < q softmax sink(e[h]) }")
    found, want = attn(q, k, v, e=e, **ALL), rows(q, k, v, e)
    for one, other in zip(found, want, strict=True):
        assert torch.allclose(one, other.to(one.dtype), rtol=0, atol=1e-12)
    assert found[4].dtype == torch.int64 and not found[2].requires_grad

    def loss(made):
        return made[0].sum() + (made[1] ** 2).sum() + (made[3] ** 2).sum()

    mine, theirs = (torch.autograd.grad(loss(made), (q, k, v, e)) for made in (found, want))
    for one, other in zip(mine, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-10)


def test_each_by_itself_is_the_same():
    q, k, v = tensors(1, 2, 20, 16)
    attn = attncc.compile("attention a { mask k <= q }")
    out, lse, top, entropy, pairs = attn(q, k, v, **ALL)
    assert torch.equal(attn(q, k, v, return_max=True)[1], top)
    assert torch.equal(attn(q, k, v, return_entropy=True)[1], entropy)
    assert torch.equal(attn(q, k, v, return_pairs=True, return_lse=True)[2], pairs)
    assert torch.equal(attn(q, k, v), out) and torch.equal(attn(q, k, v, return_lse=True)[1], lse)
    (alone,) = torch.autograd.grad(attn(q, k, v, return_entropy=True)[1].sum(), q)
    assert torch.equal(alone, torch.autograd.grad(entropy.sum(), q)[0])


def test_a_row_that_sees_nothing():
    q, k, v = tensors(1, 1, 3, 16)
    _, lse, top, entropy, pairs = attncc.compile("attention a { mask k < 0 }")(q, k, v, **ALL)
    assert (lse == -torch.inf).all() and (top == -torch.inf).all() and (entropy == 0).all() and (pairs == 0).all()


def test_in_a_graph():
    q, k, v = tensors(1, 2, 20, 16)
    attn = attncc.compile("attention a { mask k <= q }")
    call = torch.compile(lambda *x: attn(*x, return_entropy=True), fullgraph=True, backend="aot_eager")
    out, entropy = call(q, k, v)
    plain = attn(q, k, v, return_entropy=True)
    assert torch.equal(out, plain[0]) and torch.equal(entropy, plain[1])
    mine, theirs = (torch.autograd.grad(x.sum(), q)[0] for x in (entropy, plain[1]))
    assert torch.equal(mine, theirs)


def test_in_a_graph_beside_rows_of_the_spec():
    q, k, v = tensors(1, 2, 20, 16)
    attn = attncc.compile("attention a(n: const int = 3) { mask k <= q + n } layout { rows max }")
    call = torch.compile(lambda *x: attn(*x, return_entropy=True), fullgraph=True, backend="aot_eager")
    plain = attn(q, k, v, return_entropy=True)
    assert all(map(torch.equal, call(q, k, v), plain))


def test_what_has_no_gradient_costs_the_backward_pass_nothing():
    sizes = (("head_dim", 64),)
    asked = [
        backward(plan(Request(text=text, filename="a.attn", target="sm_90", sizes=sizes, dtype="bf16")))
        for text in ("attention a { mask k <= q }", "attention a { mask k <= q } layout { rows max, pairs }")
    ]
    assert render(asked[0]) == render(asked[1])


@pytest.mark.parametrize(
    ("softmax", "flag", "fault", "words"),
    [
        ("sigmoid(1)", "return_entropy", ValueError, "do not add up to 1"),
        ("custom(weight = exp(s), divide = none)", "return_entropy", ValueError, "do not add up to 1"),
        ("sparsemax", "return_max", attncc.NotBuilt, "beside softmax sparsemax"),
        ("custom(weight = sqrt(max(s, 0)), divide = sum)", "return_entropy", attncc.NotBuilt, "no exponentials"),
    ],
)
def test_refusals(softmax, flag, fault, words):
    with pytest.raises(fault, match=words):
        attncc.compile(f"attention a {{ softmax {softmax} }}")(*tensors(1, 1, 3, 16), **{flag: True})


def test_an_algorithm_that_returns_none_says_so():
    for name in ("standard", "fa1", "fa3"):
        with pytest.raises(SpecError, match=f"algorithm {name} returns nothing of a row but its lse"):
            attncc.compile(f"attention a {{ mask k <= q }} schedule {{ algorithm {name} }} layout {{ rows max }}")
    text = "attention a { mask k <= q } layout { rows max }"
    sizes = (("k_len", 16384), ("q_len", 16384))
    chosen = plan(Request(text=text, filename="a.attn", target="sm_90", sizes=sizes, dtype="bf16")).choice
    assert chosen.plan.algorithm == "fa2"
    assert any("fa3 returns nothing of a row but its lse" in why for _, why in chosen.rejected)


def test_packed_sequences_say_that_they_have_none():
    q, k, v = (x.transpose(0, 1) for x in (y[0] for y in tensors(1, 2, 5, 16)))
    starts = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="of packed sequences"):
        attncc.compile("attention a { mask k <= q }").varlen(q, k, v, starts, return_max=True)


def test_the_text_keeps_their_order():
    assert "rows max, pairs" in attncc.compile("attention a { mask k <= q } layout { rows pairs, max }").text
