"""The planner's untuned first choice beside the fastest plan of a grid, in dense rows and variants, on this GPU.

    python benchmarks/planner.py [--out DIR] [--rows dense,variants] [--only TEXT,...] [--json NAME]
        [--seconds SECONDS] [--every] [--within TIMES] [--rest FILE,... [--again NAME]] [--algorithm NAME]

The grid: every legal fa2 plan with 64 or 128 rows, 32, 64 or 128 keys, two to four stages, 4 warps (8 too, where there
are 128 rows, with and without a cap on registers) and each reference of the exponentials; and every legal schedule of
the warp-specialised kernel. `--every` takes every plan that the planner ranks instead; `--within` leaves out those to
which the model gives more than so many times its least time. `--rest` takes the times that these records have, and
measures the other plans, the first choice and the fastest of what is known; `--again` measures those of an algorithm
whose kernels have changed since. Each is compared with float64, then timed, briefly where it is far from the fastest so
far; the first choice and the fastest are timed again in turns. Rows of one spec and head size share their kernels and
are measured by a process of their own; the GPU is had by one at a time. What is measured is written as it comes, so
that a run that was ended goes on with `--rest` and its record. The bar is 0.9.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import queue
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import forward
import records
import torch
import turns

from attncc import frontend, pipeline, planner
from attncc.ir import KernelPlan, Shape
from attncc.planner import Candidate
from attncc.planner.search import ranked, specialised
from attncc.runtime.attention import Attention
from attncc.runtime.precompile import Workers
from attncc.runtime.timing import Events
from attncc.runtime.tune import having, job_of

TARGET = "sm_90"
WRONG = 1e-2  # relative error of a 16-bit result that is no rounding
SMALL = 1280  # rows of a call that loads a kernel
FINALISTS = 3  # of the grid, that meet the first choice
FAR = 1.5  # times the fastest, beyond which a brief time is enough
KEPT = 10.0  # seconds after which what was measured is written
Family = tuple[str, str, int]  # part, spec, head size
Known = dict[str, dict[str, float]]  # milliseconds of plans by row


def planned_of(family: Family) -> pipeline.Planned:
    """The model's plan for the long calls of a spec and head size."""
    _, spec, d = family
    parsed = frontend.parse((forward.SPECS / f"{spec}.attn").read_text(encoding="utf-8"), spec)
    shape = planner.bucket_of(Shape(head_dim=d, head_dim_v=d, dtype="bf16"))
    return pipeline.plan_parsed(parsed, {}, {}, shape, TARGET)


def grid(planned: pipeline.Planned, every: bool, algorithm: str = "") -> list[Candidate]:
    """The first choice, then the warp-specialised schedules, most of which the model has no times for, then the other
    plans in the order of its times; those of one algorithm, where that is asked for."""
    found = dict(ranked(planned.spec, planned.shape, planned.target, planned.visits))
    first = next(iter(found))
    others = specialised(planned.spec, planned.shape, planned.target, planned.visits)
    ahead = [p for p in found if every or usual(p)]
    whole = dict.fromkeys((first, *others, *ahead))
    return [Candidate(p, found.get(p)) for p in whole if not algorithm or p.algorithm == algorithm or p == first]


def usual(plan: KernelPlan) -> bool:
    """Whether a plan of fa2 is in the grid."""
    if plan.algorithm != "fa2":
        return True
    few = plan.warps == 4 and not plan.max_registers
    many = plan.warps == 8 and plan.tile_q >= 128
    return plan.tile_q >= 64 and plan.tile_k >= 32 and plan.stages >= 2 and (few or many)


def rest(candidates: list[Candidate], known: list[dict[str, float]]) -> list[Candidate]:
    """Those that have no time in one of these rows, behind the first choice, the first of each algorithm and its
    fastest in each row. `known`: milliseconds of plans, a row each."""
    named = {told(c): c for c in candidates}
    firsts = {c.plan.algorithm: told(c) for c in reversed(candidates)}
    kept = {told(candidates[0]), *firsts.values()}
    for times in known:
        for algorithm in firsts:
            mine = [name for name in times if name in named and named[name].plan.algorithm == algorithm]
            kept |= set(sorted(mine, key=lambda name: times[name])[:FINALISTS])
    measured = set.intersection(*map(set, known))
    return [c for n, c in named.items() if n in kept] + [c for n, c in named.items() if n not in kept | measured]


def beyond(candidates: list[Candidate], within: float) -> set[str]:
    """Names of those to which the model gives more than so many times its least time, but for the first of each
    algorithm."""
    firsts = {c.plan.algorithm: told(c) for c in reversed(candidates)}
    known = {told(c): c.predicted_ms for c in candidates if c.predicted_ms is not None}
    return {name for name, ms in known.items() if ms > within * min(known.values())} - set(firsts.values())


