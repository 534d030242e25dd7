"""Normalisers beside the exponential ones: against float64 in every pass, by their formula, and what they refuse."""

from __future__ import annotations

import pytest
import torch

import attncc
from attncc import frontend, pipeline
from attncc.analysis.normaliser import normaliser
from attncc.runtime.check import SHAPES, check

SPECS = {
    "sigmoid": "attention a(e: f32[h] grad) { mask k <= q score 3 * tanh(s) softmax sigmoid(e[h]) weight 1 + 0.1 * k }",
    "relu": "attention a { mask 0 <= q - k < 9 softmax relu(1) }",
    "relu_squared": "attention a(n: const int = 2) { mask k <= q softmax relu(n) }",
    "two_pass": "attention a { mask 0 <= q - k < 9 softmax two_pass }",
    "unified": "attention a(c: float = 2.0) { mask k <= q softmax unified(c) }",
    "custom": "attention a(e: f32[h] grad, g: f32[b, k] grad) "
    "{ mask k <= q softmax custom(weight = exp(s) + e[h] * g[b, k] * s * s, divide = 1 + row) }",
    "custom_sum": "attention a(e: f32[h] grad) { softmax custom(weight = exp2(s * e[h] - m), divide = sum) }",
    "sparsemax": "attention a(w: f32[h] grad) { mask k <= q softmax sparsemax weight w[h] }",
    "entmax": "attention a { mask 0 <= q - k < 9 score 3 * s softmax entmax(1.5) dropout 0.2 }",
    "entmax_low": "attention a { mask k < q softmax entmax(1.2) }",
    "own_sum": "attention a(g: f32[h] grad) "
    "{ mask k <= q softmax custom(weight = log(1 + exp(s * g[h])), divide = sum) weight 1 + 0.1 * k }",
    "none": "attention a(g: f32[h] grad) { mask k <= q score s * exp2(-g[h] * g[h] * (q - k)) softmax none }",
}


@pytest.mark.parametrize("text", SPECS.values(), ids=SPECS)
def test_on_the_cpu(text):
    report = check(frontend.parse(text).spec, "cpu", seeds=(0,), shapes=SHAPES["cpu"][:3], differences=True)
    assert report.passed, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "interpreter"])
@pytest.mark.parametrize("text", SPECS.values(), ids=SPECS)
def test_everything(text, device):
    report = check(frontend.parse(text).spec, device, differences=True)
    assert report.passed, str(report)


def tensors(*shape: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(3)]


def test_by_their_formula():
    """Beside the reference, which check uses: these lines know nothing of attncc."""
    q, k, v = tensors(1, 2, 7, 16)
    s = q @ k.mT / 4
    for policy, p in (("sigmoid(-1)", torch.sigmoid(s - 1)), ("relu(1)", s.relu() / 7),
                      ("relu(3)", s.relu() ** 3 / 7), ("none", s)):  # fmt: skip
        out = attncc.compile(f"attention a {{ softmax {policy} }}")(q, k, v)
        assert torch.allclose(out, p @ v, rtol=1e-12, atol=1e-12), policy


def test_an_exponential_of_ones_own_is_softmax_to_the_bit():
    q, k, v = tensors(1, 2, 9, 16)
    for weight in ("exp(s)", "exp(s - m)"):
        own = attncc.compile(f"attention a {{ mask k <= q softmax custom(weight = {weight}, divide = sum) }}")
        plain = attncc.compile("attention a { mask k <= q }")
        for x, y in zip(own(q, k, v, return_lse=True), plain(q, k, v, return_lse=True), strict=True):
            assert torch.equal(x, y)


def test_a_parameter_called_m_is_refused_where_m_is_the_maximum():
    with pytest.raises(attncc.api.SpecError, match="E303: 'm' is the row's maximum in a custom weight"):
        attncc.compile("attention a(m: float) { softmax custom(weight = exp(s - m), divide = sum) }")


def test_what_changes_nothing_has_no_gradient():
    with pytest.raises(attncc.api.SpecError, match=r"E606.*relative to, which changes nothing"):
        attncc.compile("attention a(c: float grad) { softmax unified(c) }")


