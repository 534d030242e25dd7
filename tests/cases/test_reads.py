"""Reads outside an axis, with poison on both sides of the table in memory; and infinite sinks and values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attncc.frontend import parse
from attncc.runtime.reference import reference

B, H, Q, K, D = 1, 2, 19, 23, 16
PADDING = 64


def tensors() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((B, H, n, D)) for n in (Q, K, K)]


def between(table: torch.Tensor, poison: float) -> torch.Tensor:
    """The same elements in the midst of `poison`."""
    storage = torch.full((PADDING + table.numel() + PADDING,), poison, dtype=torch.float64).to(table.dtype)
    storage[PADDING:-PADDING] = table.flatten()
    return storage[PADDING:-PADDING].view(table.shape)


FLOATS = torch.linspace(-1, 1, 14).view(2, 7)
READS = [
    ("t: f32[h, n]", "score s + t[h, q - k]", FLOATS, torch.nan),
    ("t: f32[h, n]", "score s + t[h, k - 9]", FLOATS, torch.nan),
    ("t: f32[n, m]", "score s * t[k - q, q - k + 2]", FLOATS, torch.inf),
    ("t: f32[h, n]", "weight 1 + t[h, q - 8]", FLOATS, torch.nan),
    ("t: f32[n, m]", "softmax sink(t[row - 17, h - 1])", FLOATS, torch.nan),
    ("t: i32[h, n]", "mask k - t[h, q - k] < 20", torch.arange(14, dtype=torch.int32).view(2, 7), 100.0),
    ("t: i32[n]", "mask t[q - 12] <= k", torch.arange(7, dtype=torch.int32), 100.0),
    ("t: bool[n, m]", "mask not t[q - 3, k - 5]", (torch.arange(14) % 3 == 0).view(2, 7), 1.0),
    ("t: bit[n, m]", "mask not t[q - 3, k - 5]", torch.tensor([[0x5A5A5A5A], [0x33CC33CC]], dtype=torch.int32), -1.0),
]


@pytest.mark.parametrize(("param", "body", "table", "poison"), READS, ids=[f"{p} {b}" for p, b, *_ in READS])
def test_nothing_is_read_on_either_side_of_a_table(runner, param, body, table, poison):
    text = f"attention x({param}) {{ {body} }}"
    q, k, v = tensors()
    out, lse = runner(text, q, k, v, t=between(table, poison))
    want, want_lse = reference(parse(text).spec, *map(torch.from_numpy, (q, k, v)), {"t": table})
    np.testing.assert_allclose(out, want.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "body", ["score s + t[h, q - k]", "score s * (1 + t[h, k - 9])", "softmax sink(t[h, row - 8])"]
)
def test_nor_is_anything_added_there(back, body):
    text = f"attention x(t: f32[h, n] grad) {{ {body} }}"
    q, k, v = tensors()
    d_out = np.random.default_rng(1).standard_normal((B, H, Q, D))
    found = back(text, q, k, v, d_out=d_out, t=between(FLOATS, torch.nan).detach().requires_grad_())
    alone = back(text, q, k, v, d_out=d_out, t=FLOATS.clone().requires_grad_())
    for name, gradient in found.items():
        assert np.isfinite(gradient).all(), name
        np.testing.assert_array_equal(gradient, alone[name])


@pytest.mark.parametrize("sink", [np.inf, -np.inf])
def test_a_sink_may_be_infinite(runner, sink):
    text = "attention x(sink: float) { mask k <= row softmax sink(sink) }"
    q, k, v = tensors()
    out, lse = runner(text, q, k, v, sink=sink)
    want, want_lse = reference(parse(text).spec, *map(torch.from_numpy, (q, k, v)), {"sink": sink})
    np.testing.assert_allclose(out, want.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse.numpy(), rtol=1e-5, atol=1e-5)
