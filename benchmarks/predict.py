"""Predicted and measured time of both passes, over specs, head sizes and shapes, on this GPU.

    python benchmarks/predict.py [--out DIR] [--only TEXT] [--head-dims 64,128] [--json NAME] [--algorithm NAME]

The prediction is that of `attncc explain`; the bar is a median error of 25%. Kernels are compiled side by side first.
Short calls are timed in a CUDA graph, so that the host plays no part.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import triton
import turns

import attncc
from attncc import analysis, frontend, pipeline
from attncc.commands.costs import forward_costs, visited_tiles
from attncc.ir import KernelPlan, Schedule
from attncc.planner import backward_costs, special_functions
from attncc.runtime.attention import Attention
from attncc.runtime.bench import drawn

SPECS = Path(__file__).parent.parent / "specs"
SHAPES = ((16, 16, 1024), (4, 16, 4096), (1, 16, 16384), (1, 16, 2048))  # batch, heads, length
PARAMS: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {}, "window": {"window": 1024}, "alibi": {}, "softcap": {}, "prefix": {"prefix": 500},
    "streaming": {}, "document": {}, "gpt_oss": {}, "sigmoid": {}, "chunked": {"chunk": 1024}, "block_causal": {},
}  # fmt: skip
TARGET = "sm_90"


@dataclass(frozen=True)
class Row:
    """A spec at a head size and a shape."""

    spec: str
    head_dim: int
    batch: int
    heads: int
    length: int
    algorithm: str | None = None
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.spec} D{self.head_dim} B{self.batch} H{self.heads} S{self.length}"

    @property
    def planned(self) -> pipeline.Planned:
        made, _ = plans_of(self.spec, self.head_dim, self.algorithm)
        sizes = {"batch": self.batch, "heads": self.heads, "kv_heads": self.heads, "q_len": self.length,
                 "k_len": self.length, "head_dim": self.head_dim}  # fmt: skip
        return replace(made, shape=pipeline.shape_of(sizes))


@cache
def plans_of(name: str, head_dim: int, algorithm: str | None) -> tuple[pipeline.Planned, KernelPlan]:
    """Of both passes, for every long call."""
    parsed = frontend.parse((SPECS / f"{name}.attn").read_text(encoding="utf-8"), name)
    if algorithm:
        parsed = replace(parsed, spec=replace(parsed.spec, schedules=(Schedule(algorithm=algorithm),)))
    consts, values = pipeline.split_values(parsed.spec, PARAMS[name])
    made = pipeline.plan_parsed(parsed, consts, values, pipeline.shape_of({"head_dim": head_dim}), TARGET)
    return made, pipeline.backward(made).choice.plan


def contents(row: Row) -> dict[str, Any]:
    """Documents of a quarter of the length, slopes as people have them; other tensors are drawn."""
    if row.spec == "alibi":
        return {"slopes": torch.exp2(-8.0 * torch.arange(1, row.heads + 1) / row.heads)}
    if row.spec != "document":
        return {}
    return {"doc": (torch.arange(row.length) // (row.length // 4)).to(torch.int32).expand(row.batch, -1)}


def predicted(planned: pipeline.Planned, back: KernelPlan, values: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of each pass."""
    plan, shape = planned.choice.plan, planned.shape
    counts = analysis.tile_counts(planned.spec, shape, plan.tile_q, plan.tile_k, values, planned.visits)
    visited = None if counts is None else counts["partial"] + counts["full"]
    found = {"forward": forward_costs(planned, visited).predicted_ms}
    tiles, spread = visited_tiles(planned, back, values), analysis.spread(planned.spec, planned.visits)
    found["backward"] = backward_costs(back, shape, planned.target, tiles, spread, special_functions(planned.spec))[
        0
    ].predicted_ms
    return found


