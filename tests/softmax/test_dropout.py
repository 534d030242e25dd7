"""Dropout: which weights are dropped depends on (seed, b, h, row, k) alone, and the rest is as without."""

from __future__ import annotations

import math

import pytest
import torch

import attncc
from attncc import frontend, pipeline
from attncc.ir import Shape
from attncc.runtime.check import SHAPES, check
from attncc.runtime.dropout import philox, survivors

PLAIN = attncc.compile("attention plain { mask k <= q }")
DROPPED = attncc.compile("attention dropped(p: float) { mask k <= q dropout p }")
SPECS = {
    "causal": "attention a { mask k <= q dropout 0.1 }",
    "with_all": "attention a(e: f32[h] grad, p: float = 0.3, w: f32[k] grad, t: f32[h, row, k] grad) "
                "{ score s + t[h, row, k] mask k <= q softmax sink(e[h]) dropout p * 0.5 weight w[k] }",
    "sigmoid": "attention a(e: f32[h] grad) { softmax sigmoid(e[h]) dropout 0.5 score 2 * tanh(s) }",
}  # fmt: skip


def tensors(q_len: int = 33, k_len: int = 70, heads: int = 2, dtype: torch.dtype = torch.float64):
    g = torch.Generator().manual_seed(5)
    sizes = (2, heads, q_len, 16), (2, heads, k_len, 16), (2, heads, k_len, 8)
    return [torch.randn(size, generator=g, dtype=torch.float64).to(dtype) for size in sizes]


@pytest.mark.parametrize("text", SPECS.values(), ids=SPECS)
def test_on_the_cpu(text):
    report = check(frontend.parse(text).spec, "cpu", seeds=(0,), shapes=SHAPES["cpu"][:3], differences=True)
    assert report.passed, str(report)


def test_a_sample_in_the_interpreter():
    """The bits of tl.philox, in a kernel that makes them for 8 keys at a time; tests/backward has one by one."""
    text, shape = SPECS["causal"], Shape(1, 2, 1, 20, 70, 16, 16, "f32")
    spec = frontend.parse(text + " precision { inputs f32 } schedule { tile q = 32, k = 64 }").spec
    report = check(spec, "interpreter", seeds=(0,), shapes=(shape,), gradients=False)
    assert report.passed, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "interpreter"])
@pytest.mark.parametrize("text", SPECS.values(), ids=SPECS)
def test_everything(text, device):
    report = check(frontend.parse(text).spec, device)
    assert report.passed, str(report)


