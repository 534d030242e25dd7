"""A q of floats beside 8-bit k and v: what the text says, numbers against float64, and what is refused."""

from __future__ import annotations

import re

import pytest
import torch

import attncc
from attncc import frontend, pipeline
from attncc.errors import NotBuilt, PlanError
from attncc.ir import Const, Op, Param, Precision, Read, Var
from attncc.runtime.check import _shape, check
from attncc.runtime.quantise import quantised
from attncc.runtime.reference import reference

SHAPES = [_shape(2, 4, 2, 33, 47, 32, 16), _shape(1, 2, 1, 70, 150, 16, 16)]
BODY = "mask 0 <= q - k < 40 score s - 0.1 * (q - k) softmax sink(0.5)"
E4M3 = torch.float8_e4m3fn


def text(precision, body=BODY, layout=""):
    return f"attention x {{ {body} }} precision {{ inputs {precision} }} {layout}"


def inputs(k_len=150, size=16, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(2, h, n, size).to(dtype) for h, n in ((4, 70), (2, k_len), (2, k_len))]


def test_scales_are_parameters():
    spec = frontend.parse(text("bf16, f8e4m3 scales per_block(64)", "score s + 1.0 weight 2.0")).spec
    assert spec.precision == Precision(inputs="bf16", kept="f8e4m3", scales="per_block(64)")
    axes = ("b", "h_kv", "key_blocks")
    assert spec.params == tuple(Param(name, "float", "f32", axes) for name in ("k_scales", "v_scales"))
    at = (Var("b", "int"), Var("h_kv", "int"), Op("//", (Var("k", "int"), Const(64)), "int"))
    assert spec.scores[0] == Op("*", (Var("s", "float"), Read("k_scales", at, "float")), "float")
    assert spec.weight == Op("*", (Read("v_scales", at, "float"), Const(2.0)), "float")


@pytest.mark.parametrize(
    "precision", ["bf16, f8e4m3", "f16, f8e5m2 scales per_head", "f32, f8e4m3 scales per_block(7)"]
)
@pytest.mark.parametrize("body", [BODY, "weight 2", "softmax sigmoid(1.0)"])
def test_the_text_comes_back(precision, body):
    spec = frontend.parse(text(precision, body)).spec
    written = frontend.canonical(spec)
    assert f"inputs {precision.partition(' scales')[0]}" in written and "k_scales" not in written
    assert frontend.parse(written).spec.bind({}) == spec.bind({})


@pytest.mark.parametrize("device", ["cpu", "interpreter"])
@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        ("f32, f8e4m3 scales per_block(16)", ""),
        ("f16, f8e4m3 scales per_head", "layout { q ragged  kv ragged }"),
        ("f32, f8e4m3 scales per_block(128)", ""),
        ("f32, f8e4m3 scales per_block(64)", "layout { q ragged  kv ragged }"),
    ],
)
def test_numbers(device, precision, layout):
    report = check(frontend.parse(text(precision, layout=layout)).spec, device, shapes=SHAPES, seeds=(0,))
    assert report.passed, str(report)


@pytest.mark.parametrize(
    "body", ["softmax sparsemax", "softmax sigmoid(0.5) weight 1 + h", "dropout 0.25", "softmax two_pass"]
)
def test_normalisers(body):
    report = check(frontend.parse(text("bf16, f8e5m2 scales per_head", body)).spec, "cpu", shapes=SHAPES, seeds=(0,))
    assert report.passed, str(report)


@pytest.mark.parametrize("scales", ["per_tensor", "per_head", "per_block(128)"])
def test_what_quantize_gives(scales):
    q, k, v = inputs()
    k[..., 5] *= 20
    x = quantised(q, k, v, Precision(inputs="f8e4m3", scales=scales, rotate="none"))
    out, lse = attncc.compile(text(f"f32, f8e4m3 scales {scales}"))(
        q, x.k, x.values, k_scales=x.k_scales, v_scales=x.v_scales, return_lse=True
    )
    want, want_lse = reference(frontend.parse(f"attention x {{ {BODY} }}").spec, q, *x.dequantised()[1:], {})
    assert (out - want).abs().sum() < 1e-5 * want.abs().sum() and (lse - want_lse).abs().max() < 1e-5


