"""The warp-specialised forward kernels on this GPU, as planned and with the running maximum, beside cuDNN.

    python benchmarks/hopper.py [--out DIR] [--rows dense,variants,masks,short,keys,groups] [--only TEXT,...]
        [--checks] [--flex]

Kernels are compiled side by side first. Numbers are compared with float64 in rows of two heads, then calls are timed
in short turns, so that all see the same clocks of the GPU, through a cleared L2; short ones, which the host would slow
down, in CUDA graphs of ten. The median counts. TFLOP/s are over the pairs that the mask keeps. `--checks` compares
whole results of small calls first: normalisers, masks of keys alone, and rows whose scores grow late, in many more
tiles than there are processors. `--flex` times FlexAttention in the rows of short calls, with the
options that max-autotune chose.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forward
import peers
import records
import torch
import turns

import attncc
from attncc import pipeline, planner
from attncc.ir import KernelPlan, Shape
from attncc.planner import Candidate
from attncc.runtime import check, tune
from attncc.runtime.attention import Attention
from attncc.runtime.precompile import Job, Workers
from attncc.runtime.timing import Events

TARGET = "sm_90"
ROUNDS, SPAN = 8, 1.0  # turns of each call, and their milliseconds
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


def group_rows() -> list[forward.Row]:
    """As many heads of queries, with as many or fewer of keys and values."""
    return [
        forward.Row("groups", "causal", b, 32, s, 128, mask=forward.causal, causal=True, kv_heads=heads)
        for b, s in ((4, 4096), (1, 16384)) for heads in (32, 8)
    ]  # fmt: skip


MADE = forward.MADE | {"short": short_rows, "keys": key_rows, "groups": group_rows}


@dataclass(frozen=True)
class Form:
    """One plan of a row's kernel."""

    name: str
    attention: Attention
    words: str


def forms(row: forward.Row) -> Iterator[tuple[Form, Job]]:
    """The planner's choice, and the same with the running maximum where it has another reference."""
    attn, kv_heads = forward.compiled(row.spec, "fa3"), row.kv_heads or row.heads
    shape = Shape(row.batch, row.heads, kv_heads, row.length, row.length, row.head_dim, row.head_dim)
    planned = pipeline.plan_parsed(attn.parsed, attn.consts, {}, planner.bucket_of(shape), TARGET)
    plans = [plan for plan, _ in planner.ranked(planned.spec, planned.shape, planned.target, planned.visits)]
    running = [p for p in plans if p.reference == "running"][: planned.choice.plan.reference != "running"]
    if row.part == "keys":
        yield formed("fa2", forward.compiled(row.spec, "fa2"), planned.shape, None)
    for name, plan in (("attncc", planned.choice.plan), *(("attncc_running", p) for p in running)):
        yield formed(name, attn, planned.shape, plan)


def formed(name: str, attn: Attention, shape: Shape, plan: KernelPlan | None) -> tuple[Form, Job]:
    """An attention with a plan, or with its planner's choice, and what compiles it ahead."""
    planned = pipeline.plan_parsed(attn.parsed, attn.consts, {}, shape, TARGET)
    chosen = Candidate(plan or planned.choice.plan, None)
    words = f"{chosen.plan.tile_q}x{chosen.plan.tile_k} {chosen.plan.reference}{', apart' if chosen.plan.apart else ''}"
    form = Form(name, tune.having(attn, planned, pipeline.FORWARD, chosen), words)
    return form, tune.job_of(attn, planned, pipeline.FORWARD, chosen)


def measure(row: forward.Row, made: list[Form], clock: Events, flex: bool) -> dict[str, Any]:
    q, k, v = forward.tensors(row)
    calls: dict[str, Callable[[], Any]] = {
        f.name: lambda f=f: f.attention(q, k, v, **row.params)
        for f in made  # type: ignore[misc]
    }
    off = max(forward.error(row, q, k, v, call()) for call in calls.values())
    if row.causal is not None:
        calls["cudnn"] = peers.cudnn(q, k, v, row.causal)
    if flex and row.part == "short":
        calls["flex"] = peers.flex(q, k, v, row.mask, chosen=peers.CHOSEN)
    ms = dict(zip(calls, clock.in_turns(list(calls.values())), strict=True))
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
    jobs = [
        workers.submit(Job(a.parsed.text, {}, planner.bucket_of(s), TARGET, 32, {}, pipeline.FORWARD,
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
    parser.add_argument("--rows", default=",".join(MADE))
    parser.add_argument("--only", default="", metavar="TEXT,...", help="rows whose name holds one of these texts")
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--flex", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = [row for _, _, row in forward.wanted(MADE, options.rows, options.only) if row.spec != "neighborhood_2d"]
    order = [row.name for _, _, row in forward.wanted(MADE, ",".join(MADE), "")]
    workers = Workers()
    made = [list(forms(row)) for row in rows]
    jobs = [[workers.submit(job) for _, job in several] for several in made]
    results: list[dict[str, Any]] = []
    for job in (job for several in jobs for job in several):
        job.exception()
    if options.checks:
        checked(workers)
    clocks = {cold: Events(cold, SPAN, ROUNDS) for cold in (True, False)}
    clocks[False].SHORT = turns.HOST
    for row, several in zip(rows, made, strict=True):
        clock = clocks[row.part != "short"]
        with turns.GPU:
            results.append(measure(row, [form for form, _ in several], clock, options.flex))
        rates = "  ".join(f"{n} {t:6.1f}" for n, t in results[-1]["tflops"].items())
        print(f"{row.name:36s} {rates}   {results[-1]['plan']}, error {results[-1]['error']:.1e}", flush=True)
        records.write(Path(options.out) / "forward_fa3.json", results, order, algorithm="fa3")
        torch.cuda.empty_cache()
    workers.close()


if __name__ == "__main__":
    main()