ONES, PI = (2**32 - 1,) * 4, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
KEY = (0xA4093822, 0x299F31D0)
ANSWERS = {  # of Random123 1.14, philox4x32, by rounds: counter, key, result
    None: (
        ((0,) * 4, (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (ONES, ONES[:2], (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (PI, KEY, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    ),
    10: (
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (ONES, ONES[:2], (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, KEY, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ),
}


@pytest.mark.parametrize("rounds", ANSWERS)
def test_philox_by_its_published_answers(rounds):
    """The 7 rounds that dropout takes, which are those without a number, and the usual 10."""
    for counter, key, want in ANSWERS[rounds]:
        more = {} if rounds is None else {"rounds": rounds}
        found = philox(key[0] | key[1] << 32, *(torch.tensor(c) for c in counter), **more)
        assert tuple(int(x) for x in found) == want


def grid(b: int, h: int, q: int, k: int):
    return (
        torch.arange(b)[:, None, None, None],
        torch.arange(h)[:, None, None],
        torch.arange(q)[:, None],
        torch.arange(k),
    )


def test_the_keep_rate_and_its_independence():
    for p in (0.1, 0.25, 0.9):
        kept = survivors(7, p, *grid(1, 4, 512, 512)).double()
        assert abs(kept.mean() - (1 - p)) < 0.002  # over 2^20 cells
        for axis in (1, 2, 3):  # neighbours are as likely kept as others
            both = (kept.narrow(axis, 0, kept.shape[axis] - 1) * kept.narrow(axis, 1, kept.shape[axis] - 1)).mean()
            assert abs(both - (1 - p) ** 2) < 0.004
        assert (survivors(7, p, *grid(1, 4, 512, 512)) != survivors(8, p, *grid(1, 4, 512, 512))).any()


def kept_by(attn, q_len: int, k_len: int, seed: int, heads: int = 2, **more: float) -> torch.Tensor:
    """Which pairs a program keeps: with equal weights and unit vectors as values its output says it."""
    q, k = torch.zeros(2, heads, q_len, 8), torch.zeros(2, heads, k_len, 8)
    return attn(q, k, torch.eye(k_len).expand(2, heads, -1, -1), seed=seed, **more) != 0


@pytest.mark.parametrize("tiles", ["", "schedule { tile q = 16, k = 16 }", "schedule { tile q = 64, k = 32 }"])
def test_tiles_have_no_say(tiles):
    attn = attncc.compile("attention free { dropout 0.3 }\n" + tiles)
    for seed in (0, -1, 2**62 + 12345):
        want = survivors(seed, 0.3, *grid(2, 2, 300, 330))
        assert torch.equal(kept_by(attn, 300, 330, seed), want)
    assert torch.equal(kept_by(attn, 20, 30, 5), survivors(5, 0.3, *grid(2, 2, 20, 30)))


def test_without_a_probability_it_is_without_dropout_to_the_bit():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        q, k, v = tensors(dtype=dtype)
        for x, y in zip(DROPPED(q, k, v, p=0.0, return_lse=True), PLAIN(q, k, v, return_lse=True), strict=True):
            assert torch.equal(x, y)


def test_the_lse_does_not_see_it_and_the_mean_is_right():
    q, k, v = tensors()
    want, want_lse = PLAIN(q, k, v, return_lse=True)
    mean = torch.zeros_like(want)
    for seed in range(400):
        out, lse = DROPPED(q, k, v, p=0.3, seed=seed, return_lse=True)
        assert torch.equal(lse, want_lse)
        mean += out / 400
    assert (mean - want).abs().mean() < 4 * math.sqrt(0.3 / 0.7 / 400) * want.abs().mean()


def test_the_seed_comes_from_torchs_generator():
    q, k, v = tensors()
    torch.manual_seed(3)
    first, second = DROPPED(q, k, v, p=0.5), DROPPED(q, k, v, p=0.5)
    torch.manual_seed(3)
    assert torch.equal(DROPPED(q, k, v, p=0.5), first) and not torch.equal(first, second)
    given = DROPPED(q, k, v, p=0.5, seed=11)
    assert torch.equal(given, DROPPED(q, k, v, p=0.5, seed=torch.tensor(11)))


def test_gradients_take_the_seed_of_their_call():
    q, k, v = (x.requires_grad_() for x in tensors(9, 12))
    torch.manual_seed(0)
    few = [x[:1, :1, :5].detach().requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *x: DROPPED(*x, p=0.4, seed=2), few)
    out = DROPPED(q, k, v, p=0.4)
    torch.manual_seed(0)
    again = DROPPED(q, k, v, p=0.4, seed=int(torch.randint(2**63 - 1, ())))
    d_out = torch.ones_like(out)
    for x, y in zip(
        torch.autograd.grad(out, (q, k, v), d_out), torch.autograd.grad(again, (q, k, v), d_out), strict=True
    ):
        assert torch.equal(x, y)


def test_checkpointing_draws_the_same_seed_again():
    q, k, v = (x.requires_grad_() for x in tensors(9, 12))
    torch.manual_seed(4)
    plain = torch.autograd.grad(DROPPED(q, k, v, p=0.4).square().sum(), (q, k, v))
    torch.manual_seed(4)
    out = torch.utils.checkpoint.checkpoint(lambda *x: DROPPED(*x, p=0.4), q, k, v, use_reentrant=False)
    for x, y in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), plain, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("seed", [6, None])
def test_in_a_graph_with_gradients(seed):
    attn = attncc.compile("attention a(p: float) { mask k <= q dropout p }")
    q, k, v = (x.requires_grad_() for x in tensors(9, 12))

    def loss(q, k, v):
        return attn(q, k, v, p=0.4, seed=seed).square().sum()

    graph = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(graph(q, k, v), [q, k, v])
    assert all(x.isfinite().all() for x in found)
    if seed is None:
        assert graph(q, k, v) != graph(q, k, v)  # each run draws a seed
    else:
        want = torch.autograd.grad(loss(q, k, v), [q, k, v])
        assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


@pytest.mark.parametrize(
    ("schedule", "spelled"),
    [("schedule { algorithm fa2 }", "tl.full([], rate"), ("schedule { algorithm fa3 }", "gl.to_tensor(rate)")],
)
def test_a_let_may_give_the_probability(schedule, spelled):
    attn = attncc.compile(f"attention a(p: float) {{ let rate = p * 0.5 + 0.01 * p dropout rate }} {schedule}")
    text = pipeline.render(pipeline.plan(pipeline.Request(text=attn.parsed.text, target="sm_90")))
    assert "rate = " in text and spelled in text
