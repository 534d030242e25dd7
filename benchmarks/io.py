"""Bytes that kernels move to and from this GPU's memory, by its counters, beside the IO model; time and memory too.

    python benchmarks/io.py [--out DIR] [--only TEXT,...] [--counting TEXT,...] [--no-counters] [--json NAME]
    python benchmarks/io.py --plot FILE [--json NAME]      the recorded results as a PNG

Each case is a full (or causal) attention by one algorithm, forward or backward, at a length whose working set does not
fit in the L2, and some that does. Kernels are compiled side by side first; then time (median) and memory are measured,
and a second process runs each case once more under `ncu` of Nsight Compute, with nothing flushed between calls: what a
call leaves dirty in the L2 is written while the next runs, so that a steady state is counted. Numbers are compared with
float64 in the first and last rows of two heads.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import counters
import records
import torch
import turns

from attncc import frontend, pipeline
from attncc.analysis import spread, tile_counts
from attncc.commands.costs import forward_costs, visited_tiles
from attncc.ir import KernelPlan, Schedule
from attncc.planner import special_functions
from attncc.planner.io import backward_costs, backward_kernels, forward_kernels, sizes_of
from attncc.runtime.attention import Attention
from attncc.runtime.bench import Part, drawn

SPECS = Path(__file__).parent.parent / "specs"
RESULTS = Path(__file__).parent / "results"
TARGET = "sm_90"
SHORT = 10.0  # milliseconds of a run that is repeated many times
LONG = 1500.0  # milliseconds of runs after which one is not repeated


@dataclass(frozen=True)
class Case:
    """One call: batch 1, as many heads of K and V as of Q unless `kv_heads` says otherwise, bf16."""

    algorithm: str
    direction: str
    heads: int
    length: int
    head_dim: int = 128
    spec: str = "full"
    tile_q: int | None = None
    tile_k: int | None = None
    kv_heads: int | None = None

    @property
    def name(self) -> str:
        heads = f"H{self.heads}" + (f"/{self.kv_heads}" if self.kv_heads else "")
        tile = f" tile {self.tile_q or ''}x{self.tile_k or ''}" if self.tile_q or self.tile_k else ""
        return f"{self.algorithm} {self.direction} {self.spec} {heads} S{self.length} D{self.head_dim}{tile}"

    @property
    def kind(self) -> Case:
        """What is compiled for it, at a size that costs nothing."""
        return replace(self, heads=2, kv_heads=None, length=512)

    @property
    def planned(self) -> pipeline.Planned:
        sizes = {"heads": self.heads, "q_len": self.length, "k_len": self.length, "head_dim": self.head_dim}
        sizes |= {} if self.kv_heads is None else {"kv_heads": self.kv_heads}
        pins = Schedule(algorithm=self.algorithm, tile_q=self.tile_q, tile_k=self.tile_k)
        return replace(plan_of(self.spec, self.head_dim, pins), shape=pipeline.shape_of(sizes))


@cache
def plan_of(name: str, head_dim: int, pins: Schedule) -> pipeline.Planned:
    """That of every long call."""
    parsed = frontend.parse((SPECS / f"{name}.attn").read_text(encoding="utf-8"), name)
    parsed = replace(parsed, spec=replace(parsed.spec, schedules=(pins,)))
    return pipeline.plan_parsed(parsed, {}, {}, pipeline.shape_of({"head_dim": head_dim}), TARGET)


@cache
def backward_of(name: str, head_dim: int, pins: Schedule) -> KernelPlan:
    return pipeline.backward(plan_of(name, head_dim, pins)).choice.plan


LADDER = ("standard", "fa1", "fa2", "fa3")


def cases() -> list[Case]:
    """The ladder from 1K to 64K, then heads, head sizes, tiles and masks whose working sets leave the L2."""
    found = [Case(a, "forward", 4, n) for a in LADDER for n in (1024, 2048, 4096, 8192, 16384, 32768, 65536)]
    found += [Case("fa2", "backward", 4, n) for n in (1024, 2048, 4096, 8192, 16384, 32768, 65536)]
    found += [Case("standard", "forward", 8, 16384, 64), Case("standard", "forward", 8, 16384, 128, "causal")]
    found += [
        Case("fa1", "forward", 16, 16384), Case("fa1", "forward", 32, 16384, 64, tile_q=128, tile_k=64),
        Case("fa1", "forward", 16, 16384, tile_k=64), Case("fa1", "forward", 16, 32768, tile_k=32),
        Case("fa1", "forward", 16, 32768, spec="causal", tile_k=64),
    ]  # fmt: skip
    found += [
        Case("fa2", "forward", 16, 16384), Case("fa2", "forward", 16, 32768), Case("fa2", "forward", 16, 65536),
        Case("fa2", "forward", 16, 32768, tile_q=64, tile_k=64), Case("fa2", "forward", 64, 32768, 64),
        Case("fa2", "forward", 8, 32768, 256), Case("fa2", "forward", 16, 32768, spec="causal"),
        Case("fa2", "forward", 32, 32768, kv_heads=4), Case("fa3", "forward", 16, 32768),
        Case("fa3", "forward", 16, 32768, spec="causal"), Case("fa3", "forward", 8, 131072),
    ]  # fmt: skip
    found += [
        Case("fa2", "backward", 16, 16384), Case("fa2", "backward", 16, 32768), Case("fa2", "backward", 32, 32768, 64),
        Case("fa2", "backward", 8, 32768, 256), Case("fa2", "backward", 16, 32768, spec="causal"),
        Case("fa2", "backward", 8, 32768, 64), Case("fa2", "backward", 32, 16384, 64),
        Case("fa2", "backward", 8, 16384, 256), Case("fa2", "backward", 16, 32768, 256),
        Case("fa3", "backward", 16, 32768), Case("fa3", "backward", 32, 32768, 64),
    ]  # fmt: skip
    return found


def predicted(case: Case) -> dict[str, Any]:
    """What the model says: bytes of each kernel by name, sums, and milliseconds."""
    planned = case.planned
    plan, shape, target = planned.choice.plan, planned.shape, planned.target

    if case.direction == "forward":
        counts = tile_counts(planned.spec, shape, plan.tile_q, plan.tile_k, {}, planned.visits)
        assert counts is not None
        visited = counts["partial"] + counts["full"]
        found = forward_costs(planned, visited)
        kernels = forward_kernels(plan, sizes_of(plan, shape, target, visited))
    else:
        plan = backward_of(case.spec, case.head_dim, planned.spec.schedules[0])
        tiles = visited_tiles(planned, plan, {})
        how = spread(planned.spec, planned.visits), special_functions(planned.spec)
        found = backward_costs(plan, shape, target, tiles, *how)[0]
        kernels = tuple(k for k, _ in backward_kernels(plan, shape, target, tiles))
    return {
        "kernels": {k.name: int(k.from_memory(target.l2_bytes)) for k in kernels}, "hbm_bytes": found.hbm_bytes,
        "streamed_bytes": found.streamed_bytes, "held": found.held, "ms": found.predicted_ms,
        "tile": [plan.tile_q, plan.tile_k],
    }  # fmt: skip


def call_of(case: Case) -> tuple[Callable[[], Any], Callable[[], float]]:
    """What is measured, and a check of its numbers: the worst error as a part of what it may be."""
    planned = case.planned
    attention = Attention(planned.parsed, planned.consts, tuned={})
    call = drawn(attention, planned, planned.shape, {}, "cuda")
    if case.direction == "forward":
        run = lambda: attention(call.q, call.k, call.v)

        def off() -> float:
            part = Part(call)
            error, bound = part.verdict({"out": part.of_rows(run())})
            return error / bound

        return run, off
    q, k, v = (x.detach().requires_grad_() for x in (call.q, call.k, call.v))

    def off_back() -> float:
        out = attention(q, k, v)
        part, part_d = Part(call), torch.zeros_like(out)
        part_d[0, part.heads[:, None], part.rows] = part.d_out.to(out)
        d_q, d_k, d_v = torch.autograd.grad(out, (q, k, v), part_d)
        error, bound = part.verdict({"q": part.of_rows(d_q), "k": part.of_keys(d_k), "v": part.of_keys(d_v)})
        return error / bound

    return turns.gradients(attention, call.q, call.k, call.v, call.params), off_back


def warm(case: Case) -> str:
    """Compile; what is compiled stays in the cache."""
    try:
        call_of(case)[0]()
        torch.cuda.synchronize()
    except Exception as fault:  # told, and its cases are left out
        return str(fault).strip().splitlines()[0][:160]
    return ""


def timed(case: Case, check: bool) -> dict[str, Any]:
    """Milliseconds, and bytes that the call held beyond its inputs and results."""
    run, off = call_of(case)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made, first = once(run)
    results = made if isinstance(made, tuple) else (made,)
    beyond = (
        torch.cuda.max_memory_allocated()
        - before
        - sum(x.numel() * x.element_size() for x in results if isinstance(x, torch.Tensor))
    )
    del made, results
    ms = first if first > LONG else milliseconds(run)
    return {"ms": round(ms, 4), "beyond_bytes": beyond} | ({"error": off()} if check else {})


def once(run: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, and its milliseconds."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    made = run()
    end.record()
    torch.cuda.synchronize()
    return made, start.elapsed_time(end)


def milliseconds(run: Callable[[], Any]) -> float:
    """Median. Short calls are many, so that the host plays no part; of long ones there are three at most."""
    times: list[float] = []
    while len(times) < 3 and sum(times) < LONG:
        times.append(once(run)[1])
        if times[0] < SHORT:
            return turns.milliseconds(run)
    return statistics.median(times)


def count(wanted: list[int], until: float) -> None:
    """The process that ncu looks at: each case once, behind one call that is not looked at unless that takes long.
    None begins after `until`."""
    every = cases()
    for i in wanted:
        if time.time() > until:
            print(f"{every[i].name} and what follows were not counted", flush=True)
            break
        run: Any = None
        try:
            run = call_of(every[i])[0]
            if predicted(every[i])["ms"] < LONG / 10:
                run()
        except Exception as fault:
            print(f"{every[i].name}: {fault}", flush=True)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(10)  # counters.MARK
        if run is not None:
            run()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        run = None
        torch.cuda.empty_cache()


def joined(case: Case, model: dict[str, Any], kernels: list[dict[str, Any]]) -> dict[str, Any]:
    """Measured and predicted bytes of a case; kernels that are not of the spec (a fill) count in the sum."""
    total = sum(k["read"] + k["written"] for k in kernels)
    mine = [k for k in kernels if k["kernel"].startswith(case.spec)]
    names = list(model["kernels"])
    each = []
    for k in mine:
        name = k["kernel"].split("(")[0].removeprefix(f"{case.spec}_").removeprefix(f"{case.direction}_")
        name = {"dk": "dkdv", "forward": "forward"}.get(name, name)
        guess = model["kernels"].get(name if name in names else names[0])
        each.append({**k, "name": name, "predicted": guess})
    return {"measured_bytes": total, "kernels": each, "ratio": ratio(model, total)}


def ratio(model: dict[str, Any], measured: int) -> float | None:
    return round(model["hbm_bytes"] / measured, 4) if measured else None


def renew(row: dict[str, Any], case: Case) -> None:
    """Put what today's model says of a case in the place of what an earlier one said."""
    row["model"] = predicted(case)
    if "measured_bytes" in row:
        row["ratio"] = ratio(row["model"], row["measured_bytes"])
    for kernel in row.get("kernels", ()):
        if kernel.get("predicted") is not None:
            kernel["predicted"] = row["model"]["kernels"].get(kernel["name"], kernel["predicted"])


