"""The Triton kernels on a real GPU, against float64: every spec, odd shapes, strides, sizes that need 64 bits.

python -m pytest -q tests/gpu
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch

import attncc
from attncc import frontend
from attncc.ir import Layout
from attncc.runtime.attention import Attention
from attncc.runtime.check import check
from attncc.runtime.reference import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]
SPECS = sorted((Path(__file__).parents[2] / "specs").glob("*.attn"))


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", dtype=torch.float32, generator=generator).to(dtype)


def right(spec, q, k, v, params) -> torch.Tensor:
    return reference(spec, q.cpu(), k.cpu(), v.cpu(), params)[0].cuda()


def unfused(spec, q, k, v, params):
    """The right answer, and the relative error of an unfused computation in the same type."""
    want = right(spec, q, k, v, params)
    group = q.shape[1] // k.shape[1]
    s = (q @ k.repeat_interleave(group, 1).mT) * q.shape[-1] ** -0.5
    i = torch.arange(q.shape[2], device="cuda")[:, None] + k.shape[2] - q.shape[2]
    s = s.masked_fill(torch.arange(k.shape[2], device="cuda") > i, -torch.inf)
    p = s.softmax(-1).nan_to_num(0.0)
    return want, ((p @ v.repeat_interleave(group, 1)).double() - want).norm() / want.norm()


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_every_spec_passes_its_check(path: Path):
    report = check(attncc.load(path).parsed.spec, device="cuda")
    assert report.passed, report


@pytest.mark.parametrize("algorithm", ["standard", "fa1"])
@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_older_algorithms_pass_it_too(path: Path, algorithm: str):
    parsed = frontend.pinned(attncc.load(path).parsed, algorithm)
    if any(frontend.inexpressible(parsed.spec)):
        pytest.skip(f"{algorithm} cannot express it")
    report = check(parsed.spec, device="cuda")
    assert report.passed, report


@pytest.mark.parametrize("algorithm", ["standard", "fa1"])
@pytest.mark.parametrize("d", [64, 128])
def test_older_algorithms_in_long_calls(d, algorithm):
    """Many tiles of keys: threads of a program read what others have written. Equal calls give equal bits."""
    parsed = frontend.parse("attention causal { mask k <= q }")
    attn = Attention(frontend.pinned(parsed, algorithm), {})
    q, k, v = (draw(2, 4, 2100, d, seed=i) for i in range(3))
    want, error = unfused(parsed.spec, q, k, v, {})
    found = [attn(q, k, v) for _ in range(5)]
    assert all(torch.equal(found[0], again) for again in found[1:])
    assert (found[0].double() - want).norm() / want.norm() <= 2 * error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("q_len", "k_len", "d", "dv", "heads", "kv_heads"),
    [(1, 1, 64, 64, 2, 2), (127, 257, 96, 64, 6, 2), (300, 129, 128, 128, 4, 1), (1000, 1000, 64, 64, 2, 2),
     (65, 1000, 256, 256, 2, 1), (33, 70, 31, 24, 3, 3), (130, 130, 192, 128, 2, 2), (200, 333, 512, 512, 2, 1)],
)  # fmt: skip
def test_causal_in_odd_sizes(q_len, k_len, d, dv, heads, kv_heads, dtype):
    attn = attncc.load(SPECS[0].parent / "causal.attn")
    q, k, v = (
        draw(2, heads, q_len, d, dtype=dtype),
        draw(2, kv_heads, k_len, d, dtype=dtype, seed=1),
        draw(2, kv_heads, k_len, dv, dtype=dtype, seed=2),
    )
    want, base = unfused(attn.spec, q, k, v, {})
    out, lse = attn(q, k, v, return_lse=True)
    error = (out.double() - want).norm() / want.norm()
    assert error <= max(2 * base.item(), 1e-5)
    assert not out.isnan().any() and not lse.isnan().any()
    if q_len > k_len:
        assert (out[:, :, : q_len - k_len] == 0).all() and (lse[:, :, : q_len - k_len] == -torch.inf).all()


def test_views_give_the_bits_of_their_copies():
    attn = attncc.load(SPECS[0].parent / "causal.attn")
    fused = draw(2, 200, 3, 4, 64)
    q, k, v = (fused[:, :, i].transpose(1, 2) for i in range(3))
    same = attn(q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(attn(q, k, v), same)


@pytest.mark.filterwarnings("ignore:.*the kernel for any strides runs")
def test_heads_that_share_memory_agree():
    attn = attncc.load(SPECS[0].parent / "causal.attn")
    one = draw(2, 1, 200, 64).expand(2, 4, 200, 64)
    assert (attn(one, one, one) - attn(*[one.contiguous()] * 3)).abs().max() < 2e-2


def test_views_that_tma_cannot_take_agree():
    attn = attncc.load(SPECS[0].parent / "causal.attn")
    q, k, v = (draw(1, 2, 64, 200, seed=i).transpose(2, 3) for i in range(3))
    want, base = unfused(attn.spec, q, k, v, {})
    assert (attn(q, k, v).double() - want).norm() / want.norm() <= 2 * base
    odd = draw(1, 2, 200, 65)[..., :64]
    want, base = unfused(attn.spec, odd, odd, odd, {})
    assert (attn(odd, odd, odd).double() - want).norm() / want.norm() <= 2 * base


def test_integers_beyond_32_bits():
    attn = attncc.load(SPECS[0].parent / "window.attn")
    q = draw(1, 2, 200, 64)
    causal = attncc.load(SPECS[0].parent / "causal.attn")(q, q, q)
    for window in (2**31 - 1, 2**40, 2**62):
        assert torch.equal(attn(q, q, q, window=window), causal)
    product = attncc.compile("attention big(n: int) { mask k * n <= q * n }")
    assert (product(q, q, q, n=2**33) - causal).abs().max() < 2e-2


def test_more_programs_than_a_second_grid_axis_holds():
    attn = attncc.load(SPECS[0].parent / "causal.attn")
    q = draw(70000, 1, 16, 16)
    out = attn(q, q, q)
    want = right(attn.spec, q[-3:], q[-3:], q[-3:], {})
    assert (out[-3:].double() - want).abs().max() < 2e-2


def test_offsets_beyond_32_bits():
    attn = attncc.load(SPECS[0].parent / "window.attn")
    length = 2**31 // 64 // 8 + 1000
    q = torch.zeros(1, 8, length, 64, device="cuda", dtype=torch.bfloat16)
    q[:, :, -300:] = draw(1, 8, 300, 64)
    out = attn(q, q, q, window=100)
    tail = q[:, :, -300:]
    want = right(attn.spec, tail, tail, tail, {"window": 100})
    assert (out[:, :, -200:].double() - want[:, :, -200:]).abs().max() < 2e-2


def test_rows_that_leave_the_safe_range_are_computed_again():
    attn = attncc.load(SPECS[0].parent / "causal.attn")
    q, k, v = draw(1, 2, 1024, 128), draw(1, 2, 1024, 128, seed=1), draw(1, 2, 1024, 128, seed=2)
    k[:, :, 100:200] *= 40
    want, base = unfused(attn.spec, q, k, v, {})
    out, lse = attn(q, k, v, return_lse=True)
    assert (out.double() - want).norm() / want.norm() <= 2 * base
    assert lse.isfinite().all()


def test_new_lengths_compile_nothing():
    attn = attncc.load(SPECS[0].parent / "document.attn")
    for n in (1, 17, 100, 333, 1000, 2048):
        q = draw(1, 2, n, 64)
        attn(q, q, q, doc=torch.zeros(1, n, device="cuda", dtype=torch.int32))
    kernels = attn.launchers()
    assert len(kernels) <= 3


def test_a_second_stream():
    attn = attncc.load(SPECS[0].parent / "causal.attn")
    q = draw(2, 4, 500, 64)
    here = attn(q, q, q)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        there = attn(q, q, q)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(here, there)


@pytest.mark.parametrize("path", [p for p in SPECS if p.stem != "dense_bias"], ids=lambda p: p.stem)
def test_every_spec_packed(path: Path):
    """Between sequences of other lengths; dense_bias has a cell for each pair of a sequence."""
    spec = attncc.load(path).parsed.spec
    report = check(replace(spec, layout=Layout("ragged", "ragged")), device="cuda")
    assert report.passed, report


def test_packed_sequences_of_many_lengths():
    attn = attncc.load(SPECS[0].parent / "causal.attn")
    lengths = [0, 1, 700, 129, 0, 128, 2048, 5]
    cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    q, k, v = (draw(sum(lengths), h, 64, seed=i).requires_grad_() for i, h in enumerate((8, 2, 2)))
    d_out = draw(sum(lengths), 8, 64, seed=4)
    out, lse = attn.varlen(q, k, v, cu, return_lse=True, validate=True)
    found = torch.autograd.grad(out, (q, k, v), d_out)
    for a, b in pairwise(cu.tolist()):
        one = [x[a:b].detach().transpose(0, 1)[None].requires_grad_() for x in (q, k, v)]
        alone, alone_lse = attn(*one, return_lse=True)
        assert torch.allclose(alone[0].transpose(0, 1), out[a:b], atol=2e-2)
        assert torch.allclose(alone_lse[0], lse[:, a:b], atol=1e-3)
        back = torch.autograd.grad(alone, one, d_out[a:b].transpose(0, 1)[None])
        for x, y in zip(back, found, strict=True):
            assert torch.allclose(x[0].transpose(0, 1), y[a:b], atol=5e-2)
