"""Benchmarks that run side by side compile together, and have the GPU one by one while they check and time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from attncc.runtime.attention import Attention
from attncc.runtime.timing import Events

# PyTorch needs filelock itself. Reentrant within a process.
GPU = FileLock(Path(tempfile.gettempdir()) / "attncc_benchmark_gpu.lock")
HOST = 3.0  # milliseconds that the host may take for a call, beside others
RECORDS = FileLock(Path(tempfile.gettempdir()) / "attncc_benchmark_records.lock")


def milliseconds(call: Callable[[], Any]) -> float:
    """Median of a call of some milliseconds. Ones that may be shorter than the host takes to launch them are captured
    in a CUDA graph."""
    clock = Events(False)
    clock.SHORT = HOST
    return clock.time(call)


def gradients(attention: Attention, q: Tensor, k: Tensor, v: Tensor, params: Mapping[str, Any]) -> Callable[[], Any]:
    """The backward pass of a call without autograd around it: d_q, d_k, d_v, and those of parameters by name."""
    with torch.no_grad():
        out, lse = attention.both(q, k, v, dict(params))
    ready, whole = attention.ready(q, k, v, params), (q, k, v, out, lse, torch.randn_like(out), None)
    return lambda: attention.gradients(ready, whole, params)
