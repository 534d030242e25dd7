"""Run by test_skips.py with TRITON_INTERPRET=1: the products that kernels of sparse weights make.

Prints a JSON line for each spec: how many products of tiles the forward and the backward pass make, how many tiles the
mask leaves and how many of them have a weight, and the greatest error of an output or gradient beside float64's.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from triton.runtime.interpreter import interpreter_builder

import attncc
from attncc import frontend
from attncc.runtime.check import compiled
from tests.backward.interpreted import Case, module_of

TILE, ROWS = 16, 160
TILES = f"schedule {{ algorithm fa2 tile q = {TILE}, k = {TILE} }}"
ORIGINAL = interpreter_builder.create_dot


class Products:
    """Counts those of tiles while it is entered."""

    def __enter__(self) -> Products:
        self.count = 0
        interpreter_builder.create_dot = self._product
        return self

    def __exit__(self, *_: object) -> None:
        interpreter_builder.create_dot = ORIGINAL

    def _product(self, *args: Any) -> Any:
        self.count += 1
        return ORIGINAL(*args)


def tiles(pairs: torch.Tensor) -> int:
    """How many tiles hold any of these pairs [Q, K]."""
    across = pairs.unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE))
    return int(across.any(3).any(1).sum())


def counted(text: str) -> dict[str, Any]:
    g = torch.Generator().manual_seed(2)
    q, k, v, d_out = (torch.randn(1, 1, ROWS, 16, generator=g) for _ in range(4))
    run = compiled(frontend.parse(f"{text} {TILES}").spec, "interpreter")
    with tempfile.TemporaryDirectory() as folder:
        _, module = module_of(Case("backward", text, tiles=(TILE, TILE)), Path(folder))
        with Products() as forward:
            out, thresholds = run(q, k, v)
        with Products() as backward:
            *found, _ = module.backward(q, k, v, out, thresholds, d_out)
    attn, exact = attncc.compile(text), [x.double().requires_grad_() for x in (q, k, v)]
    want = attn(*exact)
    gradients = torch.autograd.grad(want, exact, d_out.double())
    pairs = zip((out, *found), (want, *gradients), strict=True)
    unit = torch.eye(ROWS, dtype=torch.float64)[None, None]  # with such values the output is the weights
    return {
        "forward": forward.count, "backward": backward.count, "error": max(map(error, *zip(*pairs, strict=True))),
        "weighty": tiles(attn(q.double(), k.double(), unit)[0, 0] != 0),
    }  # fmt: skip


def error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).abs().sum() / y.abs().sum())


if __name__ == "__main__":
    for text in sys.argv[1:]:
        print(json.dumps(counted(text)), flush=True)
