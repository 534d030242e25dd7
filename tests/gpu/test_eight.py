"""8-bit inputs on a Hopper GPU: within the bound of `attncc check`, equal bits twice, long flat rows, equal values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import attncc
from attncc.ir import Precision, Shape
from attncc.runtime.check_eight import check
from attncc.runtime.quantise import quantised

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="products of 8 bits by a warp group")]

BODIES = {
    "full": "", "causal": "mask k <= q", "window": "mask 0 <= q - k < 200",
    "alibi": "mask k <= q  score s - 0.01 * (q - k)", "cap": "mask k <= q  score 20 * tanh(s / 20)",
    "sink": "mask k <= q  softmax sink(1.0)", "streaming": "mask 0 <= q - k < 150 or k < 4 and k <= q",
}  # fmt: skip
BLOCKS, HEADS = "inputs f8e4m3", "inputs f8e4m3 scales per_head"
CASES = [
    *((body, BLOCKS, 128) for body in BODIES), ("causal", HEADS, 64), ("full", BLOCKS, 64), ("full", HEADS, 128),
    ("causal", BLOCKS, 192), ("causal", BLOCKS, 256), ("full", HEADS, 256), ("causal", "inputs f8e5m2", 128),
]  # fmt: skip


REFUSED = ("causal_dropout", "entmax15", "padding", "retnet", "sigmoid", "sparsemax")  # by fa3 with 8-bit inputs
SPECS = [p for p in sorted((Path(__file__).parents[2] / "specs").glob("*.attn")) if p.stem not in REFUSED]


def attention(body, precision):
    return attncc.compile(f"attention x {{ {BODIES[body]} }} precision {{ {precision} }} schedule {{ algorithm fa3 }}")


def inputs(*sizes, batch=1):
    """q [B, H, Q, D], k and v [B, H_kv, K, D] of (H, H_kv, Q, K, D)."""
    h, h_kv, n, m, d = sizes
    shapes = (batch, h, n, d), (batch, h_kv, m, d), (batch, h_kv, m, d)
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]


@pytest.mark.parametrize(("body", "precision", "size"), CASES)
def test_it_keeps_to_its_bound(body, precision, size):
    spec = attention(body, precision).parsed.spec
    report = check(spec, "cuda", shapes=[Shape(1, 4, 2, 260, 390, size, size), Shape(2, 2, 2, 33, 150, size, size)])
    assert report.passed, [r for r in report.rows if not r.passed]


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_every_spec_keeps_to_its_bound(path):
    spec = attncc.frontend.parse(f"{path.read_text(encoding='utf-8')}\nprecision {{ {HEADS} }}").spec
    report = check(spec, "cuda", shapes=[Shape(1, 4, 2, 260, 390, 128, 128)])
    assert report.passed, [r for r in report.rows if not r.passed]


@pytest.mark.parametrize("precision", [BLOCKS, HEADS])
@pytest.mark.parametrize("shift", [0.0, 1.2])
def test_the_same_bits_twice(precision, shift):
    """Many tiles of rows for each program; with a shift all scores are far below 0."""
    torch.manual_seed(0)
    attn = attention("causal", precision)
    q, k, v = inputs(40, 5, 700, 900, 128, batch=2)
    x = quantised(q + (shift > 0), k - shift, v, attn.spec.precision)
    out = attn.quantised(x)
    assert all(torch.equal(out, attn.quantised(x)) for _ in range(5))
    q, k, v = (y.double() for y in x.dequantised())
    k, v = (y.repeat_interleave(8, 1) for y in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    later = torch.ones(700, 900, dtype=torch.bool, device="cuda").triu(201)
    want = s.masked_fill(later, -torch.inf).softmax(-1) @ v
    assert (out - want).norm() < 0.03 * want.norm()


def test_long_flat_rows_and_equal_values():
    torch.manual_seed(0)
    attn = attention("full", HEADS)
    q, k, v = inputs(1, 1, 256, 131072, 128)
    x = quantised(0.1 * q, k, v + 1, attn.spec.precision)
    q8, k8, v8 = (y[0, 0].double() for y in x.dequantised())
    want = ((q8 @ k8.mT) * 128**-0.5).softmax(-1) @ v8
    assert (attn.quantised(x)[0, 0] - want).norm() < 3e-3 * want.norm()
    assert torch.equal(attn(0.1 * q, k, torch.full_like(v, 0.7109375)), torch.full_like(q, 0.7109375))


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.bfloat16, 128), (torch.bfloat16, 256), (torch.float16, 96), (torch.float32, 64)],
)
@pytest.mark.parametrize("scales", ["per_block(128)", "per_head", "per_tensor"])
def test_the_pass_that_quantises_gives_the_bits_of_the_cpu(dtype, size, scales):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 300, h, size, device="cuda", dtype=dtype).transpose(1, 2) for h in (4, 2, 2))
    k[..., 5] *= 40
    q[0, 0, 3, 1] = float("nan")
    precision = Precision(inputs="f8e4m3", scales=scales)
    there, here = quantised(q, k, v, precision), quantised(q.cpu(), k.cpu(), v.cpu(), precision)
    for name in ("q", "k", "v", "q_scales", "k_scales", "v_scales"):
        a, b = getattr(there, name).cpu(), getattr(here, name)
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name
