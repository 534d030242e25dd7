"""What training loops wrap around a call: checkpoints that choose, autocast, several processes, Inductor, vmap."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import attncc
from tests.training.model import Block, data
from tests.training.test_autograd import ROOT

aten = torch.ops.aten
SAVED = {"products": (aten.mm.default, aten.bmm.default), "attention": ("attncc",), "nothing": ()}


@pytest.fixture(scope="module")
def attn():
    return attncc.load(ROOT / "specs" / "window_alibi_sinks.attn")


def gradients(model, x, target):
    model.zero_grad()
    (model(x) - target).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("saved", SAVED)
def test_selective_checkpoints(attn, saved):
    """The call is one operator to them: it is saved or run again as a whole, and nothing of it is changed in place."""
    model, (x, target) = Block(attn), data()
    seen = []

    def policy(ctx, op, *args, **kwargs):
        seen.append(op)
        chosen = op in SAVED[saved] or (op.namespace in SAVED[saved])
        return CheckpointPolicy.MUST_SAVE if chosen else CheckpointPolicy.PREFER_RECOMPUTE

    want = gradients(model, x, target)
    context = partial(create_selective_checkpoint_contexts, policy)
    have = gradients(Checkpointed(model, context), x, target)
    assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))
    assert torch.ops.attncc.attention.default in seen


class Checkpointed(torch.nn.Module):
    def __init__(self, model, context) -> None:
        super().__init__()
        self.model, self.context = model, context

    def forward(self, x):
        return checkpoint(self.model, x, use_reentrant=False, context_fn=self.context)


def test_autocast_takes_the_call_to_its_type(attn):
    causal = attncc.compile("attention x { mask k <= q }")
    wide = attncc.compile("attention x { mask k <= q } precision { inputs f32 }")
    x = torch.randn(2, 2, 20, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = causal(x, x, x.double().float().bfloat16())  # types that differ become one, as PyTorch's attention has it
        assert out.dtype == scaled_dot_product_attention(x, x, x).dtype == torch.bfloat16
        assert causal(*3 * [x.double()]).dtype == torch.float64 and wide(x, x, x).dtype == torch.float32
        graph = torch.compile(lambda y: causal(y, y, y), fullgraph=True, backend="aot_eager")
        assert torch.equal(graph(x), causal(x, x, x))
        model, (y, target) = Block(attn), data()
        loss = (model(y) - target).square().mean()
    (d_x,) = torch.autograd.grad(out.sum(), x)
    assert d_x.dtype == torch.float32 and torch.equal(out, causal(*3 * [x.bfloat16()]))
    loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())
    torch._dynamo.reset()


def test_two_processes_by_ddp_and_fsdp2(tmp_path):
    command = [sys.executable, "-m", "tests.training.distributed"]
    kept = {n: x for n, x in os.environ.items() if not n.startswith("PYTEST_")}
    started = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "meet")], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env={**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said[0][-3000:] + said[1][-3000:]


@pytest.mark.slow
def test_inductor(attn):
    model, (x, target) = Block(attn), data()
    want = gradients(model, x, target)
    have = gradients(torch.compile(model, fullgraph=True), x, target)
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(have, want, strict=True))
    torch._dynamo.reset()


def test_equal_bits_where_pytorch_is_told_so(attn):
    model, (x, target) = Block(attn), data()
    want = gradients(model, x, target)
    torch.use_deterministic_algorithms(True)
    try:
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, x, target), want, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


TEXT = """attention examples(slopes: f32[h] grad, e: f32[b, h] grad, doc: i32[b, k]) {
    score s - slopes[h] * (q - k)  mask doc[b, q] == doc[b, k]  softmax sink(e[b, h])
}"""
COUNT = 3


@pytest.fixture(scope="module")
def examples():
    """(function of q, k, v and e, those of several examples)"""
    attn, g = attncc.compile(TEXT), torch.Generator().manual_seed(0)
    shared = {"slopes": torch.rand(4, generator=g), "doc": torch.randint(0, 2, (2, 13), generator=g).int()}
    sizes = (2, 4, 9, 16), (2, 2, 13, 16), (2, 2, 13, 16), (2, 4)
    f = lambda q, k, v, e, **more: attn(q, k, v, e=e, return_lse=True, **{**shared, **more})
    return f, [torch.randn(COUNT, *size, generator=g) for size in sizes]


def one_by_one(f, *xs):
    return [torch.stack(each) for each in zip(*(f(*(x[i] for x in xs)) for i in range(COUNT)), strict=True)]


def test_vmap_is_one_call_for_all_examples(examples):
    f, xs = examples
    want = one_by_one(f, *xs)
    for have in (torch.vmap(f)(*xs), torch.no_grad()(torch.vmap(f))(*xs)):
        assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))
    q, k, v, e = xs
    some = torch.vmap(lambda q, e: f(q, k[0], v[0], e)[0], in_dims=(2, 1), out_dims=1)
    have = some(q.movedim(0, 2), e.movedim(0, 1))
    want = [f(q[i], k[0], v[0], e[i])[0] for i in range(COUNT)]
    assert torch.equal(have, torch.stack(want, 1))


def test_derivatives_of_and_under_vmap(examples):
    f, (q, k, v, e) = examples
    loss = lambda q, e: (f(q, k[0], v[0], e)[0] ** 2).sum()
    slope = torch.func.grad(loss, argnums=(0, 1))
    assert all(torch.equal(a, b) for a, b in zip(torch.vmap(slope)(q, e), one_by_one(slope, q, e), strict=True))
    total = lambda s: (torch.vmap(lambda q: f(q, k[0], v[0], e[0], slopes=s)[0])(q) ** 2).sum()
    s = torch.rand(4)
    have = torch.func.grad(total)(s)
    want = sum(torch.func.grad(lambda s, x=x: (f(x, k[0], v[0], e[0], slopes=s)[0] ** 2).sum())(s) for x in q)
    assert (have - want).abs().max() < 1e-5 * want.abs().max()
    short = lambda x: f(x, k[0], v[0], e[0])[0].sum((0, 1))
    forward, reverse = (make(short)(q[0, :, :, :2]) for make in (torch.func.jacfwd, torch.func.jacrev))
    assert forward.shape == (2, 16, 2, 4, 2, 16) and (forward - reverse).abs().max() < 1e-5


def test_what_vmap_refuses(examples):
    f, (q, k, v, e) = examples
    rest = k[0], v[0], e[0]
    with pytest.raises(NotImplementedError, match="vmap over slopes, which has no axis b"):
        torch.vmap(lambda s: f(q[0], *rest, slopes=s))(torch.rand(COUNT, 4))
    with pytest.raises(NotImplementedError, match="gradients for each example of a parameter without an axis b"):
        torch.vmap(torch.func.grad(lambda s, x: f(x, *rest, slopes=s)[0].sum()), in_dims=(None, 0))(torch.rand(4), q)
    apart = attncc.compile("attention apart { mask (k + b) % 2 == 0 }")
    with pytest.raises(NotImplementedError, match="the spec reads b"):
        torch.vmap(lambda x: apart(x, k[0], v[0]))(q)