@pytest.mark.parametrize(("policy", "reference"), [("two_pass", "two_pass"), ("unified(3)", "fixed")])
def test_kernels_have_their_own_reference(policy, reference):
    text = f"attention a {{ mask k <= q softmax {policy} }}"
    plan = pipeline.plan(pipeline.Request(text=text, target="sm_90"))
    rendered = pipeline.render(plan)
    assert plan.choice.plan.reference == reference
    assert ("out *= rescale" in rendered) == (reference == "fixed")  # of the second try
    assert rendered.count("s = tl.dot(") == (2 if reference == "two_pass" else 1)
    half = pipeline.plan(pipeline.Request(text=text, target="sm_90", dtype="f16")).choice.plan
    assert half.reference == ("two_pass" if reference == "two_pass" else "running")


def test_a_score_of_minus_infinity_is_excluded_and_nan_passes():
    q, k, v = tensors(1, 1, 5, 8)
    v[:, :, 4] = torch.nan
    for policy in ("sigmoid(0)", "relu(2)", "none"):
        out = attncc.compile(f"attention a {{ score where(k < 4, s, log(0.0)) softmax {policy} }}")(q, k, v)
        want = attncc.compile(f"attention a {{ mask k < 4 softmax {policy} }}")(q, k, v)
        assert torch.equal(out, want) and want.isfinite().all()
        out = attncc.compile(f"attention a {{ score where(k < 3, s, log(-1.0)) softmax {policy} }}")(q, k, q)
        assert out.isnan().all(), policy


def test_parts_add_up():
    q, k, v = tensors(1, 2, 9, 16)
    part = attncc.compile("attention a(low: int, high: int) { mask low <= k < high softmax sigmoid(-2) }")
    whole = attncc.compile("attention a { softmax sigmoid(-2) }")(q, k, v)
    assert torch.allclose(part(q, k, v, low=0, high=4) + part(q, k, v, low=4, high=9), whole, rtol=1e-12)


def test_there_is_no_lse():
    q, k, v = tensors(1, 2, 9, 16)
    with pytest.raises(ValueError, match="softmax sigmoid divides by no sum, and has no lse"):
        attncc.compile("attention a { softmax sigmoid(-2) }")(q, k, v, return_lse=True)


def sparse(s: torch.Tensor, alpha: float) -> torch.Tensor:
    """By sorting, for 2 (Martins and Astudillo 2016, algorithm 1) and 1.5 (Peters et al. 2019, algorithm 2)."""
    x = (s * (alpha - 1)).sort(-1, descending=True).values
    count = torch.arange(1, s.shape[-1] + 1, dtype=s.dtype)
    mean, square = x.cumsum(-1) / count, (x * x).cumsum(-1) / count
    root = ((1 - count * (square - mean**2)) / count).clamp(min=0).sqrt()
    t = mean - (1 / count if alpha == 2 else root)
    kept = (t <= x).sum(-1, keepdim=True)
    return (s * (alpha - 1) - t.gather(-1, kept - 1)).clamp(min=0) ** (1 / (alpha - 1))


@pytest.mark.parametrize(("policy", "alpha"), [("sparsemax", 2.0), ("entmax(1.5)", 1.5)])
def test_sparse_weights_by_sorting(policy, alpha):
    q, k, v = tensors(1, 2, 300, 16)
    attn = attncc.compile(f"attention a {{ score 4 * s softmax {policy} }}")
    p = sparse(q @ k.mT, alpha)
    assert (p == 0).float().mean() > 0.9  # most tiles of keys have rows that they give nothing to
    assert torch.allclose(attn(q, k, v), p @ v, rtol=1e-10, atol=1e-10)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad((sparse(q @ k.mT, alpha) @ v).square().sum(), leaves)
    found = torch.autograd.grad(attn(q, k, v).square().sum(), leaves)
    for x, y in zip(found, want, strict=True):
        assert torch.allclose(x, y, rtol=1e-8, atol=1e-8)


def test_equal_scores_share_a_row():
    torch.manual_seed(1)
    q, k, v = torch.zeros(1, 1, 3, 8), torch.randn(1, 1, 200, 8), torch.randn(1, 1, 200, 8)
    for policy in ("sparsemax", "entmax(1.5)", "entmax(1.1)"):
        out = attncc.compile(f"attention a {{ softmax {policy} }}")(q, k, v)
        assert torch.allclose(out, v.mean(-2, keepdim=True).expand(out.shape), atol=1e-5), policy