def compiled(wanted: list[int]) -> list[int]:
    """The cases whose kernels there are, after they were made side by side."""
    every, start = cases(), time.perf_counter()
    kinds = list(dict.fromkeys(every[i].kind for i in wanted))
    with ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn")) as pool:
        failed = {kind: why for kind, why in zip(kinds, pool.map(warm, kinds), strict=True) if why}
    for kind, why in failed.items():
        print(f"{kind.name}: {why}", flush=True)
    print(f"compiled {len(kinds)} in {time.perf_counter() - start:.0f} s", flush=True)
    return [i for i in wanted if every[i].kind not in failed]


def measure(record: Path, only: list[str], counting: list[str], seconds: float) -> None:
    """Rows are written when all are timed, and again when all are counted: those too that were timed before."""
    every, start = cases(), time.perf_counter()
    timing, wanted = ([i for i, case in enumerate(every) if any(text in case.name for text in texts)]
                      for texts in (only, counting if seconds else []))  # fmt: skip
    there = compiled(sorted({*timing, *wanted}))
    rows = {row["row"]: row for row in records.rows(record)}
    for case in every:
        renew(rows.get(case.name, {}), case)
    with turns.GPU:
        for i in (i for i in timing if i in there):
            case = every[i]
            rows[case.name] = row = {"part": "io", "row": case.name, "case": asdict(case), "model": predicted(case)}
            try:
                row |= timed(case, case.length == 4096 or (case.heads != 4 and case.length == 16384))
            except Exception as fault:  # told; the others go on
                print(f"{case.name}: {str(fault).strip().splitlines()[0][:160]}", flush=True)
            print(told(row), flush=True)
            torch.cuda.empty_cache()
        records.write(record, [rows[case.name] for case in every if case.name in rows])
        print(f"timed at {time.perf_counter() - start:.0f} s", flush=True)
        if seconds:
            ready = [i for i in wanted if i in there and "ms" in rows.get(every[i].name, {})]
            ready.sort(key=lambda i: rows[every[i].name]["ms"])
            found = counters.counted(__file__, ready, seconds)
            for i, kernels in found.items():
                row = rows[every[i].name]
                row |= joined(every[i], row["model"], kernels)
                print(told(row), flush=True)
            records.write(record, [rows[every[i].name] for i in found])
            print(f"counted at {time.perf_counter() - start:.0f} s", flush=True)


