"""Tune the library's specs on this machine's GPU, and write the table of winners that comes with attncc.

    python benchmarks/tune_all.py [--specs causal,full] [--head-dims 64,128] [--lengths 1024,4096,16384]
        [--passes forward] [--seconds 25] [--deadline 600] [--out attncc/tuned]

Each length is tuned with 16384 rows in all. Of lengths that share a bucket the plan is kept that is nearest to the best
in all of them. What is not tuned in time, or in an earlier run, stays as the table has it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

import attncc
from attncc import frontend, pipeline, planner
from attncc.ir import Shape
from attncc.runtime import winners
from attncc.runtime.attention import Attention
from attncc.runtime.precompile import Workers
from attncc.runtime.search import OK, Found
from attncc.runtime.tune import candidates_of, job_of
from attncc.runtime.tune_drawn import tune_drawn

ROOT = Path(__file__).resolve().parent.parent
TOKENS = 16384  # rows of a call, batch times length
WIDTH = 2048  # columns of a row, heads times head size
VALUES = {"window": {"window": 1024}, "streaming": {"first": 4, "window": 1024}, "prefix": {"prefix": 1024},
          "softcap": {"cap": 50.0}, "chunked": {"chunk": 1024}}  # fmt: skip


def shapes(head_dim: int, lengths: list[int]) -> Iterator[Shape]:
    heads = max(1, WIDTH // head_dim)
    for length in lengths:
        yield Shape(max(1, TOKENS // length), heads, heads, length, length, head_dim, head_dim, "bf16")


def tensors(spec: Any, shape: Shape) -> dict[str, np.ndarray[Any, Any]]:
    """Contents that people would have, where what is drawn at random would be a mask of another kind."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for p in spec.tensors:
        if p.name in ("doc", "segment"):
            found[p.name] = np.tile(np.arange(shape.k_len) * 8 // shape.k_len, (shape.batch, 1)).astype(np.int32)
        elif p.name == "slopes":
            found[p.name] = np.exp2(-np.arange(1, shape.heads + 1) * 8.0 / shape.heads).astype(np.float32)
        elif p.name == "length":
            found[p.name] = np.full(shape.batch, shape.k_len, np.int32)
    return {n: x for n, x in found.items() if len(spec.param(n).axes) == x.ndim}


def planned_for(name: str, shape: Shape) -> pipeline.Planned:
    parsed = frontend.parse((ROOT / "specs" / f"{name}.attn").read_text(encoding="utf-8"))
    known = {p.name for p in parsed.spec.params}
    given = {n: x for n, x in VALUES.get(name, {}).items() if n in known}
    consts, values = pipeline.split_values(parsed.spec, given)
    return pipeline.plan_parsed(parsed, consts, values, shape, winners.target_of(torch.device("cuda", 0)))


def compile_ahead(workers: Workers, todo: list[tuple[str, str, int]], lengths: list[int]) -> None:
    """All candidates of all searches at once, so that no search waits for its own."""
    for name, direction, head_dim in todo:
        for bucket in dict.fromkeys(planner.bucket_of(s) for s in shapes(head_dim, lengths)):
            planned = planned_for(name, bucket)
            attention = Attention(planned.parsed, planned.consts)
            for candidate in candidates_of(planned, direction):
                workers.submit(job_of(attention, planned, direction, candidate))


def nearest(found: list[Found]) -> tuple[dict[str, Any], list[float]] | None:
    """The choices that lose least over several searches of a bucket, and their milliseconds in each."""
    times = [{t.candidate.plan: t.ms for t in f.trials if t.status == OK and t.ms} for f in found if f.best]
    if not times or len(times) < len(found):
        return None
    both = [p for p in times[0] if all(p in other for other in times)]
    best = min(both, key=lambda p: sum(t[p] / min(t.values()) for t in times), default=None)
    return None if best is None else (planner.choices_of(best), [t[best] for t in times])


def rows(
    name: str, direction: str, head_dim: int, lengths: list[int], seconds: float, workers: Workers
) -> Iterator[Any]:
    """The table's rows of one spec, pass and head size: one for each bucket."""
    by_bucket: dict[Shape, list[tuple[Shape, Found]]] = {}
    for shape in shapes(head_dim, lengths):
        planned = planned_for(name, shape)
        made = tune_drawn(planned, tensors(planned.spec, shape), (direction,), False, seconds, workers=workers)
        found = made.found[direction]
        by_bucket.setdefault(planner.bucket_of(shape), []).append((shape, found))
        own, best = found.first and found.first.ms, found.best and found.best.ms
        gain = f"{own / best:.3f}" if own and best else "-"
        print(f"{name:20s} {direction:8s} D{head_dim:<4d} S{shape.q_len:<6d} best {best} planner {own} gain {gain} "
              f"in {found.seconds:.1f} s, thrown out {len(found.thrown_out)}; {found.stopped}", flush=True)  # fmt: skip
        for trial in found.thrown_out[:2]:
            print(f"    {trial.status}: {trial.why[:150]}", flush=True)
        torch.cuda.empty_cache()
    device = winners.device_of(torch.device("cuda", 0))
    text = frontend.canonical(planned.spec)
    assert device is not None
    for bucket, several in by_bucket.items():
        kept = nearest([f for _, f in several])
        if kept is not None:
            where = winners.key(text, device, bucket, direction)
            yield {
                "key": winners.row_of(where), "spec": name, "pass": direction, "q_len": bucket.q_len,
                "head_dim": head_dim, "choices": kept[0],
                "ms": {str(s.q_len): round(ms, 5) for (s, _), ms in zip(several, kept[1], strict=True)},
                "planner_ms": {str(s.q_len): f.first and f.first.ms and round(f.first.ms, 5) for s, f in several},
            }  # fmt: skip


def write(path: Path, device: winners.Device, made: list[Any]) -> None:
    before = json.loads(path.read_text(encoding="utf-8"))["winners"] if path.exists() else []
    merged = {row["key"]: row for row in (*before, *made)}
    order = sorted(merged.values(), key=lambda r: (r["spec"], r["pass"], r["head_dim"], r["q_len"]))
    content = {
        "device": device.name, "capability": device.capability, "driver": device.driver, "torch": torch.__version__,
        "triton": triton.__version__, "attncc": attncc.__version__, "date": datetime.date.today().isoformat(),
        "winners": order,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specs", default=",".join(sorted(p.stem for p in (ROOT / "specs").glob("*.attn"))))
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--passes", default="forward,backward")
    parser.add_argument("--seconds", type=float, default=25.0, help="for each search")
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds after which no search begins")
    parser.add_argument("--out", default=str(ROOT / "attncc" / "tuned"))
    options = parser.parse_args()
    start = time.monotonic()
    device = winners.device_of(torch.device("cuda", 0))
    assert device is not None
    lengths = [int(n) for n in options.lengths.split(",")]
    todo = [(name, direction, int(d)) for direction in options.passes.split(",") for name in options.specs.split(",")
            for d in options.head_dims.split(",")]  # fmt: skip
    path = Path(options.out) / f"{device.name.replace(' ', '_')}.json"
    made: list[Any] = []
    workers = Workers()
    try:
        compile_ahead(workers, todo, lengths)
        for one in todo:
            if time.monotonic() - start > options.deadline:
                print(f"out of time: {one} and what follows stays as it was", flush=True)
                break
            try:
                made += rows(*one, lengths, options.seconds, workers)
            except Exception as fault:
                print(f"{one}: {type(fault).__name__}: {fault}", flush=True)
            write(path, device, made)
    finally:
        workers.close()
    print(f"{len(made)} winners in {time.monotonic() - start:.0f} s, in {path}")


if __name__ == "__main__":
    main()