@pytest.mark.parametrize("policy", ["sparsemax", "entmax(1.5)"])
def test_tiles_that_the_mask_leaves_out_have_no_threshold(policy):
    """k % 512 < 4 keeps nothing of the second tile of keys; a mask that keeps nothing at all leaves none."""
    torch.manual_seed(1)
    q, (k, v) = torch.randn(1, 1, 4, 8), (torch.randn(1, 1, 300, 8) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    few = attncc.compile(f"attention a {{ mask k % 512 < 4 softmax {policy} }}")
    near = attncc.compile(f"attention a {{ softmax {policy} }}")(q, k[:, :, :4], v[:, :, :4])
    found, want = (torch.autograd.grad(x.square().sum(), leaves) for x in (few(q, k, v), near))
    assert torch.allclose(few(q, k, v), near, atol=1e-6)
    assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(found, want, strict=True))
    none = attncc.compile(f"attention a {{ mask k % 8 > 100 - q_len softmax {policy} }}")
    assert none(q, k[:, :, :6], v[:, :, :6]).count_nonzero() == 0


def test_a_pair_without_a_weight_is_excluded():
    q, k, v = (torch.zeros(1, 1, 2, 8) for _ in range(3))
    q[..., 0] = k[..., 0, 0] = 4.0
    v[..., 1, :] = torch.inf  # of the key with the lesser score
    for policy in ("sparsemax", "entmax(1.5)"):
        attn = attncc.compile(f"attention a {{ scale 1.0 align start softmax {policy} }}")
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attn(*leaves)
        assert torch.equal(out, torch.zeros_like(out))
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves))


def test_a_row_of_nan_is_nan_alone():
    q, k, v = tensors(1, 1, 5, 8)
    q[..., 2, :] = torch.nan
    out = attncc.compile("attention a { softmax entmax(1.5) }")(q, k, v)
    assert out[..., 2, :].isnan().all() and out[..., [0, 1, 3, 4], :].isfinite().all()


def test_thresholds_are_no_lse():
    q, k, v = tensors(1, 2, 9, 16)
    with pytest.raises(ValueError, match="softmax sparsemax has a threshold in place of an lse"):
        attncc.compile("attention a { softmax sparsemax }")(q, k, v, return_lse=True)


def test_parts_of_an_own_sum_merge():
    q, k, v = tensors(1, 2, 9, 16)
    own = "softmax custom(weight = 1 / (1 + s * s), divide = sum)"
    part = attncc.compile(f"attention a(low: int, high: int) {{ mask low <= k < high {own} }}")
    whole = attncc.compile(f"attention a {{ {own} }}")(q, k, v, return_lse=True)
    parts = [part(q, k, v, low=a, high=b, return_lse=True) for a, b in ((0, 4), (4, 4), (4, 9))]
    for x, y in zip(attncc.merge(*zip(*parts, strict=True)), whole, strict=True):
        assert torch.allclose(x, y, rtol=1e-12)


@pytest.mark.parametrize(
    ("weight", "proved"),
    [("s * s", True), ("exp(s) + abs(s) * k", True), ("log(1 + exp(s))", True), ("max(s, 0)", True), ("s", False),
     ("1 - sigmoid(s)", False), ("tanh(s) + 1", False), ("where(s < 0, 0, s * s)", True)],
)  # fmt: skip
def test_weights_are_summed_where_none_is_negative(weight, proved):
    text = f"attention a {{ softmax custom(weight = {weight}, divide = sum) }}"
    if proved:
        assert normaliser(frontend.parse(text).spec).summed
    else:
        with pytest.raises(attncc.api.SpecError, match=r"E504.*must not be negative"):
            frontend.parse(text)


def test_in_a_graph_with_gradients():
    attn = attncc.compile("attention a(e: f32[h] grad) { mask k <= q softmax sigmoid(e[h]) }")
    e = torch.zeros(2, requires_grad=True)

    def loss(q, k, v):
        return attn(q, k, v, e=e).square().sum()

    q, k, v = (x.requires_grad_() for x in tensors(1, 2, 9, 16))
    want = torch.autograd.grad(loss(q, k, v), [q, k, v, e])
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(q, k, v), [q, k, v, e])
    assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


@pytest.mark.parametrize(
    ("policy", "vanishes", "flat"),
    [("sigmoid(k_len)", True, True), ("relu(1)", True, True), ("relu(8)", True, True), ("none", False, False)],
)
def test_what_happens_to_an_excluded_score_is_proved(policy, vanishes, flat):
    rule = normaliser(frontend.parse(f"attention a {{ softmax {policy} }}").spec)
    assert (rule.vanishes, rule.flat, rule.has_lse) == (vanishes, flat, False)


def test_the_power_is_a_constant_in_its_range():
    with pytest.raises(attncc.api.SpecError, match="E505: the power is 9"):
        attncc.compile("attention a(n: const int) { softmax relu(n) }", n=9)
