"""What normalisers, dropout and what rows return cost beside plain softmax, causal, on this GPU; all are checked first.

    python benchmarks/normalisers.py [--out DIR] [--length N] [--rounds N] [--only NAME,…] [--algorithm NAME,…]
        [--forward]

Kernels are compiled side by side first, then timed in turns, medians of rounds, forward and backward. They are compared
with the plain softmax of the same run, by the algorithm that the planner chooses; what returns more of each row, which
fa2 alone does, with that of fa2. Writes normalisers.json where --out says.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import turns

import attncc
from attncc import pipeline
from attncc.ir import Shape
from attncc.runtime import check
from attncc.runtime.cache import Cache
from attncc.runtime.precompile import Job, Workers

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
    "sparsemax": ("attention simplex { mask k <= q softmax sparsemax }", lambda h: {}, 0.0),
    "entmax15": ("attention halfway { mask k <= q softmax entmax(1.5) }", lambda h: {}, 0.25),
    "entmax15_near": (  # weights lie near the row's own key: most tiles have none
        "attention near(c: float = 0.02) { mask k <= q score s - c * (q - k) softmax entmax(1.5) }",
        lambda h: {"c": 0.02}, 0.0,
    ),
    "sparsemax_near": (
        "attention close(c: float = 0.02) { mask k <= q score s - c * (q - k) softmax sparsemax }",
        lambda h: {"c": 0.02}, 0.0,
    ),
    "dropout": ("attention dropped(p: float = 0.1) { mask k <= q dropout p }", lambda h: {"p": 0.1, "seed": 17}, 0.70),
    "max": ("attention top { mask k <= q } layout { rows max }", lambda h: {}, 0.97),
    "entropy": ("attention spread { mask k <= q } layout { rows entropy }", lambda h: {}, 0.97),
    "pairs": ("attention counted { mask k <= q } layout { rows pairs }", lambda h: {}, 0.97),
}  # fmt: skip


BESIDE = dict.fromkeys(("max", "entropy", "pairs"), "plain@fa2")  # what a row is compared with, where not with plain


def text_of(name: str) -> str:
    """The spec of a row, NAME or NAME@ALGORITHM where that is pinned."""
    spec, _, algorithm = name.partition("@")
    return SPECS[spec][0] + (f" schedule {{ algorithm {algorithm} }}" if algorithm else "")


def warm(names: Sequence[str], length: int, passes: Sequence[str]) -> None:
    """Compile what the rows need, side by side; what fails is told, and fails again where it is called."""
    workers, shape = Workers(), Shape(BATCH, HEADS, HEADS, length, length, HEAD_DIM, HEAD_DIM, "bf16")
    major, minor = torch.cuda.get_device_capability()
    root, target = str(Cache().root), f"sm_{major}{minor}"
    jobs = {
        (name, size, direction): workers.submit(Job(text_of(name), {}, size, target, 32, {}, direction, root))
        for name in names for size in (shape, SMALL) for direction in passes
    }  # fmt: skip
    for (name, _, direction), job in jobs.items():
        if fault := job.exception():
            print(f"{name} {direction}: {fault}", flush=True)
    workers.close()


def faults(name: str, gradients: bool) -> tuple[str, ...]:
    """What is wrong with a small call and its gradients, by float64."""
    spec = attncc.compile(text_of(name)).spec
    run = check.compiled(spec, "cuda")
    return check.call(spec, run, "cuda", SMALL, "bf16", "contiguous", 0, {"p": 0.1}, gradients).faults


def timed(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, in turns; the host is ahead of the GPU, so that what it takes does not count."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    for _ in range(rounds):
        next(iter(calls.values()))()
        events = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in calls}
        for name, call in calls.items():
            events[name][0].record()
            call()
            events[name][1].record()
        torch.cuda.synchronize()
        for name, (start, end) in events.items():
            found[name].append(start.elapsed_time(end))
    return {name: statistics.median(ms) for name, ms in found.items()}


def measure(names: Sequence[str], length: int, rounds: int, backwards: bool) -> dict[str, Any]:
    made = [torch.randn(BATCH, HEADS, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    q, k, v = (x.requires_grad_() for x in made[:3])
    forward: dict[str, Callable[[], Any]] = {}
    backward: dict[str, Callable[[], Any]] = {}
    wrong = {}
    for name in names:
        try:
            wrong[name] = faults(name, backwards)
            attn, given = attncc.compile(text_of(name)), SPECS[name.partition("@")[0]][1](HEADS)
            forward[name] = partial(attn, *(x.detach() for x in (q, k, v)), **given)
            if backwards:
                out = attn(q, k, v, **given)
                backward[name] = partial(torch.autograd.grad, out, (q, k, v), made[3], retain_graph=True)
            forward[name]()
            torch.cuda.synchronize()
        except Exception as fault:  # the others are measured all the same
            wrong[name] = (f"{type(fault).__name__}: {fault}",)
            forward.pop(name, None), backward.pop(name, None)
        print(f"{name}: {'; '.join(wrong[name]) or 'right'}", flush=True)
    with turns.GPU:
        back = timed(backward, rounds) if backward else {}
        return {"wrong": wrong, "forward_ms": timed(forward, rounds), "backward_ms": back}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default=",".join(SPECS), help="these rows, beside the plain softmax")
    parser.add_argument("--algorithm", default="", help="rows with these algorithms pinned too")
    parser.add_argument("--forward", action="store_true", help="the forward pass alone")
    asked = parser.parse_args()
    pinned = [f"{n}@{a}" for a in asked.algorithm.split(",") if a for n in asked.only.split(",")]
    wanted = asked.only.split(",")
    names = list(dict.fromkeys(("plain", *(BESIDE[n] for n in wanted if n in BESIDE), *wanted, *pinned)))
    warm(names, asked.length, ("forward",) if asked.forward else ("forward", pipeline.BACKWARD))
    found = measure(names, asked.length, asked.rounds, not asked.forward)
    found |= {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "attncc": attncc.__version__, "length": asked.length, "heads": HEADS, "head_dim": HEAD_DIM,
    }  # fmt: skip
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "normalisers.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    show(found)


def show(found: dict[str, Any]) -> None:
    """A line for each row, forward and backward."""
    products = 4 * BATCH * HEADS * found["length"] ** 2 * HEAD_DIM / 2
    print(f"{'':16s} forward ms  TFLOP/s  of plain (bar)  backward ms  of plain")
    for name, ms in found["forward_ms"].items():
        back, bar = found["backward_ms"], SPECS[name.partition("@")[0]][2]
        beside = BESIDE.get(name, "plain")
        more = f"{back[name]:12.3f} {back[beside] / back[name]:9.2f}" if {name, beside} <= {*back} else ""
        part = found["forward_ms"][beside] / ms
        print(f"{name:16s} {ms:10.3f} {products / ms / 1e9:8.0f} {part:9.2f} ({bar:.2f}){more}")


if __name__ == "__main__":
    main()
