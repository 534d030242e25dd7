"""The warp-specialised forward kernels on this GPU, as planned and with the running maximum, beside cuDNN.

    python benchmarks/hopper.py [--out DIR] [--rows dense,variants,masks,short,keys] [--only TEXT,...] [--checks]

Kernels are compiled side by side first. Numbers are compared with float64 in rows of two heads, then calls are timed
one by one in random order, so that all see the same clocks of the GPU, through a cleared L2; the median counts.
TFLOP/s are over the pairs that the mask keeps. `--checks` compares whole results of small calls first: normalisers,
masks of keys alone, and rows whose scores grow late, in many more tiles than there are processors.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import forward
import peers
import records
import torch

import attncc
from attncc import pipeline, planner
from attncc.ir import Shape
from attncc.runtime import check, winners
from attncc.runtime.attention import Attention
from attncc.runtime.precompile import Job, Workers

ROUNDS, WARM = 30, 5
CLEARED = 256 * 2**20  # bytes, more than L2 holds
ROWS_AT_ONCE = 512
SMALL = (Shape(2, 4, 2, 300, 300, 128, 128), Shape(1, 3, 3, 1000, 1000, 64, 64), Shape(3, 16, 4, 700, 700, 128, 128))
NORMALISERS = (
    "",
    "softmax sink(e[h])",
    "softmax off_by_one",
    "softmax sigmoid(e[h])",
    "softmax relu(2)",
    "softmax none",
)
MASKS = ("k <= q", "k < n[b]", "k <= q and k < n[b]", "0 <= q - k < 100")


def short_rows() -> list[forward.Row]:
    """Calls that fill few tiles of rows, and an odd length."""
    sizes = ((128, 512), (128, 1000), (64, 512), (64, 1000))
    made = [forward.Row("short", "causal", 32, 16, s, d, mask=forward.causal, causal=True) for d, s in sizes]
    return made


def key_rows() -> list[forward.Row]:
    """A mask of keys alone, beside the Triton kernel."""
    length = 16384
    given = {"length": torch.tensor([length - 300], dtype=torch.int32, device="cuda")}
    return [forward.Row("keys", "padding", 1, 16, length, 128, given, lambda b, h, i, j: (j < length - 300) & (i >= 0))]


MADE = forward.MADE | {"short": short_rows, "keys": key_rows}


@dataclass(frozen=True)
class Form:
    """One plan of a row's kernel."""

    name: str
    attention: Attention
    words: str


def forms(row: forward.Row) -> Iterator[tuple[Form, Job]]:
    """The planner's choice, and the same with the running maximum where it has another reference."""
    attn = forward.compiled(row.spec, "fa3")
    target = winners.target_of(torch.device("cuda", 0))
    bucket = planner.bucket_of(
        Shape(row.batch, row.heads, row.heads, row.length, row.length, row.head_dim, row.head_dim)
    )
    planned = pipeline.plan_parsed(attn.parsed, attn.consts, {}, bucket, target)
    plans = planner.ranked(planned.spec, planned.shape, planned.target, planned.visits)
    running = next((p for p, _ in plans if p.reference == "running" and p.algorithm == "fa3"), None)
    root = str(attn.kernels.cache.root)
    if row.part == "keys":
        other = forward.compiled(row.spec, "fa2")
        yield Form("fa2", other, "fa2"), Job(other.parsed.text, {}, bucket, target, 32, {}, pipeline.FORWARD, root)
    for name, plan in (("attncc", planned.choice.plan), ("attncc_running", running)):
        if plan is None or (name != "attncc" and planned.choice.plan.reference == "running"):
            continue
        choices = planner.choices_of(plan)
        whole = planner.with_choices(planned.choice.plan, choices, planned.target)
        assert whole is not None  # both are legal
        tuned, own = {pipeline.FORWARD: choices}, replace(planned.choice, plan=whole)
        job = Job(attn.parsed.text, attn.consts, bucket, target, 32, tuned, pipeline.FORWARD, root)
        words = f"{plan.tile_q}x{plan.tile_k} {plan.reference}{', apart' if plan.apart else ''}"
        yield Form(name, attn.having(tuned, replace(planned, tuned=tuned, choice=own)), words), job


