"""The float64 reference against plain Python and PyTorch's own attention."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from attncc import frontend
from attncc.ir import Const, Op, Read, Var
from attncc.runtime.reference import Env, evaluate, reference

NOTHING = Env({}, {}, {})


def spec(body: str, params: str = ""):
    return frontend.parse(f"attention tried{params} {{ {body} }}").spec


def value(text: str, params: str = "", **env):
    """An expression of the language, read from a score or mask, evaluated."""
    tensors = {n: x for n, x in env.items() if isinstance(x, torch.Tensor) and x.dim()}
    scalars = {n: x for n, x in env.items() if n not in tensors}
    kind = "mask" if any(c in text for c in "<>=") and "where" not in text else "score"
    read = spec(f"{kind} {text}", params)
    bits = {p.name: x.shape[-1] * 32 for p in read.tensors if p.element == "bit" for x in [tensors[p.name]]}
    return evaluate((read.masks or read.scores)[0], Env(scalars, tensors, bits)).tolist()


@pytest.mark.parametrize("a", [-7, -6, -1, 0, 1, 5, 6])
@pytest.mark.parametrize("b", [1, 2, 3])
def test_division_floors(a, b):
    assert value("q // k", q=a, k=b) == a // b
    assert value("q % k", q=a, k=b) == a % b
    assert value("q / k", q=a, k=b) == a / b


@pytest.mark.parametrize("b", [0, -3])
def test_a_divisor_below_one_gives_zero(b):
    assert value("q // k", q=7, k=b) == 0
    assert value("q % k", q=7, k=b) == 0


@pytest.mark.parametrize(
    "text, want",
    [
        ("exp(s)", math.exp(0.7)), ("exp2(s)", 2**0.7), ("log(s)", math.log(0.7)), ("log2(s)", math.log2(0.7)),
        ("tanh(s)", math.tanh(0.7)), ("sigmoid(s)", 1 / (1 + math.exp(-0.7))), ("sqrt(s)", math.sqrt(0.7)),
        ("floor(-s)", -1), ("abs(-s)", 0.7), ("min(s, 1)", 0.7), ("max(s, 1)", 1), ("-s * 2", -1.4),
        ("where(s > 0.5, q, 2.5)", 3.0), ("where(s > 0.8, q, 2.5)", 2.5),
        ("0 <= q < 4", True), ("0 <= q < 3", False), ("not q == 3 or k != 2", False), ("q == 3 and k == 2", True),
    ],
)  # fmt: skip
def test_operators(text, want):
    assert value(text, s=0.7, q=3, k=2) == pytest.approx(want, rel=1e-15)


def test_a_read_outside_an_axis_is_zero_and_never_wraps():
    table = torch.arange(1, 7).view(2, 3)
    read = Read("t", (Var("i", "int"), Var("j", "int")), "int")
    at = {"i": torch.tensor([-1, 0, 1, 2])[:, None], "j": torch.tensor([-1, 0, 2, 3, 2**40])}
    got = evaluate(read, Env(at, {"t": table}, {}))
    assert got.tolist() == [[0] * 5, [0, 1, 3, 0, 0], [0, 4, 6, 0, 0], [0] * 5]
    assert evaluate(read, Env(at, {"t": table[:, :0]}, {})).sum() == 0


def test_bits_are_packed_lowest_first():
    words = torch.tensor([[0b101, -(2**31)]], dtype=torch.int32)
    read = Read("t", (Const(0), Var("j", "int")), "bool")
    at = torch.arange(-2, 66)
    got = evaluate(read, Env({"j": at}, {"t": words}, {"t": 64}))
    assert at[got].tolist() == [0, 2, 63]
    assert at[evaluate(read, Env({"j": at}, {"t": words}, {"t": 63}))].tolist() == [0, 2]


def test_a_sum_of_thousands_of_terms_is_not_too_deep():
    total = Var("q", "int")
    for _ in range(4000):
        total = Op("+", (total, Const(1)), "int")
    assert evaluate(total, Env({"q": 2}, {}, {})) == 4002


def call(batch=2, heads=4, kv_heads=2, rows=5, keys=7, head=8, head_v=6):
    g = torch.Generator().manual_seed(0)
    sizes = (batch, heads, rows, head), (batch, kv_heads, keys, head), (batch, kv_heads, keys, head_v)
    return [torch.randn(s, generator=g, dtype=torch.float64) for s in sizes]


@pytest.mark.parametrize("align, offset", [("end", 2), ("start", 0)])
def test_against_scaled_dot_product_attention(align, offset):
    q, k, v = call()
    keep = torch.ones(5, 7, dtype=torch.bool).tril(offset)
    out, _ = reference(spec(f"align {align} mask k <= q"), q, k, v, {})
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, keep, enable_gqa=True))


def test_scale_score_sink_and_weight():
    q, k, v = call(batch=1, heads=1, kv_heads=1)
    params = "(cap: float, sinks: f32[h], gate: f32[k])"
    body = "scale 1 / sqrt(4) score cap * tanh(s / cap) softmax sink(sinks[h]) weight gate[k]"
    sinks, gate = torch.tensor([0.5]), torch.linspace(0, 1, 7)
    out, lse = reference(spec(body, params), q, k, v, {"cap": 2.0, "sinks": sinks, "gate": gate})
    s = 2 * torch.tanh(q @ k.mT / 2 / 2)
    total = s.exp().sum(-1) + math.exp(0.5)
    torch.testing.assert_close(lse, total.log())
    torch.testing.assert_close(out, (s.exp() / total[..., None] * gate.double()) @ v)


def test_what_is_excluded_adds_nothing_even_where_it_is_not_a_number():
    q, k, v = call()
    want = reference(spec("mask k < 3"), q, k, v, {})
    k[:, :, 3:], v[:, :, 3:] = torch.nan, torch.inf
    for got, x in zip(reference(spec("mask k < 3"), q, k, v, {}), want, strict=True):
        torch.testing.assert_close(got, x)


def test_rows_that_see_nothing():
    q, k, v = call()
    out, lse = reference(spec("mask k < 0"), q, k, v, {})
    assert (out == 0).all() and torch.isneginf(lse).all()
    out, lse = reference(spec("mask k < 0 softmax off_by_one"), q, k, v, {})
    assert (out == 0).all() and (lse == 0).all()
    out, lse = reference(spec("mask k <= q"), q, k[:, :, :0], v[:, :, :0], {})
    assert (out == 0).all() and torch.isneginf(lse).all()


def test_minus_infinity_from_a_score_excludes():
    q, k, v = call()
    bias = torch.zeros(7)
    bias[4:] = -torch.inf
    got = reference(spec("score s + bias[k]", "(bias: f32[k])"), q, k, v, {"bias": bias})
    for x, want in zip(got, reference(spec("mask k < 4"), q, k, v, {}), strict=True):
        torch.testing.assert_close(x, want)


def test_a_missing_parameter_is_named():
    q, k, v = call()
    with pytest.raises(KeyError, match="window"):
        reference(spec("mask q - k < window", "(window: int)"), q, k, v, {})
