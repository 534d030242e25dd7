"""Quantised inputs: what stands where, scales, the rotation, and that a call computes with them."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.autograd import forward_ad

import attncc
from attncc.ir import Precision
from attncc.runtime.quantise import quantised, rotation, turned

SCALES = ("per_tensor", "per_head", "per_block(128)")
CAUSAL = "attention x(a: f32[h] grad) { mask k <= q  score s - a[h] * (q - k) }"


def calls(rows=150, keys=200, size=64, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    sizes = (2, 4, rows, size), (2, 2, keys, size), (2, 2, keys, size)
    return [torch.randn(s, generator=g).to(dtype) for s in sizes]


@pytest.mark.parametrize("size", [1, 8, 31, 96, 128])
def test_rotation_is_orthogonal_and_mixes(size):
    matrix = rotation(size).double()
    assert (matrix @ matrix.T - torch.eye(size)).abs().max() < 1e-6
    assert size < 8 or matrix[:8].abs().max() < 0.5


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("rotate", ["hadamard", "none"])
def test_numbers_come_back(scales, rotate):
    given = calls(size=96)
    x = attncc.quantize(*given, scales=scales, rotate=rotate)
    back = list(x.dequantised())
    if rotate == "hadamard":
        back[:2] = (y @ rotation(96).T for y in back[:2])
    for y, want in zip(back, given, strict=True):
        assert 0.02 < (y - want).norm() / want.norm() < 0.03
    blocks = {"per_tensor": 1, "per_head": 1, "per_block(128)": 2}[scales]
    assert x.q_scales.shape == (2, 4, blocks) and x.v_scales.shape == (2, 2, blocks)
    if scales == "per_tensor":
        assert len(x.q_scales.unique()) == 1
    largest = (x.q.float().abs().amax((-1, -2)), x.v.float().abs().amax((-1, -2)))
    assert all((y == 448).any() for y in largest)


def test_what_shares_a_scale_is_told_apart():
    q, k, v = calls(rows=256, keys=256)
    v[:, :, 128:] *= 2.0**20
    x = attncc.quantize(q, k, v)
    assert torch.equal((x.v_scales[..., 1] > 2.0**15 * x.v_scales[..., 0]), torch.ones(2, 2, dtype=torch.bool))
    assert (x.values[:, :, :128].float().abs().amax((2, 3)) == 448).all()


def test_order_of_values():
    v = torch.arange(32).float()[None, None, :, None].expand(1, 1, 32, 2).to(torch.float8_e4m3fn)[:, :, :20]
    made = turned(v).float()[0, 0, 1]
    for key in range(20):
        b, i, c = key % 16 // 8, key % 8 // 2, key % 2
        assert made[key // 16 * 16 + 4 * i + 2 * b + c] == v[0, 0, key, 0].float()
    assert made.shape == (32,) and made.count_nonzero() == 19  # nothing behind the last key, and key 0 is 0


@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**60, 0.0])
def test_any_size_of_numbers(scale):
    q, k, v = (x * scale for x in calls())
    x = attncc.quantize(q, k, v)
    back = x.dequantised()[0] @ rotation(64).T
    assert torch.isfinite(x.q_scales).all() and (back - q).norm() <= 0.03 * q.norm()


def test_integers_make_the_rotation_the_same_in_any_order():
    q, k, v = calls()
    x = quantised(q, k, v, Precision("f8e4m3"))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    from attncc.runtime import quantise

    matrix, _ = quantise.rotation_parts(64)
    whole = torch.ldexp(q, torch.tensor(12)).round()
    assert torch.equal(whole @ matrix, whole[..., order] @ matrix[order])
    assert torch.equal(quantised(q, k, v, Precision("f8e4m3")).q.view(torch.uint8), x.q.view(torch.uint8))


def test_nan_stays_in_its_row():
    q, k, v = calls()
    q[0, 0, 3, 5], v[0, 0, 7, 2] = torch.nan, torch.nan
    x = attncc.quantize(q, k, v)
    assert x.q.float().isnan().any(-1).nonzero().tolist() == [[0, 0, 3]]
    assert x.values.float().isnan().nonzero().tolist() == [[0, 0, 7, 2]]


@pytest.mark.parametrize("inputs", ["f8e4m3", "f8e5m2"])
@pytest.mark.parametrize("rotate", ["hadamard", "none"])
def test_a_call_is_that_of_dequantised_inputs(inputs, rotate):
    eight = attncc.compile(f"{CAUSAL} precision {{ inputs {inputs} rotate {rotate} }}")
    plain, slopes = attncc.compile(CAUSAL), torch.linspace(0.01, 0.1, 4)
    given = [x.requires_grad_() for x in calls()]
    near = attncc.quantize(*(x.detach() for x in given), inputs=inputs, rotate=rotate)
    leaves = [x.requires_grad_() for x in near.dequantised()]
    a, b = slopes.clone().requires_grad_(), slopes.clone().requires_grad_()
    out, lse = eight(*given, a=a, return_lse=True)
    want, want_lse = plain(*leaves, a=b, return_lse=True)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert torch.equal(eight.quantised(near, a=slopes, dtype=torch.float32), out)
    d = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out * d).sum().backward()
    (want * d).sum().backward()
    turn = rotation(64).T if rotate == "hadamard" else torch.eye(64)
    for x in (*given, a):
        assert x.grad is not None and torch.isfinite(x.grad).all()
    for x, y, t in zip(given, leaves, (turn, turn, torch.eye(64)), strict=True):
        assert torch.allclose(x.grad, y.grad @ t, atol=1e-5, rtol=1e-5)
    assert torch.equal(a.grad, b.grad)


def test_types_and_copies():
    eight = attncc.compile("attention x { mask k <= q } precision { inputs f8e4m3 }")
    given = calls(dtype=torch.bfloat16)
    out = eight(*given)
    assert out.dtype == torch.bfloat16 and torch.equal(pickle.loads(pickle.dumps(eight))(*given), out)
    assert eight(*(x.double() for x in given)).dtype == torch.float64
    assert torch.equal(torch.compile(eight, backend="eager")(*given), out)
    assert eight(given[0], given[1][:, :, :0], given[2][:, :, :0]).count_nonzero() == 0


def test_scales_of_another_number_are_refused():
    """Where each head has one, or each block."""
    blocks = "per_block(128)"
    specs = {
        n: attncc.compile(f"attention x {{ }} precision {{ inputs f8e4m3 scales {n} }}") for n in ("per_head", blocks)
    }
    q, k, v = (torch.randn(1, 1, 300, 32) for _ in range(3))
    for name, attn in specs.items():
        attn.quantised(attncc.quantize(q, k, v, scales=name))
        for short in ({}, {"q": q[:, :, :9]}, {"k": k[:, :, :9], "v": v[:, :, :9]}):
            given = {"q": q, "k": k, "v": v, **short}
            other = attncc.quantize(**given, scales="per_tensor" if name == blocks else blocks)
            with pytest.raises(ValueError, match="quantised otherwise"):
                attn.quantised(other)


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: torch.func.grad(lambda q: f(q).sum())])
def test_quantize_under_a_transform_is_refused_by_name(transform):
    q = torch.randn(2, 1, 1, 4, 32)
    with pytest.raises(
        attncc.NotBuilt, match=r"quantize under torch\.func \(vmap, grad, jvp and the like\) is not built yet"
    ):
        transform(lambda x: attncc.quantize(x, x, x).q_scales)(q if transform is torch.func.vmap else q[0])


def test_refusals():
    eight = attncc.compile("attention x { mask k <= q } precision { inputs f8e4m3 }")
    given = calls()
    with pytest.raises(ValueError, match="quantised otherwise"):
        eight.quantised(attncc.quantize(*given, rotate="none"))
    with pytest.raises(TypeError, match=r"x is what attncc\.quantize gives, and is of type int"):
        eight.quantised(3)
    with pytest.raises(ValueError, match=r"scales must be one of .*, and is 'per_block\(64\)'"):
        attncc.quantize(*given, scales="per_block(64)")
    with pytest.raises(TypeError, match="k must be a float tensor"):
        attncc.quantize(given[0], given[1].int(), given[2])
    with pytest.raises(TypeError, match="no parameter 'b'"):
        eight(*given, b=1)
    with pytest.raises(NotImplementedError, match="not tuned yet"):
        eight.tune(*given)
    with pytest.raises(attncc.SpecError, match="packed sequences"):
        eight.varlen(given[0][0], given[1][0], given[2][0], torch.tensor([0, 4], dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="interpreter"):
        attncc.compile("attention x { } precision { inputs f8e4m3 }", target="interpreter")(*given)


def _dual(f, x):
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(x, x))


@pytest.mark.parametrize(
    "derive",
    [
        lambda f, x: torch.func.grad(lambda y: f(y).sum())(x), lambda f, x: torch.func.vjp(f, x),
        lambda f, x: torch.func.jvp(f, (x,), (x,)), lambda f, x: torch.func.vmap(f)(x[None]),
        lambda f, x: torch.func.jacrev(f)(x), _dual,
        lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True),
        lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True, strategy="forward-mode"),
    ],
    ids=["grad", "vjp", "jvp", "vmap", "jacrev", "dual", "batched", "forward_mode"],
)  # fmt: skip
def test_derivatives_other_than_backward_are_refused(derive):
    eight, (q, k, v) = attncc.compile(f"{CAUSAL} precision {{ inputs f8e4m3 }}"), calls(5, 6)
    slopes = torch.full((4,), 0.1)
    for f, x in ((lambda y: eight(y, k, v, a=slopes), q), (lambda y: eight(q, k, v, a=y), slopes)):
        with pytest.raises(attncc.NotBuilt, match="8-bit inputs"):
            derive(f, x)
    near = attncc.quantize(q, k, v)
    with pytest.raises(attncc.NotBuilt, match=r"8-bit inputs under torch\.func"):
        torch.func.vmap(lambda y: eight.quantised(near, a=y))(slopes[None])


def test_a_derivative_of_a_gradient_is_refused_and_not_left_out():
    attn = attncc.compile("attention c { mask k <= q } precision { inputs f8e4m3 }")
    x = torch.randn(1, 1, 5, 32, requires_grad=True)
    with pytest.raises(attncc.NotBuilt, match="differentiable once"):
        torch.autograd.grad(attn(x, x, x).square().sum(), x, create_graph=True)
