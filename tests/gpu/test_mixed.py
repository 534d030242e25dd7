"""8-bit k and v beside a q of floats on this GPU: every spec within the bounds of `attncc check`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import attncc
from attncc.ir import Precision, Shape
from attncc.runtime.check import check
from attncc.runtime.quantise import quantised

CAPABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CAPABLE, reason="conversions of e4m3")]
SPECS = sorted((Path(__file__).parents[2] / "specs").glob("*.attn"))
SHAPES = [Shape(1, 4, 2, 260, 390, 128, 128), Shape(2, 4, 1, 3, 150, 64, 64)]


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_every_spec_keeps_to_its_bound(path):
    text = f"{path.read_text(encoding='utf-8')}\nprecision {{ inputs bf16, f8e4m3  scales per_head }}"
    spec = attncc.frontend.parse(text).spec
    report = check(spec, "cuda", shapes=SHAPES, seeds=(0,))
    assert report.passed, str(report)


@pytest.mark.parametrize("inputs", ["f16, f8e4m3", "bf16, f8e5m2", "f32, f8e4m3"])
@pytest.mark.parametrize("scales", ["", "scales per_block(128)"])
@pytest.mark.parametrize("ragged", [False, True])
def test_every_type(inputs, scales, ragged):
    layout = "layout { q ragged  kv ragged }" if ragged else ""
    text = f"attention x {{ mask 0 <= q - k < 200 }} precision {{ inputs {inputs}  {scales} }} {layout}"
    report = check(attncc.frontend.parse(text).spec, "cuda", shapes=SHAPES, seeds=(0,))
    assert report.passed, str(report)


@pytest.mark.parametrize("scales", ["per_tensor", "per_head", "per_block(128)"])
def test_what_quantize_gives(scales):
    """k and v as attncc.quantize makes them, q as it was."""
    torch.manual_seed(0)
    attn = attncc.compile(f"attention x {{ mask k <= q }} precision {{ inputs bf16, f8e4m3  scales {scales} }}")
    q, k, v = (torch.randn(2, h, 700, 128, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))
    k[..., 5] *= 20
    x = quantised(q, k, v, Precision(inputs="f8e4m3", scales=scales, rotate="none"))
    out = attn(q, x.k, x.values, k_scales=x.k_scales, v_scales=x.v_scales)
    _, k, v = (y.double().repeat_interleave(2, 1) if y.shape[1] == 2 else y for y in x.dequantised())
    s = q.double() @ k.mT * 128**-0.5
    later = torch.ones(700, 700, dtype=torch.bool, device="cuda").triu(1)
    want = s.masked_fill(later, -torch.inf).softmax(-1) @ v
    assert (out - want).norm() < 6e-3 * want.norm()