def calls(row: Row, planned: pipeline.Planned) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is timed by pass, and what the parameters are as arrays and numbers."""
    attention = Attention(planned.parsed, planned.consts, tuned={})
    call = drawn(attention, planned, planned.shape, contents(row), "cuda")
    read = {n: x for n, x in call.params.items() if not isinstance(x, torch.Tensor) or not x.is_floating_point()}
    values = {n: x.cpu().numpy() if isinstance(x, torch.Tensor) else x for n, x in read.items()}
    made = {
        "forward": lambda: attention(call.q, call.k, call.v, **call.params),
        "backward": turns.gradients(attention, call.q, call.k, call.v, call.params),
    }
    return made, values


def warm(row: Row) -> str:
    """Compile both passes; what is compiled stays in the cache."""
    try:
        made, _ = calls(row, row.planned)
        for call in made.values():
            call()
        torch.cuda.synchronize()
    except Exception as fault:  # told, and the row is left out
        return str(fault).strip().splitlines()[0][:100]
    return ""


def measure(row: Row) -> dict[str, Any]:
    planned = row.planned
    made, values = calls(row, planned)
    guess = predicted(planned, plans_of(row.spec, row.head_dim, row.algorithm)[1], values)
    found: dict[str, Any] = {"row": row.name, "algorithm": planned.choice.plan.algorithm}
    for name, call in made.items():
        with turns.GPU:
            ms = turns.milliseconds(call)
        found[name] = {"ms": round(ms, 4), "predicted_ms": round(guess[name], 4)}
    return found


def told(result: dict[str, Any], name: str) -> str:
    ms, guess = result[name]["ms"], result[name]["predicted_ms"]
    return f"{name} {ms:8.4f} predicted {guess:8.4f} ({guess / ms:.2f})"


def errors(rows: list[dict[str, Any]], name: str) -> list[float]:
    return [abs(r[name]["predicted_ms"] / r[name]["ms"] - 1) for r in rows if name in r]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
    parser.add_argument("--only", default="", help="rows whose name holds this text")
    parser.add_argument("--head-dims", default="64,128")
    parser.add_argument("--json", default="predict.json")
    parser.add_argument("--algorithm", help="pinned in every spec; the planner's choice where it is left out")
    options = parser.parse_args()
    dims = [int(d) for d in options.head_dims.split(",")]
    rows = [Row(spec, d, *shape, options.algorithm, params) for d in dims for spec, params in PARAMS.items()
            for shape in SHAPES]  # fmt: skip
    rows = [row for row in rows if options.only in row.name]
    kinds = list({(row.spec, row.head_dim): replace(row, batch=1, heads=1, length=512) for row in rows}.values())
    start = time.perf_counter()
    with ProcessPoolExecutor(12, mp_context=multiprocessing.get_context("spawn")) as pool:
        failed = {(k.spec, k.head_dim): why for k, why in zip(kinds, pool.map(warm, kinds), strict=True) if why}
    print(f"compiled in {time.perf_counter() - start:.0f} s", failed, flush=True)
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "attncc": attncc.__version__, "date": datetime.date.today().isoformat(), "rows": [],
    }  # fmt: skip
    for row in rows:
        if (row.spec, row.head_dim) in failed:
            continue
        try:
            result = measure(row)
        except Exception as fault:  # told; the others go on
            print(f"{row.name}: {str(fault).strip().splitlines()[0][:100]}", flush=True)
            continue
        record["rows"].append(result)
        shown = "  ".join(map(partial(told, result), ("forward", "backward")))
        print(f"{row.name:34s} {result['algorithm']:4s} {shown}", flush=True)
        torch.cuda.empty_cache()
        Path(options.out).mkdir(parents=True, exist_ok=True)
        (Path(options.out) / options.json).write_text(json.dumps(record, indent=1) + "\n")
    for name in ("forward", "backward"):
        found = errors(record["rows"], name)
        if found:
            print(f"{name}: median error {100 * statistics.median(found):.1f}%, of {len(found)}")


if __name__ == "__main__":
    main()