def test_what_is_excluded_may_be_nan():
    q, k, v = inputs()
    k, v = k.to(E4M3), v.to(E4M3)
    spoiled = v.clone().view(torch.uint8)
    spoiled[:, :, 100:] = 0x7F
    attn = attncc.compile(text("f32, f8e4m3", "mask k < 100"))
    assert torch.equal(attn(q, k, spoiled.view(E4M3)), attn(q, k, v))
    assert attncc.compile(text("f32, f8e4m3", ""))(q, k, spoiled.view(E4M3)).isnan().all()


def test_calls_that_are_refused():
    q, k, v = inputs()
    attn = attncc.compile(text("f32, f8e4m3 scales per_block(16)"))
    scales = {"k_scales": torch.ones(2, 2, 10), "v_scales": torch.ones(2, 2, 10)}
    with pytest.raises(TypeError, match=r"k must be f8e4m3, as the spec's precision says, and is torch\.float32"):
        attn(q, k, v, **scales)
    k, v = k.to(E4M3), v.to(E4M3)
    with pytest.raises(TypeError, match="q must be f32"):
        attn(q.half(), k, v, **scales)
    with pytest.raises(TypeError, match="k_scales"):
        attn(q, k, v)
    short = {name: x[..., :9] for name, x in scales.items()}
    with pytest.raises(ValueError, match="must have 10 along their last axis, one for each 16 of 150 keys, and have 9"):
        attn(q, k, v, **short)
    starts = torch.tensor([0, 150], dtype=torch.int32)
    packed = [x[0].transpose(0, 1) for x in (k.to(q.dtype), k, v)]
    with pytest.raises(ValueError, match="must have 10 along their last axis"):
        attn.varlen(*packed, starts, **{n: x[:1] for n, x in short.items()})
    with pytest.raises(NotBuilt, match="derivatives"):
        attn(q.requires_grad_(), k, v, **scales)
    with pytest.raises(TypeError, match="k must have the dtype of q"):
        attncc.compile("attention x { }")(q, k, v)


@pytest.mark.parametrize(
    ("precision", "said"),
    [("", "x has no 8-bit inputs"), ("inputs bf16, f8e4m3 scales per_head", "k_scales=x.k_scales, v_scales=x.v_scales"),
     ("inputs bf16, f8e4m3", "called with it: attn(q, k, v), whose elements are the numbers")],
)  # fmt: skip
def test_what_quantize_gives_whole_is_for_a_q_of_8_bits(precision, said):
    attn = attncc.compile(f"attention x {{ }} precision {{ {precision} }}")
    with pytest.raises(TypeError, match=re.escape(said)):
        attn.quantised(attncc.quantize(*inputs(), rotate="none"), return_lse=True)


@pytest.mark.parametrize("made", [pipeline.backward, pipeline.tangent])
def test_derivatives_are_refused(made):
    with pytest.raises(NotBuilt, match="derivatives"):
        made(pipeline.plan(pipeline.Request(text=text("bf16, f8e4m3"), target="sm_90")))


@pytest.mark.parametrize(
    ("target", "kept", "built"),
    [("sm_80", "f8e4m3", False), ("sm_86", "f8e4m3", False), ("sm_80", "f8e5m2", True), ("sm_89", "f8e4m3", True),
     ("sm_90", "f8e5m2", True), ("sm_100", "f8e4m3", True), ("gfx942", "f8e4m3", True)],
)  # fmt: skip
def test_targets(target, kept, built):
    request = pipeline.Request(text=text(f"bf16, {kept}"), target=target)
    if built:
        assert pipeline.plan(request).choice.plan.kept == kept
    else:
        with pytest.raises(PlanError, match=f"{target} converts no f8e4m3 to the type of q, only f8e5m2"):
            pipeline.plan(request)
