"""Parts over disjoint sets of keys, joined, are the whole: outputs, lse and every gradient, a sink counted once."""

from __future__ import annotations

import pytest
import torch

import attncc

PART = attncc.compile("attention part(low: int, high: int) { mask low <= k < high and k <= q }")
WHOLE = attncc.compile("attention whole { mask k <= q }")
SUNK = attncc.compile("attention sunk(e: f32[h] grad) { mask k <= q softmax sink(e[h]) }")
H, K = 4, 37


def draw(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q with rows before the first key, which see nothing in any part."""
    g = torch.Generator().manual_seed(3)
    sizes = (2, H, 41, 16), (2, 2, K, 16), (2, 2, K, 8)
    return [torch.randn(size, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]


def parts(q, k, v, ends: tuple[int, ...]):
    edges = zip((0, *ends), (*ends, K), strict=True)
    return zip(*(PART(q, k, v, low=low, high=high, return_lse=True) for low, high in edges), strict=True)


def gradients(out, lse, leaves):
    g = torch.Generator().manual_seed(4)
    d_out, d_lse = (torch.randn(x.shape, generator=g, dtype=torch.float64).to(x) for x in (out, lse))
    loss = (out * d_out).sum() + torch.where(lse.isfinite(), lse * d_lse, 0.0).sum()
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("ends", [(), (11,), (11, 11), (5, 20, 36), (0, 12, 37)], ids=str)
@pytest.mark.parametrize("sink", [False, True])
def test_parts_are_the_whole(ends, sink):
    q, k, v = draw()
    e = torch.tensor([0.3, -1.0, 2.0, -torch.inf], requires_grad=True)
    leaves = [q, k, v, *([e] if sink else [])]
    want = SUNK(q, k, v, e=e, return_lse=True) if sink else WHOLE(q, k, v, return_lse=True)
    have = attncc.merge(*map(list, parts(q, k, v, ends)), sink=e if sink else None)
    for x, y in zip((*have, *gradients(*have, leaves)), (*want, *gradients(*want, leaves)), strict=True):
        assert torch.allclose(x, y, rtol=1e-6, atol=1e-9), (x - y).abs().max()
    unseen = have[0][:, :, :4]
    assert (unseen == 0).all()


def test_a_row_that_saw_nothing_has_the_sink_or_nothing():
    out = torch.full((1, 2, 3, 4), torch.nan)  # whatever stands there
    lse = torch.full((1, 2, 3), -torch.inf)
    for sink, want in ((None, -torch.inf), (0.5, 0.5), (-torch.inf, -torch.inf)):
        merged, merged_lse = attncc.merge([out, out], [lse, lse], sink)
        assert (merged == 0).all() and (merged_lse == want).all()


def test_types_stay_and_sums_are_wide():
    q, k, v = (x.detach() for x in draw(torch.bfloat16))
    out, lse = attncc.merge(*map(list, parts(q, k, v, (9, 20))))
    want, want_lse = WHOLE(q, k, v, return_lse=True)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert torch.allclose(lse, want_lse, atol=1e-5) and (out - want).abs().max() < 0.02
    huge = [torch.full((1, 1, 1), 3e38), torch.full((1, 1, 1), 3e38)]
    assert torch.isfinite(attncc.merge([torch.ones(1, 1, 1, 2)] * 2, huge)[1]).all()


def test_nan_is_passed_on():
    nan = torch.full((1, 1, 1), torch.nan)
    out, lse = attncc.merge([torch.ones(1, 1, 1, 2)] * 2, [nan, torch.zeros(1, 1, 1)])
    assert out.isnan().all() and lse.isnan().all()


OUT, LSE = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)


@pytest.mark.parametrize(
    ("outs", "lses", "sink", "said"),
    [
        ([], [], None, "at least one"),
        ([OUT], [LSE, LSE], None, "1 and 2"),
        ([OUT, OUT.double()], [LSE, LSE], None, r"outs\[1\]"),
        ([OUT, OUT[:, :1]], [LSE, LSE], None, r"outs\[1\]"),
        ([OUT], [LSE[:, :1]], None, "lses"),
        ([OUT], [OUT], None, r"lses\[0\] must be \[B, H, Q\]"),
        ([OUT], [LSE.int()], None, r"lses\[0\] must be a tensor of floats"),
        ([OUT], [LSE], torch.zeros(3), "sink must be"),
        ([OUT], [LSE], "none", "sink must be a number"),
    ],
)
def test_bad_input_is_named(outs, lses, sink, said):
    with pytest.raises((TypeError, ValueError), match=said):
        attncc.merge(outs, lses, sink)


@pytest.mark.parametrize("given", [torch.zeros(2, 1, 1, 1, 1), None, {1}], ids=["tensor", "none", "set"])
def test_parts_are_a_list(given):
    with pytest.raises(TypeError, match="outs must be a list of tensors, one for each part"):
        attncc.merge(given, [torch.zeros(1, 1, 1)])


def test_an_infinite_sink_takes_everything():
    outs, lses = [torch.ones(1, 2, 3, 4)] * 2, [torch.zeros(1, 2, 3)] * 2
    out, lse = attncc.merge(outs, lses, sink=float("inf"))
    assert not out.any() and torch.equal(lse, torch.full_like(lse, torch.inf))
