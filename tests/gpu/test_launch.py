"""The launch path on a real GPU: graphs, streams, other devices, and tuning (cases 36, 37 and 40).

python -m pytest -q tests/gpu/test_launch.py
"""

from __future__ import annotations

import pytest
import torch

import attncc
from attncc.runtime import winners
from attncc.runtime.cache import Cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]
CAUSAL = "attention causal { mask k <= q }"


def draw(length: int, device: str = "cuda") -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(length)
    make = lambda: torch.randn(2, 4, length, 64, device=device, generator=generator).bfloat16()
    return [make() for _ in range(3)]


BIASED = "attention biased(bias: f32[h, far] grad) { mask k <= q score s + bias[h, min(q - k, far - 1)] }"


def test_36_the_same_bits_in_every_run_and_batch():
    attn, (q, k, v) = attncc.compile(BIASED), [x.requires_grad_() for x in draw(700)]
    bias = torch.linspace(-1, 1, 4 * 30, device="cuda").reshape(4, 30).requires_grad_()

    def run():
        out = attn(q, k, v, bias=bias)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v, bias))]

    first = run()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))
    with torch.no_grad():
        alone = attn(q[:1], k[:1], v[:1], bias=bias)
        more = attn(*(torch.cat([x, x, x]) for x in (q, k, v)), bias=bias)
    assert torch.equal(alone, first[0][:1]) and torch.equal(more[2:4], first[0])


def test_40_a_graph_replays_what_a_call_gives_after_lengths_changed():
    attn, graphs = attncc.compile(CAUSAL), {}
    with torch.no_grad():
        for length in (64, 300, 1000, 64):
            attn(*draw(length))
        for length in (300, 1000):
            q, k, v = draw(length)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = attn(q, k, v)
            graphs[length] = graph, (q, k, v), out
        for length in (1000, 300):
            graph, (q, k, v), out = graphs[length]
            for x, y in zip((q, k, v), draw(length + 1), strict=True):
                x.copy_(y[:, :, :length])
            graph.replay()
            assert torch.equal(out, attn(q, k, v))


def test_a_stream_is_honoured():
    """What the stream writes late is what the call reads: on another stream it would find zeros."""
    attn, (q, k, v) = attncc.compile(CAUSAL), draw(1000)
    stream, late = torch.cuda.Stream(), torch.zeros_like(q)
    with torch.no_grad():
        want = attn(q, k, v)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            late.copy_(q)
            out = attn(late, k, v)
        stream.synchronize()
    assert torch.equal(out, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU here")
def test_a_second_device_is_honoured():
    attn = attncc.compile(CAUSAL)
    with torch.no_grad():
        want = attn(*draw(300))
        got = attn(*(x.to("cuda:1") for x in draw(300)))
    assert got.device.index == 1 and torch.equal(got.cpu(), want.cpu())


@pytest.mark.parametrize("passes", [("forward",), ("backward",)])
def test_37_tuning_leaves_results_alone(tmp_path, monkeypatch, passes):
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path))
    attn, (q, k, v) = attncc.compile(CAUSAL), [x.requires_grad_() for x in draw(2000)]

    def run():
        out = attn(q, k, v)
        return [out.detach(), *torch.autograd.grad(out.float().sum(), (q, k, v))]

    before = run()
    found = attn.tune(q, k, v, passes=passes, budget=8.0).found[passes[0]]
    assert found.best is not None and found.first.ms >= found.best.ms * 0.99
    first, second = run(), run()
    off = lambda a, b: (a - b).float().norm() / b.float().norm()
    assert all(torch.equal(a, b) for i, (a, b) in enumerate(zip(first, second, strict=True)) if i != 1)
    assert off(second[1], first[1]) < 1e-3  # dQ, added up in any order
    assert all(off(a, b) <= 2e-2 for a, b in zip(first, before, strict=True))
    kept = winners.find(Cache(), attn.text, winners.device_of(q.device), found_shape(q))
    assert kept == {passes[0]: found.best.candidate.choices}


def found_shape(q: torch.Tensor):
    from attncc.ir import Shape

    b, h, s, d = q.shape
    return Shape(b, h, h, s, s, d, d, "bf16")