class Contest:
    """Every plan of the grid in every row of a family."""

    def __init__(
        self, family: Family, only: str, every: bool, algorithm: str, known: Known, within: float = math.inf
    ) -> None:
        self.family, self.planned = family, planned_of(family)
        self.candidates = grid(self.planned, every, algorithm)
        self.names, self.beyond = {told(c) for c in self.candidates}, beyond(self.candidates, within)
        self.known = {row: {n: ms for n, ms in times.items() if n in self.names} for row, times in known.items()}
        self.attention = Attention(self.planned.parsed, self.planned.consts, tuned={})
        rows = forward.wanted({family[0]: forward.MADE[family[0]]}, family[0], only)
        self.rows = [row for _, _, row in rows if (row.spec, row.head_dim) == family[1:]]
        if any(row.name in known for row in self.rows):
            self.candidates = rest(self.candidates, [self.known.get(row.name, {}) for row in self.rows])
        self.candidates = [c for c in self.candidates if told(c) not in self.beyond]
        self.times: dict[str, dict[Candidate, float]] = {row.name: {} for row in self.rows}
        self.wrong: list[str] = []
        self.compiled: dict[Candidate, Attention] = {}
        self.clock = Events(False, span=8.0, rounds=5)

    def measure(self, candidate: Candidate) -> None:
        """Compare with float64 in the first row; time in all."""
        attn = self.compiled[candidate] = having(self.attention, self.planned, pipeline.FORWARD, candidate)
        small = shortened(self.rows[0])
        with torch.no_grad():  # loads the kernel, while another has the GPU
            attn(*forward.tensors(small), **small.params)
        with torch.no_grad(), turns.GPU:
            for i, row in enumerate(self.rows):
                torch.manual_seed(0)
                q, k, v = forward.tensors(row)
                off = forward.error(row, q, k, v, attn(q, k, v, **row.params)) if i == 0 else 0.0
                if not off < WRONG:
                    self.wrong.append(f"{told(candidate)}: off by {off:.1e}")
                    return
                self.times[row.name][candidate] = self._time(row, self._call(candidate, row, q, k, v))

    def _time(self, row: forward.Row, call: Any) -> float:
        fastest = min((*self.times[row.name].values(), *self.known.get(row.name, {}).values()), default=math.inf)
        short = brief(call, FAR * fastest)
        return short if short > FAR * fastest else self.clock.time(call)

    def results(self, left: int, failed: list[str], ended: bool = True) -> list[dict[str, Any]]:
        """A record of each row; at the end first choice and finalists are timed in turns."""
        made = []
        for row in self.rows:
            times = self.times[row.name]
            if not times:
                continue
            first = self.candidates[0]
            best = sorted(times, key=lambda c: times[c])
            fa2 = [c for c in self.candidates if c in times and c.plan.algorithm == "fa2"]
            of_fa2 = fa2[:1] + [c for c in best if c in fa2][:1]
            meet = list(dict.fromkeys([c for c in (first,) if c in times] + best[:FINALISTS] + of_fa2))
            final = self._in_turns(row, meet) if ended else {c: times[c] for c in meet}
            winner = min(final, key=lambda c: final[c])
            every = dict(self.known.get(row.name, {}))
            for c, ms in (times | final).items():  # what held up a call before may not hold it up today
                every[told(c)] = min(round(ms, 4), every.get(told(c), math.inf))
            made.append({
                "part": row.part, "row": row.name, "plans": len(self.names), "measured": len(every),
                "beyond": len(self.beyond - every.keys()),
                "left": left, "wrong": self.wrong, "failed": failed,
                "first": told(first), "first_ms": final.get(first), "best": told(winner), "best_ms": final[winner],
                "share": round(final[winner] / final[first], 4) if first in final else None,
                "first_fa2": told(fa2[0]) if fa2 else None, "first_fa2_ms": final[fa2[0]] if fa2 else None,
                "best_fa2": told(min(of_fa2, key=lambda c: final[c])) if fa2 else None,
                "share_fa2": round(min(final[c] for c in of_fa2) / final[fa2[0]], 4) if fa2 else None,
                "times": dict(sorted(every.items(), key=lambda pair: pair[1])),
            })  # fmt: skip
        return made

    def _in_turns(self, row: forward.Row, candidates: list[Candidate]) -> dict[Candidate, float]:
        q, k, v = forward.tensors(row)
        with torch.no_grad(), turns.GPU:
            again = self.clock.in_turns([self._call(c, row, q, k, v) for c in candidates])
        return dict(zip(candidates, again, strict=True))

    def _call(self, candidate: Candidate, row: forward.Row, q: Any, k: Any, v: Any) -> Any:
        attn = self.compiled[candidate]
        return lambda: attn(q, k, v, **row.params)


def brief(call: Any, enough: float) -> float:
    """Milliseconds of the fastest of three calls, behind another one; of fewer, where one takes no more than `enough`.
    A single one may be held up by what other processes do."""
    call()
    least = math.inf
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        least = min(least, start.elapsed_time(end))
        if least <= enough:
            break
    return least