def told(row: dict[str, Any]) -> str:
    """A line of the table."""
    model = row["model"]
    measured = row.get("measured_bytes")
    shown = f"{measured / 1e6:10.1f} MB" if measured else f"{'-':>13s}"
    ms = f"{row['ms']:9.3f} ms, predicted {model['ms']:9.3f}" if "ms" in row else "-"
    mark = "" if model["held"] else " *"
    error = f", error {row['error']:.2f} of its bound" if "error" in row else ""
    guess = f"predicted {model['hbm_bytes'] / 1e6:10.1f} ({row.get('ratio') or 0:.2f}){mark}"
    return f"{row['row']:52s} {shown}, {guess}; {ms}; beyond {row.get('beyond_bytes', 0) / 1e6:8.1f} MB{error}"


def plot(record: dict[str, Any], path: Path) -> None:
    """Bytes and time of the ladder over lengths: lines are predicted, points measured."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in record["rows"]:
        case = row["case"]
        if case["heads"] == 4 and case["spec"] == "full" and case["head_dim"] == 128 and "ms" in row:
            groups.setdefault(f"{case['algorithm']} {case['direction']}", []).append(row)
    for axis, what, unit in ((axes[0], "bytes", "bytes of HBM"), (axes[1], "ms", "milliseconds")):
        for i, (name, rows) in enumerate(groups.items()):
            lengths = [row["case"]["length"] for row in rows]
            guess = [row["model"]["hbm_bytes" if what == "bytes" else "ms"] for row in rows]
            axis.plot(lengths, guess, color=f"C{i}", label=f"{name}, predicted")
            found = [row.get("measured_bytes" if what == "bytes" else "ms") for row in rows]
            axis.plot(lengths, found, color=f"C{i}", marker="o", linestyle="none", label=f"{name}, measured")
        axis.set(xscale="log", yscale="log", xlabel="length", ylabel=unit)
        ticks = sorted({row["case"]["length"] for rows in groups.values() for row in rows})
        axis.set_xticks(ticks, [f"{n // 1024}K" for n in ticks])
        axis.set_xticks([], minor=True)
        axis.grid(True, which="both", alpha=0.25)
    axes[0].legend(fontsize="small")
    figure.suptitle(f"full attention, batch 1, 4 heads of 128, bf16, {record['device']}")
    figure.savefig(path, dpi=120, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--only", default="", metavar="TEXT,...", help="cases whose name holds one of these texts")
    parser.add_argument("--json", default="io.json")
    parser.add_argument("--no-counters", action="store_true", help="time and memory only")
    parser.add_argument("--counting", metavar="TEXT,...", help="cases to count, timed now or before; left out: --only")
    parser.add_argument("--seconds", type=float, default=600.0, help="that counting may take")
    parser.add_argument("--plot", help="draw the recorded results, and measure nothing")
    parser.add_argument("--count", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count:
        count(*json.loads(options.count))
        return
    folder = Path(options.out)
    if options.plot:
        plot(json.loads((folder / options.json).read_text(encoding="utf-8")), Path(options.plot))
        return
    folder.mkdir(parents=True, exist_ok=True)
    only, counting = (texts.split(",") for texts in (options.only, options.counting or options.only))
    measure(folder / options.json, only, counting, 0 if options.no_counters else options.seconds)


if __name__ == "__main__":
    main()
