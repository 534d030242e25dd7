"""What 8-bit inputs cost with the default settings, beside one scale for all and weights that are not scaled up."""

from __future__ import annotations

import pytest
import torch

from attncc.ir import Precision, Shape
from attncc.runtime.check_eight import KINDS, inputs
from attncc.runtime.quantise import quantised, rotation

SHAPE = Shape(1, 2, 2, 256, 1024, 128, 128)
LONG = Shape(1, 2, 2, 512, 2048, 128, 128)
TILE = 128
HEADROOM = 8  # log2 of the largest weight, as kernels have it
DEFAULT = Precision(inputs="f8e4m3")
USUAL = Precision(inputs="f8e4m3", scales="per_tensor", rotate="none")
BETTER = {"outliers": 1.8, "entries": 1.4, "channels": 1.4}  # others: no worse, within what a few draws differ by
NO_WORSE = 0.95


def scores(q, k):
    return q.double() @ k.double().mT * q.shape[-1] ** -0.5


def rounded(p, headroom):
    return (p * 2.0**headroom).float().to(torch.float8_e4m3fn).double() * 2.0**-headroom


def attended(q, k, v, headroom, turned):
    """Attention with a running maximum and weights of 8 bits, tiles of keys from the last on where it is `turned`;
    without `headroom` as FlashAttention-3 has it, whose sums are of weights before they are rounded."""
    s, v = scores(q, k), v.double()
    top = torch.full_like(s[..., :1], -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q.double())
    for at in sorted(range(0, s.shape[-1], TILE), reverse=turned):
        tile = s[..., at : at + TILE]
        higher = torch.maximum(top, tile.amax(-1, True))
        exact = torch.exp(tile - higher)
        p = rounded(exact, headroom)
        total, out = (x * torch.exp(top - higher) for x in (total, out))
        total = total + (p if headroom else exact).sum(-1, True)
        out, top = out + p @ v[..., at : at + TILE, :], higher
    return out / total


def error(kind, precision, headroom, turned, shape, seeds):
    """Root mean square of the error from the inputs as they were."""
    square = 0.0
    for seed in range(seeds):
        q, k, v = inputs(kind, shape, seed)
        found = attended(*quantised(q, k, v, precision).dequantised(), headroom, turned)
        square += (found - scores(q, k).softmax(-1) @ v.double()).square().mean().item()
    return square**0.5


def ratio(kind, shape, seeds):
    return error(kind, USUAL, 0, False, shape, seeds) / error(kind, DEFAULT, HEADROOM, True, shape, seeds)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_default_beside_one_scale_for_all(kind):
    assert ratio(kind, LONG, 8) > BETTER.get(kind, NO_WORSE)


@pytest.mark.parametrize("kind", ["outliers", "gaussian", "sink"])
def test_a_sample_of_it(kind):
    assert ratio(kind, SHAPE, 12) > min(BETTER.get(kind, NO_WORSE), 1.5) - 0.1


@pytest.mark.parametrize(("size", "most"), [(64, 1), (256, 1), (32, 2), (128, 2), (512, 2)])
def test_what_columns_share_is_spread(size, most):
    """A mean of all columns is as large in each rotated one, or nothing in one half of them."""
    turned = (torch.ones(size) / size**0.5) @ rotation(size) * size**0.5
    assert turned.square().max() < most + 1e-5


def test_turned_tiles_keep_the_weights_beside_sinks():
    """A few first keys far above all others: from the first on, what comes later is lost."""
    q, k, v = inputs("gaussian", SHAPE, 0)
    q[..., 0], k[..., 0], k[:, :, :4, 0] = 8.0, 0.0, 13 * 128**0.5 / 8
    v[:, :, :TILE] = 0
    want = scores(q, k).softmax(-1) @ v.double()
    off = [(attended(q, k, v, HEADROOM, turned) - want).norm() / want.norm() for turned in (False, True)]
    assert off[1] < 0.04 and off[0] > 4 * off[1]
