"""Calls that PyTorch differentiates: gradients of every argument, and what is asked for and cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attncc
from attncc.errors import NotBuilt, SpecError
from tests.backward.dense import attention

ROOT = Path(__file__).parents[2]
TEXT = """attention all(window: int, cap: float grad, slopes: f32[h] grad, sinks: bf16[h] grad, doc: i32[b, k]) {
    score cap * tanh(s / cap) - slopes[h] * (q - k)
    mask 0 <= q - k < window and doc[b, q] == doc[b, k]
    softmax sink(sinks[h])
}"""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TARGET = "interpreter" if INTERPRETED else None


@pytest.fixture(scope="module")
def attn():
    return attncc.compile(TEXT, target=TARGET)


def call(dtype=torch.float32, seed=0, grad=True):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(size, generator=g).to(dtype) for size in ((2, 4, 37, 16), (2, 2, 53, 16), (2, 2, 53, 16)))
    params = {
        "window": 20, "cap": torch.tensor(2.0), "slopes": torch.rand(4, generator=g),
        "sinks": torch.randn(4, generator=g).bfloat16(),
        "doc": torch.randint(0, 3, (2, 53), generator=g).int().sort(-1).values,
    }  # fmt: skip
    for x in (q, k, v, *params.values()):
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.requires_grad_(grad)
    return (q, k, v), params


def learned(inputs, params):
    return [*inputs, params["cap"], params["slopes"], params["sinks"]]


def assert_close(have, want, part=1e-5):
    for x, y in zip(have, want, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        rounding = torch.finfo(x.dtype).eps if x.dtype == torch.bfloat16 else 0.0
        assert (x.double() - y.double()).abs().sum() <= max(part, rounding) * y.double().abs().sum()


def test_every_gradient_with_those_of_the_lse(attn):
    inputs, params = call()
    out, lse = attn(*inputs, **params, return_lse=True)
    have = torch.autograd.grad((out * out).sum() + (lse * lse).sum(), learned(inputs, params))
    wide, dense = call()
    out, lse = attention(attn.spec, *(x.double() for x in wide), {
        n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in dense.items()
    })  # fmt: skip
    want = torch.autograd.grad((out * out).sum() + (lse * lse).sum(), learned(wide, dense))
    assert_close(have, want)


def test_incoming_gradients_of_any_form(attn):
    """Expanded scalars, transposed and wider ones; of the output alone, of the lse alone."""
    inputs, params = call()
    out, lse = attn(*inputs, **params, return_lse=True)
    every = learned(inputs, params)
    g = torch.randn(out.shape[::-1]).permute(3, 2, 1, 0)
    for of, strange, plain in (
        (out, torch.tensor(0.5).expand(out.shape), torch.full(out.shape, 0.5)), (out, g, g.contiguous()),
        (lse, torch.tensor(1.5).expand(lse.shape), torch.full(lse.shape, 1.5)),
    ):  # fmt: skip
        have = torch.autograd.grad(of, every, strange, retain_graph=True, allow_unused=True, materialize_grads=True)
        want = torch.autograd.grad(of, every, plain, retain_graph=True, allow_unused=True, materialize_grads=True)
        assert all(torch.equal(x, y) for x, y in zip(have, want, strict=True))
    if not INTERPRETED:
        assert_close(
            torch.autograd.grad(out.double().sum(), every), torch.autograd.grad(attn(*inputs, **params).sum(), every)
        )


def test_only_what_is_wanted(attn):
    inputs, params = call(grad=False)
    assert attn(*inputs, **params).grad_fn is None
    params["sinks"].requires_grad_()
    out = attn(*inputs, **params)
    (d_sinks,) = torch.autograd.grad(out.sum(), [params["sinks"]])
    assert d_sinks.dtype == torch.bfloat16 and d_sinks.abs().sum() > 0
    with torch.no_grad():
        assert attn(*inputs, **params).grad_fn is None


def test_checkpoints_and_changes_in_place(attn):
    inputs, params = call()
    every = learned(inputs, params)
    want = torch.autograd.grad(attn(*inputs, **params).sum(), every)
    out = checkpoint(lambda *x: attn(*x, **params), *inputs, use_reentrant=False)
    assert all(torch.equal(x, y) for x, y in zip(torch.autograd.grad(out.sum(), every), want, strict=True))
    out = attn(*inputs, **params)
    params["doc"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_gradient_that_the_spec_does_not_give_is_refused():
    attn = attncc.compile("attention x(slopes: f32[h], a: float) { score a * s - slopes[h] * (q - k) }")
    (q, k, v), params = call()
    with pytest.raises(ValueError, match=r"slopes requires a gradient.*`slopes: f32\[h\] grad`"):
        attn(q, k, v, slopes=params["slopes"], a=1.0)
    with pytest.raises(ValueError, match=r"a requires a gradient.*`a: float grad`"):
        attn(q, k, v, slopes=params["slopes"].detach(), a=params["cap"])
    with torch.no_grad():
        attn(q, k, v, slopes=params["slopes"], a=params["cap"])
    window = attncc.compile("attention x(window: int) { mask q - k < window }")
    with pytest.raises(ValueError, match=r"window requires a gradient, and x gives it none: pass window.detach\(\)$"):
        window(q, k, v, window=torch.tensor(3.0, requires_grad=True))


@pytest.mark.parametrize(
    "body", ["mask k < w[h]", "score s + floor(w[h])", "score where(w[h] > 0, s, 0.0)", "mask k < 3"]
)
def test_a_parameter_that_cannot_have_a_gradient_is_refused_at_once(body):
    with pytest.raises(SpecError) as caught:
        attncc.compile(f"attention x(w: f32[h] grad) {{ {body} }}")
    assert [d.code for d in caught.value.diagnostics] == ["E606"]
    assert caught.value.diagnostics[0].span.column == 13


def test_differentiable_once(attn):
    inputs, params = call()
    out = attn(*inputs, **params)
    (d_q,) = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        (d_q.norm() + out.sum()).backward()


def test_several_incoming_gradients_at_once_are_those_of_vmap():
    attn, (q, k, v) = attncc.compile("attention c { mask k <= q }"), (torch.randn(1, 1, 5, 8) for _ in range(3))
    several = torch.randn(3, 1, 1, 5, 8)
    _, back = torch.func.vjp(lambda x: attn(x, k, v), q)
    (made,) = torch.func.vmap(back)(several)
    assert torch.allclose(made[1], back(several[1])[0])
    out = attn(q.requires_grad_(), k, v)
    with pytest.raises(NotBuilt, match=r"torch\.func\.vmap of torch\.func\.vjp"):
        torch.autograd.grad(out, q, several, is_grads_batched=True)
    with pytest.raises(NotBuilt, match=r"torch\.func\.vmap of torch\.func\.jvp"):
        torch.autograd.functional.jacobian(lambda q: attn(q, k, v), q, vectorize=True, strategy="forward-mode")
    wide = attncc.compile("attention c { mask k <= q } precision { inputs f8e4m3 }")
    with pytest.raises(NotBuilt, match="no gradients of 8-bit inputs by is_grads_batched"):
        torch.autograd.grad(wide(q, k, v), q, several, is_grads_batched=True)


def test_transforms_of_functions(attn):
    inputs, params = call(grad=False)
    f = lambda q: attn(q, *inputs[1:], **params).sum()
    have = torch.func.grad(f)(inputs[0])
    q = inputs[0].clone().requires_grad_()
    assert torch.equal(have, torch.autograd.grad(f(q), q)[0])


def test_sizes_of_nothing():
    attn = attncc.compile("attention x(e: f32[h] grad) { softmax sink(e[h]) }", target=TARGET)
    for batch, rows, keys in ((0, 3, 3), (1, 0, 3), (1, 3, 0)):
        q, k, v, e = (
            torch.ones(s, requires_grad=True) for s in ((batch, 2, rows, 16), *2 * [(batch, 2, keys, 16)], (2,))
        )
        out, lse = attn(q, k, v, e=e, return_lse=True)
        grads = torch.autograd.grad(out.sum() + lse.sum(), [q, k, v, e])
        assert [x.shape for x in grads] == [q.shape, k.shape, v.shape, e.shape]
        assert not grads[0].any() and not grads[1].any() and not grads[2].any()
        assert torch.equal(grads[3], torch.full((2,), float(batch * rows if keys == 0 else 0)))


if not INTERPRETED:

    def test_the_same_in_the_interpreter():
        kept = {n: x for n, x in os.environ.items() if not n.startswith("PYTEST_")}
        chosen = "every_gradient or transforms or sizes"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", __file__, "-q", "-k", chosen, "-p", "no:cacheprovider"], cwd=ROOT,
            env={**kept, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_what_v_holds_where_nothing_sees_it_reaches_no_weight():
    attn = attncc.compile("attention w(k0: int, g: f32[h] grad) { mask k < k0 weight g[h] }")
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    found = []
    for beyond in (0.0, float("nan")):
        v[:, :, 7:] = beyond
        g = torch.tensor([0.5, 2.0], requires_grad=True)
        attn(q, k, v, k0=7, g=g).sum().backward()
        found.append(g.grad)
    assert torch.equal(*found)