def timed(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median milliseconds of each."""
    clear = torch.empty(CLEARED, dtype=torch.int8, device="cuda")
    names: list[str] = list(calls)
    kept: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in names}
    order = random.Random(0)
    for _ in range(WARM + ROUNDS):
        order.shuffle(names)
        for name in names:
            clear.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            calls[name]()
            end.record()
            kept[name].append((begin, end))
    torch.cuda.synchronize()
    return {n: statistics.median(a.elapsed_time(b) for a, b in pairs[WARM:]) for n, pairs in kept.items()}


def measure(row: forward.Row, made: list[Form]) -> dict[str, Any]:
    q, k, v = forward.tensors(row)
    calls: dict[str, Callable[[], Any]] = {
        f.name: lambda f=f: f.attention(q, k, v, **row.params)
        for f in made  # type: ignore[misc]
    }
    off = max(forward.error(row, q, k, v, call()) for call in calls.values())
    if row.causal is not None:
        calls["cudnn"] = peers.cudnn(q, k, v, row.causal)
    ms = timed(calls)
    flops = 4 * forward.kept_pairs(row) * row.batch * row.heads * row.head_dim
    return {
        "row": row.name, "part": row.part, "plan": next(f.words for f in made if f.name == "attncc"), "error": off,
        "ms": {n: round(t, 4) for n, t in ms.items()},
        "tflops": {n: round(flops / t / 1e9, 1) for n, t in ms.items()},
    }  # fmt: skip


def checked(workers: Workers) -> None:
    """Print what differs from float64 among calls of many kinds."""
    texts = [
        f"attention c(e: f32[h], n: i32[b]) {{ mask {mask} {softmax} }} schedule {{ algorithm fa3 }}"
        for softmax in NORMALISERS for mask in MASKS
    ]  # fmt: skip
    made = [(attncc.compile(text), SMALL[i % len(SMALL)]) for i, text in enumerate(texts)]
    target = winners.target_of(torch.device("cuda", 0))
    jobs = [
        workers.submit(Job(a.parsed.text, {}, planner.bucket_of(s), target, 32, {}, pipeline.FORWARD,
                           str(a.kernels.cache.root)))
        for a, s in made
    ]  # fmt: skip
    wrong = 0
    for i, ((attn, shape), job) in enumerate(zip(made, jobs, strict=True)):
        job.exception()
        run = lambda q, k, v, attn=attn, **params: attn.both(q, k, v, params)
        row = check.call(attn.spec, run, "cuda", shape, "bf16", "contiguous", i, {})
        wrong += bool(row.faults)
        if row.faults:
            print(f"{texts[i]}: {row.faults}", flush=True)
    print(f"{len(texts)} small calls, {wrong} wrong", flush=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
    parser.add_argument("--rows", default="dense,variants,masks,short,keys")
    parser.add_argument("--only", default="", metavar="TEXT,...", help="rows whose name holds one of these texts")
    parser.add_argument("--checks", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = [row for _, _, row in forward.wanted(MADE, options.rows, options.only) if row.spec != "neighborhood_2d"]
    workers = Workers()
    made = [list(forms(row)) for row in rows]
    jobs = [[workers.submit(job) for _, job in several] for several in made]
    results: list[dict[str, Any]] = []
    for job in (job for several in jobs for job in several):
        job.exception()
    if options.checks:
        checked(workers)
    for row, several in zip(rows, made, strict=True):
        results.append(measure(row, [form for form, _ in several]))
        rates = "  ".join(f"{n} {t:6.1f}" for n, t in results[-1]["tflops"].items())
        print(f"{row.name:36s} {rates}   {results[-1]['plan']}, error {results[-1]['error']:.1e}", flush=True)
        records.write(Path(options.out) / "forward_fa3.json", results, [r.name for r in rows], algorithm="fa3")
        torch.cuda.empty_cache()
    workers.close()


if __name__ == "__main__":
    main()
