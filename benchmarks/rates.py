"""How fast every spec of the library goes over the tiles that it visits, beside plain causal, at one shape.

    python benchmarks/rates.py [--specs causal,window] [--out DIR] [--length 16384]

A rate is 4 * pairs * head size / time, over all pairs of visited tiles; the share of them that the mask keeps stands
beside it. Causal is timed in turns with each spec, and the ratio of both rates counts.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import records
import torch
import triton
import turns

import attncc
from attncc import analysis, pipeline, planner
from attncc.ir import Shape
from attncc.runtime import winners
from attncc.runtime.precompile import Job, Workers

SPECS = Path(__file__).parent.parent / "specs"
HEADS, HEAD_DIM = 16, 128
ROUNDS = 3


def params(length: int) -> dict[str, dict[str, Any]]:
    """Calls that people make of each spec, tensors on the GPU."""
    place: dict[str, Any] = {"device": "cuda"}
    row, head = torch.arange(length, **place), torch.arange(HEADS, **place)
    slopes = torch.exp2(-(head + 1) * 8.0 / HEADS)
    blocks = torch.rand(HEADS, length // 64, length // 64, **place) < 0.1
    lo, hi = (x.int().expand(1, HEADS, length).contiguous() for x in ((row - 1024).clamp(min=0), row + 1))
    side = int(length**0.5)
    return {
        "alibi": {"slopes": slopes}, "block_sparse": {"blocks": blocks | torch.eye(length // 64, **place).bool()},
        "causal_dropout": {"seed": 0}, "document": {"doc": (row // 2048).int()[None]},
        "global_tokens": {"is_global": (row % 4096 == 5)[None], "side": 512},
        "gpt_oss": {"window": 1024, "sinks": torch.zeros(HEADS, **place).bfloat16()},
        "neighborhood_2d": {"height": side, "width": side, "radius": 8},
        "padding": {"length": torch.tensor([length - 300], dtype=torch.int32, **place)}, "prefix": {"prefix": 4096},
        "prefix_batch": {"prefix": torch.tensor([4096], dtype=torch.int32, **place)},
        "relative_bias": {
            "bucket_of": (torch.arange(257, **place) // 8).int(), "table": torch.randn(33, HEADS, **place),
        },
        "retnet": {"decay": 0.1 * slopes}, "row_bounds": {"lo": lo, "hi": hi},
        "sigmoid": {"shift": torch.full((HEADS,), -9.0, **place)},
        "tree": {"ancestor": torch.full((1, length, length // 32), -1, dtype=torch.int32, **place)},
        "window_alibi_sinks": {"slopes": slopes, "sinks": torch.zeros(HEADS, **place)},
    }  # fmt: skip


def call_of(name: str, length: int) -> dict[str, Any]:
    if name == "dense_bias":
        return {"bias": torch.randn(1, HEADS, length, length, device="cuda")}
    return params(length).get(name, {})


def visited(attn: Any, shape: Shape, given: dict[str, Any]) -> tuple[str, int, int | None]:
    """The plan in words, the pairs of the tiles that one head visits, and those that the mask keeps."""
    place = winners.target_of(torch.device("cuda", 0)), winners.device_of(torch.device("cuda", 0))
    planned = attn.kernels.planned(place, planner.bucket_of(shape), 32)
    return counted(planned, shape, given)


def counted(planned: pipeline.Planned, shape: Shape, given: dict[str, Any]) -> tuple[str, int, int | None]:
    spec, plan = planned.spec, planned.choice.plan
    values = {p.name: p.default for p in spec.scalars} | {
        n: x.float().cpu().numpy() if torch.is_tensor(x) and x.dtype == torch.bfloat16 else
        x.cpu().numpy() if torch.is_tensor(x) else x for n, x in given.items() if n in {p.name for p in spec.params}
    }  # fmt: skip
    known = {n: x for n, x in values.items() if not isinstance(x, np.ndarray) or x.nbytes < 2**32}
    by_head = {p.name: p.axes.index("h") for p in spec.tensors if "h" in p.axes}
    needed = {n: np.take(x, [0], by_head[n]) if n in by_head else x for n, x in known.items()}
    shape = replace(shape, heads=1, kv_heads=1)  # whose masks are alike
    tiles = analysis.tile_counts(spec, shape, plan.tile_q, plan.tile_k, needed, planned.visits)
    count = 0 if tiles is None else tiles["partial"] + tiles["full"]
    words = f"{plan.algorithm} {plan.tile_q}x{plan.tile_k} {plan.reference}"
    return words, count * plan.tile_q * plan.tile_k, analysis.kept_pairs(spec, shape, needed)


def timed(calls: list[Callable[[], Any]]) -> list[float]:
    """Median milliseconds of each, in turns."""
    rounds: list[list[float]] = [[] for _ in calls]
    for call in calls:
        triton.testing.do_bench(call, warmup=10, rep=10)
    for _ in range(ROUNDS):
        for kept, call in zip(rounds, calls, strict=True):
            kept.append(triton.testing.do_bench(call, warmup=4, rep=25, return_mode="median"))
    return [statistics.median(kept) for kept in rounds]


def measure(name: str, length: int, qkv: list[torch.Tensor], causal: Callable[[], Any], own: int) -> dict[str, Any]:
    attn, given = attncc.load(SPECS / f"{name}.attn"), call_of(name, length)
    attn(*qkv, **given)
    words, pairs, kept = visited(attn, Shape(1, HEADS, HEADS, length, length, HEAD_DIM, HEAD_DIM, "bf16"), given)
    plain, ms = timed([causal, lambda: attn(*qkv, **given)])
    rate, causal_rate = (4 * HEADS * HEAD_DIM * n / t / 1e9 for n, t in ((pairs, ms), (own, plain)))
    return {
        "part": "rates", "row": f"{name} D{HEAD_DIM} H{HEADS} S{length}", "plan": words, "ms": round(ms, 4),
        "tflops": round(rate, 1), "causal": round(causal_rate, 1), "ratio": round(rate / causal_rate, 3),
        "kept": None if kept is None else round(kept / pairs, 3),
    }  # fmt: skip


def warm(names: list[str], length: int) -> None:
    """Compile the kernels of all specs side by side."""
    workers, target = Workers(), winners.target_of(torch.device("cuda", 0))
    shape = planner.bucket_of(Shape(1, HEADS, HEADS, length, length, HEAD_DIM, HEAD_DIM, "bf16"))
    jobs = []
    for name in names:
        attn = attncc.load(SPECS / f"{name}.attn")
        root = str(attn.kernels.cache.root)
        jobs.append(workers.submit(Job(attn.text, {}, shape, target, 32, {}, pipeline.FORWARD, root)))
    for name, job in zip(names, jobs, strict=True):
        if job.exception() is not None:
            print(f"{name}: {job.exception()}", flush=True)
    workers.close()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specs", default=",".join(sorted(p.stem for p in SPECS.glob("*.attn"))))
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
    options = parser.parse_args()
    torch.manual_seed(0)
    names, length = options.specs.split(","), options.length
    warm(sorted({*names, "causal"}), length)
    shape = (1, HEADS, length, HEAD_DIM)
    qkv = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    attn = attncc.load(SPECS / "causal.attn")
    attn(*qkv)
    _, own, _ = visited(attn, Shape(1, HEADS, HEADS, length, length, HEAD_DIM, HEAD_DIM, "bf16"), {})
    rows: list[dict[str, Any]] = []
    for name in names:
        try:
            with turns.GPU:
                rows.append(measure(name, length, qkv, lambda: attn(*qkv), own))
        except Exception as fault:
            print(f"{name}: {type(fault).__name__}: {fault}", flush=True)
            continue
        r = rows[-1]
        print(f"{name:20s} {r['plan']:28s} {r['ms']:8.3f} ms  {r['tflops']:6.1f} of causal's {r['causal']:6.1f}: "
              f"{r['ratio']:.2f}, kept {r['kept']}", flush=True)  # fmt: skip
        torch.cuda.empty_cache()
    records.write(Path(options.out) / "rates.json", rows)


if __name__ == "__main__":
    main()
