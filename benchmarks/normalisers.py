"""What each normaliser and dropout cost beside plain softmax, causal, on this GPU; each is checked before it is timed.

    python benchmarks/normalisers.py [--out DIR] [--length N] [--rounds N]

Kernels are timed in turns, medians of rounds, forward and backward; the plain softmax of the same run is what they are
compared with. Writes normalisers.json where --out says.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

import attncc
from attncc.ir import Shape
from attncc.runtime import check

BATCH, HEADS, HEAD_DIM = 1, 16, 128
SMALL = Shape(1, 4, 2, 515, 515, HEAD_DIM, HEAD_DIM, "bf16")
SPECS = {  # text, parameters by name for so many heads, least part of the plain softmax's rate in the forward pass
    "plain": ("attention plain { mask k <= q }", lambda h: {}, 1.0),
    "sink": (
        "attention sunk(e: f32[h] grad) { mask k <= q softmax sink(e[h]) }",
        lambda h: {"e": torch.zeros(h, device="cuda")}, 0.97,
    ),
    "off_by_one": ("attention off { mask k <= q softmax off_by_one }", lambda h: {}, 0.97),
    "two_pass": ("attention twice { mask k <= q softmax two_pass }", lambda h: {}, 0.0),
    "unified": ("attention given { mask k <= q softmax unified(4) }", lambda h: {}, 0.0),
    "sigmoid": (
        "attention sig(e: f32[h] grad) { mask k <= q softmax sigmoid(e[h]) }",
        lambda h: {"e": torch.full((h,), -8.0, device="cuda")}, 1.0,
    ),
    "relu": ("attention ramp { mask k <= q softmax relu(2) }", lambda h: {}, 0.0),
    "none": ("attention kept { mask k <= q softmax none }", lambda h: {}, 0.0),
    "dropout": ("attention dropped(p: float = 0.1) { mask k <= q dropout p }", lambda h: {"p": 0.1, "seed": 17}, 0.70),
}  # fmt: skip


def faults(name: str) -> tuple[str, ...]:
    """What is wrong with a small call and its gradients, by float64."""
    spec = attncc.compile(SPECS[name][0]).spec
    run = check.compiled(spec, "cuda")
    return check.call(spec, run, "cuda", SMALL, "bf16", "contiguous", 0, {"p": 0.1}, True).faults


def timed(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, in turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            found[name].append(start.elapsed_time(end))
    return {name: statistics.median(ms) for name, ms in found.items()}


def measure(length: int, rounds: int) -> dict[str, Any]:
    made = [torch.randn(BATCH, HEADS, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    q, k, v = (x.requires_grad_() for x in made[:3])
    forward: dict[str, Callable[[], Any]] = {}
    backward: dict[str, Callable[[], Any]] = {}
    wrong = {}
    for name, (text, params, _) in SPECS.items():
        wrong[name] = faults(name)
        attn, given = attncc.compile(text), params(HEADS)
        forward[name] = partial(attn, *(x.detach() for x in (q, k, v)), **given)
        backward[name] = partial(torch.autograd.grad, attn(q, k, v, **given), (q, k, v), made[3], retain_graph=True)
        print(f"{name}: {'; '.join(wrong[name]) or 'right'}", flush=True)
    return {"wrong": wrong, "forward_ms": timed(forward, rounds), "backward_ms": timed(backward, rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    found = measure(asked.length, asked.rounds)
    found |= {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "attncc": attncc.__version__, "length": asked.length, "heads": HEADS, "head_dim": HEAD_DIM,
    }  # fmt: skip
    products = 4 * BATCH * HEADS * asked.length**2 * HEAD_DIM / 2
    print(f"{'':12s} forward ms  TFLOP/s  of plain (bar)  backward ms  of plain")
    for name, (_, _, bar) in SPECS.items():
        ms, back = found["forward_ms"], found["backward_ms"]
        print(f"{name:12s} {ms[name]:10.3f} {products / ms[name] / 1e9:8.0f} {ms['plain'] / ms[name]:9.2f} ({bar:.2f})"
              f" {back[name]:12.3f} {back['plain'] / back[name]:9.2f}")  # fmt: skip
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "normalisers.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
