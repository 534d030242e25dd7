"""What others run for the same computation: SDPA's backends and FlexAttention, from PyTorch itself."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attncc.runtime import peers

Call = Callable[[], torch.Tensor]

# What max-autotune chose on an H200 for the forward pass in every row of results/forward.json.
CHOSEN = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}


def sdpa(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
    return partial(peers.sdpa, backend, q, k, v, is_causal=causal)


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
    return sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, causal)


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
    return sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, causal)


def flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Any = None,
    score: Any = None,
    tuned: bool = True,
    chosen: dict[str, int] | None = None,
) -> Call:
    """FlexAttention compiled for exactly these shapes, tuned by max-autotune or with the options that are `chosen`.

    Its block mask is made eagerly, once, and is not part of the call: compiling that takes 40 s at 16384 positions.
    """
    torch._dynamo.reset()
    mode = "max-autotune-no-cudagraphs" if tuned and chosen is None else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(flex_attention, dynamic=False, mode=mode)
    block_mask = None
    if mask is not None:
        block_mask = create_block_mask(mask, None, None, q.shape[2], k.shape[2], device=q.device)
    gqa = q.shape[1] != k.shape[1]
    options = {"score_mod": score, "block_mask": block_mask, "enable_gqa": gqa, "kernel_options": chosen}
    return lambda: compiled(q, k, v, **options)


def warm(module: str, rows: Sequence[tuple[str, int]], seconds: float, workers: int = 8) -> None:
    """Compile what max-autotune will want for `rows`, arguments of `module`.compile_flex, side by side before it times.

    Triton's cache is shared, what a worker found fastest beside the others is not. After `seconds` the rest is left.
    """
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(tempfile.gettempdir(), "flex_triton"))
    waiting, running = list(rows), []
    context, end = multiprocessing.get_context("spawn"), time.monotonic() + seconds
    while (waiting or running) and time.monotonic() < end:
        running = [worker for worker in running if worker.is_alive()]
        while waiting and len(running) < workers:
            running.append(context.Process(target=_compile, args=(module, *waiting.pop(0)), daemon=True))
            running[-1].start()
        time.sleep(0.2)
    for worker in running:
        worker.kill()


def _compile(module: str, part: str, index: int) -> None:
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp(), "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    importlib.import_module(module).compile_flex(part, index)
