"""What a call costs where the mask is new each time: another length, other documents, another grid. On this GPU.

    python benchmarks/masks.py [--out DIR] [--only TEXT] [--calls N] [--algorithm NAME,...] [--recompile]

Every call gets tensors of a length that no call before had, and a mask that was not seen before; the time is that of
the whole call, from Python to the end of the last kernel, the making of tables or block masks included, and beside it
the time after which the call returned to Python. Medians of the calls after the first WARM. Ours with what the planner
chooses, and with each algorithm that --algorithm pins. FlexAttention compiled for any length (dynamic=True) with an
eager create_block_mask, the same with a compiled one, and with --recompile compiled for each length anew
(dynamic=False). Numbers in its masks are tensors, as its authors advise: a new one compiles nothing there either.

Rows compile side by side, each in its own process; when all have, they are measured one by one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import forward
import records
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

HEADS, HEAD_DIM, LONGEST, SIDE, RADIUS = 16, 128, 16384, 128, 8
WARM = 3  # calls that may compile: at the second length dynamo makes sizes symbolic
ANEW = "flex, compiled anew"
RECOMPILED = 2  # calls of the form that compiles each time
COMPILING = 300  # seconds until a row is given up that others wait for
DEVICE, RESERVED = "cuda", 16 * 2**30
Mask = Callable[[Any, Any, Any, Any], Any]
Making = Callable[..., Any]


@dataclass(frozen=True)
class Call:
    """One call: its length, the parameters of the spec, and the mask as FlexAttention has it."""

    length: int
    params: dict[str, Any]
    mask: Mask


def streaming(n: int) -> Call:
    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & ((i - j <= 1024) | (j < 4))

    return Call(n, {"first": 4, "window": 1025}, mask)


def documents(n: int) -> Call:
    """Documents of 256 to 4096 positions in one row."""
    ends = torch.randint(256, 4096, (n // 256 + 1,)).cumsum(0)
    doc = torch.searchsorted(ends, torch.arange(n), right=True).to(torch.int32).to(DEVICE)

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (doc[i] == doc[j]) & (i >= j)

    return Call(n, {"doc": doc[None]}, mask)


def prefix(n: int) -> Call:
    end = torch.tensor(n // 4, device=DEVICE)

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) | (j < end)

    return Call(n, {"prefix": n // 4}, mask)


def neighbourhood(n: int) -> Call:
    height = n // SIDE
    lowest = torch.tensor(height - 1 - RADIUS, device=DEVICE)  # row that a whole neighbourhood is centred on

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        y = torch.minimum((i // SIDE).clamp(RADIUS), lowest)
        x = (i % SIDE).clamp(RADIUS, SIDE - 1 - RADIUS)
        return ((j // SIDE - y).abs() <= RADIUS) & ((j % SIDE - x).abs() <= RADIUS)

    return Call(height * SIDE, {"height": height, "width": SIDE, "radius": RADIUS}, mask)


ROWS = {"streaming": streaming, "document": documents, "prefix": prefix, "neighborhood_2d": neighbourhood}


def lengths(count: int) -> Iterator[int]:
    """All different, none a power of two, down from LONGEST."""
    return (LONGEST - SIDE * (2 * i + 1) for i in range(count))


def tensors(length: int) -> tuple[torch.Tensor, ...]:
    shape = (1, length, HEADS, HEAD_DIM)
    return tuple(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))


def flex(attention: Any, making: Making, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    blocks = making(call.mask, None, None, q.shape[2], k.shape[2], device=q.device)
    return attention(q, k, v, block_mask=blocks)


def forms(spec: str, algorithms: Sequence[str], recompile: bool) -> dict[str, Callable[..., torch.Tensor]]:
    """Functions of q, k, v and the call, by name; the first is ours as it is planned."""

    def ours(algorithm: str | None) -> Callable[..., torch.Tensor]:
        attn = forward.compiled(spec, algorithm)
        return lambda q, k, v, call: attn(q, k, v, **call.params)

    any_length = torch.compile(flex_attention, dynamic=True)
    made = {"attncc": ours(None), **{f"attncc {name}": ours(name) for name in algorithms}}
    made["flex, eager mask"] = partial(flex, any_length, create_block_mask)
    made["flex, compiled mask"] = partial(flex, any_length, torch.compile(create_block_mask, dynamic=True))
    if recompile:
        made[ANEW] = partial(flex, torch.compile(flex_attention, dynamic=False), create_block_mask)
    return made


@dataclass(frozen=True)
class Timed:
    """Milliseconds to the end on the GPU, those until the call returned to Python, MiB beyond what was allocated."""

    ms: float
    host_ms: float
    mib: float


def timed(call: Callable[[], torch.Tensor]) -> tuple[Timed, torch.Tensor]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    out = call()
    returned = time.perf_counter()
    torch.cuda.synchronize()
    end = time.perf_counter()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return Timed((end - start) * 1e3, (returned - start) * 1e3, peak), out


def reserve() -> None:
    """One piece of memory for the allocator to share out: a new length is not to wait for the driver."""
    torch.empty(RESERVED, dtype=torch.uint8, device=DEVICE)


def prepare() -> None:
    reserve()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64


def measure(spec: str, count: int, algorithms: Sequence[str], recompile: bool) -> dict[str, Any]:
    """One row; waits before its measured calls until all rows have come so far, and for its turn."""
    try:
        prepare()
        calls = forms(spec, algorithms, recompile)
        seen: dict[str, list[Timed]] = {name: [] for name in calls}
        worst = 0.0
        new = lengths(WARM + count)
        for _ in range(WARM):
            worst = max(worst, turn(spec, next(new), without_anew(calls), {}))
        everybody.wait(COMPILING)
    except BaseException:
        everybody.abort()
        raise
    with one_by_one:
        for i, length in enumerate(new):
            now = calls if i < RECOMPILED else without_anew(calls)
            worst = max(worst, turn(spec, length, now, seen))
    figures = {
        "ms": {n: round(statistics.median(t.ms for t in of), 3) for n, of in seen.items()},
        "host_ms": {n: round(statistics.median(t.host_ms for t in of), 3) for n, of in seen.items()},
        "mib": {n: round(max(t.mib for t in of), 1) for n, of in seen.items()},
    }
    return {"part": "masks", "row": spec, "calls": count, "difference": worst, **figures}


def without_anew(calls: dict[str, Any]) -> dict[str, Any]:
    return {name: run for name, run in calls.items() if name != ANEW}


def turn(
    spec: str, length: int, calls: dict[str, Callable[..., torch.Tensor]], seen: dict[str, list[Timed]]
) -> float:  # fmt: skip
    """One new call, by all; kept where `seen` has a place for it. How far results are apart, relative."""
    call = ROWS[spec](length)
    q, k, v = tensors(call.length)
    want, worst = None, 0.0
    for name, run in calls.items():
        found, out = timed(partial(run, q, k, v, call))
        want = out if want is None else want
        worst = max(worst, ((out - want).float().norm() / want.float().norm()).item())
        if name in seen:
            seen[name].append(found)
    return worst


def begin(barrier: Any, lock: Any) -> None:
    """What the process of a row shares with the others."""
    global everybody, one_by_one
    everybody, one_by_one = barrier, lock


def told(result: dict[str, Any]) -> str:
    ours = result["ms"]["attncc"]
    times = "  ".join(
        f"{n} {t:.3f} ms ({t / ours:.1f}x, host {result['host_ms'][n]:.3f})" for n, t in result["ms"].items()
    )
    extra = "  ".join(f"{n} {m:.0f}" for n, m in result["mib"].items())
    return f"{result['row']:16s} {times}   MiB: {extra}   apart {result['difference']:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
    parser.add_argument("--only", default="", help="rows whose name holds this text")
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--algorithm", default="fa2", metavar="NAME,...", help="columns beside the planner's choice")
    parser.add_argument("--recompile", action="store_true", help="add the form that compiles at each length")
    options = parser.parse_args()
    algorithms = [name for name in options.algorithm.split(",") if name]
    specs = [name for name in ROWS if options.only in name]
    context = multiprocessing.get_context("spawn")
    shared = context.Barrier(len(specs)), context.Lock()
    results = []
    with ProcessPoolExecutor(len(specs), context, begin, shared) as pool:
        for row in as_completed(
            pool.submit(measure, spec, options.calls, algorithms, options.recompile) for spec in specs
        ):
            found = row.result()
            print(told(found), flush=True)
            results.append(found)
            results.sort(key=lambda result: specs.index(result["row"]))
            records.write(Path(options.out) / "masks.json", results, calls=options.calls)


if __name__ == "__main__":
    main()
