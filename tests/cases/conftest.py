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


def run_back(
    target: str | None, text: str, *tensors: np.ndarray, d_out: np.ndarray, d_lse: Any = None,
    dtype: torch.dtype = torch.float32, **params: Any,
) -> dict[str, Any]:  # fmt: skip
    """Gradients of sum(out * d_out) + sum(lse * d_lse) by name, float64 arrays: q, k, v and what requires one."""
    q, k, v = (torch.from_numpy(np.ascontiguousarray(x)).to(dtype).requires_grad_() for x in tensors)
    out, lse = attncc.compile(text, target=target)(q, k, v, return_lse=True, **params)
    wanted = {"q": q, "k": k, "v": v} | {
        n: x for n, x in params.items() if isinstance(x, torch.Tensor) and x.requires_grad
    }
    back = [torch.from_numpy(np.ascontiguousarray(d_out)).to(out)]
    back += [] if d_lse is None else [torch.from_numpy(np.ascontiguousarray(d_lse)).to(lse)]
    found = torch.autograd.grad([out, lse][: len(back)], list(wanted.values()), back)
    return {n: x.double().numpy() for n, x in zip(wanted, found, strict=True)}


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNNERS = {"interpreter": partial(run, "interpreter")} if INTERPRETED else {"cpu": partial(run, None)}


BACK = {name: partial(run_back, *run.args) for name, run in RUNNERS.items()}


@pytest.fixture(params=BACK)
def back(request: pytest.FixtureRequest) -> Callable[..., dict[str, Any]]:
    """`back(text, q, k, v, d_out=…, d_lse=…, **params)`: the gradients, see run_back."""
    return BACK[request.param]


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
