"""Calls where torch's default device is another: what attncc makes for itself lies where the call's tensors lie."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import attncc
from attncc.ir import Shape
from attncc.runtime import tune
from attncc.runtime.draw import Draw
from attncc.runtime.gradients import gradients
from attncc.runtime.quantise import rotation_parts
from attncc.runtime.reference import reference

BITS = "attention a(t: f32[h, far] grad, m: bit[b, k], w: int = 9"
DOC = "mask doc[b, q] == doc[b, k] score where(k < floor(3.5), s, s + t[h])"
TEXTS = {
    "dropout": f"{BITS}, p: float = 0.25) {{ mask m[b, k] and q - k < w score s + t[h, min(k, far - 1)] dropout p }}",
    "rows": f"{BITS}) {{ mask m[b, k] or k % 5 < 2 score s + t[h, abs(q - k)] }} layout {{ rows max, entropy, pairs }}",
    "packed": f"attention a(t: f32[h] grad, doc: i32[b, k] sorted) {{ {DOC} }}",
    "summaries": f"attention a(t: f32[h] grad, doc: i32[b, k] sorted) {{ {DOC} }}",
    "sparse": "attention a { mask k <= q softmax entmax(1.5) }",
    "eight": "attention a { mask k <= q } precision { inputs f8e4m3 }",
}


def results(name: str) -> list[torch.Tensor]:
    """out, the gradients and, where there is one, the tangent of a call."""
    g = torch.Generator("cpu").manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=g, device="cpu").requires_grad_()
    attn = attncc.compile(TEXTS[name])
    q, k, v = (draw(1, 2, 40, 16) for _ in range(3))
    doc = torch.arange(40, dtype=torch.int32, device="cpu")[None] // 13
    bits = torch.full((1, 2), 0x5B5B, dtype=torch.int32, device="cpu")
    given = {"t": draw(2, 12) if "far" in TEXTS[name] else draw(2), "doc": doc, "m": bits}
    params = {p.name: given[p.name] for p in attn.spec.params if p.name in given}
    leaves = [q, k, v, *(x for x in params.values() if x.requires_grad)]
    torch.manual_seed(1)  # of the seed of dropout
    if name == "packed":
        cu = torch.tensor([0, 15, 40], dtype=torch.int32, device="cpu")
        out = attn.varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), cu, **{**params, "doc": doc[0]})
    else:
        out = attn(q, k, v, **params)
    found = [out, *torch.autograd.grad(out.square().sum(), leaves)]
    if name == "summaries":
        plain = {n: x.detach() for n, x in params.items()}
        found += torch.func.jvp(lambda q: attn(q, k.detach(), v.detach(), **plain), (q.detach(),), (k.detach(),))
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_results_are_those_of_the_usual_default(name):
    rotation_parts.cache_clear()
    with torch.device("meta"):
        found = results(name)
    rotation_parts.cache_clear()
    assert all(map(torch.equal, found, results(name)))


@pytest.mark.parametrize("name", ["dropout", "rows", "summaries", "sparse"])
def test_references_lie_where_the_tensors_lie(name):
    """A search draws its calls on the CPU, and works out what is right where they run."""
    spec, shape = attncc.compile(TEXTS[name]).spec, Shape(1, 2, 2, 20, 20, 16, 16, "f32")
    draw = Draw(spec, 0, {})
    with torch.device("cpu"):
        call, params = draw.inputs(shape, "f32", "contiguous", "cpu"), draw.params(shape, "cpu")
        out, lse = reference(spec, *call, params)
        ones = torch.ones_like(out), torch.ones_like(lse)
        right = lambda: (*reference(spec, *call, params), *gradients(spec, *call, params, *ones).values.values())
        want = right()
    with torch.device("meta"):
        assert all(map(torch.equal, right(), want))


def test_a_graph():
    attn = attncc.compile("attention a(g: float) { mask k <= q score s * g dropout 0.25 }")
    q, k, v = (torch.randn(1, 2, 9, 8, device="cpu") for _ in range(3))
    call = torch.compile(lambda q, k, v: attn(q, k, v, g=0.5), fullgraph=True, backend="eager")
    torch._dynamo.reset()
    torch.manual_seed(1)
    want = attn(q, k, v, g=0.5)
    torch.manual_seed(1)
    with torch.device("meta"):
        assert torch.equal(call(q, k, v), want)
    torch._dynamo.reset()


def test_candidates_are_judged():
    q = torch.zeros(1, 2, 20, 16, device="cpu")
    attn = attncc.compile("attention a(t: f32[h]) { mask k <= q weight t[h] }")
    call = tune.Measured(attn, q, q, q, {})
    with torch.device("meta"):
        for direction in ("forward", "backward"):
            subject = SimpleNamespace(call=call, direction=direction, _once=lambda name, make: make())
            assert not tune.OnDevice._small(subject, attn)
