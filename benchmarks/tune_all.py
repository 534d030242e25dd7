"""Tune the library's specs on this machine's GPU, and write the table of winners that comes with attncc.

    python benchmarks/tune_all.py [--specs causal,full] [--head-dims 128,64] [--lengths 1024,8192]
        [--passes forward,backward] [--candidates 4,2] [--quick] [--seconds 25] [--deadline 600] [--missing]
        [--out attncc/tuned]

Each length is tuned with 16384 rows in all; of lengths that share a bucket the plan is kept that is nearest to the best
in all of them, and the planner's own where another gains no more than 2%. What is named first is tuned first, and
written at once: a run may be ended at any time, and what it has not tuned stays as the table has it; `--missing` goes
on with what it lacks. `--quick` measures shorter, `--candidates` takes the planner's first few plans of each pass.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

import attncc
from attncc import frontend, pipeline, planner
from attncc.ir import AttentionSpec, Shape
from attncc.runtime import winners
from attncc.runtime.attention import Attention
from attncc.runtime.draw import Draw
from attncc.runtime.precompile import Workers
from attncc.runtime.search import OK, Found
from attncc.runtime.timing import Events
from attncc.runtime.tune import Contest, beside, job_of, tune

ROOT = Path(__file__).resolve().parent.parent
TOKENS = 16384  # rows of a call, batch times length
DEVICE = "cuda"
WIDTH = 2048  # columns of a row, heads times head size
AHEAD = 16  # searches whose plans are being compiled while one is measured
QUICK = {"span": 10.0, "rounds": 3}
WORTH = 0.98  # a plan takes the place of the planner's own where it takes less than this part of its time
VALUES = {"window": {"window": 1024}, "streaming": {"first": 4, "window": 1024}, "prefix": {"prefix": 1024},
          "softcap": {"cap": 50.0}, "chunked": {"chunk": 1024}}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One search for each length, of the plans of a bucket."""

    name: str
    direction: str
    head_dim: int
    lengths: tuple[int, ...]

    def shapes(self) -> Iterator[Shape]:
        heads = max(1, WIDTH // self.head_dim)
        for n in self.lengths:
            yield Shape(max(1, TOKENS // n), heads, heads, n, n, self.head_dim, self.head_dim, "bf16")

    def __str__(self) -> str:
        lengths = ", ".join(map(str, self.lengths))
        return f"{self.name:18s} {self.direction:8s} D{self.head_dim:<3d} S {lengths}"


def tasks(options: argparse.Namespace) -> list[Task]:
    """In the order in which passes, head sizes and specs were named."""
    lengths = [int(n) for n in options.lengths.split(",")]
    buckets: dict[int, list[int]] = {}
    for n in lengths:
        buckets.setdefault(planner.bucket_of(Shape(q_len=n)).q_len, []).append(n)
    return [Task(name, direction, int(d), tuple(several)) for direction in options.passes.split(",")
            for d in options.head_dims.split(",") for name in options.specs.split(",")
            for several in buckets.values()]  # fmt: skip


def contents(name: str, shape: Shape) -> dict[str, Any]:
    """Parameters as people would have them, where what is drawn at random would be a mask of another kind."""
    n, b, h = shape.k_len, shape.batch, shape.heads
    device, rows = DEVICE, torch.arange(shape.q_len, device=DEVICE)
    several = lambda x, *size: x.to(torch.int32).expand(*size, x.shape[-1]).contiguous()
    slopes = lambda: {"slopes": torch.exp2(-8.0 * torch.arange(1, h + 1, device=device) / h)}
    made: dict[str, Callable[[], dict[str, Any]]] = {
        "alibi": slopes,
        "window_alibi_sinks": lambda: slopes() | {"sinks": torch.zeros(h, device=device)},
        "document": lambda: {"doc": several(rows * 8 // n, b)},
        "padding": lambda: {"length": torch.full((b,), n, dtype=torch.int32, device=device)},
        "prefix_batch": lambda: {"prefix": torch.full((b,), n // 4, dtype=torch.int32, device=device)},
        "row_bounds": lambda: {"lo": several((rows - n // 8).clamp(min=0), b, h), "hi": several(rows + 1, b, h)},
        "global_tokens": lambda: {"is_global": (rows % 256 == 0).expand(b, n).contiguous()},
        "block_sparse": lambda: {"blocks": torch.rand(h, n // 64, n // 64, device=device) < 0.2},
        "neighborhood_2d": lambda: {"height": 32, "width": n // 32, "radius": 6},
        "relative_bias": lambda: {
            "bucket_of": torch.arange(-128, 129, device=device).abs().add(1).log2().mul(4).to(torch.int32),
            "table": torch.randn(32, h, device=device),
        },
        "dense_bias": lambda: {"bias": torch.randn(b, h, n, n, device=device)},
        "retnet": lambda: {"decay": -torch.log2(1 - torch.exp2(-5 - torch.arange(h, device=device).float()))},
        "sigmoid": lambda: {"shift": torch.full((h,), -math.log(n), device=device)},
    }  # fmt: skip
    return made[name]() if name in made else {}


def contest(task: Task, target: str, most: int | None) -> Contest:
    """The plans of a bucket, in the model's order; takes a second, and no GPU."""
    parsed = frontend.parse((ROOT / "specs" / f"{task.name}.attn").read_text(encoding="utf-8"))
    known = {p.name for p in parsed.spec.params}
    given = {n: x for n, x in VALUES.get(task.name, {}).items() if n in known}
    consts, values = pipeline.split_values(parsed.spec, given)
    bucket = planner.bucket_of(next(task.shapes()))
    made = Contest.of(pipeline.plan_parsed(parsed, consts, values, bucket, target), task.direction)
    made.candidates = made.candidates[:most]
    return made


def drawn(task: Task, spec: AttentionSpec, shape: Shape, values: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
    """A call: q, k, v, and the parameters by name."""
    params = contents(task.name, shape)
    if any(not p.const and p.name not in params for p in spec.params):
        params = Draw(spec, 0, values).params(shape, DEVICE) | values | params
    size = (shape.batch, shape.heads, shape.q_len, shape.head_dim)  # of all three: shapes() has it so
    generator = torch.Generator(DEVICE).manual_seed(0)
    qkv = [torch.randn(size, generator=generator, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    return qkv, {n: x for n, x in params.items() if n not in spec.free_axes}


def nearest(found: list[Found]) -> tuple[dict[str, Any], list[float]] | None:
    """The choices that lose least over several searches of a bucket, and their milliseconds in each."""
    times = [{t.candidate.plan: t.ms for t in f.trials if t.status == OK and t.ms} for f in found if f.best]
    if not times or len(times) < len(found):
        return None
    if len(found) == 1 and found[0].best is not None:  # who of those that are near one another was chosen
        best: Any = found[0].best.candidate.plan
    else:
        both = [p for p in times[0] if all(p in other for other in times)]
        best = min(both, key=lambda p: sum(t[p] / min(t.values()) for t in times), default=None)
    own = found[0].trials[0].candidate.plan
    if best is not None and all(own in t for t in times) and sum(t[best] / t[own] for t in times) > WORTH * len(times):
        best = own
    return None if best is None else (planner.choices_of(best), [t[best] for t in times])


def row(task: Task, contest: Contest, options: argparse.Namespace, workers: Workers) -> dict[str, Any] | None:
    """The table's row of a task; None where nothing was right."""
    spec, found = contest.planned.spec, []
    attention = Attention(contest.planned.parsed, contest.planned.consts)
    for shape in task.shapes():
        qkv, params = drawn(task, spec, shape, dict(contest.planned.values))
        timer = Events(False, **(QUICK if options.quick else {}))
        made = tune(attention, *qkv, params, passes=(task.direction,), budget=options.seconds, timer=timer,
                    workers=workers, contests={task.direction: contest})  # fmt: skip
        found.append(made.found[task.direction])
        tell(task, shape, found[-1])
    torch.cuda.empty_cache()
    kept = nearest(found)
    if kept is None:
        return None
    device = winners.device_of(torch.device("cuda", 0))
    assert device is not None
    bucket = planner.bucket_of(next(task.shapes()))
    where = winners.key(attention.text, device, bucket, task.direction)
    return {
        "key": winners.row_of(where), "spec": task.name, "pass": task.direction, "q_len": bucket.q_len,
        "head_dim": task.head_dim, "choices": kept[0],
        "ms": {str(n): round(ms, 5) for n, ms in zip(task.lengths, kept[1], strict=True)},
        "planner_ms": {str(n): f.first and f.first.ms and round(f.first.ms, 5)
                       for n, f in zip(task.lengths, found, strict=True)},
    }  # fmt: skip


def tell(task: Task, shape: Shape, found: Found) -> None:
    own, best = found.first and found.first.ms, found.best and found.best.ms
    gain = f"{own / best:.3f}" if own and best else "-"
    measured = sum(t.ms is not None for t in found.trials)
    print(f"{task} now {shape.q_len}: best {best and round(best, 4)} gain {gain} of {measured} "
          f"in {found.seconds:.1f} s {found.stopped}", flush=True)  # fmt: skip
    for trial in found.thrown_out[:3]:
        print(f"    {trial.status}: {trial.why[:150]}", flush=True)


def write(path: Path, device: winners.Device, made: list[Any]) -> None:
    """The table with these rows in place of its own, all at once: whoever ends this leaves the one or the other."""
    before = json.loads(path.read_text(encoding="utf-8"))["winners"] if path.exists() else []
    merged = {r["key"]: r for r in (*before, *made)}
    content = {
        "device": device.name, "capability": device.capability, "driver": device.driver, "torch": torch.__version__,
        "triton": triton.__version__, "attncc": attncc.__version__, "date": datetime.date.today().isoformat(),
        "winners": sorted(merged.values(), key=lambda r: (r["spec"], r["pass"], r["head_dim"], r["q_len"])),
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(".tmp")
    staged.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(staged, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specs", default=",".join(sorted(p.stem for p in (ROOT / "specs").glob("*.attn"))))
    parser.add_argument("--head-dims", default="128,64,256")
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--passes", default="forward,backward")
    parser.add_argument("--candidates", help="of each search, for each pass or for all; left out: all")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--processes", type=int, help="that compile; left out: one for each core")
    parser.add_argument("--seconds", type=float, default=25.0, help="for each search")
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds after which no search begins")
    parser.add_argument("--missing", action="store_true", help="only what the table lacks")
    parser.add_argument("--out", default=str(ROOT / "attncc" / "tuned"))
    options = parser.parse_args()
    import turns  # beside this script

    start = time.monotonic()
    device = winners.device_of(torch.device("cuda", 0))
    assert device is not None
    path = Path(options.out) / f"{device.name.replace(' ', '_')}.json"
    todo, most, workers = tasks(options), limits(options), Workers(options.processes)
    todo = lacking(todo, path) if options.missing else todo
    made: list[Any] = []
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1), get_context("spawn")) as pool:
        ahead = Ahead(todo, [pool.submit(contest, t, device.capability, most[t.direction]) for t in todo], workers)
        try:
            for i, task in enumerate(todo):
                if time.monotonic() - start > options.deadline:
                    print(f"out of time: {task} and what follows stay as they were", flush=True)
                    break
                try:
                    found = ahead.compiled(i)
                    with turns.GPU:
                        made += filter(None, [row(task, found, options, workers)])
                except Exception as fault:
                    print(f"{task}: {type(fault).__name__}: {fault}", flush=True)
                write(path, device, made)
        finally:
            workers.close()
            pool.shutdown(cancel_futures=True)
    print(f"{len(made)} winners in {time.monotonic() - start:.0f} s, in {path}")


def limits(options: argparse.Namespace) -> dict[str, int | None]:
    """How many plans of each pass are measured; None for all."""
    passes = options.passes.split(",")
    most = [int(n) for n in options.candidates.split(",")] if options.candidates else [None]
    return dict(zip(passes, most * len(passes) if len(most) == 1 else most, strict=True))


def lacking(todo: list[Task], path: Path) -> list[Task]:
    """Tasks that a table has no row of."""
    rows = json.loads(path.read_text(encoding="utf-8"))["winners"] if path.exists() else []
    there = {(r["spec"], r["pass"], r["head_dim"], r["q_len"]) for r in rows}
    bucket = lambda task: planner.bucket_of(next(task.shapes())).q_len
    return [t for t in todo if (t.name, t.direction, t.head_dim, bucket(t)) not in there]


@dataclass
class Ahead:
    """The contests of tasks, in their order, whose plans are being compiled before their turn comes."""

    todo: list[Task]
    planned: list[Future[Contest]]
    workers: Workers
    known: dict[tuple[str, str, int], Contest] = field(default_factory=dict)
    begun: int = 0

    def contest(self, i: int) -> Contest:
        """That of the i-th task; raises what planning it raised."""
        while self.begun < min(i + AHEAD, len(self.todo)):
            self.begun += 1
            if self.planned[self.begun - 1].exception() is None:  # else it is said when its turn comes
                self._compile(self._alike(self.begun - 1))
        return self._alike(i)

    def compiled(self, i: int) -> Contest:
        """The same, once its plans are compiled, or refused."""
        contest = self.contest(i)
        wait(self._compile(contest))
        return contest

    def _alike(self, i: int) -> Contest:
        """Buckets with the same plans share one contest, so that each plan is compiled and judged once."""
        task, made = self.todo[i], self.planned[i].result()
        first = self.known.setdefault((task.name, task.direction, task.head_dim), made)
        return first if first.candidates == made.candidates else made

    def _compile(self, contest: Contest) -> list[Future[None]]:
        """A search asks for the same, and waits for what is not done yet."""
        attention = Attention(contest.planned.parsed, contest.planned.consts)
        own = (job_of(attention, contest.planned, contest.direction, c) for c in contest.candidates)
        return [self.workers.submit(job) for job in (*beside(attention, contest), *own)]


if __name__ == "__main__":
    main()
