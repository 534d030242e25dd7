"""Forward-mode derivatives of calls: torch.func.jvp, dual tensors, and what is asked for and cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.autograd import forward_ad

import attncc
from tests.backward.dense import attention
from tests.training.test_autograd import INTERPRETED, ROOT, TARGET, TEXT, assert_close, call

LEARNED = ("cap", "slopes", "sinks")


@pytest.fixture(scope="module")
def attn():
    return attncc.compile(TEXT, target=TARGET)


def problem(attn):
    """(function of q, k, v and the learned parameters to out and lse, primals, tangents)"""
    inputs, params = call(grad=False)
    g = torch.Generator().manual_seed(5)
    primals = (*inputs, *(params[n] for n in LEARNED))
    tangents = tuple(torch.randn(x.shape, generator=g).to(x.dtype) for x in primals)

    def f(q, k, v, *learned):
        return attn(q, k, v, return_lse=True, **{**params, **dict(zip(LEARNED, learned, strict=True))})

    return f, primals, tangents, params


def test_tangents_of_both_results_along_every_argument(attn):
    f, primals, tangents, params = problem(attn)

    def dense(q, k, v, *learned):
        return attention(attn.spec, q, k, v, {**params, **dict(zip(LEARNED, learned, strict=True))})

    _, have = torch.func.jvp(f, primals, tangents)
    wide = (tuple(x.double() for x in xs) for xs in (primals, tangents))
    _, want = torch.func.jvp(dense, *wide)
    assert have[0].dtype == have[1].dtype == torch.float32
    assert_close(have, [x.float() for x in want])


def test_dual_tensors_with_and_without_grad_mode(attn):
    f, primals, tangents, _ = problem(attn)
    _, want = torch.func.jvp(f, primals, tangents)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(primals, tangents, strict=True)]
        have = [forward_ad.unpack_dual(x).tangent for x in f(*duals)]
        with torch.no_grad():
            again = [forward_ad.unpack_dual(x).tangent for x in f(*duals)]
        assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(want, have, again, strict=True))
        assert forward_ad.unpack_dual(f(*primals)[0]).tangent is None


@pytest.mark.skipif(INTERPRETED, reason="once is enough")
def test_a_tangent_is_linear_in_what_moves(attn):
    """Each argument by itself, the others still, add up to all at once."""
    f, primals, tangents, _ = problem(attn)
    _, want = torch.func.jvp(f, primals, tangents)
    total = torch.zeros_like(want[0])
    for i, tangent in enumerate(tangents):
        along = lambda x, i=i: f(*primals[:i], x, *primals[i + 1 :])[0]
        total += torch.func.jvp(along, (primals[i],), (tangent,))[1]
    assert_close([total], want[:1], 1e-4)


@pytest.mark.skipif(INTERPRETED, reason="once is enough")
def test_reverse_and_forward_mode_agree(attn):
    f, primals, tangents, _ = problem(attn)
    g = torch.Generator().manual_seed(6)
    (out, lse), moves = torch.func.jvp(f, primals, tangents)
    back = [torch.randn(x.shape, generator=g) for x in (out, lse)]
    leaves = [x.clone().requires_grad_() for x in primals]
    gradients = torch.autograd.grad(f(*leaves), leaves, back)
    forward = sum(float((x.double() * y).sum()) for x, y in zip(moves, back, strict=True))
    reverse = sum(float((x.double() * y).sum()) for x, y in zip(gradients, tangents, strict=True))
    assert abs(forward - reverse) < 1e-2 * (1 + abs(forward))  # the sinks' gradient is bf16


@pytest.mark.skipif(INTERPRETED, reason="once is enough")
def test_differentiable_once_in_either_mode(attn):
    f, primals, tangents, _ = problem(attn)
    along = lambda q: torch.func.jvp(lambda x: f(x, *primals[1:])[0], (q,), tangents[:1])[1].sum()
    slope = torch.func.grad(lambda q: f(q, *primals[1:])[0].sum())
    for second in (
        lambda: torch.func.jvp(along, primals[:1], tangents[:1]), lambda: torch.func.grad(along)(primals[0]),
        lambda: torch.func.jvp(slope, primals[:1], tangents[:1]),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match="differentiable once"):
            second()
    q = primals[0].clone().requires_grad_()
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(q, tangents[0]), *primals[1:])[0]).tangent
        with pytest.raises(NotImplementedError, match="derivative of its tangents"):
            tangent.sum().backward()


@pytest.mark.skipif(INTERPRETED, reason="once is enough")
def test_a_tangent_that_the_spec_does_not_give_is_refused():
    attn = attncc.compile("attention x(slopes: f32[h]) { score s - slopes[h] * (q - k) }")
    inputs, params = call(grad=False)
    with pytest.raises(ValueError, match=r"slopes has a tangent.*`slopes: f32\[h\] grad`"):
        torch.func.jvp(lambda x: attn(*inputs, slopes=x), (params["slopes"],), (params["slopes"],))


@pytest.mark.skipif(INTERPRETED, reason="once is enough")
def test_in_a_graph_it_is_refused_and_never_zero():
    """PyTorch gives a registered operator tangents of zero; in a graph that breaks, the eager call is right."""
    attn = attncc.compile("attention x { mask k <= q }")
    (q, k, v), _ = call(grad=False)
    bare = lambda x: torch.ops.attncc.attention(attn.text, "", "", x, k, v, [], [], [])[0]
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(bare, (q,), (q,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        bare(forward_ad.make_dual(q, q))
    moved = lambda x: torch.func.jvp(lambda y: attn(y, k, v), (x,), (x,))[1]
    with pytest.raises(Exception, match="no forward-mode derivative"):
        torch.compile(moved, backend="aot_eager", fullgraph=True)(q)


@pytest.mark.skipif(not INTERPRETED, reason="there it shows, and once is enough")
def test_behind_a_break_of_a_graph_it_is_that_of_an_eager_call():
    """torch.compile does not trace what is generated, of which it would make graphs again."""
    attn = attncc.compile("attention x { mask k <= q }", target=TARGET)
    q, k, v = (x[:1, :2, :9] for x in call(grad=False)[0])
    moved = lambda x: torch.func.jvp(lambda y: attn(y, k, v), (x,), (x,))[1]
    inside = torch.compile(lambda x: attn(2 * x, k, v), backend="aot_eager")
    for have in (torch.compile(moved, backend="aot_eager")(2 * q), torch.func.jvp(inside, (q,), (q,))[1]):
        assert torch.equal(have, moved(2 * q))
    torch._dynamo.reset()


@pytest.mark.skipif(INTERPRETED, reason="once is enough")
def test_sizes_of_nothing():
    attn = attncc.compile("attention x(e: f32[h] grad) { softmax sink(e[h]) }")
    for batch, rows, keys in ((0, 3, 3), (1, 0, 3), (1, 3, 0)):
        given = [torch.ones(s) for s in ((batch, 2, rows, 16), *2 * [(batch, 2, keys, 16)], (2,))]
        f = lambda q, k, v, e: attn(q, k, v, e=e, return_lse=True)
        _, (out_t, lse_t) = torch.func.jvp(f, tuple(given), tuple(given))
        assert out_t.shape == (batch, 2, rows, 16) and not out_t.any()
        assert (lse_t == 1).all() or keys


if not INTERPRETED:

    def test_the_same_in_the_interpreter():
        kept = {n: x for n, x in os.environ.items() if not n.startswith("PYTEST_")}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider"], cwd=ROOT,
            env={**kept, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
