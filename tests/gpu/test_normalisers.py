"""Normalisers and dropout on a GPU: sigmoids of any size, the bits of dropout in every algorithm, what rows return.

python -m pytest -q tests/gpu/test_normalisers.py
"""

from __future__ import annotations

import pytest
import torch

import attncc
from attncc.frontend import parse
from attncc.ir import Shape
from attncc.runtime.check import check
from attncc.runtime.dropout import survivors
from attncc.runtime.reference import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="there is no Hopper here"
    ),
]
KINDS = [
    ("fa3", ""), ("fa2", ""), ("fa2", "tile q = 64, k = 32"), ("fa2", "tile q = 128, k = 16"), ("fa1", ""),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sigmoids_small_and_large(dtype):
    """Scores of some keys are beyond 2^128, beside small ones; elsewhere all exponentials are small."""
    attn = attncc.compile("attention a(e: f32[h]) { mask k <= q softmax sigmoid(e[h]) } schedule { algorithm fa3 }")
    g = torch.Generator("cuda").manual_seed(4)
    q, k, v = (torch.randn(1, 2, 700, 128, generator=g, device="cuda", dtype=dtype) for _ in range(3))
    k[:, :, 100:140:3] *= 60
    k[:, :, 300:310] *= 12
    k[:, 1, 500:] = 0
    e = torch.tensor([-8.0, 45.0], device="cuda")
    want = reference(attn.spec, q, k, v, {"e": e})[0].cpu()
    out = attn(q, k, v, e=e).cpu().double()
    assert (out - want).norm() / want.norm() < (4e-3 if dtype == torch.bfloat16 else 6e-4)


def kept(algorithm: str, tiles: str, p: float, seed: int, length: int, heads: int) -> torch.Tensor:
    """Which pairs a kernel keeps: with equal weights and unit vectors as values its output says it."""
    text = f"attention a(p: float) {{ dropout p }} schedule {{ algorithm {algorithm} {tiles} }}"
    attn = attncc.compile(text)
    q = torch.zeros(1, heads, length, 128, device="cuda", dtype=torch.bfloat16)
    found = []
    for first in range(0, length, 128):
        v = torch.zeros_like(q)
        for column in range(min(128, length - first)):
            v[:, :, first + column, column] = 1
        found.append(attn(q, q, v, p=p, seed=seed)[..., : min(128, length - first)] != 0)
    return torch.cat(found, -1).cpu()


def test_every_algorithm_keeps_the_same_weights_to_the_bit():
    b, h = torch.zeros(1, 1, 1, 1, dtype=torch.int64), torch.arange(2)[:, None, None]
    row, k = torch.arange(515)[:, None], torch.arange(515)
    for seed in (3, 2**62 + 12345):
        want = survivors(seed, 0.1, b, h, row, k)
        for algorithm, tiles in KINDS:
            assert torch.equal(kept(algorithm, tiles, 0.1, seed, 515, 2), want), (algorithm, tiles)


def test_the_keep_rate_of_a_million_weights():
    for p in (0.001, 0.1, 0.5, 0.99):
        assert abs(float(kept("fa3", "", p, 11, 512, 4).double().mean()) - (1 - p)) < 0.002


@pytest.mark.parametrize(
    "text",
    [
        "attention a(e: f32[h] grad) { mask k < q softmax sink(e[h]) } layout { rows max, entropy, pairs }",
        "attention a(c: float grad = 2.0) { mask k < q - 2 score c * tanh(s / c) dropout 0.2 } layout { rows entropy }",
        "attention a { mask 0 <= q - k < 99 softmax sigmoid(-4) } layout { rows max, pairs }",
    ],
)
def test_what_rows_return(text):
    report = check(parse(text).spec, "cuda", seeds=(0,), shapes=(Shape(2, 8, 2, 515, 515, 128, 128, "bf16"),))
    assert report.passed, str(report)


@pytest.mark.parametrize(
    "text",
    [
        "attention a { mask k <= q score s - 0.5 * (q - k) softmax entmax(1.5) }",
        "attention a(c: float grad = 0.3) { score s - c * abs(q - k) softmax sparsemax }",
        "attention a { mask k < 9 or 0 <= q - k < 200 score 4 * s softmax entmax(1.3) }",
        "attention a(doc: i32[b, k]) { mask doc[b, q] == doc[b, k] score 4 * s softmax entmax(1.5) dropout 0.2 }",
    ],
)
def test_tiles_without_a_weight_are_left_out(text):
    """In 1100 rows most tiles have none; in 9000 keys several tiles share a bit."""
    shapes = (Shape(1, 4, 2, 1100, 1100, 64, 64, "bf16"), Shape(1, 1, 1, 70, 9000, 64, 64, "bf16"))
    report = check(parse(text).spec, "cuda", seeds=(0,), shapes=shapes)
    assert report.passed, str(report)
