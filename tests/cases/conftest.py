"""What runs a spec in the cases: `runner(text, q, k, v, **params) -> (out, lse)` on float64 numpy inputs.

RUNNERS has one entry for each kind of generated program; each case runs on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import attncc


def on_cpu(text: str, *tensors: np.ndarray, dtype: torch.dtype = torch.float32, **params: Any) -> tuple[Any, Any]:
    """The CPU program. Results are float64 arrays; `dtype` is that of q, k and v."""
    consts = {n: params.pop(n) for n in list(params) if f"{n}: const" in text}
    q, k, v = (torch.from_numpy(np.ascontiguousarray(x)).to(dtype) for x in tensors)
    out, lse = attncc.compile(text, **consts)(q, k, v, return_lse=True, **params)
    assert out.dtype == dtype
    return out.double().numpy(), lse.double().numpy()


RUNNERS: dict[str, Callable[..., tuple[Any, Any]]] = {"cpu": on_cpu}


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> Callable[..., tuple[Any, Any]]:
    return RUNNERS[request.param]


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small products gain nothing from threads, which wait for one another on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
