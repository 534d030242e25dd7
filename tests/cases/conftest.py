"""What runs a spec in the cases: `runner(text, q, k, v, **params) -> (out, lse)` on float64 numpy inputs.

Each case runs on every runner of RUNNERS: the CPU program, and where TRITON_INTERPRET=1 was set before triton was
imported the Triton kernel in its interpreter instead (test_interpreter.py starts such a run).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import attncc


def run(
    target: str | None, text: str, *tensors: np.ndarray, dtype: torch.dtype = torch.float32, **params: Any
) -> tuple[Any, Any]:
    """What attncc.compile makes for `target`. Results are float64 arrays; `dtype` is that of q, k and v."""
    q, k, v = (torch.from_numpy(np.ascontiguousarray(x)).to(dtype) for x in tensors)
    out, lse = attncc.compile(text, target=target)(q, k, v, return_lse=True, **params)
    assert out.dtype == dtype
    return out.double().numpy(), lse.double().numpy()


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNNERS = {"interpreter": partial(run, "interpreter")} if INTERPRETED else {"cpu": partial(run, None)}


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