def shortened(row: forward.Row) -> forward.Row:
    """The same kernels on few rows; tensors of the row's keys are cut to them."""
    few = min(SMALL, row.length)
    cut = {n: x[..., :few] if isinstance(x, torch.Tensor) and x.shape[-1] == row.length else x
           for n, x in row.params.items()}  # fmt: skip
    return replace(row, batch=1, length=few, params=cut)


def told(candidate: Candidate) -> str:
    p = candidate.plan
    cap = f" cap {p.max_registers}" if p.max_registers and p.algorithm == "fa2" else ""
    apart = " apart" if p.apart else ""
    return f"{p.algorithm} {p.tile_q}x{p.tile_k} s{p.stages} w{p.warps} {p.reference}{cap}{apart}"


def contest(
    family: Family, only: str, every: bool, algorithm: str, known: Known, within: float, workers: int, end: float,
    out: Any,
) -> None:  # fmt: skip
    """A process of its own: results so far are put into `out` with the family, and None at the end."""
    compiling = Workers(workers)
    made, failed, left = Contest(family, only, every, algorithm, known, within), [], 0
    kept = time.time()
    try:
        waiting = [(c, compiling.submit(job_of(made.attention, made.planned, pipeline.FORWARD, c)))
                   for c in made.candidates]  # fmt: skip
        for candidate, job in waiting:
            if time.time() > end:
                left += 1
                continue
            try:
                job.result(end - time.time())
                made.measure(candidate)
            except TimeoutError:
                left += 1
            except Exception as fault:  # told; the others go on
                failed.append(f"{told(candidate)}: {str(fault).strip().splitlines()[-1][:120]}")
            if time.time() > kept + KEPT:
                out.put((family, made.results(len(waiting) - len(made.compiled) - len(failed), failed, ended=False)))
                kept = time.time()
        out.put((family, made.results(left, failed)))
        out.put((family, None))
    finally:
        compiling.close()


def families(parts: str, only: str) -> dict[Family, list[forward.Row]]:
    found: dict[Family, list[forward.Row]] = {}
    for part, _, row in forward.wanted(forward.MADE, parts, only):
        found.setdefault((part, row.spec, row.head_dim), []).append(row)
    return found


def shown(row: dict[str, Any]) -> str:
    fa2 = f"; of fa2 {row['share_fa2']:.3f}" if row["share_fa2"] else ""
    share = f"{row['share']:.3f}" if row["share"] else "-"
    return (
        f"{row['row']:40s} {share}  {row['measured']} of {row['plans']} plans, {row['beyond']} left out; "
        f"first {row['first']}, best {row['best']} {row['best_ms']:.4f} ms{fa2}; "
        f"wrong {len(row['wrong'])}, failed {len(row['failed'])}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
    parser.add_argument("--rows", default="dense,variants")
    parser.add_argument("--only", default="", metavar="TEXT,...", help="rows whose name holds one of these texts")
    parser.add_argument("--json", default="planner.json")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which nothing more is waited for")
    parser.add_argument("--workers", type=int, default=2, help="that compile for each spec and head size")
    parser.add_argument("--every", action="store_true", help="every plan that the planner ranks")
    parser.add_argument("--within", type=float, default=math.inf, metavar="TIMES", help="by the model")
    parser.add_argument("--rest", default="", metavar="FILE,...", help="records whose plans are not measured again")
    parser.add_argument("--again", default="", metavar="NAME", help="but for those of this algorithm")
    parser.add_argument("--algorithm", default="", help="plans of this one alone, beside the first choice")
    options = parser.parse_args()
    context, end = multiprocessing.get_context("spawn"), time.time() + options.seconds
    out, found = context.Queue(), families(options.rows, options.only)
    known: Known = {}
    for name in filter(None, options.rest.split(",")):
        for row in records.rows(Path(options.out) / name):
            times = {n: ms for n, ms in row["times"].items() if n.split()[0] != options.again}
            known.setdefault(row["row"], {}).update(times)
    chosen = options.only, options.every, options.algorithm, known, options.within, options.workers
    running = [context.Process(target=contest, args=(family, *chosen, end, out)) for family in found]
    for process in running:
        process.start()
    results: dict[str, dict[str, Any]] = {}
    waiting = set(found)
    while waiting and (any(p.is_alive() for p in running) or not out.empty()):
        try:
            family, rows = out.get(timeout=1)
        except queue.Empty:
            continue
        if rows is None:
            waiting.discard(family)
            for name in (row.name for row in found[family] if row.name in results):
                print(shown(results[name]), flush=True)
            continue
        results |= {row["row"]: row for row in rows}
        grid = f"{'every' if options.every else 'usual'} {options.algorithm}".rstrip()
        records.write(Path(options.out) / options.json, list(results.values()), grid=grid)
    shares = [row["share"] for row in results.values() if row["share"]]
    if shares:
        print(f"first choice / best: least {min(shares):.3f}, median {statistics.median(shares):.3f}, of {len(shares)}")


if __name__ == "__main__":
    main()
