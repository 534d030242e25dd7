"""Which gradients `check` looks at: a plain call's, and those with equal bits where another kernel makes them."""

from __future__ import annotations

import pytest
import torch

from attncc import frontend
from attncc.runtime.check import compiled


@pytest.mark.parametrize(("algorithm", "apart"), [("fa2", False), ("fa3", True)])
def test_gradients_of_equal_bits_are_calls_of_their_own_where_another_kernel_makes_them(gpu, algorithm, apart):
    text = f"attention causal {{ mask k <= q }} schedule {{ algorithm {algorithm} }}"
    run = compiled(frontend.parse(text).spec, "cuda")
    q = torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16)
    other = run.apart(q, q, q, {})
    assert not run.deterministic and (other is not None) == apart
    assert other is None or other.deterministic
